package node_test

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/sandboxtest"
	"github.com/boxed-mesh/boxed/scheduler"
	"github.com/boxed-mesh/boxed/store"
)

// host is a Node over the fake driver.
type host struct {
	*node.Node
	t       *testing.T
	driver  *sandboxtest.Driver
	manager *sandbox.Manager
	cfg     node.Config
}

const hostID = boxed.NodeID("aaaaaaaaaaaaaaaa")

var (
	ann  = keyAs("ann", boxed.RoleUser)
	bob  = keyAs("bob", boxed.RoleUser)
	root = keyAs("root", boxed.RoleAdmin)
)

func small() boxed.Limits {
	return boxed.Limits{
		MemoryBytes: 128 * boxed.MiB, CPUs: 0.1, Processes: 64, OpenFiles: 1024, WorkspaceBytes: 16 * boxed.MiB,
		HomeBytes: 8 * boxed.MiB, TmpBytes: 8 * boxed.MiB, OutputBytes: 8 * boxed.MiB, ShmBytes: 4 * boxed.MiB,
	}
}

func newHost(t *testing.T, change ...func(*node.Config)) *host {
	t.Helper()
	events, err := store.Open(store.Options{InMemory: true})
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, driver: sandboxtest.New()}
	h.driver.SetImage("base", "sha256:1")
	h.driver.SetImage("other", "sha256:2")
	templates := map[string]boxed.Template{
		boxed.DefaultTemplate: {Name: boxed.DefaultTemplate, Image: "base", Limits: small()},
		"other":               {Name: "other", Image: "other", Limits: small(), Env: map[string]string{"T": "1", "OVER": "template"}},
	}
	h.manager, err = sandbox.New(sandbox.Config{
		Node: hostID, Dir: filepath.Join(t.TempDir(), "boxes"), Agent: "/nonexistent", Driver: h.driver, Records: &sandboxtest.Records{},
		Templates: templates, Emit: func(e boxed.Event) { events.AppendEvent(e) },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- h.manager.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
		h.driver.Close()
		events.Close()
	})
	h.cfg = node.Config{
		ID: hostID, Name: "test", Version: "1", Manager: h.manager, Driver: h.driver, Events: events, Templates: templates,
		Defaults: small(), TTL: boxed.Duration(time.Hour), MaxTTL: boxed.Duration(24 * time.Hour),
		Policy: scheduler.Policy{MemoryOvercommit: 4, CPUOvercommit: 16},
	}
	for _, c := range change {
		c(&h.cfg)
	}
	if h.Node, err = node.New(h.cfg); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is ready", func() bool { return len(h.Ready(ctx)) == 0 })
	return h
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

func (h *host) create(ctx context.Context, spec boxed.Spec) *boxed.Sandbox {
	h.t.Helper()
	s, err := h.Create(ctx, spec)
	if err != nil {
		h.t.Fatalf("create: %v", err)
	}
	return s
}

func wantCode(t *testing.T, what string, err error, code boxed.Code) {
	t.Helper()
	if boxed.CodeOf(err) != code {
		t.Errorf("%s: got %v (%s), want %s", what, err, boxed.CodeOf(err), code)
	}
}

