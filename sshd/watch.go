package sshd

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/boxed-mesh/boxed"
)

// warnAt are how long before the end of its sandbox a terminal is told of it.
var warnAt = []time.Duration{5 * time.Minute, time.Minute}

// lookEvery is how often a terminal's sandbox is looked at: its end may be put off, or
// brought forward.
var lookEvery = 20 * time.Second

// errIdle ends a session in which nothing happens.
var errIdle = errors.New("nothing was typed or shown for too long")

// whyIdle is why a terminal ends by errIdle.
const whyIdle = "nothing happens in it"

// touch notes that something happens in the session.
func (x *session) touch() { x.touched.Store(time.Now().UnixNano()) }

// recordedBanner is said on each terminal that is recorded.
const recordedBanner = "this terminal is recorded, for its owner and administrators: boxedctl replay"

// greet says where the terminal is.
func (x *session) greet(t *target, e *boxed.Exec, back bool) {
	if x.recorded != nil {
		defer x.say(recordedBanner)
	}
	switch {
	case back && e.Viewers > 0:
		x.say(fmt.Sprintf("%s, in a shell that somebody else is in too", t.id.Random()))
		return
	case back:
		x.say(fmt.Sprintf("%s, back in the shell of %s", t.id.Random(), e.StartedAt.Local().Format("15:04")))
		return
	case !t.made:
		return
	}
	sb, err := x.s.cfg.Service.Get(x.ctx, t.id)
	if err != nil {
		return // what comes next says so better
	}
	node := string(sb.Node)
	if info, err := x.s.cfg.Service.GetNode(x.ctx, node); err == nil && info.Name != "" {
		node = info.Name
	}
	x.say(fmt.Sprintf("%s on %s, %s", sb.ID, node, sb.Image))
	if x.recorded == nil { // a banner has at most four lines
		x.say(reach(sb))
	}
	if !t.brief {
		x.say(fmt.Sprintf("it is kept for %s; longer: ssh boxed renew %s", sb.TTL, sb.ID.Random()))
		return
	}
	end := "it ends with this shell"
	if limit := x.s.cfg.Idle; limit > 0 {
		end += fmt.Sprintf(", or when nothing happens for %s", boxed.Duration(limit))
	}
	x.say(fmt.Sprintf("%s; after a lost link: ssh %s@boxed, for %s", end, sb.ID.Random(), lingerFor))
	x.say("to keep it: ssh boxed keep " + sb.ID.Random())
}

// reach says what a sandbox may reach, and how it may reach more.
func reach(sb *boxed.Sandbox) string {
	what := "it reaches nothing outside"
	if e := sb.Egress; e != nil && e.State == boxed.EgressOpen {
		if what = "it reaches the hosts that it was allowed"; e.Profile != "" {
			what = "it reaches what the profile " + e.Profile + " allows"
		}
	} else if e != nil && e.State == boxed.EgressDegraded {
		what = "it reaches less than it should"
	}
	return fmt.Sprintf("%s; to allow a host: ssh boxed egress allow %s HOST", what, sb.ID.Random())
}

// watch tells a terminal when its sandbox is about to end, until ctx ends. One that was
// made for it is kept alive as long as it is used.
func (x *session) watch(ctx context.Context, t *target) {
	x.touch()
	x.running.Go(func() {
		var warned time.Duration // the last threshold that was said
		tick := time.NewTicker(lookEvery)
		defer tick.Stop()
		for {
			left, why := x.look(ctx, t)
			if why != "" && left <= 0 {
				x.leave(errIdle)
				return
			}
			warned = x.warn(t.id, left, why, warned)
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
}

// look is how long the terminal has, and what ends it; why is "" where nothing does.
func (x *session) look(ctx context.Context, t *target) (left time.Duration, why string) {
	sb, err := x.s.cfg.Service.Get(ctx, t.id)
	if err != nil {
		return 0, ""
	}
	brief := sb.Labels[boxed.SSHLabel] == boxed.SSHLabelNew
	if brief && !sb.ExpiresAt.IsZero() && time.Until(sb.ExpiresAt) < sb.TTL.D()/2 {
		if renewed, err := x.s.cfg.Service.Update(ctx, t.id, boxed.Update{TTL: &sb.TTL}); err == nil {
			sb = renewed
		}
	}
	if limit := x.s.cfg.Idle; brief && limit > 0 {
		left, why = limit-time.Since(time.Unix(0, x.touched.Load())), whyIdle
	}
	if !sb.ExpiresAt.IsZero() {
		if ttl := time.Until(sb.ExpiresAt); why == "" || ttl < left {
			left, why = max(ttl, time.Second), "its time is up"
		}
	}
	return left, why
}

// warn says once per threshold how long there is left, and returns the last threshold
// that was said. An end that was put off is told of anew.
func (x *session) warn(id boxed.ID, left time.Duration, why string, warned time.Duration) time.Duration {
	due := time.Duration(0)
	for _, at := range warnAt {
		if why != "" && left <= at {
			due = at
		}
	}
	if due != 0 && (warned == 0 || due < warned) {
		stay := "to keep it: ssh boxed renew " + id.Random()
		if why == whyIdle {
			stay = "type something to stay"
		}
		x.say(fmt.Sprintf("this sandbox ends in %s: %s; %s", boxed.Duration(max(left.Round(time.Second), time.Second)), why, stay))
	}
	return due
}
