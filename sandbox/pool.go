package sandbox

import (
	"cmp"
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
	resolve  backoff // of the image or runtime that cannot be had
	making   backoff // of sandboxes that cannot be made
	held     string  // why it is not filled, though it could be
}

// Reasons of a warm miss.
const (
	missImage    = "image"    // not a template's
	missTemplate = "template" // the template has no pool
	missRuntime  = "runtime"
	missLimits   = "limits" // sizes, processes or files that are fixed at create
	missEmpty    = "empty"  // all claimed, being filled
	missDied     = "died"   // the one that was claimed ended by itself
)

// poolKey names all that is fixed when a sandbox is made.
func poolKey(image Image, runtime string, l boxed.Limits) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s %s %+v %v", image.Digest, runtime, fixed(l), image.Volumes))
	return HardeningRevision() + "-" + hex.EncodeToString(sum[:8])
}

// fixed are the limits that cannot be changed at a claim.
func fixed(l boxed.Limits) boxed.Limits {
	l.MemoryBytes, l.CPUs = 0, 0
	return l
}

// claim takes a warm sandbox for the spec, or says why there is none. One
// sandbox has one claimer: all of it happens under the Manager's lock, and the
// durable record follows in hand.
func (m *Manager) claim(owner string, spec boxed.Spec, admit func(Admission) error) (*box, string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, "", errStopping()
	}
	fit, miss := m.poolsForLocked(spec)
	if len(fit) == 0 {
		return nil, miss, nil
	}
	if err := admit(Admission{m}); err != nil {
		return nil, "", err
	}
	fill := func(r *Record) {
		r.fill(m.cfg.Now(), owner, spec)
		r.Sandbox.Warm = true
	}
	for _, p := range fit {
		for i, b := range p.ready {
			if b.record().Key != p.key || !b.claim(fill) { // trim ends it, or it is dialling again
				continue
			}
			p.ready = slices.Delete(p.ready, i, i+1)
			m.hits++
			m.claimed = time.Now()
			m.pokeLocked()
			return b, "", nil
		}
	}
	return nil, missEmpty, nil
}

// poolsForLocked finds the pools whose sandboxes fit a spec.
func (m *Manager) poolsForLocked(spec boxed.Spec) (fit []*pool, miss string) {
	if miss = missImage; spec.Template != "" {
		miss = missTemplate
	}
	for _, name := range slices.Sorted(maps.Keys(m.pools)) {
		p := m.pools[name]
		if name != spec.Template && (spec.Template != "" || p.template.Image != spec.Image || p.template.Pool == 0) {
			continue
		}
		if miss = p.misfit(spec); miss == "" {
			fit = append(fit, p)
		}
	}
	return fit, miss
}

// misfit says why no sandbox of the pool fits a spec, or "".
func (p *pool) misfit(spec boxed.Spec) string {
	switch {
	case p.template.Pool == 0:
		return missTemplate
	case p.key == "":
		return missEmpty
	// A spec that names no runtime wants the node's, not that of some template.
	case spec.Runtime != p.runtime && (spec.Runtime != "" || p.template.Runtime != ""):
		return missRuntime
	case fixed(spec.Limits) != fixed(p.template.Limits):
		return missLimits
	// Tmpfs sizes are fixed, and must not outgrow the memory of this claim.
	case spec.Limits.TmpfsBytes() > spec.Limits.MemoryBytes-boxed.MemoryHeadroom:
		return missLimits
	}
	return ""
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
				Ready: len(p.ready), Filling: p.filling, Size: p.template.Pool, Problem: cmp.Or(p.resolve.problem, p.making.problem, p.held),
			})
		}
	}
	return infos, m.hits, maps.Clone(m.misses)
}

