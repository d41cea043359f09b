package main

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"golang.org/x/sync/errgroup"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
	"github.com/boxed-mesh/boxed/sandbox/docker"
	"github.com/boxed-mesh/boxed/store"
)

// driver is the part of a node that runs sandboxes, joined in this process as
// cmd/boxed-node joins it, without a pool and without the HTTP in front: what is
// measured here is what no client could get below.
type driver struct {
	*sandbox.Manager
	close func()
}

func (r *rig) startDriver(ctx context.Context) (_ *driver, err error) {
	dir, err := r.newDir()
	if err != nil {
		return nil, err
	}
	public, _, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	id, agent := boxed.NodeIDOf(public), filepath.Join(r.bin, "boxed-agent")
	kept, err := store.Open(store.Options{Dir: filepath.Join(dir, "store")})
	if err != nil {
		return nil, err
	}
	engine, err := docker.New(docker.Config{NodeID: id, DataDir: dir, AgentPath: agent, ProbeImage: r.options.image})
	if err != nil {
		return nil, errors.Join(err, kept.Close())
	}
	m, err := sandbox.New(sandbox.Config{
		Node: id, Dir: filepath.Join(dir, "sandboxes"), Agent: agent, Driver: engine,
		Records:   store.NewTable[sandbox.Record](kept, "sandbox"),
		Templates: map[string]boxed.Template{boxed.DefaultTemplate: {Name: boxed.DefaultTemplate, Image: r.options.image, Limits: boxed.DefaultLimits()}},
		FirstUID:  330_000, LastUID: 339_999,
		Emit: func(e boxed.Event) { kept.AppendEvent(e) },
	})
	if err != nil {
		return nil, errors.Join(err, engine.Close(), kept.Close())
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	group, running := errgroup.WithContext(running)
	group.Go(func() error { return m.Run(running) })
	group.Go(func() error { return kept.Run(running) })
	d := &driver{Manager: m, close: func() {
		stop()
		group.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), cleanupLimit)
		defer cancel()
		if err := r.removeInstance(ctx, engine.Instance()); err != nil {
			r.say("remove the driver's containers: %v", err)
		}
		engine.Close()
		kept.Close()
		os.RemoveAll(dir)
	}}
	err = until(ctx, time.Minute, "the driver to recover", func() (bool, error) { return m.Recovered(), running.Err() })
	if err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (r *rig) removeInstance(ctx context.Context, instance string) error {
	list, err := r.engine.ContainerList(ctx, container.ListOptions{All: true, Filters: filters.NewArgs(filters.Arg("label", "sh.boxed.instance="+instance))})
	if err != nil {
		return err
	}
	var ids []string
	for _, c := range list {
		ids = append(ids, c.ID)
	}
	return r.remove(ctx, ids)
}

// create makes a sandbox with the defaults of a node.
func (d *driver) create(ctx context.Context, image string) (boxed.ID, error) {
	s, err := d.Create(ctx, "bench", boxed.Spec{
		Template: boxed.DefaultTemplate, Image: image, Limits: boxed.DefaultLimits(), TTL: boxed.DefaultTTL, Dir: boxed.DefaultDir,
	}, func(sandbox.Admission) error { return nil })
	if err != nil {
		return "", err
	}
	return s.ID, nil
}
