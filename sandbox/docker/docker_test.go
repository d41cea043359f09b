package docker_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/client"
	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/docker"
)

// Shared by all tests: the stand-in for the agent, a client of the tests' own,
// and the smallest image.
var (
	guestProgram string
	engineClient *client.Client
	noDocker     string // why there is none
	imported     imageList
	emptyImage   sandbox.Image
)

// testNode owns every container that these tests make.
const testNode = boxed.NodeID("testtesttesttest")

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "boxed-docker-test-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		guestProgram = filepath.Join(dir, "guest")
		build := exec.Command("go", "build", "-o", guestProgram, "./testdata/guest")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build the guest: %v\n%s", err, out)
			return 1
		}
		engineClient, err = client.NewClientWithOpts(client.FromEnv, client.WithAPIVersionNegotiation())
		if err == nil {
			_, err = engineClient.Info(context.Background())
		}
		if err != nil {
			noDocker = err.Error()
			return m.Run()
		}
		code := m.Run()
		others.close()
		imported.remove()
		engineClient.Close()
		if err := goleak.Find(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return code
	}())
}

const emptyImageName = "boxed-test/empty:1"

// needDocker skips a test where no engine answers. CI has one.
func needDocker(t *testing.T) {
	t.Helper()
	if noDocker != "" {
		if os.Getenv("CI") != "" { // there make test has started one: its absence is a fault
			t.Fatal("no Docker engine: " + noDocker)
		}
		t.Skip("no Docker engine: " + noDocker)
	}
}

// imageList are images to be removed when all tests have ended: while a
// container has one it would only lose its name.
type imageList struct {
	mu   sync.Mutex
	refs []string
}

func (l *imageList) add(ref string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refs = append(l.refs, ref)
}

func (l *imageList) remove() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ref := range l.refs {
		removeImage(ref)
	}
}

func removeImage(ref string) {
	_, _ = engineClient.ImageRemove(context.Background(), ref, image.RemoveOptions{Force: true})
}

// newDriver makes a driver of its own data directory. Its containers are
// removed at the end, whatever becomes of the test.
func newDriver(t *testing.T, change ...func(*docker.Config)) *docker.Driver {
	t.Helper()
	needDocker(t)
	return newDriverOf(t, engineClient, change...)
}

// newDriverOf is newDriver for an engine whose client is given.
func newDriverOf(t *testing.T, engine *client.Client, change ...func(*docker.Config)) *docker.Driver {
	t.Helper()
	dir, err := os.MkdirTemp("", "bx") // short: a socket's path may have 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cfg := docker.Config{NodeID: testNode, DataDir: dir, AgentPath: guestProgram, DockerConfig: filepath.Join(dir, "config.json")}
	for _, c := range change {
		c(&cfg)
	}
	d, err := docker.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, label := range []string{"sh.boxed.instance", "sh.boxed.probe"} {
			removeLabelledOn(t, engine, label+"="+d.Instance())
		}
		d.Close()
	})
	return d
}

func removeLabelled(t *testing.T, label string) {
	t.Helper()
	removeLabelledOn(t, engineClient, label)
}

func removeLabelledOn(t *testing.T, engine *client.Client, label string) {
	t.Helper()
	ctx := context.Background()
	found, err := engine.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", label))})
	if err != nil {
		t.Error(err)
	}
	for _, c := range found {
		_ = engine.ContainerUnpause(ctx, c.ID)
		if err := engine.ContainerRemove(ctx, c.ID, container.RemoveOptions{Force: true, RemoveVolumes: true}); err != nil {
			t.Logf("clean up %s: %v", c.ID, err)
		}
	}
}

// importImage makes an image out of a tar and configuration, as docker import -c
// does.
func importImage(t *testing.T, name, root string, changes ...string) {
	t.Helper()
	needDocker(t)
	importInto(t, onRunc(), name, root, changes...)
}

func importInto(t *testing.T, r *oci, name, root string, changes ...string) {
	t.Helper()
	args := []string{"import"}
	for _, c := range changes {
		args = append(args, "-c", c)
	}
	cmd := exec.Command("docker", append(args, "-", name)...)
	if r.host != "" {
		cmd.Env = append(os.Environ(), "DOCKER_HOST="+r.host)
	}
	tar := exec.Command("tar", "-c", "-C", root, ".")
	var err error
	if cmd.Stdin, err = tar.StdoutPipe(); err != nil {
		t.Fatal(err)
	}
	if err := tar.Start(); err != nil {
		t.Fatal(err)
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("docker import: %v\n%s", err, out)
	}
	if err := tar.Wait(); err != nil {
		t.Fatal(err)
	}
	if r.host != "" {
		return // it goes with its engine
	}
	if found, err := engineClient.ImageInspect(t.Context(), name); err == nil {
		imported.add(found.ID)
	}
}

// emptyOn is empty on a runtime's engine.
func emptyOn(t *testing.T, r *oci, d *docker.Driver) sandbox.Image {
	t.Helper()
	img := empty(t, newDriver(t))
	if r.host == "" {
		return img
	}
	return r.image(t, d, emptyImageName)
}

