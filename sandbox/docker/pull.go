package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/distribution/reference"
	"github.com/docker/docker/api/types/image"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// progressEvery is how often a waiter hears of a pull at most.
const progressEvery = 200 * time.Millisecond

// maxLayers bounds what is remembered of a pull.
const maxLayers = 1024

// pulls are those under way, one for each reference.
type pulls struct {
	mu     sync.Mutex
	active map[string]*pull
}

// pull is one pull of one reference. It lives as long as somebody waits for it.
type pull struct {
	cancel  context.CancelFunc
	done    chan struct{} // closed at its end; err is then set
	err     error
	waiters int // under pulls.mu

	mu       sync.Mutex
	progress sandbox.PullProgress
	layers   map[string]layer
}

type layer struct{ current, total int64 }

// do joins the pull of named, or begins it, and waits for its end. A waiter
// whose ctx ends leaves; when the last one leaves the pull is canceled.
func (p *pulls) do(ctx context.Context, d *Driver, named reference.Named, progress func(sandbox.PullProgress)) error {
	one := p.join(d, named)
	defer p.leave(named, one)
	ticks := time.NewTicker(progressEvery)
	defer ticks.Stop()
	var told sandbox.PullProgress
	tell := func() {
		if now := one.snapshot(); progress != nil && now != told {
			told = now
			progress(now)
		}
	}
	for {
		select {
		case <-one.done:
			tell()
			return one.err
		case <-ctx.Done():
			return fmt.Errorf("pull image: %w", ctx.Err())
		case <-ticks.C:
			tell()
		}
	}
}

func (p *pulls) join(d *Driver, named reference.Named) *pull {
	p.mu.Lock()
	defer p.mu.Unlock()
	one := p.active[named.String()]
	if one == nil {
		// Not the first waiter's context: the pull outlives it if others wait, and has a deadline of its own.
		ctx, cancel := context.WithTimeout(context.Background(), d.cfg.PullTimeout)
		one = &pull{cancel: cancel, done: make(chan struct{}), layers: map[string]layer{}}
		if p.active == nil {
			p.active = map[string]*pull{}
		}
		p.active[named.String()] = one
		go func() {
			defer close(one.done)
			one.err = d.pull(ctx, named, one.step)
			p.end(named, one)
		}()
	}
	one.waiters++
	return one
}

// leave ends the pull when nobody waits for it any more.
func (p *pulls) leave(named reference.Named, one *pull) {
	p.mu.Lock()
	one.waiters--
	last := one.waiters == 0
	if last && p.active[named.String()] == one {
		delete(p.active, named.String()) // whoever comes now begins anew
	}
	p.mu.Unlock()
	if last {
		one.cancel()
		<-one.done
	}
}

// end takes a finished pull away, so that a later one tries again.
func (p *pulls) end(named reference.Named, one *pull) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.active[named.String()] == one {
		delete(p.active, named.String())
	}
}

func (p *pull) snapshot() sandbox.PullProgress {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.progress
}

// step takes in one message of the engine.
func (p *pull) step(m pullMessage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.progress.Message = clip(oneLine(errors.New(m.Status)))
	if m.Status != "Downloading" || m.Progress.Total <= 0 || m.ID == "" {
		return
	}
	if _, known := p.layers[m.ID]; !known && len(p.layers) >= maxLayers {
		return
	}
	p.layers[m.ID] = layer{m.Progress.Current, m.Progress.Total}
	p.progress.Current, p.progress.Total = 0, 0
	for _, l := range p.layers {
		p.progress.Current += l.current
		p.progress.Total += l.total
	}
}

// pullMessage is one line of the engine's report of a pull.
type pullMessage struct {
	ID       string `json:"id"`
	Status   string `json:"status"`
	Progress struct {
		Current int64 `json:"current"`
		Total   int64 `json:"total"`
	} `json:"progressDetail"`
	Error string `json:"error"`
}

// pull has the engine fetch named, and returns when it is there.
func (d *Driver) pull(ctx context.Context, named reference.Named, step func(pullMessage)) error {
	auth, authProblem := d.credentials(ctx, reference.Domain(named))
	if authProblem != nil {
		d.log.WarnContext(ctx, "registry credentials cannot be used", "registry", reference.Domain(named), "error", oneLine(authProblem))
	}
	body, err := d.client.ImagePull(ctx, named.String(), image.PullOptions{RegistryAuth: auth})
	if err != nil {
		return d.pullError(ctx, named, err, authProblem)
	}
	defer body.Close()
	for dec := json.NewDecoder(body); ; {
		var m pullMessage
		err := dec.Decode(&m)
		switch {
		case err == io.EOF:
			return nil
		case err != nil:
			return d.pullError(ctx, named, err, authProblem)
		case m.Error != "":
			return d.pullError(ctx, named, errors.New(m.Error), authProblem)
		}
		step(m)
	}
}

// pullError says why an image cannot be had, and what to do about it.
func (d *Driver) pullError(ctx context.Context, named reference.Named, err, authProblem error) error {
	ref, registry := reference.FamiliarString(named), reference.Domain(named)
	if errors.Is(ctx.Err(), context.Canceled) {
		return fmt.Errorf("pull image: %w", ctx.Err())
	}
	reason := pullReason(err)
	var message string
	switch {
	case ctx.Err() != nil:
		reason = boxed.ImageTimeout
		message = fmt.Sprintf("image %s was not pulled within %v: `docker pull` it on this host, or raise docker.pull_timeout", ref, d.cfg.PullTimeout)
	case isUnreachable(err) && reason == "":
		return d.engineError("pull image", err)
	case reason == boxed.ImageNotFound:
		message = fmt.Sprintf("image %s does not exist at %s, or asks for a login: check its name, build or `docker load` it on this host, or `docker login` there", ref, registry)
	case reason == boxed.ImageUnauthorized:
		message = fmt.Sprintf("%s refuses to give image %s without a valid login: `docker login %s` on this host", registry, ref, registry)
	case reason == boxed.ImageNoSpace:
		message = fmt.Sprintf("the disk of the Docker engine is full while pulling %s: free some (docker image prune), then try again", ref)
	case reason == boxed.ImageTimeout:
		message = fmt.Sprintf("%s does not answer in time for image %s: try again, or build or `docker load` the image on this host", registry, ref)
	case reason == boxed.ImageUnusable:
		message = fmt.Sprintf("image %s is not for this host's architecture: choose a tag that is", ref)
	case reason == boxed.ImageNoRoute:
		message = fmt.Sprintf("no registry answers for %s: build or `docker load` the image on this host, or let the Docker engine reach %s", ref, registry)
	default:
		reason = boxed.ImageNoRoute
		message = fmt.Sprintf("%s did not serve image %s (%s): try again, or build or `docker load` the image on this host", registry, ref, oneLine(err))
	}
	if reason == boxed.ImageUnauthorized && authProblem != nil {
		message += fmt.Sprintf(" (the stored login cannot be used: %s)", oneLine(authProblem))
	}
	return &boxed.Error{
		Code: boxed.CodeImage, Message: message, Err: err,
		Detail: map[string]any{"reason": string(reason), "field": "image"},
	}
}
