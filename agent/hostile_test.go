package agent_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed/agent"
)

// peer is a guest of which the test writes every byte.
type peer struct {
	*agent.Host
	t      *testing.T
	dir    string
	broken chan error
}

func listen(t *testing.T) *peer {
	t.Helper()
	return listenWith(t, nil)
}

func listenWith(t *testing.T, budget *agent.Budget) *peer {
	t.Helper()
	ignore := goleak.IgnoreCurrent()
	p := &peer{t: t, dir: t.TempDir(), broken: make(chan error, 16)}
	host, err := agent.Listen(agent.HostConfig{
		Dir: p.dir, Socket: "s", Secret: "s3cret", Config: agent.Config{UID: 1}, Budget: budget, Broken: func(err error) { p.broken <- err },
	})
	if err != nil {
		t.Fatal(err)
	}
	p.Host = host
	t.Cleanup(func() {
		host.Close()
		goleak.VerifyNone(t, ignore)
	})
	return p
}

func (p *peer) dial() net.Conn {
	p.t.Helper()
	conn, err := net.Dial("unix", filepath.Join(p.dir, "s"))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { conn.Close() })
	return conn
}

// hello shakes hands and returns what the host said.
func hello(conn net.Conn, h agent.Hello) (w agent.Welcome, err error) {
	if err := agent.WriteMessage(conn, h); err != nil {
		return w, err
	}
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	defer conn.SetReadDeadline(time.Time{})
	err = agent.ReadMessage(conn, 1<<20, &w)
	return w, err
}

// control is a control connection after its handshake.
func (p *peer) control() net.Conn {
	p.t.Helper()
	conn := p.dial()
	if _, err := hello(conn, agent.Hello{Version: 1}); err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(p.t.Context(), 5*time.Second)
	defer cancel()
	if err := p.Ready(ctx); err != nil {
		p.t.Fatal(err)
	}
	return conn
}

// header is a frame header of the multiplexer.
func header(typ byte, flags uint16, id, length uint32) []byte {
	b := []byte{0, typ}
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint32(b, id)
	return binary.BigEndian.AppendUint32(b, length)
}

const (
	data, window, ping, goAway = 0, 1, 2, 3
	syn, ack, fin, rst         = 1, 2, 4, 8
	heapBound                  = 16 << 20
	goroutineBound             = 200
)

// watch samples the heap and the goroutines of this process until it is stopped.
func watch() (stop func() (heap uint64, goroutines int)) {
	runtime.GC()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	g := runtime.NumGoroutine()
	var heap atomic.Uint64
	var routines atomic.Int64
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			var now runtime.MemStats
			runtime.ReadMemStats(&now)
			// What lives, and what the collector has not had the time to free.
			if now.HeapInuse > before.HeapInuse {
				heap.Store(max(heap.Load(), now.HeapInuse-before.HeapInuse))
			}
			routines.Store(max(routines.Load(), int64(runtime.NumGoroutine()-g)))
			select {
			case <-done:
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	}()
	return func() (uint64, int) {
		close(done)
		<-ended
		return heap.Load(), int(routines.Load())
	}
}

