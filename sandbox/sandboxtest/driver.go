package sandboxtest

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Runtime is the one OCI runtime that a Driver has.
const Runtime = "fake"

// The methods of a driver, as Fail and Calls name them.
const (
	Image  = "image"
	Create = "create"
	Start  = "start"
	Remove = "remove"
	Gone   = "gone"
	Pause  = "pause"
	Resume = "resume"
	Limit  = "limit"
	Stats  = "stats"
	Status = "status"
	List   = "list"
	Info   = "info"
)

// Fault is called at the beginning of a method; what it returns is the method's
// error. It may wait, for ctx too. target is the container, for create the
// sandbox, and for image the reference.
type Fault func(ctx context.Context, target string) error

// Agent is what runs in a container in place of the ordinary guest, until ctx
// ends. dial reaches the host of that sandbox.
type Agent func(ctx context.Context, box sandbox.Box, dial func() (net.Conn, error))

// Driver is a sandbox.Driver in memory. The zero Driver is not ready; see New.
type Driver struct {
	mu         sync.Mutex
	containers map[string]*container
	foreign    map[string]sandbox.Status
	images     map[string]sandbox.Image
	faults     map[string]Fault
	calls      map[string]int
	watchers   map[int]*watcher
	programs   map[string]Program
	agent      Agent
	down       bool
	serial     int
	running    sync.WaitGroup // guests
}

type watcher struct {
	ended func(string)
	broke chan struct{}
}

var _ sandbox.Driver = (*Driver)(nil)

// New makes an engine with no container and no image.
func New() *Driver {
	return &Driver{
		containers: map[string]*container{}, foreign: map[string]sandbox.Status{}, images: map[string]sandbox.Image{},
		faults: map[string]Fault{}, calls: map[string]int{}, watchers: map[int]*watcher{}, programs: map[string]Program{},
	}
}

// SetImage makes an image known, or changes what is behind its name.
func (d *Driver) SetImage(ref, digest string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.images[ref] = sandbox.Image{Ref: ref, Digest: digest, Env: map[string]string{"FROM_IMAGE": ref}}
}

// SetProgram makes a program known to containers that are started later, in
// place of a builtin one.
func (d *Driver) SetProgram(name string, p Program) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.programs[name] = p
}

// SetAgent replaces the guest of containers that are started later; nil is the
// ordinary one.
func (d *Driver) SetAgent(a Agent) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.agent = a
}

// Silent is an agent that never dials.
func Silent(ctx context.Context, _ sandbox.Box, _ func() (net.Conn, error)) { <-ctx.Done() }

// Fail installs a fault of a method; nil removes it.
func (d *Driver) Fail(method string, f Fault) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f == nil {
		delete(d.faults, method)
		return
	}
	d.faults[method] = f
}

// SetDown makes the engine unreachable, or reachable again. Containers live on.
func (d *Driver) SetDown(down bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.down = down
	if down {
		for n, w := range d.watchers {
			close(w.broke)
			delete(d.watchers, n)
		}
	}
}

// Calls is how often a method was called.
func (d *Driver) Calls(method string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.calls[method]
}

// Containers are the IDs of all containers but forged ones.
func (d *Driver) Containers() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.containers))
}

// Running is how many containers run.
func (d *Driver) Running() (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.containers {
		if c.status.Running {
			n++
		}
	}
	return n
}

// Boxes are what the containers were made of, by container.
func (d *Driver) Boxes() map[string]sandbox.Box {
	d.mu.Lock()
	defer d.mu.Unlock()
	boxes := map[string]sandbox.Box{}
	for id, c := range d.containers {
		boxes[id] = c.box
	}
	return boxes
}

// Forge adds a container of somebody else that claims what status says. Remove
// of it is a mistake that Foreign shows.
func (d *Driver) Forge(s sandbox.Status) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.foreign[s.ContainerID] = s
}

// Foreign are the forged containers that are left.
func (d *Driver) Foreign() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.foreign))
}

// Crash ends the container of a sandbox as if its first process had.
func (d *Driver) Crash(id boxed.ID, code int, oom bool) {
	if c := d.of(id); c != nil {
		c.exit(code, oom)
	}
}

