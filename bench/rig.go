package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/client"
)

// Times of the program itself.
const (
	trialLimit   = 2 * time.Minute // of one trial
	cleanupLimit = 5 * time.Minute // of removing all that was made
)

// benchLabel is on every container that is made without boxed; its value is the
// process that made it.
const benchLabel = "sh.boxed.bench"

// rig is what all experiments need: the engine, the programs, a place for files.
type rig struct {
	options options
	root    string // of the repository
	dir     string // for data directories; removed at the end
	dirs    int
	bin     string
	engine  *client.Client
	imageID string
	network string // of docker-stock, see findNetwork
	owner   string // value of benchLabel
	stderr  io.Writer
	started time.Time
	busy    bool // the experiment that runs has a load
	close   func()
}

func newRig(ctx context.Context, root string, o options, stderr io.Writer) (_ *rig, err error) {
	r := &rig{options: o, root: root, stderr: stderr, started: time.Now(), owner: strconv.Itoa(os.Getpid())}
	if os.Geteuid() != 0 {
		return nil, errors.New("boxed-node gives directories to other users: run this as root, or by make bench")
	}
	r.engine, err = client.NewClientWithOpts(client.FromEnv, client.WithAPIVersionNegotiation())
	if err != nil {
		return nil, fmt.Errorf("reach the engine: %w", err)
	}
	image, err := r.engine.ImageInspect(ctx, o.image)
	if err != nil {
		return nil, fmt.Errorf("look up the image %s (make up builds it): %w", o.image, err)
	}
	r.imageID = image.ID
	if r.dir, err = os.MkdirTemp("", "boxed-bench-"); err != nil {
		return nil, err
	}
	// Containers mount files from below it.
	if err := os.Chmod(r.dir, 0o711); err != nil {
		return nil, err
	}
	r.close = func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupLimit)
		defer cancel()
		if err := errors.Join(r.removeContainers(ctx, benchLabel+"="+r.owner), r.removeNetworks(ctx)); err != nil {
			r.say("remove what was made: %v", err)
		}
		os.RemoveAll(r.dir)
		r.engine.Close()
	}
	if r.bin = o.bin; r.bin == "" {
		r.bin = filepath.Join(r.dir, "bin")
		if err := r.build(ctx); err != nil {
			r.close()
			return nil, err
		}
	}
	if err := r.findNetwork(ctx); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// Networks of docker-stock, the first that works.
const (
	networkDefault = "default"                                                     // the engine's bridge
	networkOwn     = "a bridge network of our own: the engine's default is broken" // somebody removed docker0
	networkNone    = "no network: this engine has no bridge"                       // started without a packet filter
)

// findNetwork tries which network a container can have. Where the default is
// not to be had, what stands in for it is said with the results.
func (r *rig) findNetwork(ctx context.Context) error {
	var why error
	for _, r.network = range []string{networkDefault, networkOwn, networkNone} {
		if r.network == networkOwn {
			_, err := r.engine.NetworkCreate(ctx, r.ownNetwork(), network.CreateOptions{Driver: "bridge", Labels: map[string]string{benchLabel: r.owner}})
			if err != nil {
				why = errors.Join(why, err)
				continue
			}
		}
		stock := r.stock()
		id, err := stock.create(ctx)
		if id != "" {
			err = errors.Join(err, stock.destroy(context.WithoutCancel(ctx), id))
		}
		if err == nil {
			if r.network != networkDefault {
				r.say("docker-stock has %s (%v)", r.network, why)
			}
			return nil
		}
		why = errors.Join(why, err)
	}
	return fmt.Errorf("start a container: %w", why)
}

func (r *rig) ownNetwork() string { return "boxed-bench-" + r.owner }

func (r *rig) removeNetworks(ctx context.Context) error {
	if r.network == networkDefault {
		return nil
	}
	list, err := r.engine.NetworkList(ctx, network.ListOptions{Filters: filters.NewArgs(filters.Arg("label", benchLabel+"="+r.owner))})
	for _, n := range list {
		err = errors.Join(err, r.engine.NetworkRemove(ctx, n.ID))
	}
	return err
}

// build makes the programs as `make build` does.
func (r *rig) build(ctx context.Context) error {
	r.say("building the programs")
	for name, pkg := range map[string]string{"boxed-agent": "./agent/boxed-agent", "boxed-tools": "./agent/boxed-tools", "boxed-node": "./cmd/boxed-node"} {
		if err := r.buildOne(ctx, filepath.Join(r.bin, name), pkg); err != nil {
			return err
		}
	}
	return nil
}

func (r *rig) buildOne(ctx context.Context, path, pkg string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=bench", "-o", path, pkg)
	cmd.Dir, cmd.Env = r.root, append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", pkg, err, text)
	}
	return nil
}

// newDir makes a directory for a node. Its name is short: the path of a socket
// in it has room for a hundred bytes.
func (r *rig) newDir() (string, error) {
	r.dirs++
	dir := filepath.Join(r.dir, strconv.Itoa(r.dirs))
	return dir, os.Mkdir(dir, 0o711)
}

// say writes a line of progress.
func (r *rig) say(format string, args ...any) {
	fmt.Fprintf(r.stderr, "%6.1fs  %s\n", time.Since(r.started).Seconds(), fmt.Sprintf(format, args...))
}

// count is how many of something: in a full run, on a busy machine and in a
// quick run.
func (r *rig) count(full, busy, quick int) int {
	switch {
	case r.options.quick && r.busy:
		return max(1, quick/2)
	case r.options.quick:
		return quick
	case r.busy:
		return busy
	}
	return full
}

// trials is count for what -n sets.
func (r *rig) trials(full, busy, quick int) int {
	if r.options.trials > 0 {
		return r.options.trials
	}
	return r.count(full, busy, quick)
}

// removeContainers removes all that have a label.
func (r *rig) removeContainers(ctx context.Context, label string) error {
	list, err := r.engine.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", label))})
	if err != nil {
		return err
	}
	var ids []string
	for _, c := range list {
		ids = append(ids, c.ID)
	}
	return r.remove(ctx, ids)
}

// remove removes containers, a few at a time.
func (r *rig) remove(ctx context.Context, ids []string) error {
	errs := make([]error, len(ids))
	each(len(ids), 4, func(i int) {
		errs[i] = until(ctx, cleanupLimit, "the removal of "+ids[i], func() (bool, error) {
			err := r.engine.ContainerRemove(ctx, ids[i], container.RemoveOptions{Force: true, RemoveVolumes: true})
			if errdefs.IsConflict(err) { // a removal that was begun by somebody else goes on
				return false, nil
			}
			return errdefs.IsNotFound(err), ignore(err, errdefs.IsNotFound)
		})
	})
	return errors.Join(errs...)
}

func ignore(err error, what func(error) bool) error {
	if what(err) {
		return nil
	}
	return err
}

// each calls f for 0 to n-1, at most so many at once, and returns after all.
func each(n, atOnce int, f func(i int)) {
	slots := make(chan struct{}, atOnce)
	for i := range n {
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			f(i)
		}()
	}
	for range atOnce {
		slots <- struct{}{}
	}
}

// until waits for a condition.
func until(ctx context.Context, limit time.Duration, what string, ok func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		done, err := ok()
		if done || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, ctx.Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// pause is a wait that ends with ctx.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// ms is how long ago a time is, in milliseconds.
func ms(from time.Time) float64 { return milliseconds(time.Since(from)) }

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
