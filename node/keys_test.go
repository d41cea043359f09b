package node_test

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/store"
)

// keyring is Keys over a store in memory with a clock that tests set.
type keyring struct {
	*node.Keys
	store *store.Store
	nanos atomic.Int64
}

func keySigner(c byte) ed25519.PrivateKey {
	return ed25519.NewKeyFromSeed([]byte(strings.Repeat(string(c), ed25519.SeedSize)))
}

func (k *keyring) now() time.Time        { return time.Unix(0, k.nanos.Load()) }
func (k *keyring) sleep(d time.Duration) { k.nanos.Add(int64(d)) }
func (k *keyring) open(t *testing.T) {
	t.Helper()
	var err error
	k.Keys, err = node.NewKeys(node.KeysConfig{Documents: k.store, Signer: keySigner('a'), Clock: k.store.Clock(), Now: k.now})
	if err != nil {
		t.Fatal(err)
	}
}

func newKeyring(t *testing.T) *keyring {
	t.Helper()
	k := &keyring{}
	k.nanos.Store(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).UnixNano())
	s, err := store.Open(store.Options{InMemory: true, Now: k.now})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	k.store = s
	k.open(t)
	return k
}

func keyAs(owner string, role boxed.Role) context.Context {
	return boxed.WithPrincipal(context.Background(), boxed.Principal{Owner: owner, Role: role})
}

var keyAdmin = keyAs("root", boxed.RoleAdmin)