// I7: whatever a peer sends, the host grows by a bounded amount, and says that
// the protocol is broken where it is.
func TestFloodsAreBounded(t *testing.T) {
	repeat := func(b []byte) func(int) []byte {
		many := bytes.Repeat(b, 4096/len(b)+1)
		return func(int) []byte { return many }
	}
	for name, next := range map[string]func(i int) []byte{
		"pings":                 repeat(header(ping, syn, 0, 7)),
		"answers to no ping":    repeat(header(ping, ack, 0, 7)),
		"new streams":           func(i int) []byte { return header(window, syn, uint32(2*i+2), 0) },
		"streams that end":      func(i int) []byte { return header(window, syn|fin, uint32(2*i+2), 0) },
		"streams with a byte":   func(i int) []byte { return append(header(data, syn|fin, uint32(2*i+2), 1), 'x') },
		"streams that are full": func(i int) []byte { return append(header(data, syn, uint32(2*i+2), 256<<10), make([]byte, 256<<10)...) },
		"window updates":        repeat(header(window, 0, 1, 1)),
		"resets":                repeat(header(window, rst, 1, 0)),
		"empty frames":          repeat(header(data, 0, 1, 0)),
		"go away":               repeat(header(goAway, 0, 0, 0)),
		"a frame too large":     repeat(header(data, 0, 1, 1<<30)),
		"another version":       repeat([]byte{7, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}),
		"another type":          repeat([]byte{0, 9, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}),
	} {
		t.Run(name, func(t *testing.T) {
			p := listen(t)
			conn := p.control()
			stop := watch()
			// It never reads, either.
			conn.SetWriteDeadline(time.Now().Add(5 * time.Second))
			var sent int
			for i := 0; ; i++ {
				n, err := conn.Write(next(i))
				sent += n
				if err != nil {
					break
				}
			}
			heap, goroutines := stop()
			select {
			case err := <-p.broken:
				t.Logf("%v after %d KiB; heap +%d KiB, goroutines +%d", err, sent>>10, heap>>10, goroutines)
			case <-time.After(time.Second):
				if name != "go away" && name != "resets" { // which end the session by themselves
					t.Errorf("the host took %d KiB and did not mind", sent>>10)
				}
			}
			if heap > heapBound || goroutines > goroutineBound {
				t.Errorf("heap +%d MiB, goroutines +%d", heap>>20, goroutines)
			}
		})
	}
}

// I7: data without an end on streams of the host, which nobody reads.
func TestFilledStreamsAreBounded(t *testing.T) {
	p := listen(t)
	conn := p.control()
	// The host asks; each answer is a flood.
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	var calls sync.WaitGroup
	for range 8 {
		calls.Go(func() {
			if _, err := p.Stats(ctx); err == nil {
				t.Error("an answer of junk was taken")
			}
		})
	}
	time.Sleep(100 * time.Millisecond) // the requests are under way
	// The answers promise all that one may be, and go on until the host minds.
	frame := append(header(data, 0, 0, 64<<10), bytes.Repeat([]byte{0, 0x3f, 0xff, 0xff}, 16<<10)...)
	stop := watch()
	conn.SetWriteDeadline(time.Now().Add(2 * time.Second))
	for i := 0; ; i++ {
		binary.BigEndian.PutUint32(frame[4:], uint32(2*(i%8)+1))
		if _, err := conn.Write(frame); err != nil {
			break
		}
	}
	heap, goroutines := stop()
	cancel()
	calls.Wait()
	if heap > heapBound || goroutines > goroutineBound {
		t.Errorf("heap +%d MiB, goroutines +%d", heap>>20, goroutines)
	}
}

// I7: an answer may be so large and no larger, and it ends the sandbox.
func TestAnAnswerThatIsTooLargeBreaksTheProtocol(t *testing.T) {
	for name, answer := range map[string][]byte{
		"by its word": binary.BigEndian.AppendUint32(nil, agent.MaxResponse+1),
		"not JSON":    append(binary.BigEndian.AppendUint32(nil, 4), "junk"...),
		"other JSON":  append(binary.BigEndian.AppendUint32(nil, 16), `{"value":"what"}`...),
	} {
		t.Run(name, func(t *testing.T) {
			p := listen(t)
			conn := p.control()
			go answerAll(conn, answer)
			_, err := p.Stats(t.Context())
			if !errors.Is(err, agent.ErrLost) {
				t.Errorf("got %v", err)
			}
			select {
			case <-p.broken:
			case <-time.After(5 * time.Second):
				t.Error("it was not told as a breach")
			}
		})
	}
}

// answerAll gives every stream that the host opens the same answer.
func answerAll(conn net.Conn, answer []byte) {
	var head [12]byte
	for {
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return
		}
		length := binary.BigEndian.Uint32(head[8:])
		if head[1] == data {
			if _, err := io.CopyN(io.Discard, conn, int64(length)); err != nil {
				return
			}
		}
		if id := binary.BigEndian.Uint32(head[4:]); binary.BigEndian.Uint16(head[2:])&syn != 0 {
			conn.Write(header(window, ack, id, 0))
			conn.Write(append(header(data, 0, id, uint32(len(answer))), answer...))
		}
	}
}

