package api_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// fake is a boxed.API and boxed.Admin in memory. Tests replace what they care
// about: a nil function has the default behaviour.
type fake struct {
	run    func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error)
	attach func(ctx context.Context, req boxed.AttachRequest) (boxed.ExitStatus, error)
	create func(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error)
	events func(ctx context.Context, after boxed.Cursor) iter.Seq2[boxed.Event, error]
	dial   func(ctx context.Context, port uint16) (net.Conn, error)
	write  func(ctx context.Context, req boxed.WriteRequest) (*boxed.FileInfo, error)
	read   func(ctx context.Context, req boxed.ReadRequest) (*boxed.FileReader, error)

	noNotes bool // for benchmarks

	mu        sync.Mutex
	sandboxes map[boxed.ID]*boxed.Sandbox
	execs     map[boxed.ExecID]*boxed.Exec
	files     map[string][]byte
	keys      []boxed.Key
	last      any // the last request's decoded form
	who       boxed.Principal
	calls     []string
	changed   chan struct{}
}

const testNode = boxed.NodeID("abcdefghijklmnop")

func newFake() *fake {
	return &fake{
		sandboxes: map[boxed.ID]*boxed.Sandbox{}, execs: map[boxed.ExecID]*boxed.Exec{},
		files: map[string][]byte{}, changed: make(chan struct{}),
	}
}

