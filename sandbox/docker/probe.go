package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Times of probing.
const (
	probeTimeout = 15 * time.Second // for one runtime, from create to the agent's first byte
	probeAgain   = time.Minute      // before the default runtime is tried again after it failed
)

// noFileSteps are the open-files limits that are tried, highest first. Which
// the engine can give depends on its own limit and on CAP_SYS_RESOURCE.
var noFileSteps = []int64{1 << 20, 1 << 16, 1 << 15, 1 << 14, 1 << 13, 1 << 12, 1 << 10}

// probePrefix begins the names of probes' directories.
const probePrefix = "probe-"

// probeUID is the user of a probe, which runs nothing as a user.
const probeUID = 65534

// probes is what came of probing.
type probes struct {
	signature string          // of the engine that was probed
	works     map[string]bool // by runtime
	skipped   map[string]string
	noFile    int64 // 0: not known
	failed    bool  // nothing can be started by default, so it is tried again soon
	at        time.Time
}

// probing lets one probe run at a time: the others find it done.
type probing struct {
	once sync.Once
	slot chan struct{}
}

func (p *probing) lock(ctx context.Context) error {
	p.once.Do(func() { p.slot = make(chan struct{}, 1) })
	select {
	case p.slot <- struct{}{}:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("probe runtimes: %w", ctx.Err())
	}
}

func (p *probing) unlock() { <-p.slot }

// Probe forgets what is known of the runtimes and tries them all again.
func (d *Driver) Probe(ctx context.Context) (sandbox.Info, error) {
	d.mu.Lock()
	d.probes = nil
	d.mu.Unlock()
	return d.Info(ctx)
}

// probed is what came of probing this engine, now or before.
func (d *Driver) probed(ctx context.Context, e *engine) (*probes, error) {
	if err := d.probing.lock(ctx); err != nil {
		return nil, err
	}
	defer d.probing.unlock()
	d.mu.Lock()
	p := d.probes
	d.mu.Unlock()
	if p != nil && p.signature == e.signature && (!p.failed || time.Since(p.at) < probeAgain) {
		return p, nil
	}
	fresh, err := d.probe(ctx, e)
	if err != nil {
		return nil, err
	}
	fresh.signature, fresh.at = e.signature, time.Now()
	d.mu.Lock()
	d.probes = fresh
	d.mu.Unlock()
	return fresh, nil
}

// probe tries every runtime that may be offered.
func (d *Driver) probe(ctx context.Context, e *engine) (*probes, error) {
	p := &probes{works: map[string]bool{}, skipped: map[string]string{}}
	d.sweepProbes(ctx)
	img, done, err := d.probeImage(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	names := slices.Sorted(maps.Keys(e.runtimes))
	slices.SortStableFunc(names, func(a, b string) int { // the default first: it finds out the open-files limit
		return boolRank(a == d.runtimeOf(e, "")) - boolRank(b == d.runtimeOf(e, ""))
	})
	for _, name := range names {
		if len(d.cfg.Runtimes) > 0 && !slices.Contains(d.cfg.Runtimes, name) {
			p.skipped[name] = "docker.runtimes does not name it"
			continue
		}
		if slices.Contains(aliases, name) && name != d.runtimeOf(e, "") && !slices.Contains(d.cfg.Runtimes, name) {
			p.skipped[name] = "another name of runc"
			continue
		}
		if err := d.probeRuntime(ctx, e, p, name, img); err != nil {
			if ctx.Err() != nil || errors.Is(err, boxed.CodeNotReady) {
				return nil, err
			}
			p.failed = p.failed || name == d.runtimeOf(e, "")
			p.skipped[name] = runtimeWords(err)
			d.log.WarnContext(ctx, "runtime does not start a sandbox", "runtime", name, "error", p.skipped[name])
			continue
		}
		p.works[name] = true
	}
	return p, nil
}

// runtimeWords are a runtime's own, for operators: what the engine wraps around
// them and what startError hides.
func runtimeWords(err error) string {
	if cause := errors.Unwrap(err); cause != nil {
		err = cause
	}
	text := oneLine(err)
	for _, wrapping := range []string{"OCI runtime create failed: ", "OCI runtime start failed: "} {
		if _, rest, ok := strings.Cut(text, wrapping); ok {
			text = rest
		}
	}
	return strings.TrimSuffix(strings.TrimPrefix(text, "start container: "), ": unknown")
}

func boolRank(first bool) int {
	if first {
		return 0
	}
	return 1
}

// probeRuntime starts one sandbox, and finds out the open-files limit if that
// is not known yet.
func (d *Driver) probeRuntime(ctx context.Context, e *engine, p *probes, name string, img sandbox.Image) error {
	if p.noFile > 0 {
		return d.tryRuntime(ctx, e, name, img, p.noFile)
	}
	least := noFileSteps[len(noFileSteps)-1]
	err := d.tryRuntime(ctx, e, name, img, noFileSteps[0])
	if err == nil {
		p.noFile = noFileSteps[0]
		return nil
	}
	if err := d.tryRuntime(ctx, e, name, img, least); err != nil {
		return err
	}
	p.noFile = least
	for _, n := range noFileSteps[1 : len(noFileSteps)-1] {
		if d.tryRuntime(ctx, e, name, img, n) == nil {
			p.noFile = n
			break
		}
	}
	return nil
}

// probeImage is the image that probes run in: the configured one if this host
// has it, or an empty one, as all that is started is the agent. done takes it
// away again.
func (d *Driver) probeImage(ctx context.Context) (img sandbox.Image, done func(), err error) {
	if name, err := parseRef(d.cfg.ProbeImage); err == nil && d.cfg.ProbeImage != "" {
		if found, err := d.lookUpImage(ctx, name.String()); err == nil {
			if _, err := d.judgeImage(ctx, d.cfg.ProbeImage, found); err == nil {
				return sandbox.Image{Ref: d.cfg.ProbeImage, Digest: found.ID}, func() {}, nil
			}
		}
	}
	var empty bytes.Buffer
	if err := tar.NewWriter(&empty).Close(); err != nil {
		return img, nil, err
	}
	body, err := d.client.ImageImport(ctx, image.ImportSource{Source: &empty, SourceName: "-"}, "", image.ImportOptions{})
	if err != nil {
		return img, nil, d.engineError("make an image for probing", err)
	}
	defer body.Close()
	var made struct{ Status, Error string }
	if err := json.NewDecoder(body).Decode(&made); err != nil || made.Error != "" {
		return img, nil, d.engineError("make an image for probing", errors.Join(err, errors.New(made.Error)))
	}
	return sandbox.Image{Digest: made.Status}, func() {
		d.forgetImage(made.Status)
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
		defer cancel()
		_, _ = d.client.ImageRemove(undo, made.Status, image.RemoveOptions{}) // what is left is 0 bytes without a name
	}, nil
}

// tryRuntime makes a sandbox as any other and waits for its agent to call.
func (d *Driver) tryRuntime(ctx context.Context, e *engine, name string, img sandbox.Image, noFile int64) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	listener, dir, err := d.probeMount()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	defer listener.Close()
	config, err := d.imageConfig(ctx, img.Digest)
	if err != nil {
		return err
	}
	seccomp, err := sandbox.Seccomp(e.arch)
	if err != nil {
		return err
	}
	spec := containerSpec{
		box: sandbox.Box{
			ID: boxed.NewID(d.cfg.NodeID), Nonce: filepath.Base(dir), Image: img, Limits: probeLimits(noFile), UID: probeUID,
			Mount: dir, Agent: d.cfg.AgentPath,
		},
		image: config, instance: d.instance, runtime: name, seccomp: string(seccomp), sharesKernel: e.sharesKernel[name],
	}
	box := spec.config()
	delete(box.Labels, labelInstance) // not a sandbox: no sweep may find it
	box.Labels[labelProbe] = d.instance
	made, err := d.client.ContainerCreate(ctx, box, spec.hostConfig(), nil, nil, "boxed-probe-"+spec.box.ID.Random())
	if err != nil {
		return d.engineError("create probe", err)
	}
	defer d.removeProbe(ctx, made.ID)
	if err := d.client.ContainerStart(ctx, made.ID, container.StartOptions{}); err != nil {
		return d.startError(err)
	}
	if e.sharesKernel[name] && d.local() {
		c, err := d.client.ContainerInspect(ctx, made.ID)
		if err != nil {
			return d.engineError("look up probe", err)
		}
		if err := attest(ctx, c); err != nil {
			return err
		}
	}
	return awaitCall(ctx, listener)
}

