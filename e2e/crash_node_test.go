package e2e_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// crashImage is all that these tests need of an image.
const crashImage = "boxed/small:bookworm"

// stepped is boxed-node built with the hook at steps, once for all tests.
var stepped = sync.OnceValues(func() (string, error) {
	out := filepath.Join(bin, "boxed-node-steps")
	cmd := exec.Command("go", "build", "-trimpath", "-tags", "steps", "-o", out, "./cmd/boxed-node")
	cmd.Dir = ".."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	text, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("build boxed-node with the hook: %w\n%s", err, text)
	}
	return out, err
})

// mortal is a node that is killed, of a build and on an engine of the test's
// choice.
type mortal struct {
	*node
	program string
	over    chan struct{} // closed when the present process has ended
	engine  engine
	seen    map[string][]string // paths on the host of each container that was ever there, by its ID
	debris  bool                // the engine is killed in the middle of its work, and loses shims, cgroups and runtimes at work of its own
}

// engine is a Docker engine; "" is the machine's own.
type engine string

func (e engine) docker(args ...string) (string, error) {
	if e != "" {
		args = append([]string{"-H", string(e)}, args...)
	}
	var errs bytes.Buffer
	cmd := exec.Command("docker", args...)
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("docker %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return strings.TrimSpace(string(out)), err
}

// ask is a question to the engine itself: the program docker takes longer to start
// than the engine to answer.
func (e engine) ask(path string, into any) error {
	host := cmp.Or(string(e), os.Getenv("DOCKER_HOST"), "unix:///var/run/docker.sock")
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(host, "unix://"))
	}
	asking := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := asking.Get("http://engine" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// newMortal makes a node without starting it. What is left of it is removed
// after the test.
func newMortal(t *testing.T, program string, e engine, args ...string) *mortal {
	t.Helper()
	if _, err := e.docker("version"); err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip("no container engine answers; make test starts one")
	}
	args = append([]string{"--templates-default-image", crashImage, "--templates-default-pool", "0", "--log-level", "warn", "--drain", "1s"}, args...)
	if e != "" {
		args = append(args, "--docker-host", string(e))
	}
	n := &node{t: t, dir: t.TempDir(), agent: filepath.Join(bin, "boxed-agent"), args: args, log: &safeBuffer{}}
	n.endpoint = "http://" + freeAddress(t)
	m := &mortal{node: n, program: program, engine: e, seen: map[string][]string{}}
	t.Cleanup(func() {
		m.stop(syscall.SIGKILL)
		for left, tries := m.containers(), 20; len(left) > 0 && tries > 0; left, tries = m.containers(), tries-1 {
			for id := range left { // the engine may still finish what the node had begun
				e.docker("rm", "-f", id)
			}
		}
		if t.Failed() {
			t.Logf("node: %s", n.log.tail(8000))
		}
	})
	return m
}

// launch starts the process and returns.
func (m *mortal) launch() {
	m.t.Helper()
	args := append([]string{"run", "--listen", strings.TrimPrefix(m.endpoint, "http://"), "--data-dir", m.dir, "--agent", m.agent}, m.args...)
	cmd := exec.Command(m.program, args...)
	cmd.Stdout, cmd.Stderr = m.log, m.log
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	ended := make(chan error, 1)
	over := make(chan struct{})
	m.cmd, m.ended, m.over = cmd, ended, over
	go func() {
		ended <- cmd.Wait()
		close(over)
	}()
}