// Images are references of images that are known to be here: those of pools, and of
// living sandboxes.
func (m *Manager) Images() map[string]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	images := map[string]bool{}
	for _, p := range m.pools {
		if p.image.Digest != "" {
			images[p.template.Image] = true
		}
	}
	for _, b := range m.living {
		b.look(func(r *Record) { images[r.Sandbox.Image] = true })
	}
	return images
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
	for {
		m.trim()
		for m.fillOne(ctx, slots, &making) {
		}
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		case <-look.C:
		}
	}
}

// fillOne begins one sandbox that a pool needs, as soon as a slot is free, and
// reports whether there was a need.
func (m *Manager) fillOne(ctx context.Context, slots chan struct{}, making *sync.WaitGroup) bool {
	if !m.calm(ctx) || m.making.busy() { // those who wait come first; the last of them wakes us
		return false
	}
	select {
	case slots <- struct{}{}:
	case <-ctx.Done():
		return false
	}
	p, b, image := m.next()
	if p == nil {
		<-slots
		return false
	}
	making.Go(func() {
		m.filled(p, b, b.make(ctx, image))
		<-slots
	})
	return true
}

// refresh keeps what is known of the templates' images and runtimes up to date,
// each on its own: a pull of one holds no other up.
func (m *Manager) refresh(ctx context.Context) {
	var each sync.WaitGroup
	defer each.Wait()
	for _, p := range m.pools { // the map itself never changes
		if p.template.Pool == 0 {
			continue
		}
		each.Go(func() {
			look := time.NewTicker(lookEvery)
			defer look.Stop()
			for {
				m.refreshPool(ctx, p)
				select {
				case <-ctx.Done():
					return
				case <-look.C:
				}
			}
		})
	}
}

// refreshPool looks whether a template's image or the runtime has changed; then
// the pool is rolled: what does not fit any more is ended and made anew.
func (m *Manager) refreshPool(ctx context.Context, p *pool) {
	m.mu.Lock()
	early := p.resolve.waiting(m.cfg.Now())
	m.mu.Unlock()
	if early {
		return
	}
	image, runtime, err := m.resolve(ctx, p.template)
	m.mu.Lock()
	defer m.mu.Unlock()
	if err != nil {
		if ctx.Err() == nil && p.resolve.failed(m.cfg.Now(), err) {
			m.log.Warn("a pool cannot be filled", "template", p.template.Name, "err", err)
		}
		return
	}
	key := poolKey(image, runtime, p.template.Limits)
	if p.image.Digest == "" || p.key != key {
		p.making = backoff{}
	}
	p.image, p.runtime, p.key, p.resolve = image, runtime, key, backoff{}
	m.pokeLocked()
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

// next finds a pool that needs filling, and registers a sandbox of it: its room
// is taken from then on. It returns nil if there is no need.
func (m *Manager) next() (*pool, *box, Image) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.cfg.Now()
	for _, name := range slices.Sorted(maps.Keys(m.pools)) {
		p := m.pools[name]
		p.held = ""
		if p.image.Digest == "" || len(p.ready)+p.filling >= p.template.Pool || p.making.waiting(now) {
			continue
		}
		if m.cfg.PoolRoom != nil {
			used, warm := m.usedLocked()
			if warm.MemoryBytes+p.template.Limits.MemoryBytes > m.cfg.PoolRoom(used) {
				p.held = "held back: the memory that warm sandboxes may take is used up"
				continue
			}
		}
		rec := m.newRecord(p.image, p.runtime, p.template.Limits)
		rec.Pooled, rec.Sandbox.Template = true, p.template.Name
		b, err := m.registerLocked(rec)
		if err != nil {
			p.making.failed(now, err)
			continue
		}
		p.filling++
		return p, b, p.image
	}
	return nil, nil, Image{}
}

// filled takes a made sandbox into its pool, or puts the next try off.
func (m *Manager) filled(p *pool, b *box, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p.filling--
	if err != nil {
		p.making.failed(m.cfg.Now(), err)
		return
	}
	p.ready = append(p.ready, b)
	p.making = backoff{}
	m.pokeLocked()
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
