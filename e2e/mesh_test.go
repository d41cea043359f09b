package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport/tsnet/tailnettest"
)

// fleet is nodes on hosts of their own that are one cluster.
type fleet struct {
	*lab
	nodes []*node
	ssh   *sshClient // known on all of them, as the admin keys' owner
}

// newFleet starts a node on each host, makes a cluster on the first one and joins
// the others. With onTailnet they reach each other over a tailnet, whose control
// server has a host of its own.
func newFleet(t *testing.T, count int, onTailnet bool) *fleet {
	t.Helper()
	needEngine(t)
	f := &fleet{lab: newLab(t, count+1)}
	var authorized string
	f.ssh, authorized = newSSHClient(t)
	f.ssh.port = "2222" // of each host's loopback
	var tailnet *tailnettest.Tailnet
	if onTailnet {
		control := f.hosts[count]
		err := control.inside(func() (err error) {
			tailnet, err = tailnettest.Run(tailnettest.Config{Listen: control.addr + ":0"})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(tailnet.Close)
	}
	for i, h := range f.hosts[:count] {
		n := &node{
			t: t, dir: t.TempDir(), agent: filepath.Join(bin, "boxed-agent"), log: &safeBuffer{}, host: h, endpoint: "http://127.0.0.1:8080",
			args: []string{
				"--name", fmt.Sprintf("n%d", i), "--mesh-listen", h.addr + ":7946", "--templates-default-pool", "1",
				"--uid-range-first", fmt.Sprint(200_000 + 1000*i), "--uid-range-last", fmt.Sprint(200_999 + 1000*i),
				"--ssh-authorized-keys", "admin=" + authorized,
			},
		}
		if onTailnet {
			n.args = append(n.args, "--mesh-network", "tailnet", "--tailnet-control-url", tailnet.ControlURL)
			n.environ = tailnettest.Env()
		}
		f.nodes = append(f.nodes, n.run())
	}
	within(t, 30*time.Second, "the first node to be where the others can reach it", func() bool {
		_, err := f.nodes[0].StartCluster(t.Context(), boxed.ClusterRequest{})
		return err == nil
	})
	token, err := f.nodes[0].ClusterToken(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range f.nodes[1:] {
		within(t, 60*time.Second, n.name()+" to join", func() bool {
			_, err := n.StartCluster(t.Context(), boxed.ClusterRequest{Token: token})
			return err == nil
		})
	}
	f.see(t, boxed.NodeAlive, f.nodes, f.nodes)
	within(t, 30*time.Second, "each node's key to be known to all", func() bool {
		for _, by := range f.nodes {
			for _, of := range f.nodes {
				if _, err := by.GetNode(t.Context(), of.name()); err != nil {
					return false
				}
			}
		}
		return true
	})
	return f
}

// see waits until nodes see others in a state, and returns how long it took.
func (f *fleet) see(t *testing.T, state boxed.NodeState, seen, by []*node) time.Duration {
	t.Helper()
	start := time.Now()
	within(t, 60*time.Second, fmt.Sprintf("nodes to be seen as %s", state), func() bool {
		for _, b := range by {
			states := f.states(t, b)
			for _, s := range seen {
				if states[s.name()] != state {
					return false
				}
			}
		}
		return true
	})
	return time.Since(start)
}

func (n *node) name() string { return n.args[1] }

func (f *fleet) states(t *testing.T, by *node) map[string]boxed.NodeState {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	list, err := by.ListNodes(ctx)
	if err != nil {
		t.Fatal(err)
	}
	states := map[string]boxed.NodeState{}
	for _, s := range list.Nodes {
		states[s.Name] = s.State
	}
	return states
}

// owner is the node of a sandbox.
func (f *fleet) owner(t *testing.T, id boxed.ID) *node {
	t.Helper()
	for _, n := range f.nodes {
		list, err := n.ListNodes(t.Context())
		if err == nil && list.Nodes[0].ID == id.Node() {
			return n
		}
	}
	t.Fatalf("no node is %s", id.Node())
	return nil
}

// pinned makes a sandbox on a node, for as long as the test runs.
func (f *fleet) pinned(t *testing.T, by, on *node) *boxed.Sandbox {
	t.Helper()
	list, err := on.ListNodes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	sb := by.create(boxed.Spec{Node: list.Nodes[0].ID})
	t.Cleanup(func() { // the next one needs the room
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		by.Destroy(ctx, sb.ID)
	})
	return sb
}

// reach waits until a node reaches a sandbox: one that has just come back may lose
// its first packets to a link that loses some.
func (n *node) reach(t *testing.T, id boxed.ID) {
	t.Helper()
	within(t, 30*time.Second, n.name()+" to reach "+string(id), func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := n.Get(ctx, id)
		return err == nil
	})
}

// over runs a story on each network and in each weather.
func over(t *testing.T, story func(t *testing.T, f *fleet)) {
	for _, w := range []struct {
		name    string
		tailnet bool
		loss    float64
		delay   time.Duration
	}{
		{"over TCP", false, 0, 0},
		{"over TCP with loss and delay", false, 0.02, 5 * time.Millisecond},
		{"over a tailnet", true, 0, 0},
		{"over a tailnet with loss and delay", true, 0.02, 5 * time.Millisecond},
	} {
		t.Run(w.name, func(t *testing.T) {
			f := newFleet(t, 3, w.tailnet)
			f.weather(w.loss, w.delay)
			story(t, f)
		})
	}
}

func TestAMeshOfRealNodes(t *testing.T) {
	over(t, func(t *testing.T, f *fleet) {
		a, b, c := f.nodes[0], f.nodes[1], f.nodes[2]
		t.Run("any creates and any runs programs", func(t *testing.T) { anyToAny(t, f) })
		t.Run("ssh to any through any", func(t *testing.T) { sshAnyToAny(t, f) })
		t.Run("a killed node is known of and what ran there goes on", func(t *testing.T) {
			sb := f.pinned(t, a, c)
			if out, status := a.sh(sb.ID, "echo kept > /workspace/file; echo done"); status.Code != 0 || out != "done\n" {
				t.Fatalf("got %q, %+v", out, status)
			}
			c.stop(syscall.SIGKILL)
			took := f.see(t, boxed.NodeSilent, []*node{c}, []*node{a, b})
			t.Logf("a killed node is known everywhere after %v", took)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			if _, err := b.Get(ctx, sb.ID); boxed.CodeOf(err) != boxed.CodeNotReady || !strings.Contains(err.Error(), "n2") {
				t.Errorf("got %v", err)
			}
			client := *f.ssh
			client.t, client.host = t, f.hosts[1]
			if _, errs, code := client.run("", string(sb.ID)+"@127.0.0.1", "true"); code != 255 || !strings.Contains(errs, "n2") {
				t.Errorf("over ssh: %q, %d", errs, code)
			}
			c.start()
			f.see(t, boxed.NodeAlive, f.nodes, f.nodes)
			b.reach(t, sb.ID)
			if out, status := b.sh(sb.ID, "cat /workspace/file"); status.Code != 0 || out != "kept\n" {
				t.Errorf("got %q, %+v", out, status)
			}
		})
		t.Run("a program outlives the node that its client came in by", func(t *testing.T) { entryGone(t, f) })
		t.Run("a program ends with its client, through another node too", func(t *testing.T) { clientGone(t, f) })
		t.Run("a cut link heals by itself", func(t *testing.T) { cutAndHeal(t, f) })
		t.Run("a drained node is empty and stays so", func(t *testing.T) { drained(t, f) })
		t.Run("another build takes over with programs running", func(t *testing.T) { rolling(t, f) })
	})
}

func anyToAny(t *testing.T, f *fleet) {
	for _, by := range f.nodes {
		sb := by.create(boxed.Spec{})
		for _, through := range f.nodes {
			var out bytes.Buffer
			status, err := through.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"cat"}, Stdin: strings.NewReader("hello"), Stdout: &out})
			if err != nil || status.Code != 0 || out.String() != "hello" {
				t.Errorf("made by %s, through %s: %+v, %v, %q", by.name(), through.name(), status, err, out.String())
			}
			// The JSON call, files and errors go the same way.
			if res, err := through.Run(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"bash", "-c", "echo out; exit 7"}}); err != nil || res.Code != 7 || string(res.Stdout) != "out\n" {
				t.Errorf("through %s: %+v, %v", through.name(), res, err)
			}
			if _, err := through.WriteFile(t.Context(), sb.ID, boxed.WriteRequest{Path: "/workspace/f", Content: strings.NewReader(through.name())}); err != nil {
				t.Errorf("through %s: %v", through.name(), err)
			}
			r, err := through.ReadFile(t.Context(), sb.ID, boxed.ReadRequest{Path: "/workspace/f", Length: -1})
			if err != nil {
				t.Errorf("through %s: %v", through.name(), err)
				continue
			}
			if got, _ := io.ReadAll(r); string(got) != through.name() {
				t.Errorf("through %s: read %q", through.name(), got)
			}
			r.Close()
			if _, err := through.Stat(t.Context(), sb.ID, "/no/such"); boxed.CodeOf(err) != boxed.CodeNotFound {
				t.Errorf("through %s: %v", through.name(), err)
			}
		}
		if err := f.nodes[0].Destroy(t.Context(), sb.ID); err != nil {
			t.Error(err)
		}
	}
}

