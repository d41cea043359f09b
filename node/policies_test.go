package node_test

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
	"github.com/boxed-mesh/boxed/node"
)

// policyHost is one node's policies, and what they put in force.
type policyHost struct {
	*node.Policies
	keeper *egress.Keeper
	frozen func(boxed.ID, string, map[string]string) bool
}

// newPolicies are those of the node whose key is keySigner(name), over the documents of k.
func newPolicies(t *testing.T, k *keyring, name byte, others ...byte) *policyHost {
	t.Helper()
	h := &policyHost{}
	audit, err := egress.OpenAudit(egress.AuditConfig{Dir: t.TempDir(), Node: "aaaaaaaaaaaaaaaa"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { audit.Close() })
	proxy := egress.New(egress.Config{Records: audit, Judge: egress.NewJudge(egress.JudgeConfig{})})
	t.Cleanup(proxy.Close)
	sealer, err := egress.NewSealer(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	id := func(name byte) boxed.NodeID { return boxed.NodeIDOf(keySigner(name).Public().(ed25519.PublicKey)) }
	h.keeper = egress.NewKeeper(egress.KeeperConfig{Proxy: proxy, Sealer: sealer, Node: id(name)})
	var nodes []boxed.NodeSummary
	for _, o := range append(others, name) {
		nodes = append(nodes, boxed.NodeSummary{ID: id(o), Name: "node-" + string(o), Key: keySigner(o).Public().(ed25519.PublicKey)})
	}
	h.Policies, err = node.NewPolicies(node.PoliciesConfig{
		KeysConfig: node.KeysConfig{
			Documents: k.store, Signer: keySigner(name), Clock: k.store.Clock(), Now: k.now,
			Trusted: func(ed25519.PublicKey) bool { return true },
		},
		Node: id(name), Keeper: h.keeper, Nodes: func() []boxed.NodeSummary { return nodes },
		Sources: []string{node.SourceCommand},
		Freeze:  func(f func(boxed.ID, string, map[string]string) bool) { h.frozen = f },
	})
	if err != nil {
		t.Fatal(err)
	}
	return h
}

const token = "ghp_R3alT0kenThatMustN0tLeak0123456789ab"

func (h *policyHost) set(t *testing.T, ctx context.Context, r boxed.SecretRequest) *boxed.Secret {
	t.Helper()
	s, err := h.SetSecret(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// needsX is a profile that is of no use without the secret x.
const needsX = "version: 1\nname: needs-x\nrules:\n- host: api.github.com\n  mode: intercept\n  credential: x\n"

func (h *policyHost) apply(t *testing.T, ctx context.Context, profile string) {
	t.Helper()
	if _, err := h.ApplyProfile(ctx, []byte(profile), false); err != nil {
		t.Fatal(err)
	}
}

// attach says whether a sandbox of the owner could have the secret.
func (h *policyHost) attach(owner, name string) error {
	return h.keeper.Check(owner, &boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: name}}})
}

// A secret is whose it is, and of those that the owner names; to others it does not exist.
func TestWhoMayAttachASecret(t *testing.T) {
	h := newPolicies(t, newKeyring(t), 'a')
	ann, bob, root := keyAs("ann", boxed.RoleUser), keyAs("bob", boxed.RoleUser), keyAs("root", boxed.RoleAdmin)
	h.set(t, ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Preset: "github"}, Value: token})
	if err := h.attach("ann", "github"); err != nil {
		t.Error(err)
	}
	if err := h.attach("bob", "github"); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("another owner: %v", err)
	}
	if list, _ := h.ListSecrets(bob); len(list) != 0 {
		t.Errorf("another owner sees %+v", list)
	}
	if err := h.RevokeSecret(bob, "github"); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("another owner revokes: %v", err)
	}
	if _, err := h.SetSecret(bob, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Owner: "ann", Preset: "github"}, Value: token}); !errors.Is(err, boxed.CodeForbidden) {
		t.Errorf("another owner sets: %v", err)
	}
	h.set(t, ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", May: []string{"bob"}}})
	if err := h.attach("bob", "ann/github"); err != nil {
		t.Errorf("one who may: %v", err)
	}
	if err := h.attach("bob", "github"); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("one who may, and who has not said whose: %v", err)
	}
	if _, err := h.SetSecret(ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", May: []string{"*"}}}); !errors.Is(err, boxed.CodeForbidden) {
		t.Errorf("with everybody, by one who is no admin: %v", err)
	}
	if list, _ := h.ListSecrets(bob); len(list) != 1 || list[0].May != nil {
		t.Errorf("one who may sees %+v", list)
	}
	if list, _ := h.ListSecrets(root); len(list) != 1 || list[0].Version != 2 {
		t.Errorf("an admin sees %+v", list)
	}
}

