//go:build linux

package ctl

import (
	"context"
	"errors"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
)

// fakeNode is a boxed.API and boxed.Admin whose sandboxes are directories of
// this machine and whose programs run on it. It isolates nothing: it is for the
// stories, which run their own harmless programs, where no real node is.
type fakeNode struct {
	dir string

	mu      sync.Mutex
	fleet   fakeFleet
	egress  fakeEgress
	boxes   map[boxed.ID]*fakeBox
	keys    []boxed.Key
	events  []boxed.Event
	changed chan struct{}
}

type fakeBox struct {
	boxed.Sandbox
	root   string
	execs  map[boxed.ExecID]*fakeExec
	egress *boxed.EgressSpec
}

const (
	fakeNodeID   = boxed.NodeID("abcdefghijklmnop")
	fakeUserKey  = "boxed_user"
	fakeAdminKey = "boxed_admin"
)

// startFake serves a fake node and returns its endpoint.
func startFake(dir string, onEnd func(func())) (endpoint string, err error) {
	_, endpoint, err = serveFake(dir, onEnd)
	return endpoint, err
}

// serveFake is startFake for who has something to do with the node itself.
func serveFake(dir string, onEnd func(func())) (n *fakeNode, endpoint string, err error) {
	n = &fakeNode{dir: dir, boxes: map[boxed.ID]*fakeBox{}, changed: make(chan struct{})}
	s, err := api.New(api.Config{
		Service: n, Admin: n, Cluster: n, Policies: n, SSH: fakeSSH{}, Auth: fakeKeys{}, Version: "fake",
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		return nil, "", err
	}
	hs := httptest.NewUnstartedServer(s)
	hs.Config = s.HTTPServer()
	hs.Start()
	onEnd(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		_ = s.Shutdown(ctx)
		hs.CloseClientConnections()
		hs.Close()
		n.close()
	})
	return n, hs.URL, nil
}

type fakeKeys struct{}

func (fakeKeys) Authenticate(_ context.Context, secret string) (boxed.Principal, error) {
	switch secret {
	case fakeUserKey:
		return boxed.Principal{Owner: "ada", Role: boxed.RoleUser}, nil
	case fakeAdminKey:
		return boxed.Principal{Owner: "root", Role: boxed.RoleAdmin}, nil
	}
	return boxed.Principal{}, errors.New("no such key")
}

func (fakeKeys) Watch(string) (<-chan struct{}, func()) { return nil, func() {} }

// close ends every program.
func (n *fakeNode) close() {
	n.mu.Lock()
	var all []*fakeExec
	for _, b := range n.boxes {
		for _, x := range b.execs {
			all = append(all, x)
		}
	}
	n.mu.Unlock()
	for _, x := range all {
		x.kill(boxed.ReasonLost)
		<-x.done
	}
}

// emitLocked tells an event and wakes whoever waits for a change.
func (n *fakeNode) emitLocked(typ boxed.EventType, b *fakeBox, change func(*boxed.Event)) {
	e := boxed.Event{Cursor: boxed.Cursor(strconv.Itoa(len(n.events) + 1)), Type: typ, At: time.Now().UTC(), Node: fakeNodeID, Sandbox: b.ID, Owner: b.Owner, State: b.State}
	if change != nil {
		change(&e)
	}
	n.events = append(n.events, e)
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *fakeNode) Create(ctx context.Context, spec boxed.Spec) (*boxed.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case spec.Image == "no/such/image":
		return nil, boxed.Errorf(boxed.CodeImage, "%s is not in any registry that this node reaches", spec.Image).With("reason", string(boxed.ImageNotFound))
	case spec.Limits.MemoryBytes > 64<<30:
		return nil, boxed.Errorf(boxed.CodeExhausted, "no node has room").With("nodes", map[string]string{"fake": "1 GiB is free"})
	}
	for _, b := range n.boxes {
		if spec.Name != "" && b.Name == spec.Name && !b.State.Ended() {
			return nil, boxed.Errorf(boxed.CodeConflict, "the name %s is taken", spec.Name).WithField("name")
		}
	}
	now := time.Now().UTC()
	b := &fakeBox{execs: map[boxed.ExecID]*fakeExec{}, Sandbox: boxed.Sandbox{
		ID: boxed.NewID(fakeNodeID), Name: spec.Name, Owner: boxed.PrincipalFrom(ctx).Owner, Node: fakeNodeID, State: boxed.StateRunning,
		Labels: spec.Labels, Template: spec.Template, Image: spec.Image, Env: spec.Env, Dir: spec.Dir, Runtime: spec.Runtime,
		Limits: spec.Limits.Or(boxed.DefaultLimits()), TTL: spec.TTL, IdleTimeout: spec.IdleTimeout, CreatedAt: now, StartedAt: now, ActiveAt: now,
	}}
	if spec.Egress != nil {
		if err := n.attachLocked(b, spec.Egress); err != nil {
			return nil, err
		}
	}
	if b.Labels == nil {
		b.Labels = map[string]string{}
	}
	if b.Image == "" {
		b.Image, b.Template = "fake", boxed.DefaultTemplate
	}
	if b.Dir == "" {
		b.Dir = boxed.DefaultDir
	}
	if b.TTL == 0 {
		b.TTL = boxed.Duration(time.Hour)
	}
	if b.TTL != boxed.Never {
		b.ExpiresAt = now.Add(b.TTL.D())
	}
	b.root = filepath.Join(n.dir, b.ID.Random())
	for _, d := range []string{"workspace", "home", "tmp", "output"} {
		if err := os.MkdirAll(filepath.Join(b.root, d), 0o755); err != nil {
			return nil, err
		}
	}
	n.boxes[b.ID] = b
	n.emitLocked(boxed.EventCreated, b, nil)
	n.emitLocked(boxed.EventStarted, b, nil)
	sb := b.Sandbox
	return &sb, nil
}