// attached starts counting on a sandbox through a node, and waits for its output.
func (n *node) attached(t *testing.T, ctx context.Context, id boxed.ID) (e boxed.ExecID, out *safeBuffer, ended chan error) {
	t.Helper()
	n.reach(t, id)
	out, ended = &safeBuffer{}, make(chan error, 1)
	started := make(chan boxed.ExecID, 1)
	go func() {
		_, err := n.Exec(ctx, id, boxed.ExecRequest{Args: []string{"bash", "-c", counting}, Stdout: out, Started: func(e boxed.ExecID) { started <- e }})
		ended <- err
	}()
	select {
	case e = <-started:
	case err := <-ended:
		t.Fatalf("it did not start: %v", err)
	}
	within(t, 20*time.Second, "output", func() bool { return len(out.String()) > 20 })
	return e, out, ended
}

func entryGone(t *testing.T, f *fleet) {
	a, b, c := f.nodes[0], f.nodes[1], f.nodes[2]
	sb := f.pinned(t, b, c)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		e, out, ended := a.attached(t, t.Context(), sb.ID)
		a.stop(sig)
		if err := <-ended; err == nil {
			t.Errorf("%s: the call through a node that is gone ended well", sig)
		}
		state := boxed.NodeSilent
		if sig == syscall.SIGTERM {
			state = boxed.NodeStopped
		}
		f.see(t, state, []*node{a}, []*node{b, c}) // all know of it now, and what would end the program has
		if got, err := b.GetExec(t.Context(), sb.ID, e); err != nil || !got.Running {
			t.Errorf("%s: %+v, %v", sig, got, err)
		}
		if err := b.SignalExec(t.Context(), sb.ID, e, "TERM", false); err != nil {
			t.Errorf("%s: %v", sig, err)
		}
		var rest bytes.Buffer
		status, err := b.Attach(t.Context(), sb.ID, e, boxed.AttachRequest{StdoutOffset: int64(len(out.String())), Stdout: &rest})
		if err != nil || status.Code != 17 {
			t.Errorf("%s: %+v, %v", sig, status, err)
		}
		lines := strings.Split(out.String()+rest.String(), "\n")
		for i, line := range lines[:len(lines)-2] {
			if line != fmt.Sprint(i) {
				t.Fatalf("%s: line %d is %q", sig, i, line)
			}
		}
		a.start()
		f.see(t, boxed.NodeAlive, f.nodes, f.nodes)
	}
}

