package agent_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

// direct is a guest's direct connection of which the test writes every byte.
type direct struct {
	net.Conn
	t *testing.T
	r *bufio.Reader
}

func (p *peer) direct() *direct {
	p.t.Helper()
	conn := p.dial()
	if _, err := hello(conn, agent.Hello{Version: 1, Direct: true, Secret: "s3cret"}); err != nil {
		p.t.Fatal(err)
	}
	return &direct{conn, p.t, bufio.NewReader(conn)}
}

// serve answers one exec with its arguments as output, and more after its end.
func (d *direct) serve(more []byte) {
	d.SetReadDeadline(time.Now().Add(10 * time.Second))
	typ, payload, _, err := agent.ReadFrame(d.r, nil)
	if err != nil {
		d.t.Errorf("read the request: %v", err)
		return
	}
	var req agent.Request
	var start agent.ExecStart
	if err := json.Unmarshal(payload, &req); err != nil || typ != agent.FrameRequest || json.Unmarshal(req.Args, &start) != nil {
		d.t.Errorf("frame of type %#x: %s", typ, payload)
		return
	}
	var answer bytes.Buffer
	agent.WriteMessage(&answer, agent.Response{Value: json.RawMessage(`{"info":{"id":"` + start.ID + `"}}`)})
	agent.WriteFrame(&answer, agent.FrameStdout, bytes.Join(start.Argv, []byte(" ")))
	agent.WriteFrame(&answer, agent.FrameExit, []byte(`{"reason":"exited","code":3}`))
	answer.Write(more)
	d.Write(answer.Bytes())
}

func (p *peer) exec(id string) (string, agent.Exit, error) {
	var out bytes.Buffer
	ctx, cancel := context.WithTimeout(p.t.Context(), 2*time.Second)
	defer cancel()
	exit, err := p.Exec(ctx, agent.ExecStart{ID: id, Argv: [][]byte{[]byte("echo"), []byte(id)}}, agent.Streams{Stdout: &out})
	return out.String(), exit, err
}

// closed waits until the host has closed the connection.
func (d *direct) closed() {
	d.t.Helper()
	d.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := d.r.ReadByte(); err != io.EOF && !errors.Is(err, syscall.ECONNRESET) {
		d.t.Errorf("the connection is open still: %v", err)
	}
}

func TestADirectConnectionServesOneExecAfterTheOther(t *testing.T) {
	p := listen(t)
	p.control()
	d := p.direct()
	for _, id := range []string{"one", "two", "three"} {
		eventually(t, "the connection is free", p.HasDirect)
		go d.serve(nil)
		if out, exit, err := p.exec(id); err != nil || out != "echo "+id || exit.Code != 3 {
			t.Fatalf("%q %+v %v", out, exit, err)
		}
	}
}

// What a guest says unasked is not the answer to the next question.
func TestAGuestThatSpeaksOnItsDirectConnectionUnaskedIsNotHeard(t *testing.T) {
	forged := func() []byte {
		var b bytes.Buffer
		agent.WriteMessage(&b, agent.Response{Value: json.RawMessage(`{}`)})
		agent.WriteFrame(&b, agent.FrameExit, []byte(`{"reason":"exited","code":0}`))
		return b.Bytes()
	}()
	t.Run("before the first exec", func(t *testing.T) {
		p := listen(t)
		control := p.control()
		d := p.direct()
		eventually(t, "the connection is free", p.HasDirect)
		d.Write(forged)
		p.asksOver(control)
		d.closed()
	})
	t.Run("after an exec's end", func(t *testing.T) {
		p := listen(t)
		control := p.control()
		d := p.direct()
		eventually(t, "the connection is free", p.HasDirect)
		go d.serve(forged)
		if out, _, err := p.exec("one"); err != nil || out != "echo one" {
			t.Fatalf("%q %v", out, err)
		}
		p.asksOver(control)
		d.closed()
	})
}

// asksOver begins an exec, and checks that it is asked for over the multiplexer.
func (p *peer) asksOver(control net.Conn) {
	p.t.Helper()
	ctx, cancel := context.WithCancel(p.t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := p.Exec(ctx, agent.ExecStart{ID: "next", Argv: [][]byte{[]byte("true")}}, agent.Streams{})
		done <- err
	}()
	control.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadFull(control, make([]byte, 12)); err != nil {
		p.t.Errorf("nothing was asked over the multiplexer: %v", err)
	}
	p.Close() // which nobody will answer
	if err := <-done; err == nil {
		p.t.Error("an exec that nobody ran ended well")
	}
}

func TestAGuestHasOneDirectConnection(t *testing.T) {
	p := listen(t)
	p.control()
	first := p.direct()
	eventually(t, "the connection is free", p.HasDirect)
	p.direct().closed()
	go first.serve(nil)
	if out, _, err := p.exec("one"); err != nil || out != "echo one" {
		t.Errorf("%q %v", out, err)
	}
}

func TestAGuestThatClosesItsDirectConnectionIsAskedOverTheOther(t *testing.T) {
	p := listen(t)
	control := p.control()
	d := p.direct()
	eventually(t, "the connection is free", p.HasDirect)
	d.Close()
	p.asksOver(control)
}

// What many guests leave unanswered together is bounded, and what one hoards is
// nobody else's loss.
func TestABudgetOfStreamsIsSharedAndHasAFloor(t *testing.T) {
	budget := agent.NewBudget(2)
	p, q := listenWith(t, budget), listenWith(t, budget)
	p.control()
	q.control()
	ctx, cancel := context.WithCancel(t.Context())
	answers := make(chan error, 64)
	ask := func(h *peer, n int) {
		for range n {
			go func() { answers <- h.Ping(ctx) }()
		}
	}
	ask(p, agent.StreamFloor+2)
	eventually(t, "the budget is used up", func() bool { return budget.Left() == 0 })
	if err := p.Ping(ctx); codeOf(err) != agent.ErrExhausted {
		t.Errorf("one more: %v", err)
	}
	ask(q, agent.StreamFloor)
	eventually(t, "the other has its floor", func() bool { return q.Streams() == agent.StreamFloor })
	if err := q.Ping(ctx); codeOf(err) != agent.ErrExhausted {
		t.Errorf("one more of the other: %v", err)
	}
	cancel()
	for range 2*agent.StreamFloor + 2 {
		<-answers
	}
	eventually(t, "it is given back", func() bool { return budget.Left() == 2 })
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// codeOf is the code of a guest's or host's answer, or "".
func codeOf(err error) string {
	var e *agent.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}
