package docker_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/client"

	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/docker"
)

// oci is one runtime, and the engine that knows it.
type oci struct {
	name   string
	host   string // of the engine, as in DOCKER_HOST; "" is the one that all tests share
	client *client.Client
	shares bool // its processes are this kernel's, to be looked at from the host
}

// onEveryRuntime runs a test on runc, and on runsc and crun where they start a
// sandbox. What is skipped says why: docs/security.md has the table.
func onEveryRuntime(t *testing.T, test func(t *testing.T, r *oci)) {
	t.Helper()
	needDocker(t)
	t.Run("runc", func(t *testing.T) { test(t, onRunc()) })
	for _, name := range []string{"runsc", "crun"} {
		t.Run(name, func(t *testing.T) { test(t, otherRuntime(t, name)) })
	}
}

// onEveryKernel is onEveryRuntime for what the kernel holds and not the runtime:
// crun's processes are the same kernel's as runc's, with the same cgroups and
// filter.
func onEveryKernel(t *testing.T, test func(t *testing.T, r *oci)) {
	t.Helper()
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		if r.name == "crun" && os.Getenv("BOXED_TEST_ALL") == "" {
			t.Skip("the same kernel as runc's: BOXED_TEST_ALL=1 tests it here too")
		}
		test(t, r)
	})
}

// skipUnlessAll leaves out what takes long on another runtime, unless all is
// asked for.
func (r *oci) skipUnlessAll(t *testing.T, why string) {
	t.Helper()
	if r.host != "" && os.Getenv("BOXED_TEST_ALL") == "" {
		t.Skip(why + ": BOXED_TEST_ALL=1 runs it here too")
	}
}

// onRunc is the default of the engine that all tests share.
func onRunc() *oci { return &oci{name: "runc", client: engineClient, shares: true} }

// otherRuntime is a runtime on an engine of these tests' own, or skips the test
// with the reason why there is none.
func otherRuntime(t *testing.T, name string) *oci {
	t.Helper()
	r, why := others.get(name)
	if why != "" {
		t.Skip(name + ": " + why)
	}
	return r
}

// driver makes a Driver for the runtime.
func (r *oci) driver(t *testing.T, change ...func(*docker.Config)) *docker.Driver {
	t.Helper()
	own := func(c *docker.Config) { c.Host, c.Runtime = r.host, r.name }
	return newDriverOf(t, r.client, append([]func(*docker.Config){own}, change...)...)
}

// importImage is importImage into the runtime's engine.
func (r *oci) importImage(t *testing.T, name, root string, changes ...string) {
	t.Helper()
	importInto(t, r, name, root, changes...)
}