// Decision 13: absent and forbidden look the same, in every call.
func TestWhatOneMayNotSeeDoesNotExist(t *testing.T) {
	h := newHost(t)
	theirs, absent := h.create(ann, boxed.Spec{Name: "web"}).ID, boxed.NewID(hostID)
	exec := boxed.NewExecID()
	calls := map[string]func(context.Context, boxed.ID) error{
		"get":     func(ctx context.Context, id boxed.ID) error { _, err := h.Get(ctx, id); return err },
		"resolve": func(ctx context.Context, id boxed.ID) error { _, err := h.Resolve(ctx, string(id)); return err },
		"wait": func(ctx context.Context, id boxed.ID) error {
			_, err := h.Wait(ctx, id, boxed.StateRunning)
			return err
		},
		"destroy": h.Destroy,
		"update": func(ctx context.Context, id boxed.ID) error {
			bad := "Not A Name"
			_, err := h.Update(ctx, id, boxed.Update{Name: &bad})
			return err
		},
		"pause":  func(ctx context.Context, id boxed.ID) error { _, err := h.Pause(ctx, id); return err },
		"resume": func(ctx context.Context, id boxed.ID) error { _, err := h.Resume(ctx, id); return err },
		"stats":  func(ctx context.Context, id boxed.ID) error { _, err := h.Stats(ctx, id); return err },
		"exec": func(ctx context.Context, id boxed.ID) error {
			_, err := h.Exec(ctx, id, boxed.ExecRequest{MaxOutput: -1})
			return err
		},
		"start exec": func(ctx context.Context, id boxed.ID) error {
			_, err := h.StartExec(ctx, id, boxed.ExecRequest{})
			return err
		},
		"attach": func(ctx context.Context, id boxed.ID) error {
			_, err := h.Attach(ctx, id, exec, boxed.AttachRequest{})
			return err
		},
		"get exec":    func(ctx context.Context, id boxed.ID) error { _, err := h.GetExec(ctx, id, exec); return err },
		"list execs":  func(ctx context.Context, id boxed.ID) error { _, err := h.ListExecs(ctx, id); return err },
		"signal exec": func(ctx context.Context, id boxed.ID) error { return h.SignalExec(ctx, id, exec, "TERM", false) },
		"kill exec":   func(ctx context.Context, id boxed.ID) error { return h.KillExec(ctx, id, exec) },
		"stat":        func(ctx context.Context, id boxed.ID) error { _, err := h.Stat(ctx, id, "/"); return err },
		"list files":  func(ctx context.Context, id boxed.ID) error { _, err := h.ListFiles(ctx, id, "/"); return err },
		"read file": func(ctx context.Context, id boxed.ID) error {
			_, err := h.ReadFile(ctx, id, boxed.ReadRequest{Path: "/x"})
			return err
		},
		"write file": func(ctx context.Context, id boxed.ID) error {
			_, err := h.WriteFile(ctx, id, boxed.WriteRequest{Path: "/x", Content: strings.NewReader("")})
			return err
		},
		"mkdir":      func(ctx context.Context, id boxed.ID) error { return h.Mkdir(ctx, id, "/x", false) },
		"remove":     func(ctx context.Context, id boxed.ID) error { return h.Remove(ctx, id, "/x", false) },
		"move":       func(ctx context.Context, id boxed.ID) error { return h.Move(ctx, id, "/x", "/y") },
		"read tar":   func(ctx context.Context, id boxed.ID) error { _, err := h.ReadTar(ctx, id, "/x"); return err },
		"write tar":  func(ctx context.Context, id boxed.ID) error { return h.WriteTar(ctx, id, "/x", strings.NewReader("")) },
		"list ports": func(ctx context.Context, id boxed.ID) error { _, err := h.ListPorts(ctx, id); return err },
		"dial":       func(ctx context.Context, id boxed.ID) error { _, err := h.Dial(ctx, id, 1); return err },
	}
	for name, call := range calls {
		for who, ctx := range map[string]context.Context{"another": bob, "nobody": context.Background()} {
			a, b := call(ctx, theirs), call(ctx, absent)
			wantCode(t, name+" as "+who, a, boxed.CodeNotFound)
			if fmt.Sprint(boxed.AsError(a).Detail) != fmt.Sprint(boxed.AsError(b).Detail) ||
				strings.ReplaceAll(fmt.Sprint(a), string(theirs), "ID") != strings.ReplaceAll(fmt.Sprint(b), string(absent), "ID") {
				t.Errorf("%s: forbidden is %v, absent %v", name, a, b)
			}
		}
	}
	if s, err := h.Get(root, theirs); err != nil || s.State != boxed.StateRunning {
		t.Errorf("an admin: %+v, %v", s, err)
	}
	if _, err := h.Create(context.Background(), boxed.Spec{}); boxed.CodeOf(err) != boxed.CodeUnauthenticated {
		t.Errorf("nobody may create: %v", err)
	}
}

func TestQuotasBoundAnOwner(t *testing.T) {
	h := newHost(t, func(c *node.Config) {
		c.Quota = func(owner string) node.Quota {
			if owner == "ann" {
				return node.Quota{Sandboxes: 2, MemoryBytes: 300 * boxed.MiB}
			}
			return node.Quota{}
		}
	})
	a := h.create(ann, boxed.Spec{})
	limits := small()
	limits.MemoryBytes = 200 * boxed.MiB
	_, err := h.Create(ann, boxed.Spec{Limits: limits})
	if wantCode(t, "memory", err, boxed.CodeQuota); boxed.AsError(err).Field() != "limits.memory_bytes" {
		t.Errorf("field %q", boxed.AsError(err).Field())
	}
	h.create(ann, boxed.Spec{})
	_, err = h.Create(ann, boxed.Spec{})
	wantCode(t, "sandboxes", err, boxed.CodeQuota)
	for range 4 {
		h.create(bob, boxed.Spec{})
	}
	if err := h.Destroy(ann, a.ID); err != nil {
		t.Fatal(err)
	}
	h.create(ann, boxed.Spec{})
	if list, _ := h.List(ann, boxed.Filter{}); len(list.Sandboxes) != 2 {
		t.Errorf("%d sandboxes", len(list.Sandboxes))
	}
}

