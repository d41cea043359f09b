package sandbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// pool holds the warm sandboxes of one template: started, linked, and used by
// nobody. A claimed one is its owner's until it is destroyed, never returned.
// The Manager's lock guards it.
type pool struct {
	template boxed.Template
	image    Image // as last seen; Digest "" before that
	runtime  string
	key      string // of what fits now; others are rolled out
	ready    []*box
	filling  int
	problem  string
	retry    time.Time // not filled before, after a failure
	failures int
}

// Reasons of a warm miss.
const (
	missImage    = "image"    // not a template's
	missTemplate = "template" // the template has no pool
	missRuntime  = "runtime"
	missLimits   = "limits" // sizes, processes or files that are fixed at create
	missEmpty    = "empty"  // all claimed, being filled
)

// poolKey names all that is fixed when a sandbox is made.
func poolKey(image Image, runtime string, l boxed.Limits) string {
	l.MemoryBytes, l.CPUs = 0, 0 // written at the claim
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %s %+v %v", HardeningRevision(), image.Digest, runtime, l, image.Volumes))
	return hex.EncodeToString(sum[:8])
}

// claim takes a warm sandbox for the spec, or says why there is none. One
// sandbox has one claimer: all of it happens under the Manager's lock, and the
// durable record follows in hand.
func (m *Manager) claim(owner string, spec boxed.Spec, admit func(Admission) error) (*box, string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p, miss := m.poolForLocked(spec)
	if miss != "" {
		return nil, miss, nil
	}
	if err := admit(Admission{m}); err != nil {
		return nil, "", err
	}
	for i := 0; i < len(p.ready); {
		b := p.ready[i]
		rec := b.record()
		switch {
		case rec.Ending != "": // it died, and is being ended
			p.ready = slices.Delete(p.ready, i, i+1)
			continue
		case rec.Key != p.key:
			p.ready = slices.Delete(p.ready, i, i+1)
			m.endWarmLocked(b, "its template has changed")
			continue
		case !b.linked(): // it is dialling again, or dead and nobody has seen it yet
			i++
			continue
		}
		p.ready = slices.Delete(p.ready, i, i+1)
		rec.fill(m.cfg.Now(), owner, spec)
		rec.Sandbox.Warm = true
		b.publish(rec)
		b.mu.Lock()
		b.listed = true
		b.mu.Unlock()
		m.hits++
		m.pokeLocked()
		return b, "", nil
	}
	return nil, missEmpty, nil
}

// linked reports whether the agent is connected.
func (b *box) linked() bool {
	b.mu.Lock()
	host := b.host
	b.mu.Unlock()
	return host != nil && host.Linked()
}

// poolForLocked finds the pool whose sandboxes fit a spec.
func (m *Manager) poolForLocked(spec boxed.Spec) (*pool, string) {
	var p *pool
	if spec.Template != "" {
		p = m.pools[spec.Template]
	} else {
		for _, name := range slices.Sorted(maps.Keys(m.pools)) {
			if q := m.pools[name]; q.template.Image == spec.Image && q.template.Pool > 0 {
				p = q
				break
			}
		}
		if p == nil {
			return nil, missImage
		}
	}
	switch {
	case p == nil || p.template.Pool == 0:
		return nil, missTemplate
	case p.image.Digest == "":
		return nil, missEmpty
	case spec.Runtime != "" && spec.Runtime != p.runtime:
		return nil, missRuntime
	case poolKey(p.image, p.runtime, spec.Limits) != p.key:
		return nil, missLimits
	}
	// Tmpfs sizes are fixed, and must not outgrow the memory of this claim.
	if spec.Limits.TmpfsBytes() > spec.Limits.MemoryBytes-boxed.MemoryHeadroom {
		return nil, missLimits
	}
	return p, ""
}

// Pools describes the pools, and what claims found.
func (m *Manager) Pools() (infos []boxed.PoolInfo, hits int64, misses map[string]int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	infos = []boxed.PoolInfo{}
	for _, name := range slices.Sorted(maps.Keys(m.pools)) {
		if p := m.pools[name]; p.template.Pool > 0 {
			infos = append(infos, boxed.PoolInfo{
				Template: name, Image: p.template.Image, Runtime: p.runtime,
				Ready: len(p.ready), Filling: p.filling, Size: p.template.Pool, Problem: p.problem,
			})
		}
	}
	return infos, m.hits, maps.Clone(m.misses)
}

func (m *Manager) poke() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pokeLocked()
}

func (m *Manager) pokeLocked() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// fill keeps the pools full until ctx ends, at most Refill at a time: more gain
// nothing and disturb who uses the host.
func (m *Manager) fill(ctx context.Context) {
	var making sync.WaitGroup
	defer making.Wait()
	slots := make(chan struct{}, m.cfg.Refill)
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	m.refresh(ctx)
	for ctx.Err() == nil {
		m.trim()
		for p := m.next(); p != nil; p = m.next() {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				m.filled(p, nil, ctx.Err())
				return
			}
			making.Go(func() {
				b, err := m.makeWarm(ctx, p)
				m.filled(p, b, err)
				<-slots
			})
		}
		select {
		case <-ctx.Done():
		case <-m.wake:
		case <-look.C:
			m.refresh(ctx)
		}
	}
}

