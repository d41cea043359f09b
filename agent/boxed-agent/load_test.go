package main_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

// X12, e2b-dev/infra#2579, #2643: readers that join a program's output and leave
// again, hundreds of them within a moment and in the middle of it, hold nothing
// of the link: other calls go on as before.
func TestReadersThatLeaveHoldNothing(t *testing.T) {
	s := start(t)
	a := command("yes")
	if _, err := s.Start(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	var readers sync.WaitGroup
	for range 16 {
		readers.Go(func() {
			for range 20 {
				visit, leave := context.WithCancel(ctx)
				left := writerFunc(func(p []byte) (int, error) { // after the first bytes, with many on the way
					leave()
					return len(p), nil
				})
				_, err := s.Attach(visit, agent.Attach{ID: a.ID}, agent.Streams{Stdout: left})
				if visit.Err() == nil {
					t.Errorf("a reader is refused: %v", err)
					leave()
					return
				}
				leave()
			}
		})
	}
	readers.Wait()
	began := time.Now()
	if exit, err := s.Exec(ctx, command("true"), agent.Streams{}); err != nil || exit.Code != 0 {
		t.Errorf("a program after them: %+v, %v", exit, err)
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("a program after them took %v", took)
	}
	if err := s.Kill(ctx, a.ID, agent.ExitCanceled); err != nil {
		t.Error(err)
	}
}