// L11, I7: a guest that never answers and never reads holds no caller longer
// than it is willing to wait.
func TestAGuestThatNeverAnswersHoldsNobody(t *testing.T) {
	p := listen(t)
	p.control()
	for name, call := range map[string]func(context.Context) error{
		"ping":  p.Ping,
		"stats": func(ctx context.Context) error { _, err := p.Stats(ctx); return err },
		"end":   p.End,
		"read":  func(ctx context.Context) error { _, _, err := p.Read(ctx, agent.Read{Path: "/x"}); return err },
		"write": func(ctx context.Context) error {
			_, err := p.Write(ctx, agent.Write{Path: "/x"}, strings.NewReader("x"))
			return err
		},
		"dial": func(ctx context.Context) error { _, err := p.Dial(ctx, 1); return err },
		"attach": func(ctx context.Context) error {
			_, err := p.Attach(ctx, agent.Attach{ID: "x"}, agent.Streams{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			began := time.Now()
			if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got %v", err)
			}
			if took := time.Since(began); took > 2*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
	t.Run("exec", func(t *testing.T) { // it may have started, so there is some patience to learn
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		began := time.Now()
		if _, err := p.Exec(ctx, agent.ExecStart{ID: "x", Argv: [][]byte{[]byte("x")}}, agent.Streams{}); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("it took %v", took)
		}
	})
	t.Run("close", func(t *testing.T) {
		failed := make(chan error, 1)
		go func() { failed <- p.Ping(context.Background()) }()
		time.Sleep(20 * time.Millisecond)
		p.Close()
		if err := <-failed; !errors.Is(err, agent.ErrClosed) {
			t.Errorf("got %v", err)
		}
	})
}

// I7, L11: a guest that stops in the middle of a frame holds nobody either.
func TestAFrameWithoutItsEndHoldsNobody(t *testing.T) {
	for name, frame := range map[string][]byte{
		"header": header(data, 0, 1, 100)[:7],
		"body":   append(header(data, 0, 1, 100), "only a part"...),
	} {
		t.Run(name, func(t *testing.T) {
			p := listen(t)
			conn := p.control()
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			failed := make(chan error, 1)
			go func() { failed <- p.Ping(ctx) }()
			time.Sleep(50 * time.Millisecond)
			conn.Write(frame)
			select {
			case err := <-failed:
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("got %v", err)
				}
			case <-time.After(5 * time.Second):
				t.Error("the caller is held")
			}
		})
	}
}

// I7: a byte a second is no reason to wait for anybody else.
func TestASlowHelloHoldsNobodyUp(t *testing.T) {
	p := listen(t)
	for range 5 {
		conn := p.dial()
		conn.Write([]byte{0})
	}
	conn := p.dial()
	began := time.Now()
	if _, err := hello(conn, agent.Hello{Version: 1}); err != nil || time.Since(began) > time.Second {
		t.Errorf("%v after %v", err, time.Since(began))
	}
}

// I2: who has no secret is nobody, once there is one who has.
func TestAForgedHelloIsRefused(t *testing.T) {
	p := listen(t)
	conn := p.dial()
	w, err := hello(conn, agent.Hello{Version: 1})
	if err != nil || w.Secret != "s3cret" || w.Config == nil || w.Config.UID != 1 {
		t.Fatalf("%+v, %v", w, err)
	}
	for name, h := range map[string]agent.Hello{
		"none":         {Version: 1},
		"wrong":        {Version: 1, Secret: "S3cret"},
		"prefix":       {Version: 1, Secret: "s3cre"},
		"bulk":         {Version: 1, Bulk: "x"},
		"bulk guessed": {Version: 1, Secret: "nope", Bulk: "x"},
		"version":      {Secret: "s3cret"},
	} {
		w, err := hello(p.dial(), h)
		if err != nil || w.Error == "" || w.Secret != "" || w.Config != nil {
			t.Errorf("%s: %+v, %v", name, w, err)
		}
	}
	// A bulk connection that nobody waits for is closed; a re-dial that proves
	// itself replaces the control connection.
	late := p.dial()
	if w, err := hello(late, agent.Hello{Version: 1, Secret: "s3cret", Bulk: "nobody waits"}); err != nil || w.Error != "" {
		t.Errorf("%+v, %v", w, err)
	}
	late.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := late.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("it stays open: %v", err)
	}
	again := p.dial()
	if w, err := hello(again, agent.Hello{Version: 1, Secret: "s3cret"}); err != nil || w.Error != "" || w.Secret != "" {
		t.Errorf("%+v, %v", w, err)
	}
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.Copy(io.Discard, conn); err != nil {
		t.Errorf("the old connection was not closed: %v", err)
	}
	if !p.Linked() {
		t.Error("the link is gone")
	}
}