// refresh looks whether a template's image or the runtime has changed; then the
// pool is rolled: what does not fit any more is ended and made anew.
func (m *Manager) refresh(ctx context.Context) {
	m.mu.Lock()
	pools := slices.Collect(maps.Values(m.pools))
	m.mu.Unlock()
	for _, p := range pools {
		if p.template.Pool == 0 {
			continue
		}
		image, runtime, err := m.resolve(ctx, p.template)
		m.mu.Lock()
		if err != nil {
			if ctx.Err() == nil && p.problem != err.Error() {
				p.problem = err.Error()
				m.log.Warn("a pool cannot be filled", "template", p.template.Name, "err", err)
			}
			m.mu.Unlock()
			continue
		}
		if p.image.Digest == "" || p.key != poolKey(image, runtime, p.template.Limits) {
			p.retry, p.failures = time.Time{}, 0
		}
		p.image, p.runtime = image, runtime
		p.key = poolKey(image, runtime, p.template.Limits)
		if p.failures == 0 {
			p.problem = ""
		}
		m.mu.Unlock()
	}
}

// resolve finds a template's image and runtime, pulling the image if the
// registry has it.
func (m *Manager) resolve(ctx context.Context, t boxed.Template) (Image, string, error) {
	image, err := m.cfg.Driver.Image(ctx, t.Image, func(PullProgress) {})
	if err != nil {
		return Image{}, "", err
	}
	runtime, err := m.runtime(ctx, t.Runtime)
	return image, runtime, err
}

// next reserves a place in a pool that needs filling, or returns nil.
func (m *Manager) next() *pool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(m.pools)) {
		p := m.pools[name]
		if p.image.Digest == "" || len(p.ready)+p.filling >= p.template.Pool || m.cfg.Now().Before(p.retry) {
			continue
		}
		if m.cfg.PoolRoom != nil {
			used, warm := m.usedLocked()
			if warm.MemoryBytes+p.template.Limits.MemoryBytes > m.cfg.PoolRoom(used) {
				p.problem = "held back: warm sandboxes may take a quarter of the free memory at most"
				continue
			}
		}
		p.filling++
		return p
	}
	return nil
}

// makeWarm makes one sandbox of a pool. It is not running until it is claimed.
func (m *Manager) makeWarm(ctx context.Context, p *pool) (*box, error) {
	m.mu.Lock()
	rec := m.newRecord(p.image, p.runtime, p.template.Limits)
	rec.Pooled, rec.Sandbox.Template = true, p.template.Name
	image := p.image
	b, err := m.registerLocked(rec)
	m.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return b, b.make(ctx, image)
}

// filled takes a made sandbox into its pool, or puts the next try off.
func (m *Manager) filled(p *pool, b *box, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.filling--
	if err == nil {
		p.ready = append(p.ready, b)
		p.problem, p.failures = "", 0
		m.pokeLocked()
		return
	}
	p.failures++
	p.problem = err.Error()
	p.retry = m.cfg.Now().Add(min(time.Second<<min(p.failures, 6), time.Minute))
}

// trim takes out of the pools what no longer fits, has died, or is too much,
// and ends it.
func (m *Manager) trim() {
	m.mu.Lock()
	defer m.mu.Unlock()
	room, held := int64(-1), int64(0)
	if m.cfg.PoolRoom != nil {
		used, _ := m.usedLocked()
		room = m.cfg.PoolRoom(used)
	}
	for _, p := range m.pools {
		held += int64(len(p.ready)) * p.template.Limits.MemoryBytes
	}
	for _, p := range m.pools {
		keep := p.ready[:0:0]
		for _, b := range p.ready {
			r := b.record()
			switch {
			case r.Ending != "" || r.Sandbox.State.Ended():
			case r.Key != p.key:
				m.endWarmLocked(b, "its template has changed")
			case room >= 0 && held > room:
				held -= r.Sandbox.Limits.MemoryBytes // what is being ended is not counted twice
				m.endWarmLocked(b, "the memory is needed")
			default:
				keep = append(keep, b)
			}
		}
		p.ready = keep
	}
}

// endWarmLocked ends a warm sandbox that is in no pool any more.
func (m *Manager) endWarmLocked(b *box, why string) {
	b.mu.Lock()
	if b.rec.Ending == "" {
		b.rec.Ending, b.rec.Why = boxed.EndDestroyed, why
	}
	b.mu.Unlock()
	if !m.closed {
		m.work.Go(func() { b.destroy(context.Background(), boxed.EndDestroyed, why, boxed.StateStopped) })
	}
}