// EC13: clawpatrol#313. The value is in no document, answer or message.
func TestASecretsValueIsNowhereInTheClear(t *testing.T) {
	k := newKeyring(t)
	h := newPolicies(t, k, 'a', 'b')
	ann := keyAs("ann", boxed.RoleUser)
	s := h.set(t, ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Preset: "github", All: true}, Value: token})
	docs, err := k.store.Documents(node.SecretKind)
	if err != nil {
		t.Fatal(err)
	}
	list, _ := h.ListSecrets(ann)
	for _, v := range []any{s, docs, list} {
		raw, _ := json.Marshal(v)
		if strings.Contains(string(raw), "R3alT0ken") {
			t.Errorf("%s", raw)
		}
	}
	_, err = h.SetSecret(ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "x", Preset: "github"}, Value: token + "\r\nX-Evil: 1"})
	if !errors.Is(err, boxed.CodeInvalid) || strings.Contains(err.Error(), "R3alT0ken") {
		t.Errorf("a line break: %v", err)
	}
}

// The nodes that a secret is sealed to have it, and no others.
func TestASecretIsSealedToTheNodesThatMayUseIt(t *testing.T) {
	k := newKeyring(t)
	a, b := newPolicies(t, k, 'a', 'b'), newPolicies(t, k, 'b', 'a')
	ann := keyAs("ann", boxed.RoleUser)
	here := func(h *policyHost) bool {
		t.Helper()
		if err := h.Reload(); err != nil {
			t.Fatal(err)
		}
		list, err := h.ListSecrets(ann)
		if err != nil || len(list) != 1 {
			t.Fatalf("%+v, %v", list, err)
		}
		return list[0].Here
	}
	a.set(t, ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Preset: "github"}, Value: token})
	if !here(a) || here(b) {
		t.Errorf("by default it is on the node that it was set on: %v, %v", here(a), here(b))
	}
	if _, err := b.SetSecret(ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", All: true}}); err == nil {
		t.Error("a node without the value gave it to all")
	}
	a.set(t, ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", All: true}})
	if !here(a) || !here(b) {
		t.Errorf("sealed to all: %v, %v", here(a), here(b))
	}
	a.set(t, ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", HeldBy: "node-b"}})
	if here(a) || !here(b) {
		t.Errorf("held by one: %v, %v", here(a), here(b))
	}
	if err := a.attach("ann", "github"); err != nil {
		t.Errorf("one that another node holds may be attached: %v", err)
	}
	if _, err := a.SetSecret(ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "other", HeldBy: "nobody"}, Value: token}); !errors.Is(err, boxed.CodeInvalid) {
		t.Errorf("held by a node that is not known: %v", err)
	}
}

// A revocation is for ever, and known to the others; the name is free again.
func TestARevokedSecretStaysRevoked(t *testing.T) {
	k := newKeyring(t)
	a, b := newPolicies(t, k, 'a', 'b'), newPolicies(t, k, 'b', 'a')
	ann := keyAs("ann", boxed.RoleUser)
	a.set(t, ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Preset: "github", All: true}, Value: token})
	if err := b.Reload(); err != nil {
		t.Fatal(err)
	}
	if err := b.RevokeSecret(ann, "github"); err != nil {
		t.Fatal(err)
	}
	if err := a.Reload(); err != nil {
		t.Fatal(err)
	}
	if err := a.attach("ann", "github"); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("after the revocation: %v", err)
	}
	a.set(t, ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Preset: "github"}, Value: token})
	if err := a.attach("ann", "github"); err != nil {
		t.Errorf("set anew: %v", err)
	}
}