// A bulk connection before the first control connection would need no secret.
func TestABulkConnectionBeforeTheFirstIsRefused(t *testing.T) {
	p := listen(t)
	if w, err := hello(p.dial(), agent.Hello{Version: 1, Bulk: "x"}); err != nil || w.Error == "" {
		t.Errorf("%+v, %v", w, err)
	}
	if w, err := hello(p.dial(), agent.Hello{Version: 1}); err != nil || w.Secret == "" {
		t.Errorf("%+v, %v", w, err)
	}
}

// No hello brings the host down, and a bad one never links.
func FuzzHello(f *testing.F) {
	good, _ := json.Marshal(agent.Hello{Version: 1})
	f.Add(append(binary.BigEndian.AppendUint32(nil, uint32(len(good))), good...))
	f.Add([]byte{0, 0, 0, 0})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, '{'})
	f.Add([]byte("\x00\x00\x00\x02{}"))
	f.Add([]byte("\x00\x00\x00\x04null"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		dir := t.TempDir()
		host, err := agent.Listen(agent.HostConfig{Dir: dir, Socket: "s", Secret: "s3cret", Known: true})
		if err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("unix", filepath.Join(dir, "s"))
		if err != nil {
			t.Fatal(err)
		}
		conn.Write(raw)
		conn.(*net.UnixConn).CloseWrite()
		io.Copy(io.Discard, conn)
		conn.Close()
		if host.Linked() {
			t.Errorf("%q was taken", raw)
		}
		host.Close()
	})
}