// empty is an image with nothing in it: the agent brings all that it needs.
func empty(t *testing.T, d *docker.Driver) sandbox.Image {
	t.Helper()
	ctx := t.Context()
	if emptyImage.Digest == "" {
		cmd := exec.Command("docker", "import", "-", emptyImageName)
		tar := exec.Command("tar", "-c", "-T", "/dev/null")
		cmd.Stdin, _ = tar.StdoutPipe()
		if err := tar.Start(); err != nil {
			t.Fatal(err)
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("docker import: %v\n%s", err, out)
		}
		_ = tar.Wait()
		imported.add(emptyImageName)
	}
	img, err := d.Image(ctx, emptyImageName, nil)
	if err != nil {
		t.Fatal(err)
	}
	emptyImage = img
	return img
}

// smallLimits are enough for the guest, and quick.
func smallLimits() boxed.Limits {
	return boxed.Limits{
		MemoryBytes: 256 * boxed.MiB, CPUs: 1, Processes: 64, OpenFiles: 1024, WorkspaceBytes: 16 * boxed.MiB,
		HomeBytes: 8 * boxed.MiB, TmpBytes: 8 * boxed.MiB, OutputBytes: 4 * boxed.MiB, ShmBytes: 2 * boxed.MiB,
	}
}

// guest is a sandbox that runs, and the line to its first process.
type guest struct {
	t    *testing.T
	d    *docker.Driver
	id   string
	box  sandbox.Box
	conn net.Conn
	in   *bufio.Reader
	l    net.Listener
}

// newBox makes a Box with a directory such as sandbox.Manager makes.
func newBox(t *testing.T, img sandbox.Image) (sandbox.Box, net.Listener) {
	t.Helper()
	dir, err := os.MkdirTemp("", "bx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	const uid = 234567
	for name, content := range map[string]string{
		"passwd":      fmt.Sprintf("root:x:0:0::/:/sbin/nologin\nsandbox:x:%d:%d::%s:/bin/sh\n", uid, uid, sandbox.GuestHome),
		"group":       fmt.Sprintf("root:x:0:\nsandbox:x:%d:\n", uid),
		"hosts":       "127.0.0.1 localhost\n",
		"resolv.conf": "nameserver 127.0.0.1\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	l, err := net.Listen("unix", filepath.Join(dir, sandbox.SocketName))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if err := os.Chmod(filepath.Join(dir, sandbox.SocketName), 0o600); err != nil {
		t.Fatal(err)
	}
	return sandbox.Box{
		ID: boxed.NewID(testNode), Nonce: boxed.NewToken(26), Image: img, Limits: smallLimits(), UID: uid, Mount: dir,
		Agent: guestProgram,
	}, l
}

// start creates and starts a sandbox and waits for its first process to call.
func start(t *testing.T, d *docker.Driver, img sandbox.Image, change ...func(*sandbox.Box)) *guest {
	t.Helper()
	box, l := newBox(t, img)
	for _, c := range change {
		c(&box)
	}
	id, err := d.Create(t.Context(), box)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	g := &guest{t: t, d: d, id: id, box: box, l: l}
	g.accept()
	return g
}

// accept takes the guest's call.
func (g *guest) accept() {
	g.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	_ = g.l.(*net.UnixListener).SetDeadline(deadline)
	conn, err := g.l.Accept()
	if err != nil {
		g.t.Fatalf("the guest does not call: %v", err)
	}
	_ = conn.SetDeadline(time.Now().Add(5 * time.Minute))
	g.t.Cleanup(func() { conn.Close() })
	g.conn, g.in = conn, bufio.NewReaderSize(conn, 1<<20)
	if _, err := g.in.ReadString('\n'); err != nil {
		g.t.Fatal(err)
	}
}

// send tells the first process something without waiting for what comes of it.
func (g *guest) send(command map[string]any) {
	g.t.Helper()
	line, _ := json.Marshal(command)
	if _, err := g.conn.Write(append(line, '\n')); err != nil {
		g.t.Fatal(err)
	}
}

// reply is what a program inside did.
type reply struct {
	Out, Err, Signal string
	Code             int
}

// run runs argv inside as uid and returns when it has ended.
func (g *guest) run(uid int, argv ...string) reply {
	g.t.Helper()
	g.send(map[string]any{"uid": uid, "argv": argv})
	raw, err := g.in.ReadBytes('\n')
	if err != nil {
		g.t.Fatal(err)
	}
	var r reply
	if err := json.Unmarshal(raw, &r); err != nil {
		g.t.Fatal(err)
	}
	return r
}

// user runs the guest's own probe as the sandbox's user and gives its output.
func (g *guest) user(args ...string) string {
	g.t.Helper()
	r := g.run(g.box.UID, append([]string{"self"}, args...)...)
	if r.Signal != "" {
		return r.Signal
	}
	return strings.TrimSpace(r.Out + r.Err)
}

// eventually waits until ok, for a bounded time.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}