func TestNamesAreUniqueForEachOwner(t *testing.T) {
	h := newHost(t)
	web := h.create(ann, boxed.Spec{Name: "web"})
	_, err := h.Create(ann, boxed.Spec{Name: "web"})
	if wantCode(t, "the same name", err, boxed.CodeConflict); boxed.AsError(err).Field() != "name" {
		t.Errorf("field %q", boxed.AsError(err).Field())
	}
	his := h.create(bob, boxed.Spec{Name: "web"})
	plain := h.create(ann, boxed.Spec{})
	name := "web"
	_, err = h.Update(ann, plain.ID, boxed.Update{Name: &name})
	wantCode(t, "renamed to it", err, boxed.CodeConflict)
	if _, err := h.Update(ann, web.ID, boxed.Update{Name: &name}); err != nil {
		t.Errorf("its own name: %v", err)
	}
	for ctx, want := range map[context.Context]boxed.ID{ann: web.ID, bob: his.ID} {
		if s, err := h.Resolve(ctx, "web"); err != nil || s.ID != want {
			t.Errorf("%+v, %v", s, err)
		}
	}
	_, err = h.Resolve(root, "web")
	if wantCode(t, "for an admin", err, boxed.CodeConflict); len(boxed.AsError(err).Detail["ids"].([]boxed.ID)) != 2 {
		t.Errorf("%v", boxed.AsError(err).Detail)
	}
	// An ended one's name is free.
	if err := h.Destroy(ann, web.ID); err != nil {
		t.Fatal(err)
	}
	again := h.create(ann, boxed.Spec{Name: "web"})
	if s, err := h.Resolve(ann, "web"); err != nil || s.ID != again.ID {
		t.Errorf("%+v, %v", s, err)
	}
	none := ""
	if s, err := h.Update(ann, again.ID, boxed.Update{Name: &none}); err != nil || s.Name != "" {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestResolveByIDAndPrefix(t *testing.T) {
	h := newHost(t)
	s := h.create(ann, boxed.Spec{})
	random := s.ID.Random()
	for _, ref := range []string{string(s.ID), random, random[:boxed.MinPrefixLen]} {
		if got, err := h.Resolve(ann, ref); err != nil || got.ID != s.ID {
			t.Errorf("%q: %+v, %v", ref, got, err)
		}
		_, err := h.Resolve(bob, ref)
		wantCode(t, "another's "+ref, err, boxed.CodeNotFound)
	}
	for _, ref := range []string{random[:boxed.MinPrefixLen-1], "", "no-such", "%", strings.Repeat("a", 5000)} {
		_, err := h.Resolve(ann, ref)
		wantCode(t, fmt.Sprintf("%.20q", ref), err, boxed.CodeNotFound)
	}
	// A name that looks like another's prefix is a name first.
	named := h.create(ann, boxed.Spec{Name: random[:5]})
	if got, err := h.Resolve(ann, random[:5]); err != nil || got.ID != named.ID {
		t.Errorf("%+v, %v", got, err)
	}
	// An ended one is found by its ID, and by a prefix while nobody else has it.
	if err := h.Destroy(ann, s.ID); err != nil {
		t.Fatal(err)
	}
	if got, err := h.Resolve(ann, random); err != nil || got.State != boxed.StateStopped {
		t.Errorf("%+v, %v", got, err)
	}
}

// Bad input: a 4xx that names the field and changes nothing.
func TestABadSpecNamesItsField(t *testing.T) {
	h := newHost(t)
	limits := func(change func(*boxed.Limits)) boxed.Spec {
		var l boxed.Limits
		change(&l)
		return boxed.Spec{Limits: l}
	}
	many := map[string]string{}
	for i := range 300 {
		many[fmt.Sprint("k", i)] = "v"
	}
	for name, c := range map[string]struct {
		spec  boxed.Spec
		code  boxed.Code
		field string
	}{
		"name":                 {boxed.Spec{Name: "Not OK"}, boxed.CodeInvalid, "name"},
		"long name":            {boxed.Spec{Name: strings.Repeat("a", 41)}, boxed.CodeInvalid, "name"},
		"many labels":          {boxed.Spec{Labels: many}, boxed.CodeInvalid, "labels"},
		"label key":            {boxed.Spec{Labels: map[string]string{"a=b": ""}}, boxed.CodeInvalid, "labels"},
		"label value":          {boxed.Spec{Labels: map[string]string{"a": strings.Repeat("x", 257)}}, boxed.CodeInvalid, "labels.a"},
		"label not UTF-8":      {boxed.Spec{Labels: map[string]string{"a": "\xff"}}, boxed.CodeInvalid, "labels.a"},
		"env name":             {boxed.Spec{Env: map[string]string{"A=B": ""}}, boxed.CodeInvalid, "env"},
		"env zero":             {boxed.Spec{Env: map[string]string{"A": "\x00"}}, boxed.CodeInvalid, "env"},
		"many env":             {boxed.Spec{Env: many}, boxed.CodeInvalid, "env"},
		"large env":            {boxed.Spec{Env: map[string]string{"A": strings.Repeat("x", 300<<10)}}, boxed.CodeInvalid, "env"},
		"dir":                  {boxed.Spec{Dir: "relative"}, boxed.CodeInvalid, "dir"},
		"dir dots":             {boxed.Spec{Dir: "/a/../b"}, boxed.CodeInvalid, "dir"},
		"template":             {boxed.Spec{Template: "nope"}, boxed.CodeInvalid, "template"},
		"template and image":   {boxed.Spec{Template: "other", Image: "base"}, boxed.CodeInvalid, "image"},
		"ttl":                  {boxed.Spec{TTL: boxed.Duration(time.Millisecond)}, boxed.CodeInvalid, "ttl"},
		"negative ttl":         {boxed.Spec{TTL: -1}, boxed.CodeInvalid, "ttl"},
		"high ttl":             {boxed.Spec{TTL: boxed.Duration(25 * time.Hour)}, boxed.CodeInvalid, "ttl"},
		"never":                {boxed.Spec{TTL: boxed.Never}, boxed.CodeForbidden, "ttl"},
		"idle":                 {boxed.Spec{IdleTimeout: 1}, boxed.CodeInvalid, "idle_timeout"},
		"negative idle":        {boxed.Spec{IdleTimeout: -1}, boxed.CodeInvalid, "idle_timeout"},
		"runtime":              {boxed.Spec{Runtime: "nope"}, boxed.CodeUnavailable, "runtime"},
		"egress":               {boxed.Spec{Egress: &boxed.EgressSpec{Profile: "x"}}, boxed.CodeUnavailable, "egress"},
		"workspace":            {boxed.Spec{Workspace: &boxed.Workspace{Kind: "disk"}}, boxed.CodeUnavailable, "workspace.kind"},
		"memory":               {limits(func(l *boxed.Limits) { l.MemoryBytes = 1 }), boxed.CodeInvalid, "limits.memory_bytes"},
		"negative memory":      {limits(func(l *boxed.Limits) { l.MemoryBytes = -1 }), boxed.CodeInvalid, "limits.memory_bytes"},
		"cpus":                 {limits(func(l *boxed.Limits) { l.CPUs = 0.001 }), boxed.CodeInvalid, "limits.cpus"},
		"negative cpus":        {limits(func(l *boxed.Limits) { l.CPUs = -1 }), boxed.CodeInvalid, "limits.cpus"},
		"no number of cpus":    {limits(func(l *boxed.Limits) { l.CPUs = math.NaN() }), boxed.CodeInvalid, "limits.cpus"},
		"processes":            {limits(func(l *boxed.Limits) { l.Processes = 1 }), boxed.CodeInvalid, "limits.processes"},
		"open files":           {limits(func(l *boxed.Limits) { l.OpenFiles = 1 }), boxed.CodeInvalid, "limits.open_files"},
		"negative tmpfs":       {limits(func(l *boxed.Limits) { l.TmpBytes = -1 }), boxed.CodeInvalid, "limits.tmp_bytes"},
		"tmpfs without memory": {limits(func(l *boxed.Limits) { l.WorkspaceBytes = 256 * boxed.MiB }), boxed.CodeInvalid, "limits.memory_bytes"},
		"sizes that overflow": {limits(func(l *boxed.Limits) {
			l.WorkspaceBytes, l.HomeBytes, l.TmpBytes, l.OutputBytes = 1<<62, 1<<62, 1<<62, 1<<62
		}), boxed.CodeInvalid, "limits.workspace_bytes"},
		"file path":     {boxed.Spec{Files: []boxed.File{{Path: "ok"}, {Path: "../x"}}}, boxed.CodeInvalid, "files[1].path"},
		"no file path":  {boxed.Spec{Files: []boxed.File{{}}}, boxed.CodeInvalid, "files[0].path"},
		"file mode":     {boxed.Spec{Files: []boxed.File{{Path: "x", Mode: 0o4755}}}, boxed.CodeInvalid, "files[0].mode"},
		"many files":    {boxed.Spec{Files: make([]boxed.File, 257)}, boxed.CodeInvalid, "files"},
		"large files":   {boxed.Spec{Files: []boxed.File{{Path: "x", Content: make([]byte, 9<<20)}}}, boxed.CodeTooLarge, "files"},
		"missing image": {boxed.Spec{Image: "missing"}, boxed.CodeImage, ""},
	} {
		_, err := h.Create(ann, c.spec)
		if e := boxed.AsError(err); err == nil || e.Code != c.code || e.Field() != c.field {
			t.Errorf("%s: got %v (%s, field %q), want %s, %q", name, err, boxed.CodeOf(err), e.Field(), c.code, c.field)
		}
	}
	if list, _ := h.List(root, boxed.Filter{Owner: "*", States: []boxed.State{
		boxed.StatePending, boxed.StateStarting, boxed.StateRunning, boxed.StateFailed, boxed.StateStopped,
	}}); len(list.Sandboxes) != 0 {
		t.Errorf("%d records were made", len(list.Sandboxes))
	}
	if n := h.driver.Calls(sandboxtest.Create); n != 0 {
		t.Errorf("%d containers were made", n)
	}
}

// More than the node has is exhausted, with the reason; another node's is not
// made here.
func TestWhatDoesNotFitIsRefusedWithTheReason(t *testing.T) {
	h := newHost(t, func(c *node.Config) { c.Most = 1 })
	_, err := h.Create(ann, boxed.Spec{Limits: boxed.Limits{MemoryBytes: 1 << 45}})
	wantCode(t, "more than any node has", err, boxed.CodeUnavailable)
	s := h.create(ann, boxed.Spec{})
	_, err = h.Create(ann, boxed.Spec{})
	if wantCode(t, "a full node", err, boxed.CodeExhausted); boxed.AsError(err).Detail["nodes"] == nil {
		t.Errorf("%v", boxed.AsError(err).Detail)
	}
	if err := h.Destroy(ann, s.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Create(ann, boxed.Spec{Node: "bbbbbbbbbbbbbbbb"}); err == nil {
		t.Error("it was made on another node's behalf")
	}
	h.Drain()
	if _, err := h.Create(ann, boxed.Spec{}); err == nil { // L17
		t.Error("a draining node made one")
	}
}

func TestTemplatesCompleteASpec(t *testing.T) {
	h := newHost(t)
	s := h.create(ann, boxed.Spec{Template: "other", Env: map[string]string{"OVER": "spec"}, Limits: boxed.Limits{CPUs: 0.2}})
	want := small()
	want.CPUs = 0.2
	if s.Image != "other" || s.Template != "other" || s.Env["T"] != "1" || s.Env["OVER"] != "spec" || s.Limits != want ||
		s.Dir != boxed.DefaultDir || s.TTL != h.cfg.TTL {
		t.Errorf("%+v", s)
	}
	if s := h.create(ann, boxed.Spec{}); s.Template != boxed.DefaultTemplate || s.Image != "base" {
		t.Errorf("%+v", s)
	}
	if s := h.create(ann, boxed.Spec{Image: "other"}); s.Template != "" || s.Env["T"] != "" {
		t.Errorf("%+v", s)
	}
	// Less memory shrinks the tmpfs sizes that nobody asked for.
	if s := h.create(ann, boxed.Spec{Limits: boxed.Limits{MemoryBytes: 80 * boxed.MiB}}); s.Limits.TmpfsBytes() > 16*boxed.MiB {
		t.Errorf("%+v", s.Limits)
	}
	if s := h.create(root, boxed.Spec{TTL: boxed.Never}); !s.ExpiresAt.IsZero() {
		t.Errorf("%+v", s)
	}
}

func TestListsPageAndFilter(t *testing.T) {
	h := newHost(t)
	var ids []boxed.ID
	for i := range 7 {
		s := h.create(ann, boxed.Spec{Name: fmt.Sprint("n", i), Labels: map[string]string{"parity": fmt.Sprint(i % 2), "all": ""}})
		ids = append(ids, s.ID)
	}
	slices.Reverse(ids) // newest first
	h.create(bob, boxed.Spec{})
	var got []boxed.ID
	pages := 0
	for f := (boxed.Filter{Limit: 3}); ; pages++ {
		list, err := h.List(ann, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list.Sandboxes {
			got = append(got, s.ID)
		}
		if pages == 0 { // what comes or goes in between moves no page
			h.create(ann, boxed.Spec{Labels: map[string]string{"late": ""}})
		}
		if f.Cursor = list.Next; f.Cursor == "" {
			break
		}
	}
	if !slices.Equal(got, ids) || pages != 2 {
		t.Errorf("%v over %d pages, want %v", got, pages+1, ids)
	}
	count := func(ctx context.Context, f boxed.Filter) int {
		t.Helper()
		list, err := h.List(ctx, f)
		if err != nil {
			t.Error(err)
		}
		return len(list.Sandboxes)
	}
	if err := h.Destroy(ann, ids[0]); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		who  context.Context
		f    boxed.Filter
		want int
	}{
		{ann, boxed.Filter{}, 7},
		{ann, boxed.Filter{Labels: map[string]string{"parity": "1"}}, 3},
		{ann, boxed.Filter{Labels: map[string]string{"parity": "1", "all": "no"}}, 0},
		{ann, boxed.Filter{Labels: map[string]string{"absent": ""}}, 0},
		{ann, boxed.Filter{Name: "n3"}, 1},
		{ann, boxed.Filter{States: []boxed.State{boxed.StateStopped}}, 1},
		{ann, boxed.Filter{States: []boxed.State{boxed.StatePaused}}, 0},
		{bob, boxed.Filter{}, 1},
		{root, boxed.Filter{}, 0},
		{root, boxed.Filter{Owner: "*"}, 8},
		{root, boxed.Filter{Owner: "ann"}, 7},
		{ann, boxed.Filter{Owner: "ann"}, 7},
	} {
		if n := count(c.who, c.f); n != c.want {
			t.Errorf("%+v: %d, want %d", c.f, n, c.want)
		}
	}
	for field, f := range map[string]boxed.Filter{"limit": {Limit: 1001}, "cursor": {Cursor: "!"}, "owner": {Owner: "bob"}} {
		_, err := h.List(ann, f)
		if err == nil || boxed.AsError(err).Field() != field {
			t.Errorf("%+v: %v", f, err)
		}
	}
	_, err := h.List(ann, boxed.Filter{Owner: "*"})
	wantCode(t, "everybody's", err, boxed.CodeForbidden)
	_, err = h.List(ann, boxed.Filter{Limit: -1})
	wantCode(t, "a negative limit", err, boxed.CodeInvalid)
}

func TestUpdatesAreChecked(t *testing.T) {
	h := newHost(t)
	s := h.create(ann, boxed.Spec{IdleTimeout: boxed.Duration(time.Hour)})
	name, labels := "Bad Name", map[string]string{"=": ""}
	short, long, never := boxed.Duration(1), boxed.Duration(48*time.Hour), boxed.Never
	for field, u := range map[string]boxed.Update{
		"name": {Name: &name}, "labels": {Labels: &labels}, "idle_timeout": {IdleTimeout: &short}, "ttl": {TTL: &long},
	} {
		_, err := h.Update(ann, s.ID, u)
		if err == nil || boxed.AsError(err).Field() != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	_, err := h.Update(ann, s.ID, boxed.Update{TTL: &never})
	wantCode(t, "never", err, boxed.CodeForbidden)
	if got, err := h.Update(root, s.ID, boxed.Update{TTL: &never, IdleTimeout: &never}); err != nil || !got.ExpiresAt.IsZero() || got.IdleTimeout != 0 {
		t.Errorf("%+v, %v", got, err)
	}
}