// probeMount makes a Box.Mount under the data directory, which the engine sees
// as this process does: /tmp may be the service's own.
func (d *Driver) probeMount() (net.Listener, string, error) {
	if err := os.MkdirAll(d.cfg.DataDir, 0o700); err != nil {
		return nil, "", fmt.Errorf("make probe directory: %w", err)
	}
	dir, err := os.MkdirTemp(d.cfg.DataDir, probePrefix)
	if err != nil {
		return nil, "", fmt.Errorf("make probe directory: %w", err)
	}
	if dir, err = filepath.Abs(dir); err == nil {
		err = os.Chmod(dir, 0o711)
	}
	for _, name := range etcFiles {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), nil, 0o644))
	}
	if err != nil {
		os.RemoveAll(dir)
		return nil, "", fmt.Errorf("make probe directory: %w", err)
	}
	listener, err := sandbox.ListenSocket(dir)
	if err != nil {
		os.RemoveAll(dir)
		return nil, "", fmt.Errorf("listen for the probe: %w", err)
	}
	return listener, dir, nil
}

// awaitCall waits for the agent's first byte.
func awaitCall(ctx context.Context, listener net.Listener) error {
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	conn, err := listener.Accept()
	if err == nil {
		defer conn.Close()
		if deadline, ok := ctx.Deadline(); ok {
			_ = conn.SetDeadline(deadline)
		}
		_, err = io.ReadFull(conn, make([]byte, 1))
	}
	if err != nil {
		return boxed.Errorf(boxed.CodeUnavailable, "a sandbox started, but its agent did not call within %v: with gVisor, give the runtime --host-uds=open (--fsgofer-host-uds before 2023)", probeTimeout)
	}
	return nil
}

func (d *Driver) removeProbe(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTimeout)
	defer cancel()
	if err := d.client.ContainerRemove(ctx, id, container.RemoveOptions{Force: true, RemoveVolumes: true}); err != nil {
		d.log.WarnContext(ctx, "probe is not removed yet", "container", id, "error", oneLine(err)) // sweepProbes finds it
	}
}

// sweepProbes removes what an earlier process of this node left of probing. A
// probe's record is its directory, which is there before the container and
// whose name is the container's nonce: a label alone anybody may forge.
func (d *Driver) sweepProbes(ctx context.Context) {
	found, err := d.client.ContainerList(ctx, container.ListOptions{All: true, Filters: labelFilter(labelProbe, d.instance)})
	if err != nil {
		return // what follows meets the same
	}
	left, _ := os.ReadDir(d.cfg.DataDir) // none yet: nothing to remove
	for _, entry := range left {
		if !strings.HasPrefix(entry.Name(), probePrefix) {
			continue
		}
		for _, c := range found {
			if c.Labels[labelNonce] == entry.Name() {
				d.removeProbe(ctx, c.ID)
			}
		}
		os.RemoveAll(filepath.Join(d.cfg.DataDir, entry.Name()))
	}
}
