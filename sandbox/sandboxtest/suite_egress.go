package sandboxtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// wayOut is a sandbox.Egress that lets everybody reach names that end in .example, where
// each connection is told what it asked for and then hears itself.
type wayOut struct {
	mu       sync.Mutex
	attached map[boxed.ID]*boxed.EgressGrant
	restored int
	leaky    bool // answers for names that it must not
}

var _ sandbox.Egress = (*wayOut)(nil)

func newWayOut() *wayOut { return &wayOut{attached: map[boxed.ID]*boxed.EgressGrant{}} }

func (w *wayOut) Wanted(_ string, spec *boxed.EgressSpec) bool { return spec != nil }

func (w *wayOut) Attach(s *boxed.Sandbox, spec *boxed.EgressSpec) (*boxed.EgressGrant, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	g := &boxed.EgressGrant{
		Spec: *spec, Env: map[string]string{"FROM_EGRESS": "1"}, Canary: "canary.invalid", State: []byte("state"),
		Files: map[string][]byte{"ca.pem": fmt.Appendf(nil, "certificates for %v\n", spec.Allow)},
	}
	w.attached[s.ID] = g
	return g, nil
}

func (w *wayOut) Restore(s *boxed.Sandbox, g *boxed.EgressGrant) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if string(g.State) != "state" {
		return errors.New("another state than was given")
	}
	w.restored++
	w.attached[s.ID] = g
	return nil
}

func (w *wayOut) Relabel(boxed.ID, map[string]string) {}

func (w *wayOut) Allow(id boxed.ID, host string, _ time.Duration, _ bool) (*boxed.EgressGrant, error) {
	return w.Attach(&boxed.Sandbox{ID: id}, &boxed.EgressSpec{Allow: []string{host}})
}

func (w *wayOut) State(id boxed.ID) *boxed.EgressStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.attached[id] == nil {
		return &boxed.EgressStatus{State: boxed.EgressClosed}
	}
	return &boxed.EgressStatus{State: boxed.EgressOpen}
}

func (w *wayOut) Resolve(id boxed.ID, in boxed.EgressIntent) (int, []uint16) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.attached[id] == nil {
		return 5, nil
	}
	if !strings.HasSuffix(in.Host, ".example") && !w.leaky {
		return 3, nil
	}
	return 0, []uint16{443}
}

func (w *wayOut) Serve(_ context.Context, id boxed.ID, in boxed.EgressIntent, conn boxed.EgressConn, opened func(error) error) {
	if in.Entry == boxed.EntryName {
		if opened(nil) == nil {
			fmt.Fprintf(conn, "%s:%d\n", in.Host, in.Port)
			io.Copy(conn, conn)
		}
		return
	}
	line, _ := bufio.NewReader(conn).ReadString('\n')
	status := "403 Forbidden"
	if strings.Contains(line, ".example") {
		status = "200 OK"
	}
	fmt.Fprintf(conn, "HTTP/1.1 %s\r\n\r\n", status)
}

func (w *wayOut) Detach(id boxed.ID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.attached, id)
}

func (w *wayOut) has(id boxed.ID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.attached[id] != nil
}

// throughName connects to a name, as a program does that knows of no proxy.
const throughName = `perl -MIO::Socket::INET -e 'my $s = IO::Socket::INET->new(PeerAddr => "api.example:443", Timeout => 5) or die "none: $@\n"; print $s "hi\n"; print scalar <$s>; print scalar <$s>;'`

// runEgress is what a driver's sandboxes must be for egress: shut, until they are let out,
// and then by their entries alone.
func runEgress(t *testing.T, f Fixture) {
	w := newWayOut()
	s := newSite(t, f, func(c *sandbox.Config) {
		c.Egress = w
		d := c.Templates[boxed.DefaultTemplate]
		d.Pool = 1
		c.Templates[boxed.DefaultTemplate] = d
	})
	out := func(spec *boxed.Spec) { spec.Egress = &boxed.EgressSpec{Allow: []string{"api.example"}} }
	if f.NoEgress {
		_, err := s.Create(t.Context(), "ann", boxed.Spec{
			Template: boxed.DefaultTemplate, Image: f.Image, Dir: boxed.DefaultDir, Limits: limits(), TTL: boxed.Duration(time.Hour), Egress: &boxed.EgressSpec{},
		}, func(sandbox.Admission) error { return nil })
		if !errors.Is(err, boxed.CodeUnavailable) {
			t.Errorf("an agent that serves no egress: %v", err)
		}
		return
	}
	shut := s.create()
	if r := s.sh(shut.ID, throughName); r.status.Code == 0 || shut.Egress != nil {
		t.Errorf("a sandbox without egress: %+v, %+v", r, shut.Egress)
	}
	eventually(t, "a warm sandbox", func() bool { p, _, _ := s.Pools(); return len(p) > 0 && p[0].Ready > 0 })
	box := s.create(out)
	if !box.Warm || box.Egress == nil || box.Egress.State != boxed.EgressOpen {
		t.Errorf("warm %v, %+v", box.Warm, box.Egress)
	}
	open := func(t *testing.T) {
		t.Helper()
		if r := s.sh(box.ID, throughName); r.out != "api.example:443\nhi\n" {
			t.Errorf("by its name: %+v", r)
		}
		r := s.sh(box.ID, `echo "$FROM_EGRESS"; cat /run/boxed/ca.pem; echo x 2>/dev/null > /run/boxed/ca.pem || echo read-only`)
		if r.out != "1\ncertificates for [api.example]\nread-only\n" {
			t.Errorf("environment and files: %+v", r)
		}
	}
	open(t)
	s.restart()
	eventually(t, "it is let out again", func() bool { return w.has(box.ID) })
	open(t)
	if w.restored != 1 {
		t.Errorf("%d were restored", w.restored)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := s.AllowEgress(ctx, box.ID, "other.example", 0, false); err != nil {
		t.Fatal(err)
	}
	if r := s.sh(box.ID, `cat /run/boxed/ca.pem`); r.out != "certificates for [other.example]\n" {
		t.Errorf("a file that was replaced: %+v", r)
	}
	if err := s.SetEgress(ctx, box.ID, nil); err != nil {
		t.Fatal(err)
	}
	if r := s.sh(box.ID, throughName); r.status.Code == 0 || w.has(box.ID) {
		t.Errorf("after it was shut: %+v", r)
	}
	leaksNothing(t, s, w, out)
}

// leaksNothing: one whose canary finds a way is never handed over.
func leaksNothing(t *testing.T, s *site, w *wayOut, out func(*boxed.Spec)) {
	t.Helper()
	w.mu.Lock()
	w.leaky = true
	w.mu.Unlock()
	spec := boxed.Spec{Template: boxed.DefaultTemplate, Image: s.f.Image, Dir: boxed.DefaultDir, Limits: limits(), TTL: boxed.Duration(time.Hour)}
	out(&spec)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	_, err := s.Create(ctx, "ann", spec, func(sandbox.Admission) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "not shut") {
		t.Errorf("a sandbox that leaks: %v", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.attached) != 0 {
		t.Errorf("%d are still let out", len(w.attached))
	}
}
