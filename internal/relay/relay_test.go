package relay_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed/internal/relay"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// ends are two connected sockets.
func ends(t testing.TB) (near, far *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); s.Close() })
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// start relays between two clients.
func start(t *testing.T, o relay.Options) (a, b *net.TCPConn, result chan relay.Result) {
	t.Helper()
	a, ra := ends(t)
	b, rb := ends(t)
	result = make(chan relay.Result, 1)
	go func() { result <- relay.Both(ra, rb, o) }()
	return a, b, result
}

// EL1: goproxy#451, #583, microsandbox#1180; EL2.
func TestHalfCloseIsPassedOnAndTheOtherSideStillSpeaks(t *testing.T) {
	a, b, result := start(t, relay.Options{Idle: time.Minute, Drain: time.Minute})
	sent := make([]byte, 3<<20)
	rand.Read(sent)
	go func() { a.Write(sent); a.CloseWrite() }()
	got, err := io.ReadAll(b)
	if err != nil || !bytes.Equal(got, sent) {
		t.Fatalf("%d of %d bytes, %v", len(got), len(sent), err)
	}
	go func() { b.Write(sent[:1<<20]); b.CloseWrite() }()
	if back, err := io.ReadAll(a); err != nil || !bytes.Equal(back, sent[:1<<20]) {
		t.Fatalf("back: %d bytes, %v", len(back), err)
	}
	if r := <-result; r.Err != nil || r.Up != 3<<20 || r.Down != 1<<20 {
		t.Fatalf("%+v", r)
	}
}

// EL1: a side that never ends is not waited for after the other's end.
func TestTheSideThatIsLeftEndsAfterTheDrain(t *testing.T) {
	for _, idle := range []time.Duration{0, time.Hour} {
		a, b, result := start(t, relay.Options{Idle: idle, Drain: 30 * time.Millisecond})
		a.CloseWrite()
		io.ReadAll(b) // its end; it says nothing itself
		if r := <-result; r.Err != nil {
			t.Errorf("idle %v: %v", idle, r.Err)
		}
	}
}

// EL5: agent-vault's ReadTimeout of 60 s ended uploads that were slow.
func TestAByteOfEitherDirectionKeepsBoth(t *testing.T) {
	const idle = 150 * time.Millisecond
	a, b, result := start(t, relay.Options{Idle: idle, Drain: time.Second})
	begun := time.Now()
	for time.Since(begun) < 4*idle {
		if _, err := a.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(b, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(idle / 5)
	}
	if r := <-result; !errors.Is(r.Err, relay.ErrIdle) {
		t.Fatalf("%+v", r)
	}
}

func TestWhoIsToldOfBytesMayEndIt(t *testing.T) {
	enough := errors.New("enough")
	total := 0
	a, b, result := start(t, relay.Options{Passed: func(up bool, n int) error {
		if total += n; up && total > 100 {
			return enough
		}
		return nil
	}})
	a.Write(make([]byte, 50))
	io.ReadFull(b, make([]byte, 50))
	a.Write(make([]byte, 60))
	if r := <-result; !errors.Is(r.Err, enough) || r.Up != 50 {
		t.Fatalf("%+v", r)
	}
	if n, err := io.Copy(io.Discard, b); n != 0 {
		t.Fatalf("%d bytes beyond the bound, %v", n, err)
	}
}

func TestPipesWithoutADescriptorWorkToo(t *testing.T) {
	a, ra := net.Pipe()
	b, rb := net.Pipe()
	done := make(chan relay.Result, 1)
	go func() { done <- relay.Both(ra, rb, relay.Options{}) }()
	go a.Write([]byte("hello"))
	buf := make([]byte, 5)
	if _, err := io.ReadFull(b, buf); err != nil || string(buf) != "hello" {
		t.Fatalf("%q, %v", buf, err)
	}
	a.Close()
	b.Close()
	<-done
}