// note remembers a call.
func (f *fake) note(ctx context.Context, name string, last any) {
	if f.noNotes {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last, f.who = last, boxed.PrincipalFrom(ctx)
	f.calls = append(f.calls, name)
}

func (f *fake) lastCall() any {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
}

func (f *fake) called(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for _, c := range f.calls {
		if c == name {
			n++
		}
	}
	return n
}

// add makes a running sandbox.
func (f *fake) add(name string) *boxed.Sandbox {
	f.mu.Lock()
	defer f.mu.Unlock()
	sb := &boxed.Sandbox{
		ID: boxed.NewID(testNode), Name: name, Owner: "ada", Node: testNode, State: boxed.StateRunning,
		Image: "debian", Dir: "/workspace", Limits: boxed.DefaultLimits(), Runtime: "runc",
		TTL: boxed.Duration(time.Hour), CreatedAt: time.Now().UTC().Truncate(time.Millisecond),
	}
	f.sandboxes[sb.ID] = sb
	return sb
}

func (f *fake) find(id boxed.ID) (*boxed.Sandbox, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if sb := f.sandboxes[id]; sb != nil {
		c := *sb
		return &c, nil
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "no sandbox %s", id)
}

func (f *fake) set(id boxed.ID, change func(*boxed.Sandbox)) (*boxed.Sandbox, error) {
	if _, err := f.find(id); err != nil {
		return nil, err
	}
	f.mu.Lock()
	change(f.sandboxes[id])
	close(f.changed)
	f.changed = make(chan struct{})
	f.mu.Unlock()
	return f.find(id)
}

func (f *fake) Create(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error) {
	f.note(ctx, "Create", spec)
	if f.create != nil {
		return f.create(ctx, spec)
	}
	sb := f.add(spec.Name)
	return f.set(sb.ID, func(sb *boxed.Sandbox) { sb.Labels = spec.Labels; sb.Owner = boxed.PrincipalFrom(ctx).Owner })
}

func (f *fake) Get(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	f.note(ctx, "Get", id)
	return f.find(id)
}

func (f *fake) List(ctx context.Context, filter boxed.Filter) (boxed.List, error) {
	f.note(ctx, "List", filter)
	f.mu.Lock()
	defer f.mu.Unlock()
	var l boxed.List
	for _, sb := range f.sandboxes {
		if filter.Name == "" || sb.Name == filter.Name {
			l.Sandboxes = append(l.Sandboxes, *sb)
		}
	}
	return l, nil
}

func (f *fake) Wait(ctx context.Context, id boxed.ID, until boxed.State) (*boxed.Sandbox, error) {
	f.note(ctx, "Wait", until)
	for {
		f.mu.Lock()
		changed := f.changed
		f.mu.Unlock()
		sb, err := f.find(id)
		if err != nil || sb.State == until || sb.State.Ended() {
			return sb, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (f *fake) Destroy(ctx context.Context, id boxed.ID) error {
	f.note(ctx, "Destroy", id)
	_, err := f.set(id, func(sb *boxed.Sandbox) { sb.State, sb.Reason = boxed.StateStopped, boxed.EndDestroyed })
	return err
}

func (f *fake) Resolve(ctx context.Context, ref string) (*boxed.Sandbox, error) {
	f.note(ctx, "Resolve", ref)
	f.mu.Lock()
	defer f.mu.Unlock()
	var hits []boxed.Sandbox
	for id, sb := range f.sandboxes {
		if string(id) == ref || sb.Name == ref || (len(ref) >= 4 && strings.HasPrefix(string(id), ref)) {
			hits = append(hits, *sb)
		}
	}
	switch len(hits) {
	case 0:
		return nil, boxed.Errorf(boxed.CodeNotFound, "no sandbox is called %s", ref)
	case 1:
		return &hits[0], nil
	}
	return nil, boxed.Errorf(boxed.CodeConflict, "%s is ambiguous", ref).With("ids", []boxed.ID{hits[0].ID, hits[1].ID})
}

func (f *fake) Update(ctx context.Context, id boxed.ID, u boxed.Update) (*boxed.Sandbox, error) {
	f.note(ctx, "Update", u)
	return f.set(id, func(sb *boxed.Sandbox) {
		if u.TTL != nil {
			sb.TTL = *u.TTL
		}
	})
}

func (f *fake) Pause(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return f.set(id, func(sb *boxed.Sandbox) { sb.State = boxed.StatePaused })
}

func (f *fake) Resume(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return f.set(id, func(sb *boxed.Sandbox) { sb.State = boxed.StateRunning })
}

func (f *fake) Stats(ctx context.Context, id boxed.ID) (*boxed.Stats, error) {
	if _, err := f.find(id); err != nil {
		return nil, err
	}
	return &boxed.Stats{MemoryBytes: 1 << 20, At: time.Now().UTC()}, nil
}

// Exec runs a few programs of its own: echo, cat, false, missing.
func (f *fake) Exec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (boxed.ExitStatus, error) {
	f.note(ctx, "Exec", req)
	if _, err := f.find(id); err != nil {
		return boxed.ExitStatus{}, err
	}
	if f.run != nil {
		return f.run(ctx, req)
	}
	if req.Started != nil {
		req.Started("abcdefghij23")
	}
	status := boxed.ExitStatus{Reason: boxed.ReasonExited}
	if len(req.Args) == 0 {
		return status, nil
	}
	switch req.Args[0] {
	case "echo":
		n, err := io.WriteString(req.Stdout, strings.Join(req.Args[1:], " ")+"\n")
		status.StdoutBytes = int64(n)
		return status, err
	case "cat":
		if req.Stdin == nil {
			return status, nil
		}
		n, err := io.Copy(req.Stdout, req.Stdin)
		status.StdoutBytes = n
		if ctx.Err() != nil {
			return boxed.ExitStatus{Reason: boxed.ReasonCanceled, Code: 137}, nil
		}
		return status, err
	case "false":
		status.Code = 1
	case "missing":
		return boxed.ExitStatus{}, boxed.Errorf(boxed.CodeStartFailed, "missing: no such program").WithField("args")
	case "sleep":
		<-ctx.Done()
		return boxed.ExitStatus{Reason: boxed.ReasonCanceled, Code: 137}, nil
	}
	return status, nil
}

func (f *fake) Events(ctx context.Context, after boxed.Cursor) iter.Seq2[boxed.Event, error] {
	f.note(ctx, "Events", after)
	if f.events != nil {
		return f.events(ctx, after)
	}
	return func(yield func(boxed.Event, error) bool) {
		<-ctx.Done()
		yield(boxed.Event{}, ctx.Err())
	}
}

func (f *fake) StartExec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*boxed.Exec, error) {
	f.note(ctx, "StartExec", req)
	if _, err := f.find(id); err != nil {
		return nil, err
	}
	e := &boxed.Exec{ID: boxed.NewExecID(), Args: req.Args, Detached: true, Running: true, StartedAt: time.Now().UTC()}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.execs[e.ID] = e
	return e, nil
}

func (f *fake) exec(exec boxed.ExecID) (*boxed.Exec, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.execs[exec]; e != nil {
		c := *e
		return &c, nil
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "no exec %s", exec)
}

// end ends an exec.
func (f *fake) end(exec boxed.ExecID, status boxed.ExitStatus) {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.execs[exec]
	e.Running, e.EndedAt, e.Status = false, time.Now().UTC(), &status
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *fake) Attach(ctx context.Context, id boxed.ID, exec boxed.ExecID, req boxed.AttachRequest) (boxed.ExitStatus, error) {
	f.note(ctx, "Attach", req)
	if f.attach != nil {
		return f.attach(ctx, req)
	}
	for {
		f.mu.Lock()
		changed := f.changed
		f.mu.Unlock()
		e, err := f.exec(exec)
		switch {
		case err != nil:
			return boxed.ExitStatus{}, err
		case !e.Running:
			return *e.Status, nil
		case req.NoFollow:
			return boxed.ExitStatus{}, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return boxed.ExitStatus{}, ctx.Err()
		}
	}
}

func (f *fake) GetExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) (*boxed.Exec, error) {
	return f.exec(exec)
}

func (f *fake) ListExecs(ctx context.Context, id boxed.ID) ([]boxed.Exec, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []boxed.Exec
	for _, e := range f.execs {
		list = append(list, *e)
	}
	return list, nil
}

func (f *fake) SignalExec(ctx context.Context, id boxed.ID, exec boxed.ExecID, signal string, tree bool) error {
	f.note(ctx, "SignalExec", fmt.Sprint(signal, tree))
	_, err := f.exec(exec)
	return err
}

func (f *fake) KillExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) error {
	if _, err := f.exec(exec); err != nil {
		return err
	}
	f.end(exec, boxed.ExitStatus{Reason: boxed.ReasonCanceled, Code: 137})
	return nil
}

func (f *fake) info(p string, size int) *boxed.FileInfo {
	return &boxed.FileInfo{
		Name: path.Base(p), Path: p, Type: "file", Size: int64(size), Mode: 0o644,
		ModifiedAt: time.Date(2025, 1, 2, 3, 4, 5, 0, time.UTC),
	}
}

func (f *fake) Stat(ctx context.Context, id boxed.ID, p string) (*boxed.FileInfo, error) {
	f.note(ctx, "Stat", p)
	f.mu.Lock()
	defer f.mu.Unlock()
	b, ok := f.files[p]
	if !ok {
		return nil, boxed.Errorf(boxed.CodeNotFound, "no file %s", p)
	}
	return f.info(p, len(b)), nil
}

func (f *fake) ListFiles(ctx context.Context, id boxed.ID, p string) ([]boxed.FileInfo, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []boxed.FileInfo
	for _, name := range slices.Sorted(maps.Keys(f.files)) {
		list = append(list, *f.info(name, len(f.files[name])))
	}
	return list, nil
}

func (f *fake) ReadFile(ctx context.Context, id boxed.ID, req boxed.ReadRequest) (*boxed.FileReader, error) {
	f.note(ctx, "ReadFile", req)
	if f.read != nil {
		return f.read(ctx, req)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b, ok := f.files[req.Path]
	if !ok {
		return nil, boxed.Errorf(boxed.CodeNotFound, "no file %s", req.Path)
	}
	if req.Offset > int64(len(b)) {
		return nil, boxed.Errorf(boxed.CodeRange, "beyond the end")
	}
	part := b[req.Offset:]
	if req.Length >= 0 {
		part = part[:min(int64(len(part)), req.Length)]
	}
	return &boxed.FileReader{
		ReadCloser: io.NopCloser(bytes.NewReader(part)), Info: *f.info(req.Path, len(b)),
		Offset: req.Offset, Length: int64(len(part)),
	}, nil
}

func (f *fake) WriteFile(ctx context.Context, id boxed.ID, req boxed.WriteRequest) (*boxed.FileInfo, error) {
	f.note(ctx, "WriteFile", req)
	if f.write != nil {
		return f.write(ctx, req)
	}
	b, err := io.ReadAll(req.Content)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.files[req.Path] = b
	return f.info(req.Path, len(b)), nil
}

func (f *fake) Mkdir(ctx context.Context, id boxed.ID, p string, parents bool) error {
	f.note(ctx, "Mkdir", fmt.Sprint(p, parents))
	return nil
}

func (f *fake) Remove(ctx context.Context, id boxed.ID, p string, recursive bool) error {
	f.note(ctx, "Remove", fmt.Sprint(p, recursive))
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.files, p)
	return nil
}

func (f *fake) Move(ctx context.Context, id boxed.ID, from, to string) error {
	f.note(ctx, "Move", from+" "+to)
	return nil
}

func (f *fake) ReadTar(ctx context.Context, id boxed.ID, p string) (io.ReadCloser, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(f.files)) {
		w.WriteHeader(&tar.Header{Name: name, Size: int64(len(f.files[name])), Mode: 0o644})
		w.Write(f.files[name])
	}
	w.Close()
	return io.NopCloser(&b), nil
}

