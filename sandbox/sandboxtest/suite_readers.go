package sandboxtest

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// X12, e2b-dev/infra#2579, #2643: readers that joined and left deadlocked a
// program's output, or saw parts of it twice. X13, managoat/fountain#691,
// TanStack/ai#1085: resuming replayed a random prefix. Readers join at the start,
// at the end and in between, read at their own pace, leave after any number of
// bytes and come back to where they were: each sees every byte once, or is told
// how many are gone, and learns the same end.
func readersComeAndGo(s *site, id boxed.ID) {
	e, err := s.StartExec(context.Background(), id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptLines}})
	if err != nil {
		s.t.Fatal(err)
	}
	whole := lines()
	var readers sync.WaitGroup
	for i := range 16 {
		readers.Go(func() {
			r := &reader{s: s, id: id, exec: e.ID, whole: whole, random: rand.New(rand.NewPCG(1, uint64(i))), slow: i%4 == 0}
			if i%3 == 1 {
				r.at = r.random.Int64N(1000)
			}
			r.follow()
		})
	}
	done := make(chan struct{})
	go func() { defer close(done); readers.Wait() }()
	select {
	case <-done:
	case <-time.After(60 * time.Second):
		s.t.Fatal("readers are stuck")
	}
	late := &reader{s: s, id: id, exec: e.ID, whole: whole, stays: true}
	late.follow()
	if kept := int64(len(whole)) - late.skipped; kept > boxed.OutputRing || kept < boxed.OutputRing/2 {
		s.t.Errorf("%d bytes are kept", kept)
	}
}

// S4: what a client left is there for it to come back to, for a while: a program that
// lingers waits for a reader that is slow, goes on without one, and ends when nobody
// comes for long enough.
func programsLinger(s *site, id boxed.ID) {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	const linger = boxed.Duration(2 * time.Second)
	start := func(script string) boxed.ExecID {
		e, err := s.StartExec(ctx, id, boxed.ExecRequest{Args: []string{"sh", "-c", script}, Linger: linger})
		if err != nil {
			s.t.Fatal(err)
		}
		if e.Linger != linger {
			s.t.Errorf("it lingers for %s", e.Linger)
		}
		return e.ID
	}
	slow := &reader{s: s, id: id, exec: start(scriptLines), whole: lines(), slow: true, stays: true}
	slow.follow()
	if slow.skipped != 0 {
		s.t.Errorf("a reader that was there missed %d bytes", slow.skipped)
	}

	count := start(scriptCount)
	watching, leave := context.WithTimeout(ctx, 2*linger.D())
	s.Attach(watching, id, count, boxed.AttachRequest{Stdout: io.Discard})
	leave()
	if e, err := s.GetExec(ctx, id, count); err != nil || !e.Running {
		s.t.Fatalf("somebody was there all the time: %+v, %v", e, err)
	}
	status, err := s.Attach(ctx, id, count, boxed.AttachRequest{NoFollow: true})
	for status.Reason == "" && err == nil && ctx.Err() == nil {
		time.Sleep(linger.D() / 4)
		var e *boxed.Exec
		if e, err = s.GetExec(ctx, id, count); err == nil && e.Status != nil {
			status = *e.Status
		}
	}
	if err != nil || status.Reason != boxed.ReasonCanceled {
		s.t.Errorf("nobody came: %+v, %v", status, err)
	}
	for _, wrong := range []boxed.Duration{-1, 1, 2 * boxed.MaxLinger, boxed.Never} {
		if _, err := s.StartExec(ctx, id, boxed.ExecRequest{Args: []string{"true"}, Linger: wrong}); boxed.CodeOf(err) != boxed.CodeInvalid {
			s.t.Errorf("linger of %d: %v", wrong, err)
		}
	}
	if _, err := s.Exec(ctx, id, boxed.ExecRequest{Args: []string{"true"}, Linger: linger}); boxed.CodeOf(err) != boxed.CodeInvalid {
		s.t.Errorf("one that is attached: %v", err)
	}
}

// reader is one that comes and goes.
type reader struct {
	s       *site
	id      boxed.ID
	exec    boxed.ExecID
	whole   string
	random  *rand.Rand
	slow    bool
	stays   bool
	at      int64 // the next byte
	skipped int64
	leaves  int64 // at this byte
	leave   context.CancelFunc
}

// follow reads to the end, with breaks.
func (r *reader) follow() {
	for visit := 0; ; visit++ {
		ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
		r.leave, r.leaves = cancel, int64(len(r.whole))+1
		if !r.stays && visit < 5 {
			r.leaves = r.at + r.random.Int64N(300_000)
		}
		status, err := r.s.Attach(ctx, r.id, r.exec, boxed.AttachRequest{StdoutOffset: r.at, Stdout: r, Gap: r.gap})
		left := ctx.Err() != nil
		cancel()
		switch {
		case err == nil && status.Reason == boxed.ReasonExited:
			if r.at != int64(len(r.whole)) || status.StdoutBytes != r.at || status.Code != 3 {
				r.s.t.Errorf("it ended at byte %d of %d: %+v", r.at, len(r.whole), status)
			}
			return
		case !left || err == nil:
			r.s.t.Errorf("at byte %d: %+v, %v", r.at, status, err)
			return
		}
	}
}

func (r *reader) Write(p []byte) (int, error) {
	if end := r.at + int64(len(p)); end > int64(len(r.whole)) || string(p) != r.whole[r.at:end] {
		return 0, fmt.Errorf("at byte %d it got %.60q", r.at, p)
	}
	if r.at += int64(len(p)); r.at >= r.leaves {
		r.leave()
	}
	if r.slow {
		time.Sleep(time.Millisecond)
	}
	return len(p), nil
}

func (r *reader) gap(stream string, n int64) {
	if stream != "stdout" || n <= 0 {
		r.s.t.Errorf("a gap of %d bytes in %s", n, stream)
	}
	r.at, r.skipped = r.at+n, r.skipped+n
}

// lines is what scriptLines writes: more than is kept.
func lines() string {
	var b strings.Builder
	for i := range lineCount {
		fmt.Fprintln(&b, i)
	}
	return b.String()
}