func clientGone(t *testing.T, f *fleet) {
	a, b, c := f.nodes[0], f.nodes[1], f.nodes[2]
	sb := f.pinned(t, b, c)
	for range 8 { // where packets are lost, the word that it left may be one of them
		ctx, leave := context.WithCancel(t.Context())
		e, _, ended := a.attached(t, ctx, sb.ID)
		leave()
		<-ended
		within(t, 20*time.Second, "the program to end", func() bool {
			got, err := b.GetExec(t.Context(), sb.ID, e)
			return err == nil && !got.Running
		})
		if got, err := b.GetExec(t.Context(), sb.ID, e); err != nil || got.Status.Reason != boxed.ReasonCanceled {
			t.Errorf("%+v, %v", got, err)
		}
	}
}

// S3: the same name, wherever the sandbox runs and whatever node is asked.
func sshAnyToAny(t *testing.T, f *fleet) {
	// A key that is added at one node is known at all.
	added, file := newSSHClient(t)
	if _, errs, code := f.nodes[1].ctl("ssh-key", "add", file); code != 0 {
		t.Fatal(errs)
	}
	within(t, 10*time.Second, "all nodes to know the key", func() bool {
		for _, n := range f.nodes {
			if keys, err := n.ListSSHKeys(t.Context()); err != nil || len(keys) == 0 {
				return false
			}
		}
		return true
	})
	var authorities []string
	for i, n := range f.nodes {
		c := *added
		c.host, c.port = f.hosts[i], f.ssh.port
		if out, errs, code := c.run("", "boxed@127.0.0.1", "whoami", "-o", "name"); out != "admin\n" || code != 0 {
			t.Errorf("through n%d: %q, %q, %d", i, out, errs, code)
		}
		info, err := n.SSHInfo(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		authorities = append(authorities, info.Authority)
	}
	if len(slices.Compact(authorities)) != 1 {
		t.Errorf("the nodes are certified by %q", authorities)
	}
	for i, on := range f.nodes {
		name := fmt.Sprintf("box%d", i)
		sb := f.pinned(t, f.nodes[0], on)
		if _, err := f.nodes[0].Update(t.Context(), sb.ID, boxed.Update{Name: &name}); err != nil {
			t.Fatal(err)
		}
		for _, h := range f.hosts[:len(f.nodes)] {
			c := *f.ssh
			c.t, c.host = t, h
			if out, errs, code := c.run("in\n", name+"@127.0.0.1", "cat; echo err >&2; exit 6"); out != "in\n" || errs != "err\n" || code != 6 {
				t.Errorf("%s through %s: %q, %q, %d", name, h.addr, out, errs, code)
			}
		}
	}
}

func cutAndHeal(t *testing.T, f *fleet) {
	a, b, c := f.nodes[0], f.nodes[1], f.nodes[2]
	sb := f.pinned(t, a, c)
	// A call that is under way over the link when it is cut ends by itself.
	ended := make(chan error, 1)
	go func() {
		_, err := a.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"sleep", "300"}})
		ended <- err
	}()
	within(t, 20*time.Second, "the program to run", func() bool {
		execs, err := c.ListExecs(t.Context(), sb.ID)
		return err == nil && len(execs) == 1
	})
	f.part([]int{2}, []int{0, 1, 3}) // from what relays, too
	f.see(t, boxed.NodeSilent, []*node{c}, []*node{a, b})
	f.see(t, boxed.NodeSilent, []*node{a, b}, []*node{c})
	select {
	case err := <-ended:
		if err == nil {
			t.Error("a program whose node is cut off ended well")
		}
	case <-time.After(60 * time.Second):
		t.Error("a call over a link that was cut hangs")
	}
	list, err := a.List(t.Context(), boxed.Filter{})
	if err != nil || len(list.Incomplete) != 1 || list.Incomplete[0] != sb.ID.Node() {
		t.Errorf("the list says %v, %v", list.Incomplete, err)
	}
	if _, status := c.sh(sb.ID, "true"); status.Code != 0 {
		t.Errorf("on its own side: %+v", status)
	}
	f.heal()
	took := f.see(t, boxed.NodeAlive, f.nodes, f.nodes)
	t.Logf("a healed link is one mesh after %v", took)
	b.reach(t, sb.ID)
	if out, status := b.sh(sb.ID, "echo again"); status.Code != 0 || out != "again\n" {
		t.Errorf("got %q, %+v", out, status)
	}
}