// Vanish removes the container of a sandbox behind the node's back.
func (d *Driver) Vanish(id boxed.ID) {
	if c := d.of(id); c != nil {
		c.destroy()
	}
}

// Cut breaks the connections of a sandbox's agent, which dials again.
func (d *Driver) Cut(id boxed.ID) {
	if c := d.of(id); c != nil {
		c.cut()
	}
}

// Mute loses what the agent of a sandbox sends, until it dials again; see Cut.
func (d *Driver) Mute(id boxed.ID) {
	if c := d.of(id); c != nil {
		c.muted.Store(true)
	}
}

// SetSockets says how many TCP sockets a sandbox has.
func (d *Driver) SetSockets(id boxed.ID, n int) {
	if c := d.of(id); c != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		c.status.Sockets = n
	}
}

// Reboot ends every container, as a restart of the machine does.
func (d *Driver) Reboot() {
	for _, id := range d.Containers() {
		if c := d.get(id); c != nil {
			c.exit(255, false)
		}
	}
}

// Close removes all containers and waits for their guests.
func (d *Driver) Close() {
	for _, id := range d.Containers() {
		if c := d.get(id); c != nil {
			c.destroy()
		}
	}
	d.running.Wait()
}

func (d *Driver) get(id string) *container {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.containers[id]
}

func (d *Driver) of(id boxed.ID) *container {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.containers {
		if c.box.ID == id {
			return c
		}
	}
	return nil
}