// What follows a handshake is the multiplexer's; any bytes.
func FuzzFrames(f *testing.F) {
	f.Add(header(ping, syn, 0, 0))
	f.Add(header(data, 0, 1, 5))
	f.Add(bytes.Join([][]byte{header(window, ack, 1, 10), header(data, fin, 1, 2), []byte("xx"), header(goAway, 0, 0, 2)}, nil))
	f.Fuzz(func(t *testing.T, raw []byte) {
		dir := t.TempDir()
		host, err := agent.Listen(agent.HostConfig{Dir: dir, Socket: "s", Secret: "s3cret"})
		if err != nil {
			t.Fatal(err)
		}
		// Nothing that a guest sends holds anybody.
		watchdog := time.AfterFunc(10*time.Second, func() { panic(fmt.Sprintf("held by %q", raw)) })
		defer watchdog.Stop()
		defer host.Close()
		conn, err := net.Dial("unix", filepath.Join(dir, "s"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := hello(conn, agent.Hello{Version: 1}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		defer cancel()
		done := make(chan struct{})
		go func() { defer close(done); host.Stats(ctx) }()
		conn.Write(raw)
		<-done
	})
}

// A guest that takes no stream makes calls fail, and none of them wait past its
// context, however many there are: yamux would, from its 257th on.
func TestCallsThatPileUpHoldNobody(t *testing.T) {
	p := listen(t)
	go io.Copy(io.Discard, p.control())
	for range 400 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		began := time.Now()
		err := p.Ping(ctx)
		cancel()
		if took := time.Since(began); err == nil || took > time.Second {
			t.Fatalf("%v after %v", err, took)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := p.Ping(ctx); codeOf(err) != agent.ErrExhausted || ctx.Err() != nil {
		t.Errorf("one more than may wait: %v", err)
	}
}

// A guest that ends an exec's stream again and again, with its link alive, gets
// it lost, and costs no stream or memory for each turn.
func TestAStreamThatBreaksAgainAndAgainIsLost(t *testing.T) {
	p := listen(t)
	conn := p.control()
	var opened atomic.Int64
	go func() {
		answer := append(binary.BigEndian.AppendUint32(nil, 12), `{"value":{}}`...)
		half := append(answer, 0x11, 0, 4, 0, 0) // and the head of a frame of 256 KiB
		half = append(half, make([]byte, 200<<10)...)
		var head [12]byte
		for {
			if _, err := io.ReadFull(conn, head[:]); err != nil {
				return
			}
			if head[1] == data {
				if _, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(head[8:]))); err != nil {
					return
				}
			}
			if id := binary.BigEndian.Uint32(head[4:]); binary.BigEndian.Uint16(head[2:])&syn != 0 {
				opened.Add(1)
				conn.Write(header(window, ack, id, 0))
				conn.Write(append(header(data, 0, id, uint32(len(half))), half...))
				conn.Write(header(window, fin, id, 0))
			}
		}
	}()
	stop := watch()
	_, err := p.Exec(t.Context(), agent.ExecStart{ID: "x", Argv: [][]byte{[]byte("x")}}, agent.Streams{})
	heap, _ := stop()
	if !errors.Is(err, agent.ErrLost) {
		t.Errorf("got %v", err)
	}
	if opened.Load() > 20 || heap > heapBound {
		t.Errorf("%d streams, %d MiB", opened.Load(), heap>>20)
	}
}

// A list is counted while it is decoded: its text may be small and its entries
// many.
func TestListsOfAGuestAreCounted(t *testing.T) {
	list := `{"value":[{}` + strings.Repeat(",{}", 1_300_000) + `]}`
	answer := append(binary.BigEndian.AppendUint32(nil, uint32(len(list))), list...)
	for name, call := range map[string]func(*peer) error{
		"files": func(p *peer) error { _, err := p.List(p.t.Context(), "/"); return err },
		"execs": func(p *peer) error { _, err := p.Execs(p.t.Context()); return err },
		"ports": func(p *peer) error { _, err := p.Ports(p.t.Context()); return err },
	} {
		t.Run(name, func(t *testing.T) {
			p := listen(t)
			conn := p.control()
			go answerInWindows(conn, answer)
			stop := watch()
			err := call(p)
			heap, _ := stop()
			if !errors.Is(err, agent.ErrLost) {
				t.Errorf("got %v", err)
			}
			if heap > 64<<20 {
				t.Errorf("%d MiB for %d KiB of text", heap>>20, len(list)>>10)
			}
		})
	}
}

// answerInWindows answers one stream with more than a window holds.
func answerInWindows(conn net.Conn, answer []byte) {
	var head [12]byte
	room := 0
	for {
		if _, err := io.ReadFull(conn, head[:]); err != nil {
			return
		}
		id, length := binary.BigEndian.Uint32(head[4:]), int(binary.BigEndian.Uint32(head[8:]))
		switch {
		case head[1] == data:
			io.CopyN(io.Discard, conn, int64(length))
		case head[1] == window && binary.BigEndian.Uint16(head[2:])&syn != 0:
			conn.Write(header(window, ack, id, 0))
			room += 256 << 10
		case head[1] == window:
			room += length
		}
		for n := min(room, len(answer), 128<<10); n > 0; n = min(room, len(answer), 128<<10) {
			conn.Write(append(header(data, 0, id, uint32(n)), answer[:n]...))
			room, answer = room-n, answer[n:]
		}
	}
}