// image is an image of the shared engine, brought to the runtime's if it is
// another.
func (r *oci) image(t *testing.T, d *docker.Driver, name string) sandbox.Image {
	t.Helper()
	if r.host != "" {
		if _, err := r.client.ImageInspect(t.Context(), name); err != nil {
			saved, err := engineClient.ImageSave(t.Context(), []string{name})
			if err != nil {
				t.Fatal(err)
			}
			defer saved.Close()
			loaded, err := r.client.ImageLoad(t.Context(), saved)
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.Copy(io.Discard, loaded.Body)
			if err = errors.Join(err, loaded.Body.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
	img, err := d.Image(t.Context(), name, nil)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// others are the runtimes beside runc. The shared engine does not know them and
// must not be restarted, so they get one of their own: its directories, socket
// and containerd are apart, it touches no packet filter and makes no bridge.
var others privateEngine

type privateEngine struct {
	once    sync.Once
	dir     string
	host    string
	client  *client.Client
	ended   chan struct{} // closed when dockerd has
	stop    func()
	why     string            // there is no engine
	skipped map[string]string // by runtime
}

func (e *privateEngine) get(name string) (*oci, string) {
	e.once.Do(e.start)
	if e.why != "" {
		return nil, e.why
	}
	if why, ok := e.skipped[name]; ok {
		return nil, why
	}
	return &oci{name: name, host: e.host, client: e.client, shares: name == "crun"}, ""
}

// ociRuntime is a runtime as daemon.json has it.
type ociRuntime struct {
	Path string   `json:"path"`
	Args []string `json:"runtimeArgs,omitempty"`
}

// findRunsc finds gVisor: what BOXED_TEST_RUNSC names, what make runsc built, or
// the host's own. Debian 12's, of 2022, does not serve: a program on a terminal
// hangs in it, a flood of calls ends the agent, and every process can see and
// open the agent's descriptors.
func findRunsc() (ociRuntime, error) {
	program := os.Getenv("BOXED_TEST_RUNSC")
	if cache, err := os.UserCacheDir(); err == nil && program == "" {
		built, _ := filepath.Glob(filepath.Join(cache, "boxed", "runsc-*", "runsc")) // the pattern is a good one
		if len(built) > 0 {
			program = built[len(built)-1]
		}
	}
	if program == "" {
		program, _ = exec.LookPath("runsc")
	}
	if program == "" {
		return ociRuntime{}, errors.New("this host has none: make runsc")
	}
	out, err := exec.Command(program, "flags").CombinedOutput()
	if err != nil {
		return ociRuntime{}, fmt.Errorf("%s flags: %w", program, err)
	}
	if !bytes.Contains(out, []byte("systrap")) {
		return ociRuntime{}, errors.New(program + " is a gVisor before 2023, which does not keep user code from the agent: make runsc")
	}
	return ociRuntime{Path: program, Args: []string{"--platform=systrap", "--host-uds=open", "--network=none"}}, nil
}

// start starts the engine and probes its runtimes as boxed-node does.
func (e *privateEngine) start() {
	found, skipped := map[string]ociRuntime{}, map[string]string{}
	if r, err := findRunsc(); err != nil {
		skipped["runsc"] = err.Error()
	} else {
		found["runsc"] = r
	}
	if program, err := exec.LookPath("crun"); err != nil {
		skipped["crun"] = "this host has none: apt-get install crun"
	} else {
		found["crun"] = ociRuntime{Path: program}
	}
	e.skipped = skipped
	if len(found) == 0 {
		return
	}
	if err := e.launch(found); err != nil {
		e.why = "no engine of its own: " + err.Error()
		return
	}
	d, err := docker.New(docker.Config{NodeID: testNode, DataDir: filepath.Join(e.dir, "probe"), AgentPath: guestProgram, Host: e.host})
	if err != nil {
		e.why = err.Error()
		return
	}
	defer d.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	info, err := d.Info(ctx)
	if err != nil {
		e.why = err.Error()
		return
	}
	for name := range found {
		if !slices.Contains(info.Runtimes, name) {
			skipped[name] = info.Skipped[name]
		}
	}
}

// launch starts dockerd and waits until it answers.
func (e *privateEngine) launch(runtimes map[string]ociRuntime) error {
	program, err := exec.LookPath("dockerd")
	if err != nil || os.Geteuid() != 0 {
		return fmt.Errorf("it takes root and dockerd: %v", err)
	}
	if e.dir, err = os.MkdirTemp("", "bx-engine-"); err != nil {
		return err
	}
	in := func(name string) string { return filepath.Join(e.dir, name) }
	config, err := json.Marshal(map[string]any{"runtimes": runtimes})
	if err == nil {
		err = os.WriteFile(in("daemon.json"), config, 0o600)
	}
	var log *os.File
	if err == nil {
		log, err = os.Create(in("log"))
	}
	if err != nil {
		return err
	}
	e.host = "unix://" + in("sock")
	// In a mount namespace of its own, without the empty tree of version 2 that the hybrid layout has beside version 1's:
	// crun 1.8 refuses to run where it is. And in a network of its own: without a bridge it would remove the host's docker0.
	cmd := exec.Command("unshare", "--mount", "--net", "sh", "-c", `umount /sys/fs/cgroup/unified 2>/dev/null; exec "$@"`, "sh", program,
		"--config-file", in("daemon.json"), "--data-root", in("data"), "--exec-root",
		in("exec"), "--pidfile", in("pid"), "-H", e.host, "--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
	cmd.Stdout, cmd.Stderr = log, log
	// It ends with this process, however that ends: dockerd then ends its containers and its containerd. The signal comes
	// when the thread that started it is gone, so that one stays.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	started := make(chan error, 1)
	e.ended = make(chan struct{})
	go func() {
		runtime.LockOSThread()
		defer close(e.ended)
		defer log.Close()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // it was told to end
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	e.stop = func() { _ = cmd.Process.Signal(syscall.SIGTERM) }
	if e.client, err = client.NewClientWithOpts(client.WithHost(e.host), client.WithAPIVersionNegotiation()); err != nil {
		return err
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, err = e.client.Ping(context.Background()); err == nil {
			return nil
		}
		select {
		case <-e.ended:
			return fmt.Errorf("dockerd ended: %s", lastLine(in("log")))
		default:
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}

func lastLine(file string) string {
	raw, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	return lines[len(lines)-1]
}

// close ends the engine and removes what it had.
func (e *privateEngine) close() {
	if e.client != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		left, _ := e.client.ContainerList(ctx, container.ListOptions{All: true}) // dockerd ends those that this misses
		for _, c := range left {
			_ = e.client.ContainerRemove(ctx, c.ID, container.RemoveOptions{Force: true})
		}
		cancel()
		e.client.Close()
	}
	if e.stop != nil {
		e.stop()
		<-e.ended
	}
	if e.dir != "" {
		os.RemoveAll(e.dir)
	}
}

// A runtime beside runc has a program behind it, and the engine is really apart.
func TestRuntimesThatAreTested(t *testing.T) {
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		d := r.driver(t)
		g := start(t, d, emptyOn(t, r, d))
		if got := g.user("call", "getpid"); got != "ok" {
			t.Errorf("getpid: %s", got)
		}
		c, err := r.client.ContainerInspect(t.Context(), g.id)
		if err != nil || c.HostConfig.Runtime != r.name {
			t.Errorf("runs under %+v, %v", c.HostConfig, err)
		}
		if kernel := g.user("kernel"); (kernel == hostKernel(t)) != r.shares {
			t.Errorf("the kernel inside is %q", kernel)
		}
		images, err := engineClient.ImageList(t.Context(), image.ListOptions{})
		if err != nil || len(images) == 0 {
			t.Errorf("the shared engine: %v", err)
		}
	})
}

func hostKernel(t *testing.T) string {
	t.Helper()
	var u syscall.Utsname
	if err := syscall.Uname(&u); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, c := range u.Release {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}