func (f *fake) WriteTar(ctx context.Context, id boxed.ID, p string, r io.Reader) error {
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			return err
		}
		f.mu.Lock()
		f.files[path.Join(p, h.Name)] = b
		f.mu.Unlock()
	}
}

func (f *fake) ListPorts(ctx context.Context, id boxed.ID) ([]boxed.Port, error) { return nil, nil }

func (f *fake) Dial(ctx context.Context, id boxed.ID, port uint16) (net.Conn, error) {
	f.note(ctx, "Dial", port)
	if f.dial != nil {
		return f.dial(ctx, port)
	}
	return nil, boxed.Errorf(boxed.CodeConflict, "nothing listens on port %d", port)
}

func (f *fake) NodeInfo(ctx context.Context) (*boxed.NodeInfo, error) {
	return &boxed.NodeInfo{ID: testNode, Name: "test", Ready: true, StartedAt: time.Now().UTC()}, nil
}

func (f *fake) ListNodes(ctx context.Context) (boxed.NodeList, error) {
	return boxed.NodeList{Nodes: []boxed.NodeSummary{{ID: testNode, Name: "test", State: boxed.NodeAlive}}}, nil
}

func (f *fake) GetNode(ctx context.Context, ref string) (*boxed.NodeInfo, error) {
	f.note(ctx, "GetNode", ref)
	if ref != "test" && ref != string(testNode) {
		return nil, boxed.Errorf(boxed.CodeNotFound, "there is no node %q", ref)
	}
	return f.NodeInfo(ctx)
}