func (k *keyring) create(t *testing.T, req boxed.KeyRequest) *boxed.NewKey {
	t.Helper()
	key, err := k.CreateKey(keyAdmin, req)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (k *keyring) code(secret string) boxed.Code {
	_, err := k.Authenticate(context.Background(), secret)
	return boxed.CodeOf(err)
}

func keyClosed(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

func TestAKeyIsWhoItSaysUntilItIsRevoked(t *testing.T) {
	k := newKeyring(t)
	key := k.create(t, boxed.KeyRequest{Owner: "alice", Role: boxed.RoleUser, Comment: "laptop"})
	if !regexp.MustCompile(`^boxed_[a-z2-7]{52}$`).MatchString(key.Secret) {
		t.Errorf("the secret is %q", key.Secret)
	}
	for range 2 { // and after a restart
		p, err := k.Authenticate(context.Background(), key.Secret)
		if want := (boxed.Principal{Owner: "alice", Role: boxed.RoleUser, Key: key.ID}); err != nil || p != want {
			t.Errorf("got %+v, %v; want %+v", p, err, want)
		}
		k.open(t)
	}
	done, stop := k.Watch(key.ID)
	defer stop()
	if keyClosed(done) {
		t.Fatal("a valid key is said to have ended")
	}
	for range 2 {
		if err := k.RevokeKey(keyAdmin, key.ID); err != nil {
			t.Fatal(err)
		}
	}
	if !keyClosed(done) {
		t.Error("the revocation was not told")
	}
	late, _ := k.Watch(key.ID)
	unknown, _ := k.Watch("unknown")
	if !keyClosed(late) || !keyClosed(unknown) {
		t.Error("a key that is not valid can be watched")
	}
	for range 2 {
		if code := k.code(key.Secret); code != boxed.CodeUnauthenticated {
			t.Errorf("a revoked key: %q", code)
		}
		k.open(t)
	}
}

func TestAKeyExpires(t *testing.T) {
	k := newKeyring(t)
	key := k.create(t, boxed.KeyRequest{Owner: "alice", TTL: boxed.Duration(time.Hour)})
	forever := k.create(t, boxed.KeyRequest{Owner: "alice", TTL: boxed.Never})
	if key.Role != boxed.RoleUser || !forever.ExpiresAt.IsZero() {
		t.Errorf("got %+v, %+v", key.Key, forever.Key)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ran := make(chan error)
	go func() { ran <- k.Run(ctx) }()
	done, _ := k.Watch(key.ID)
	k.sleep(time.Hour - 1)
	if code := k.code(key.Secret); code != "" {
		t.Errorf("a moment before it expires: %q", code)
	}
	k.sleep(1)
	if code := k.code(key.Secret); code != boxed.CodeUnauthenticated {
		t.Errorf("when it has expired: %q", code)
	}
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Error("its streams were not ended within 5 s")
	}
	if code := k.code(forever.Secret); code != "" {
		t.Errorf("a key for ever: %q", code)
	}
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
}

func TestWrongSecretsAreAllTheSame(t *testing.T) {
	k := newKeyring(t)
	secret := k.create(t, boxed.KeyRequest{Owner: "alice"}).Secret
	messages := map[string]bool{}
	for _, wrong := range []string{"", "boxed_", secret[:len(secret)-1], secret + "a", strings.ToUpper(secret), " " + secret, node.NewKeySecret(), strings.Repeat("x", 1<<20)} {
		_, err := k.Authenticate(context.Background(), wrong)
		if !errors.Is(err, boxed.CodeUnauthenticated) {
			t.Errorf("%.20q: %v", wrong, err)
			continue
		}
		messages[err.Error()] = true
	}
	if len(messages) != 1 {
		t.Errorf("the messages tell them apart: %v", messages)
	}
}

func TestTheStoreHoldsNoSecret(t *testing.T) {
	k := newKeyring(t)
	key := k.create(t, boxed.KeyRequest{Owner: "alice"})
	docs, err := k.store.Documents("key")
	if err != nil || len(docs) != 1 {
		t.Fatal(docs, err)
	}
	raw, _ := json.Marshal(docs)
	if strings.Contains(string(raw)+string(docs[0].Body), strings.TrimPrefix(key.Secret, "boxed_")) {
		t.Error("the secret is in the store")
	}
}

func TestOnlyAdminsMakeAndRevokeKeys(t *testing.T) {
	k := newKeyring(t)
	alice, bob := k.create(t, boxed.KeyRequest{Owner: "alice"}), k.create(t, boxed.KeyRequest{Owner: "bob"})
	for _, ctx := range []context.Context{context.Background(), keyAs("alice", boxed.RoleUser)} {
		if _, err := k.CreateKey(ctx, boxed.KeyRequest{Owner: "alice", Role: boxed.RoleAdmin}); !errors.Is(err, boxed.CodeForbidden) {
			t.Errorf("create: %v", err)
		}
		if err := k.RevokeKey(ctx, alice.ID); !errors.Is(err, boxed.CodeForbidden) {
			t.Errorf("revoke: %v", err)
		}
	}
	ids := func(ctx context.Context) (ids []string) {
		keys, err := k.ListKeys(ctx)
		if err != nil {
			t.Error(err)
		}
		for _, key := range keys {
			ids = append(ids, key.ID)
		}
		return ids
	}
	sorted := cmpopts.SortSlices(strings.Compare)
	if diff := cmp.Diff([]string{alice.ID}, ids(keyAs("alice", boxed.RoleUser)), sorted); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{alice.ID, bob.ID}, ids(keyAdmin), sorted); diff != "" {
		t.Error(diff)
	}
	if _, err := k.ListKeys(context.Background()); !errors.Is(err, boxed.CodeForbidden) {
		t.Errorf("a stranger lists keys: %v", err)
	}
	if err := k.RevokeKey(keyAdmin, "nonsense"); !errors.Is(err, boxed.CodeNotFound) {
		t.Errorf("revoke what is not there: %v", err)
	}
}

func TestBadKeyRequestsNameTheField(t *testing.T) {
	k := newKeyring(t)
	for field, req := range map[string]boxed.KeyRequest{
		"owner":   {Owner: "*"},
		"role":    {Owner: "alice", Role: "root"},
		"comment": {Owner: "alice", Comment: "two\nlines"},
		"ttl":     {Owner: "alice", TTL: -1},
	} {
		_, err := k.CreateKey(keyAdmin, req)
		if e := boxed.AsError(err); e == nil || e.Code != boxed.CodeInvalid || e.Field() != field {
			t.Errorf("%+v: %v", req, err)
		}
	}
	if keys, _ := k.ListKeys(keyAdmin); len(keys) != 0 {
		t.Errorf("%d keys were made", len(keys))
	}
}

func TestTheConfigurationsKeyIsNotRevokedButChanged(t *testing.T) {
	k := newKeyring(t)
	secret := node.NewKeySecret()
	id, err := k.Bootstrap(secret, "admin", boxed.RoleAdmin)
	if err != nil {
		t.Fatal(err)
	}
	p, err := k.Authenticate(context.Background(), secret)
	if want := (boxed.Principal{Owner: "admin", Role: boxed.RoleAdmin, Key: id}); err != nil || p != want {
		t.Errorf("got %+v, %v", p, err)
	}
	if err := k.RevokeKey(keyAdmin, id); !errors.Is(err, boxed.CodeConflict) || !strings.Contains(err.Error(), "api_key_file") {
		t.Errorf("revoke: %v", err)
	}
	k.create(t, boxed.KeyRequest{Owner: "alice"}) // makes the index anew
	if done, _ := k.Watch(id); k.code(secret) != "" || keyClosed(done) {
		t.Error("the configuration's key was forgotten")
	}
	k.open(t) // a start with another configuration
	if code := k.code(secret); code != boxed.CodeUnauthenticated {
		t.Errorf("a key that is no longer configured: %q", code)
	}
	again, err := k.Bootstrap(secret, "admin", boxed.RoleAdmin)
	if err != nil || again != id {
		t.Errorf("its ID changed from %s to %s, %v", id, again, err)
	}
	for _, weak := range []string{"", "hunter2", "boxed_short", secret + "a", strings.Repeat("a b", 20), strings.Repeat("x", 300)} {
		if _, err := k.Bootstrap(weak, "admin", boxed.RoleAdmin); !errors.Is(err, boxed.CodeInvalid) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%.20q: %v", weak, err)
		}
	}
	if _, err := k.Bootstrap(fmt.Sprintf("%064x", 12345), "admin", boxed.RoleAdmin); err != nil {
		t.Errorf("a secret of one's own: %v", err)
	}
}