// visibleLocked are the sandboxes that the caller may know of.
func (n *fakeNode) visibleLocked(ctx context.Context) []*fakeBox {
	var out []*fakeBox
	for _, b := range n.boxes {
		if boxed.PrincipalFrom(ctx).MaySee(b.Owner) {
			out = append(out, b)
		}
	}
	return out
}

// find is a sandbox that may have ended; living asks for one that has not.
func (n *fakeNode) find(ctx context.Context, id boxed.ID, living bool) (*fakeBox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, b := range n.visibleLocked(ctx) {
		if b.ID != id {
			continue
		}
		if living && b.State.Ended() {
			return nil, boxed.Errorf(boxed.CodeGone, "%s has ended: %s", id, b.Reason).With("reason", string(b.Reason))
		}
		return b, nil
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "there is no sandbox %s", id)
}

// change changes a living sandbox and returns it as it is then.
func (n *fakeNode) change(ctx context.Context, id boxed.ID, typ boxed.EventType, f func(*fakeBox)) (*boxed.Sandbox, error) {
	b, err := n.find(ctx, id, typ != "")
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	f(b)
	if typ != "" {
		n.emitLocked(typ, b, nil)
	}
	sb := b.Sandbox
	return &sb, nil
}

func (n *fakeNode) Get(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return n.change(ctx, id, "", func(*fakeBox) {})
}

func (n *fakeNode) Resolve(ctx context.Context, ref string) (*boxed.Sandbox, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var hits []boxed.Sandbox
	for _, b := range n.visibleLocked(ctx) {
		switch {
		case string(b.ID) == ref, b.Name == ref && !b.State.Ended(),
			len(ref) >= boxed.MinPrefixLen && strings.HasPrefix(b.ID.Random(), ref):
			hits = append(hits, b.Sandbox)
		}
	}
	switch len(hits) {
	case 0:
		return nil, boxed.Errorf(boxed.CodeNotFound, "there is no sandbox %q", ref)
	case 1:
		return &hits[0], nil
	}
	return nil, boxed.Errorf(boxed.CodeConflict, "%q is ambiguous", ref).With("ids", []boxed.ID{hits[0].ID, hits[1].ID})
}

func (n *fakeNode) List(ctx context.Context, f boxed.Filter) (boxed.List, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := boxed.List{Sandboxes: []boxed.Sandbox{}}
	for _, b := range n.visibleLocked(ctx) {
		ok := f.Name == "" || f.Name == b.Name
		for k, v := range f.Labels {
			ok = ok && b.Labels[k] == v
		}
		if len(f.States) == 0 {
			ok = ok && !b.State.Ended()
		} else {
			in := false
			for _, s := range f.States {
				in = in || s == b.State
			}
			ok = ok && in
		}
		if ok {
			l.Sandboxes = append(l.Sandboxes, b.Sandbox)
		}
	}
	return l, nil
}