func (f *fake) CordonNode(ctx context.Context, ref string, on bool) (*boxed.NodeInfo, error) {
	f.note(ctx, "CordonNode", fmt.Sprint(ref, " ", on))
	return f.NodeInfo(ctx)
}

func (f *fake) DrainNode(ctx context.Context, ref string, within boxed.Duration) (*boxed.NodeInfo, error) {
	f.note(ctx, "DrainNode", fmt.Sprint(ref, " ", within))
	return f.NodeInfo(ctx)
}

func (f *fake) Explain(ctx context.Context, spec boxed.Spec) (*boxed.Explanation, error) {
	f.note(ctx, "Explain", spec)
	return &boxed.Explanation{Verdicts: []boxed.Verdict{{Node: testNode, Chosen: true, Fits: true, Message: "it would go there"}}}, nil
}

func (f *fake) Claim(ctx context.Context, key string, done bool) (*boxed.Sandbox, error) {
	f.note(ctx, "Claim", key)
	return nil, nil
}

func (f *fake) CreateKey(ctx context.Context, req boxed.KeyRequest) (*boxed.NewKey, error) {
	f.note(ctx, "CreateKey", req)
	k := boxed.Key{ID: "k1", Owner: req.Owner, Role: req.Role, CreatedAt: time.Now().UTC()}
	f.keys = append(f.keys, k)
	return &boxed.NewKey{Key: k, Secret: "boxed_x"}, nil
}

func (f *fake) ListKeys(ctx context.Context) ([]boxed.Key, error) { return f.keys, nil }

func (f *fake) RevokeKey(ctx context.Context, keyID string) error {
	f.note(ctx, "RevokeKey", keyID)
	return nil
}

var (
	_ boxed.API   = (*fake)(nil)
	_ boxed.Admin = (*fake)(nil)
)