func TestOnlyAnAdminHasANodeReadItsOwnSecrets(t *testing.T) {
	h := newPolicies(t, newKeyring(t), 'a')
	ann, root := keyAs("ann", boxed.RoleUser), keyAs("root", boxed.RoleAdmin)
	for _, source := range []string{"env:HOME", "command:cat /etc/shadow"} {
		_, err := h.SetSecret(ann, boxed.SecretRequest{Secret: boxed.Secret{Name: "x", Preset: "github", Source: source}})
		if !errors.Is(err, boxed.CodeForbidden) {
			t.Errorf("%s: %v", source, err)
		}
	}
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.set(t, root, boxed.SecretRequest{Secret: boxed.Secret{Name: "x", Preset: "github", Source: "command:cat " + file}})
	if err := h.attach("root", "x"); err != nil {
		t.Error(err)
	}
	// Only what its operator has allowed: who may have a node run commands is as mighty as it.
	if _, err := h.SetSecret(root, boxed.SecretRequest{Secret: boxed.Secret{Name: "z", Preset: "github", Source: "env:HOME"}}); !errors.Is(err, boxed.CodeForbidden) || !strings.Contains(err.Error(), "egress.sources") {
		t.Errorf("a source that the operator has not allowed: %v", err)
	}
	if _, err := h.SetSecret(root, boxed.SecretRequest{Secret: boxed.Secret{Name: "y", Preset: "github", Source: "file:/x"}}); !errors.Is(err, boxed.CodeInvalid) {
		t.Error(err)
	}
}

// Another node's document has this node run nothing, whatever it says: a node that was broken
// into has only itself.
func TestNoNodeHasAnotherRunACommand(t *testing.T) {
	k := newKeyring(t)
	a, b := newPolicies(t, k, 'a', 'b'), newPolicies(t, k, 'b', 'a')
	root := keyAs("root", boxed.RoleAdmin)
	trace := filepath.Join(t.TempDir(), "trace")
	b.set(t, root, boxed.SecretRequest{Secret: boxed.Secret{Name: "x", Preset: "github", Source: "command:echo >>" + trace + "; echo " + token}})
	ran := func() int {
		text, _ := os.ReadFile(trace)
		return len(text)
	}
	if ran() != 1 {
		t.Fatalf("where it was set it ran %d times", ran())
	}
	docs, err := k.store.Documents(node.SecretKind)
	if err != nil || len(docs) != 1 {
		t.Fatal(docs, err)
	}
	var body map[string]any
	if err := json.Unmarshal(docs[0].Body, &body); err != nil {
		t.Fatal(err)
	}
	body["nodes"] = []boxed.NodeID{boxed.NodeIDOf(keySigner('a').Public().(ed25519.PublicKey))}
	d := docs[0]
	d.Body, _ = json.Marshal(body)
	d.Stamp.WallMS++
	d.Sign(keySigner('b'))
	if took, err := k.store.PutDocument(d); !took || err != nil {
		t.Fatal(took, err)
	}
	if err := a.Reload(); err != nil {
		t.Fatal(err)
	}
	a.apply(t, root, needsX)
	if err := a.keeper.Check("root", &boxed.EgressSpec{Profile: "needs-x"}); !errors.Is(err, boxed.CodeNotFound) || ran() != 1 {
		t.Errorf("it ran %d times, and can be used here: %v", ran(), err)
	}
}

