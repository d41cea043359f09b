package sandbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Bounds of what waits for images: a create reserves nothing before its image
// is there, and a pull may take a quarter of an hour.
const (
	pullsOfOwner = 4               // images at once
	pullsInAll   = 16              // images at once, of all owners
	pullPatience = 5 * time.Second // for another one to be done
)

// pulls counts the creates that wait for an image, by owner and reference: many
// creates of one image are one pull.
type pulls struct {
	mu       sync.Mutex
	waiting  map[pull]int
	left     chan struct{} // closed and replaced when one leaves
	patience time.Duration
}

type pull struct{ owner, ref string }

func newPulls() pulls {
	return pulls{waiting: map[pull]int{}, left: make(chan struct{}), patience: pullPatience}
}

// enter lets a create wait for its image, and returns what ends its waiting.
// Errors: quota, not_ready.
func (p *pulls) enter(ctx context.Context, owner, ref string) (leave func(), err error) {
	late := time.After(p.patience)
	for {
		p.mu.Lock()
		err := p.roomLocked(pull{owner, ref})
		left := p.left
		if err == nil {
			p.waiting[pull{owner, ref}]++
		}
		p.mu.Unlock()
		if err == nil {
			return func() { p.leave(pull{owner, ref}) }, nil
		}
		select {
		case <-left:
		case <-late:
			return nil, err
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (p *pulls) leave(one pull) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.waiting[one]--; p.waiting[one] == 0 {
		delete(p.waiting, one)
		close(p.left)
		p.left = make(chan struct{})
	}
}

func (p *pulls) roomLocked(one pull) error {
	if p.waiting[one] > 0 {
		return nil
	}
	own := 0
	for other := range p.waiting {
		if other.owner == one.owner {
			own++
		}
	}
	switch {
	case own >= pullsOfOwner:
		return boxed.Errorf(boxed.CodeQuota, "%d images are being fetched for you, as many as may be at once; wait for one of them", own).With("limit", pullsOfOwner)
	case len(p.waiting) >= pullsInAll:
		return boxed.Errorf(boxed.CodeNotReady, "this node fetches %d images already, as many as it does at once; try again in a while", len(p.waiting))
	}
	return nil
}

// image finds a create's image, and pulls it if need be.
func (m *Manager) image(ctx context.Context, owner, ref string) (Image, error) {
	leave, err := m.pulls.enter(ctx, owner, ref)
	if err != nil {
		return Image{}, err
	}
	defer leave()
	return m.cfg.Driver.Image(ctx, ref, m.pullEvents(owner, ref))
}

// pullEvents tells the owner how a pull goes on.
func (m *Manager) pullEvents(owner, ref string) func(PullProgress) {
	return func(p PullProgress) {
		message := ref + ": " + p.Message
		if p.Total > 0 {
			message = fmt.Sprintf("%s (%d of %d MiB)", message, p.Current/boxed.MiB, p.Total/boxed.MiB)
		}
		m.emit(boxed.EventImage, &boxed.Sandbox{Owner: owner, Message: message}, nil)
	}
}