func TestKeysOfStrangersAreNotBelieved(t *testing.T) {
	k, other := newKeyring(t), newKeyring(t)
	key := other.create(t, boxed.KeyRequest{Owner: "mallory", Role: boxed.RoleAdmin})
	docs, err := other.store.Documents("key")
	if err != nil {
		t.Fatal(err)
	}
	d := docs[0]
	d.Sign(keySigner('m'))
	if took, err := k.store.PutDocument(d); !took || err != nil {
		t.Fatal(took, err)
	}
	k.open(t)
	if code := k.code(key.Secret); code != boxed.CodeUnauthenticated {
		t.Errorf("a stranger's key: %q", code)
	}
}

// A revocation that another node made arrives as a document.
func TestARevocationFromElsewhereEndsStreams(t *testing.T) {
	k := newKeyring(t)
	key := k.create(t, boxed.KeyRequest{Owner: "alice"})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ran := make(chan error)
	go func() { ran <- k.Run(ctx) }()
	done, _ := k.Watch(key.ID)

	docs, err := k.store.Documents("key")
	if err != nil {
		t.Fatal(err)
	}
	d := docs[0]
	d.Stamp, d.Revoked = boxed.Stamp{WallMS: 1}, true // however old
	d.Sign(keySigner('a'))
	if took, err := k.store.PutDocument(d); !took || err != nil {
		t.Fatal(took, err)
	}
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Error("its streams were not ended within 5 s")
	}
	if code := k.code(key.Secret); code != boxed.CodeUnauthenticated {
		t.Errorf("got %q", code)
	}
	cancel()
	<-ran
}

func BenchmarkAuthenticate(b *testing.B) {
	s, err := store.Open(store.Options{InMemory: true})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	k, err := node.NewKeys(node.KeysConfig{Documents: s, Signer: keySigner('a'), Clock: s.Clock()})
	if err != nil {
		b.Fatal(err)
	}
	var secret string
	for range 100 {
		key, err := k.CreateKey(keyAdmin, boxed.KeyRequest{Owner: "alice"})
		if err != nil {
			b.Fatal(err)
		}
		secret = key.Secret
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := k.Authenticate(context.Background(), secret); err != nil {
			b.Fatal(err)
		}
	}
}