func drained(t *testing.T, f *fleet) {
	a, b, c := f.nodes[0], f.nodes[1], f.nodes[2]
	sb := f.pinned(t, a, b)
	if _, err := a.DrainNode(t.Context(), "n1", boxed.Duration(2*time.Second)); err != nil {
		t.Fatal(err)
	}
	within(t, 30*time.Second, "the sandbox to be ended", func() bool {
		got, err := c.Get(t.Context(), sb.ID)
		return err == nil && got.State.Ended() && got.Reason == boxed.EndDrained
	})
	b.stop(syscall.SIGTERM)
	f.see(t, boxed.NodeStopped, []*node{b}, []*node{a, c})
	b.start()
	f.see(t, boxed.NodeAlive, f.nodes, f.nodes)
	info, err := a.GetNode(t.Context(), "n1")
	if err != nil || !info.Cordoned {
		t.Fatalf("after a restart it is %+v, %v", info, err)
	}
	for range 6 {
		if sb := b.create(boxed.Spec{}); f.owner(t, sb.ID) == b {
			t.Errorf("a cordoned node got %s", sb.ID)
		}
	}
	if _, err := c.CordonNode(t.Context(), "n1", false); err != nil {
		t.Fatal(err)
	}
	f.pinned(t, a, b)
}