// start starts the process and waits until it has recovered.
func (m *mortal) start() {
	m.t.Helper()
	m.launch()
	within(m.t, 90*time.Second, "the node to be ready", func() bool {
		select {
		case err := <-m.ended:
			m.cmd = nil
			m.t.Fatalf("the node ended: %v\n%s", err, m.log.tail(4000))
		default:
		}
		resp, err := http.Get(m.endpoint + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	m.connect()
}

// connect makes the client, once the key is there.
func (m *mortal) connect() {
	m.t.Helper()
	key, err := os.ReadFile(filepath.Join(m.dir, "admin.key"))
	if err != nil {
		m.t.Fatal(err)
	}
	m.key = strings.TrimSpace(string(key))
	if m.Client, err = client.New(client.Config{Endpoint: m.endpoint, APIKey: m.key}); err != nil {
		m.t.Fatal(err)
	}
}

// create makes a sandbox. An engine that is slow to answer on a busy machine is
// waited for.
func (m *mortal) create(spec boxed.Spec) (s *boxed.Sandbox) {
	m.t.Helper()
	within(m.t, 90*time.Second, "the node to make a sandbox", func() bool {
		var err error
		if s, err = m.Create(m.t.Context(), spec); err != nil && boxed.CodeOf(err) != boxed.CodeNotReady {
			m.t.Fatalf("create: %v", err)
		}
		return err == nil
	})
	return s
}

// arm makes something happen at a point of the hook; the returned function
// takes it back.
func (m *mortal) arm(what, point string) func() {
	m.t.Helper()
	dir := filepath.Join(m.dir, "steps")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		m.t.Fatal(err)
	}
	path := filepath.Join(dir, what+"-"+point)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		m.t.Fatal(err)
	}
	return func() { os.Remove(path) }
}

// at waits until the node waits at a point, and returns which sandbox is there.
func (m *mortal) at(point string) (id boxed.ID) {
	m.t.Helper()
	path := filepath.Join(m.dir, "steps", "at-"+point)
	within(m.t, 30*time.Second, "the node to be at "+point, func() bool {
		text, err := os.ReadFile(path)
		id = boxed.ID(text)
		return err == nil && len(text) > 0
	})
	os.Remove(path)
	return id
}

// died waits until the node has killed itself, and looks what it leaves.
func (m *mortal) died() {
	m.t.Helper()
	select {
	case <-m.ended:
	case <-time.After(60 * time.Second):
		m.t.Fatal("the node was not killed: the point was not reached")
	}
	state := m.cmd.ProcessState
	m.cmd = nil
	if s, ok := state.Sys().(syscall.WaitStatus); !ok || !s.Signaled() || s.Signal() != syscall.SIGKILL {
		m.t.Fatalf("the node ended otherwise: %v\n%s", state, m.log.tail(4000))
	}
	m.look()
}

// look remembers the containers that are there now, and what the host has of
// them.
func (m *mortal) look() {
	for id := range m.containers() {
		if m.seen[id] != nil {
			continue
		}
		var c struct {
			GraphDriver     struct{ Data struct{ MergedDir string } }
			NetworkSettings struct{ SandboxKey string }
		}
		m.seen[id] = []string{id}
		if err := m.engine.ask("/containers/"+id+"/json", &c); err == nil {
			for _, path := range []string{c.GraphDriver.Data.MergedDir, c.NetworkSettings.SandboxKey} {
				if path != "" {
					m.seen[id] = append(m.seen[id], path)
				}
			}
		}
	}
}

// containers are those that the engine has with this node's label, probes too,
// by ID. The values are their names.
func (m *mortal) containers() map[string]string {
	found := map[string]string{}
	instance := m.instance()
	if instance == "" {
		return found
	}
	for _, label := range []string{"sh.boxed.instance", "sh.boxed.probe"} {
		var list []struct {
			ID    string `json:"Id"`
			Names []string
		}
		filters := fmt.Sprintf(`{"label":[%q]}`, label+"="+instance)
		if err := m.engine.ask("/containers/json?all=1&filters="+url.QueryEscape(filters), &list); err != nil {
			found["?"] = err.Error()
		}
		for _, c := range list {
			found[c.ID] = strings.TrimPrefix(strings.Join(c.Names, " "), "/")
		}
	}
	return found
}

// instance is what this node's containers are labelled with, taken from one of
// them the first time.
func (m *mortal) instance() string {
	path := filepath.Join(m.dir, "instance")
	if text, err := os.ReadFile(path); err == nil {
		return string(text)
	}
	entries, _ := os.ReadDir(filepath.Join(m.dir, "sandboxes"))
	for _, e := range entries {
		text, err := m.engine.docker("inspect", "-f", `{{index .Config.Labels "sh.boxed.instance"}}`, "boxed-"+e.Name())
		if err == nil && text != "" {
			os.WriteFile(path, []byte(text), 0o600)
			return text
		}
	}
	return ""
}

// nothingStray waits until the engine and the host have of this node what the
// living sandboxes and so many warm ones need, and nothing else. foreign are
// names of containers that only look like the node's.
func (m *mortal) nothingStray(living []boxed.ID, warm int, foreign ...string) {
	m.t.Helper()
	m.look()
	var strays []string
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(100 * time.Millisecond) {
		if strays = m.strays(living, warm, foreign); len(strays) == 0 {
			return
		}
		if time.Now().After(deadline) {
			m.t.Fatalf("stray, or missing:\n%s", strings.Join(strays, "\n"))
		}
	}
}

func (m *mortal) strays(living []boxed.ID, warm int, foreign []string) (strays []string) {
	dead := maps.Clone(m.seen)
	have := map[string]bool{}
	for id, name := range m.containers() {
		delete(dead, id)
		if !slices.Contains(foreign, name) {
			have[strings.TrimPrefix(name, "boxed-")] = true
		}
	}
	entries, err := os.ReadDir(filepath.Join(m.dir, "sandboxes"))
	if err != nil {
		strays = append(strays, err.Error())
	}
	for _, e := range entries {
		if !have[e.Name()] {
			strays = append(strays, "directory sandboxes/"+e.Name())
		}
	}
	for _, id := range living {
		if !have[string(id)] {
			strays = append(strays, "no container of "+string(id))
		}
	}
	for sandbox := range have {
		if _, err := os.Stat(filepath.Join(m.dir, "sandboxes", sandbox, "agent.sock")); err != nil {
			strays = append(strays, "container boxed-"+sandbox+" without its socket")
		}
		if !slices.Contains(living, boxed.ID(sandbox)) {
			warm--
		}
	}
	if warm != 0 {
		strays = append(strays, fmt.Sprintf("containers %v: %d less than wanted beside %v", slices.Sorted(maps.Keys(have)), warm, living))
	}
	return append(append(strays, m.files()...), m.onHost(dead)...)
}

// files are those of the data directory that nothing of a node's accounts for.
func (m *mortal) files() (strays []string) {
	known := []string{"LOCK", "admin.key", "agent", "instance", "node.key", "sandboxes", "egress", "ssh_host_ed25519_key", "steps", "store"}
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return []string{err.Error()}
	}
	for _, e := range entries {
		if !slices.Contains(known, e.Name()) {
			strays = append(strays, "file "+e.Name())
		}
	}
	return strays
}