// begin counts a call and has it fail if it is to.
func (d *Driver) begin(ctx context.Context, method, target string) error {
	d.mu.Lock()
	d.calls[method]++
	fault := d.faults[method]
	d.mu.Unlock()
	if fault != nil {
		if err := fault(ctx, target); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.down {
		return boxed.Errorf(boxed.CodeNotReady, "the engine does not answer; start it")
	}
	return nil
}

// find is begin for a method of one container.
func (d *Driver) find(ctx context.Context, method, id string) (*container, error) {
	if err := d.begin(ctx, method, id); err != nil {
		return nil, err
	}
	if c := d.get(id); c != nil {
		return c, nil
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "there is no container %.12q", id)
}

// Image implements sandbox.Driver.
func (d *Driver) Image(ctx context.Context, ref string, progress func(sandbox.PullProgress)) (sandbox.Image, error) {
	if err := d.begin(ctx, Image, ref); err != nil {
		return sandbox.Image{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if image, ok := d.images[ref]; ok {
		return image, nil
	}
	return sandbox.Image{}, boxed.Errorf(boxed.CodeImage, "there is no image %q", ref).With("reason", string(boxed.ImageNotFound))
}

// Create implements sandbox.Driver.
func (d *Driver) Create(ctx context.Context, box sandbox.Box) (string, error) {
	if err := d.begin(ctx, Create, string(box.ID)); err != nil {
		return "", err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if box.Runtime != "" && box.Runtime != Runtime {
		return "", boxed.Errorf(boxed.CodeUnavailable, "there is no runtime %q", box.Runtime).WithField("runtime")
	}
	for id, c := range d.containers {
		if c.box.ID == box.ID && c.box.Nonce == box.Nonce {
			return id, nil
		}
		if c.box.ID == box.ID {
			return "", boxed.Errorf(boxed.CodeConflict, "sandbox %s has a container of another nonce", box.ID)
		}
	}
	d.serial++
	c := newContainer(d, fmt.Sprintf("%064x", d.serial), box)
	d.containers[c.status.ContainerID] = c
	return c.status.ContainerID, nil
}

// Start implements sandbox.Driver.
func (d *Driver) Start(ctx context.Context, id string) error {
	c, err := d.find(ctx, Start, id)
	if err != nil {
		return err
	}
	c.start()
	return nil
}

// Remove implements sandbox.Driver.
func (d *Driver) Remove(ctx context.Context, id string) error {
	if err := d.begin(ctx, Remove, id); err != nil {
		return err
	}
	d.mu.Lock()
	delete(d.foreign, id)
	d.mu.Unlock()
	if c := d.get(id); c != nil {
		c.destroy()
	}
	return nil
}

// Gone implements sandbox.Driver.
func (d *Driver) Gone(ctx context.Context, id string) error {
	if err := d.begin(ctx, Gone, id); err != nil {
		return err
	}
	c := d.get(id)
	if c == nil {
		return nil
	}
	select {
	case <-c.ctx.Done():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Pause implements sandbox.Driver.
func (d *Driver) Pause(ctx context.Context, id string) error { return d.freeze(ctx, Pause, id, true) }

// Resume implements sandbox.Driver.
func (d *Driver) Resume(ctx context.Context, id string) error {
	return d.freeze(ctx, Resume, id, false)
}

func (d *Driver) freeze(ctx context.Context, method, id string, frozen bool) error {
	c, err := d.find(ctx, method, id)
	if err != nil {
		return err
	}
	d.mu.Lock()
	running := c.status.Running
	if running {
		c.status.Paused = frozen
	}
	d.mu.Unlock()
	if !running {
		return boxed.Errorf(boxed.CodeConflict, "the container does not run")
	}
	c.gate.set(frozen)
	return nil
}

// Limit implements sandbox.Driver.
func (d *Driver) Limit(ctx context.Context, id string, l boxed.Limits) error {
	c, err := d.find(ctx, Limit, id)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !c.status.Running {
		return boxed.Errorf(boxed.CodeConflict, "the container does not run")
	}
	if l.MemoryBytes > 0 {
		c.limits.MemoryBytes = l.MemoryBytes
	}
	if l.CPUs > 0 {
		c.limits.CPUs = l.CPUs
	}
	return nil
}

// Stats implements sandbox.Driver.
func (d *Driver) Stats(ctx context.Context, id string) (boxed.Stats, error) {
	c, err := d.find(ctx, Stats, id)
	if err != nil {
		return boxed.Stats{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !c.status.Running {
		return boxed.Stats{}, boxed.Errorf(boxed.CodeConflict, "the container does not run")
	}
	return boxed.Stats{MemoryBytes: 4 * boxed.MiB, MemoryLimit: c.limits.MemoryBytes, CPUSeconds: 0.1, Processes: 1, At: time.Now()}, nil
}

// Status implements sandbox.Driver.
func (d *Driver) Status(ctx context.Context, id string) (sandbox.Status, error) {
	c, err := d.find(ctx, Status, id)
	if err != nil {
		return sandbox.Status{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return c.status, nil
}

// List implements sandbox.Driver.
func (d *Driver) List(ctx context.Context) ([]sandbox.Status, error) {
	if err := d.begin(ctx, List, ""); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []sandbox.Status
	for _, id := range slices.Sorted(maps.Keys(d.containers)) {
		all = append(all, d.containers[id].status)
	}
	for _, id := range slices.Sorted(maps.Keys(d.foreign)) {
		all = append(all, d.foreign[id])
	}
	return all, nil
}

// Watch implements sandbox.Driver.
func (d *Driver) Watch(ctx context.Context, ended func(string)) error {
	d.mu.Lock()
	if d.down {
		d.mu.Unlock()
		return boxed.Errorf(boxed.CodeNotReady, "the engine does not answer; start it")
	}
	d.serial++
	n, w := d.serial, &watcher{ended: ended, broke: make(chan struct{})}
	d.watchers[n] = w
	d.mu.Unlock()
	select {
	case <-ctx.Done():
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.watchers, n)
		return nil
	case <-w.broke:
		return boxed.Errorf(boxed.CodeNotReady, "the engine's events broke off")
	}
}

// Info implements sandbox.Driver.
func (d *Driver) Info(ctx context.Context) (sandbox.Info, error) {
	if err := d.begin(ctx, Info, ""); err != nil {
		return sandbox.Info{}, err
	}
	return sandbox.Info{
		Engine: "fake 1.0", Arch: runtime.GOARCH, Cgroup: 2, Runtimes: []string{Runtime}, Default: Runtime,
		NoFile: 4096, DiskFree: 1 << 40, Skipped: map[string]string{"broken": "it is broken, for tests"},
	}, nil
}

// dialHost reaches the socket in a directory, whatever the length of its path.
func dialHost(dir string) (net.Conn, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return net.Dial("unix", filepath.Join(fmt.Sprintf("/proc/self/fd/%d", d.Fd()), sandbox.SocketName))
}

var _ agent.Handler = (*container)(nil)