// rolling replaces one node after the other by another build, with a program in
// each that must not notice.
func rolling(t *testing.T, f *fleet) {
	next, err := nextRelease()
	if err != nil {
		t.Fatal(err)
	}
	type running struct {
		sb   *boxed.Sandbox
		exec *boxed.Exec
	}
	var all []running
	for _, n := range f.nodes {
		sb := f.pinned(t, f.nodes[0], n)
		e, err := f.nodes[1].StartExec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"bash", "-c", "read x; echo got $x"}, OpenStdin: true})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, running{sb, e})
	}
	for _, n := range f.nodes {
		n.stop(syscall.SIGTERM)
		n.program, n.agent = next.node, next.agent
		n.start()
		f.see(t, boxed.NodeAlive, f.nodes, f.nodes)
		for _, r := range all {
			f.nodes[2].reach(t, r.sb.ID)
			if got, err := f.nodes[2].GetExec(t.Context(), r.sb.ID, r.exec.ID); err != nil || !got.Running {
				t.Fatalf("after %s was replaced: %+v, %v", n.name(), got, err)
			}
		}
	}
	for i, r := range all {
		var out bytes.Buffer
		f.nodes[(i+1)%3].reach(t, r.sb.ID)
		status, err := f.nodes[(i+1)%3].Attach(t.Context(), r.sb.ID, r.exec.ID, boxed.AttachRequest{Stdin: strings.NewReader("it\n"), Stdout: &out})
		if err != nil || status.Code != 0 || out.String() != "got it\n" {
			t.Errorf("got %+v, %v, %q", status, err, out.String())
		}
	}
	list, err := f.nodes[0].ListNodes(t.Context())
	if err != nil || slices.ContainsFunc(list.Nodes, func(n boxed.NodeSummary) bool { return n.Version != next.version }) {
		t.Errorf("got %+v, %v", list.Nodes, err)
	}
}