// What a command gave is believed for a while, asked for again behind everybody's back, and
// no more believed when it fails for long. EC19: OpenShell#2049.
func TestASecretOfACommandIsReadAgain(t *testing.T) {
	k := newKeyring(t)
	h := newPolicies(t, k, 'a')
	root := keyAs("root", boxed.RoleAdmin)
	dir := t.TempDir()
	file, trace := filepath.Join(dir, "token"), filepath.Join(dir, "trace")
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	// Each run says so through a pipe, whose other end the command finds open.
	if err := syscall.Mkfifo(trace, 0o600); err != nil {
		t.Fatal(err)
	}
	pipe, err := os.OpenFile(trace, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	ran := make(chan struct{}, 16)
	go func() {
		for b := make([]byte, 1); ; ran <- struct{}{} {
			if _, err := pipe.Read(b); err != nil {
				return
			}
		}
	}()
	h.set(t, root, boxed.SecretRequest{Secret: boxed.Secret{Name: "x", Preset: "github", Source: "command:echo >" + trace + "; cat " + file}})
	<-ran
	h.apply(t, root, needsX)
	usable := func() error { return h.keeper.Check("root", &boxed.EgressSpec{Profile: "needs-x"}) }
	for range 3 { // fresh: nobody asks again, also where the documents change
		h.set(t, root, boxed.SecretRequest{Secret: boxed.Secret{Name: "other", Preset: "github"}, Value: token})
		if err := usable(); err != nil {
			t.Error(err)
		}
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if len(ran) > 0 {
		t.Error("it was asked again while what it gave was fresh")
	}
	k.sleep(6 * time.Minute)
	if err := usable(); err != nil {
		t.Errorf("while it is asked for again: %v", err)
	}
	<-ran
	k.sleep(5 * time.Minute)
	if err := usable(); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("after it has failed for long: %v", err)
	}
}

const webProfile = "version: 1\nname: web\nrules:\n- host: api.example.com\n"

// A profile is applied with what it changes, or not at all. EP1: claude-code#81572.
func TestProfilesSayWhatTheyChange(t *testing.T) {
	h := newPolicies(t, newKeyring(t), 'a')
	ann, bob, root := keyAs("ann", boxed.RoleUser), keyAs("bob", boxed.RoleUser), keyAs("root", boxed.RoleAdmin)
	change, err := h.ApplyProfile(ann, []byte(webProfile), true)
	if err != nil || change.Applied || len(change.Widened) != 1 {
		t.Errorf("%+v, %v", change, err)
	}
	if _, err := h.GetProfile(ann, "web"); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("after a dry run: %v", err)
	}
	if change, err = h.ApplyProfile(ann, []byte(webProfile), false); err != nil || !change.Applied || change.Profile.Owner != "ann" {
		t.Fatalf("%+v, %v", change, err)
	}
	change, err = h.ApplyProfile(ann, []byte(strings.Replace(webProfile, "api.example.com", "www.example.com", 1)), false)
	if err != nil || len(change.Widened) != 1 || len(change.Narrowed) != 1 {
		t.Errorf("%+v, %v", change, err)
	}
	if _, err := h.ApplyProfile(ann, []byte(webProfile+"  colour: red\n"), false); err == nil || !strings.Contains(err.Error(), "line 5") {
		t.Errorf("an unknown field: %v", err)
	}
	if p, err := h.GetProfile(ann, "web"); err != nil || p.Rules[0].Host != "www.example.com" {
		t.Errorf("what was in force stays: %+v, %v", p, err)
	}
	if _, err := h.GetProfile(bob, "web"); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("another owner's: %v", err)
	}
	if err := h.keeper.Check("bob", &boxed.EgressSpec{Profile: "web"}); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("another owner's in a sandbox: %v", err)
	}
	if change, err = h.ApplyProfile(root, []byte(webProfile), false); err != nil || change.Profile.Owner != "" {
		t.Errorf("an admin's is for everybody: %+v, %v", change, err)
	}
	if err := h.keeper.Check("bob", &boxed.EgressSpec{Profile: "web"}); err != nil {
		t.Errorf("the operator's in a sandbox: %v", err)
	}
	if err := h.DeleteProfile(bob, "web"); !errors.Is(err, boxed.CodeForbidden) {
		t.Errorf("the operator's, deleted by another: %v", err)
	}
	if err := h.DeleteProfile(ann, "web"); err != nil {
		t.Error(err)
	}
	if err := h.DeleteProfile(root, "packages"); !errors.Is(err, boxed.CodeForbidden) {
		t.Errorf("a ready one: %v", err)
	}
}

// EP4: pipelock 2.0's kill switch.
func TestFreezesAreWhoseTheyAre(t *testing.T) {
	h := newPolicies(t, newKeyring(t), 'a')
	ann, bob, root := keyAs("ann", boxed.RoleUser), keyAs("bob", boxed.RoleUser), keyAs("root", boxed.RoleAdmin)
	for _, f := range []boxed.EgressFreeze{{All: true}, {Owner: "ann"}} {
		if _, err := h.Freeze(bob, f); !errors.Is(err, boxed.CodeForbidden) {
			t.Errorf("%+v: %v", f, err)
		}
	}
	f, err := h.Freeze(ann, boxed.EgressFreeze{Labels: map[string]string{"task": "x"}})
	if err != nil {
		t.Fatal(err)
	}
	labels := map[string]string{"task": "x"}
	if !h.frozen("", "ann", labels) || h.frozen("", "ann", nil) || h.frozen("", "bob", labels) {
		t.Error("another set is frozen than was asked for")
	}
	all, err := h.Freeze(root, boxed.EgressFreeze{All: true})
	if err != nil || !h.frozen("", "bob", nil) {
		t.Errorf("all: %v", err)
	}
	if err := h.Thaw(ann, all.ID); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("an admin's, thawed by another: %v", err)
	}
	if err := h.Thaw(root, all.ID); err != nil || h.frozen("", "bob", nil) {
		t.Errorf("thawed: %v", err)
	}
	if err := h.Thaw(ann, f.ID); err != nil || h.frozen != nil {
		t.Errorf("the last one thawed: %v", err)
	}
}