func (n *fakeNode) Wait(ctx context.Context, id boxed.ID, until boxed.State) (*boxed.Sandbox, error) {
	for {
		n.mu.Lock()
		changed := n.changed
		n.mu.Unlock()
		sb, err := n.Get(ctx, id)
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

func (n *fakeNode) Destroy(ctx context.Context, id boxed.ID) error {
	b, err := n.find(ctx, id, false)
	if err != nil || b.State.Ended() {
		return err
	}
	n.mu.Lock()
	b.State, b.Reason, b.EndedAt = boxed.StateStopped, boxed.EndDestroyed, time.Now().UTC()
	n.emitLocked(boxed.EventStopped, b, func(e *boxed.Event) { e.Reason = string(b.Reason) })
	var execs []*fakeExec
	for _, x := range b.execs {
		execs = append(execs, x)
	}
	n.mu.Unlock()
	for _, x := range execs {
		x.kill(boxed.ReasonLost)
	}
	return os.RemoveAll(b.root)
}

func (n *fakeNode) Update(ctx context.Context, id boxed.ID, u boxed.Update) (*boxed.Sandbox, error) {
	return n.change(ctx, id, boxed.EventUpdated, func(b *fakeBox) {
		if u.Name != nil {
			b.Name = *u.Name
		}
		if u.Labels != nil {
			b.Labels = *u.Labels
		}
		if u.TTL != nil {
			b.TTL, b.ExpiresAt = *u.TTL, time.Now().UTC().Add(u.TTL.D())
		}
	})
}

func (n *fakeNode) Pause(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return n.change(ctx, id, boxed.EventPaused, func(b *fakeBox) { b.State, b.ExpiresAt = boxed.StatePaused, time.Time{} })
}

func (n *fakeNode) Resume(ctx context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	return n.change(ctx, id, boxed.EventResumed, func(b *fakeBox) { b.State = boxed.StateRunning })
}

func (n *fakeNode) Stats(ctx context.Context, id boxed.ID) (*boxed.Stats, error) {
	b, err := n.find(ctx, id, true)
	if err != nil {
		return nil, err
	}
	return &boxed.Stats{MemoryBytes: 3 << 20, MemoryLimit: b.Limits.MemoryBytes, Processes: 1, At: time.Now().UTC()}, nil
}

func (n *fakeNode) Events(ctx context.Context, after boxed.Cursor) iter.Seq2[boxed.Event, error] {
	return func(yield func(boxed.Event, error) bool) {
		n.mu.Lock()
		next := len(n.events)
		n.mu.Unlock()
		if after == boxed.CursorOldest {
			next = 0
		} else if at, err := strconv.Atoi(string(after)); err == nil {
			next = at
		}
		for {
			n.mu.Lock()
			pending, changed := n.events[min(next, len(n.events)):], n.changed
			n.mu.Unlock()
			for _, e := range pending {
				next++
				if boxed.PrincipalFrom(ctx).MaySee(e.Owner) && !yield(e, nil) {
					return
				}
			}
			select {
			case <-changed:
			case <-ctx.Done():
				yield(boxed.Event{}, ctx.Err())
				return
			}
		}
	}
}

func (n *fakeNode) ListPorts(ctx context.Context, id boxed.ID) ([]boxed.Port, error) {
	_, err := n.find(ctx, id, true)
	return []boxed.Port{{Port: 8000, Address: "127.0.0.1", Process: "py\x1b[31mthon"}}, err
}

func (n *fakeNode) Dial(ctx context.Context, id boxed.ID, port uint16) (net.Conn, error) {
	if _, err := n.find(ctx, id, true); err != nil {
		return nil, err
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if err != nil {
		return nil, boxed.Errorf(boxed.CodeConflict, "nothing listens on port %d", port)
	}
	return c, nil
}

func (n *fakeNode) admin(ctx context.Context) error {
	if !boxed.PrincipalFrom(ctx).Admin() {
		return boxed.Errorf(boxed.CodeForbidden, "only administrators may do this")
	}
	return nil
}

func (n *fakeNode) CreateKey(ctx context.Context, req boxed.KeyRequest) (*boxed.NewKey, error) {
	if err := n.admin(ctx); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	k := boxed.Key{ID: "key" + strconv.Itoa(len(n.keys)+1), Owner: req.Owner, Role: req.Role, Comment: req.Comment, CreatedAt: time.Now().UTC()}
	if req.TTL != 0 {
		k.ExpiresAt = k.CreatedAt.Add(req.TTL.D())
	}
	n.keys = append(n.keys, k)
	return &boxed.NewKey{Key: k, Secret: "boxed_" + boxed.NewToken(52)}, nil
}

func (n *fakeNode) ListKeys(ctx context.Context) ([]boxed.Key, error) {
	if err := n.admin(ctx); err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]boxed.Key{}, n.keys...), nil
}

func (n *fakeNode) RevokeKey(ctx context.Context, id string) error {
	if err := n.admin(ctx); err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range n.keys {
		if n.keys[i].ID == id {
			n.keys[i].RevokedAt = time.Now().UTC()
			return nil
		}
	}
	return boxed.Errorf(boxed.CodeNotFound, "there is no key %s", id)
}

var (
	_ boxed.API      = (*fakeNode)(nil)
	_ boxed.Admin    = (*fakeNode)(nil)
	_ boxed.Cluster  = (*fakeNode)(nil)
	_ boxed.Policies = (*fakeNode)(nil)
)