// onHost looks for what the kernel still has of dead containers: processes,
// cgroups and mounts.
func (m *mortal) onHost(dead map[string][]string) (strays []string) {
	var names []string
	for _, paths := range dead {
		names = append(names, paths...)
	}
	if len(names) == 0 {
		return nil
	}
	holds := func(text string) bool {
		return slices.ContainsFunc(names, func(name string) bool { return strings.Contains(text, name) })
	}
	procs, _ := filepath.Glob("/proc/[0-9]*")
	for _, proc := range procs {
		raw, _ := os.ReadFile(proc + "/cmdline")
		args := strings.ReplaceAll(string(raw), "\x00", " ")
		groups, _ := os.ReadFile(proc + "/cgroup")
		watches := strings.Contains(args, "containerd-shim") && holds(args)
		if m.debris && (watches || strings.TrimSpace(args) == "runc init") {
			continue
		}
		if watches || holds(string(groups)) {
			strays = append(strays, "process "+args)
		}
	}
	mounts, _ := os.Open("/proc/self/mountinfo")
	if mounts != nil {
		defer mounts.Close()
		for lines := bufio.NewScanner(mounts); lines.Scan(); {
			if holds(lines.Text()) {
				strays = append(strays, "mount "+lines.Text())
			}
		}
	}
	if m.debris {
		return strays
	}
	filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && holds(d.Name()) {
			strays = append(strays, "cgroup "+path)
		}
		return nil
	})
	return strays
}

// witness is a sandbox that must not notice any of what happens around it: a
// detached exec counts in it.
type witness struct {
	m         *mortal
	id        boxed.ID
	exec      boxed.ExecID
	container string
}

func (m *mortal) newWitness() *witness {
	m.t.Helper()
	s := m.create(boxed.Spec{TTL: boxed.Duration(time.Hour)})
	w := &witness{m: m, id: s.ID}
	m.sh(s.ID, "echo mine > /workspace/file")
	e, err := m.StartExec(m.t.Context(), s.ID, boxed.ExecRequest{Args: []string{"bash", "-c", "for ((i=0; ; i++)); do echo $i; sleep 0.05; done"}})
	if err != nil {
		m.t.Fatal(err)
	}
	w.exec, w.container = e.ID, w.running()
	return w
}

// running says which run of which container it is.
func (w *witness) running() string {
	text, err := w.m.engine.docker("inspect", "-f", "{{.Id}} {{.State.Running}} {{.State.StartedAt}} {{.State.Pid}}", "boxed-"+string(w.id))
	if err != nil {
		w.m.t.Errorf("witness: %v", err)
	}
	return text
}

// untouched checks that it ran on, and that its exec's output is whole.
func (w *witness) untouched() {
	t := w.m.t
	t.Helper()
	if now := w.running(); now != w.container {
		t.Errorf("the witness was %q and is %q", w.container, now)
	}
	if s, err := w.m.Get(t.Context(), w.id); err != nil || s.State != boxed.StateRunning {
		t.Errorf("the witness: %+v, %v", s, err)
	}
	lines := w.count()
	within(t, 30*time.Second, "the witness's exec to go on", func() bool { return w.count() > lines })
	if text, _ := w.m.sh(w.id, "cat /workspace/file"); text != "mine\n" {
		t.Errorf("the witness's file: %q", text)
	}
}

// count reads the exec's output from its start and says how many lines it has.
func (w *witness) count() int {
	t := w.m.t
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	var out safeBuffer
	status, err := w.m.Attach(ctx, w.id, w.exec, boxed.AttachRequest{
		NoFollow: true, Stdout: &out, Gap: func(stream string, n int64) { t.Errorf("the witness's %s lost %d bytes", stream, n) },
	})
	if err != nil || status.Reason != "" {
		t.Fatalf("the witness's exec: %+v, %v", status, err)
	}
	n := 0
	for line := range strings.Lines(out.String()) {
		if line != strconv.Itoa(n)+"\n" {
			t.Fatalf("the witness's line %d is %q", n, line)
		}
		n++
	}
	return n
}

// cutOff reports whether err is what a client gets from a node that is killed
// under its call, or is not there: never an answer that the node did not give.
func cutOff(err error) bool {
	return errors.Is(err, boxed.CodeLost) || errors.Is(err, boxed.CodeNotReady)
}
