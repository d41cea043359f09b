package agent_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"

	"pgregory.net/rapid"

	"github.com/boxed-mesh/boxed/agent"
)

func FuzzReadFrame(f *testing.F) {
	var good bytes.Buffer
	agent.WriteFrame(&good, agent.FrameStdout, []byte("hello"))
	f.Add(good.Bytes())
	f.Add([]byte{1, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{1, 0, 0, 0, 9, 'x'})
	f.Fuzz(func(t *testing.T, raw []byte) {
		r := bufio.NewReader(bytes.NewReader(raw))
		var buf []byte
		read := 0
		for {
			typ, payload, grown, err := agent.ReadFrame(r, buf)
			if len(grown) > agent.MaxFrame {
				t.Fatalf("a buffer of %d bytes", len(grown))
			}
			if err != nil {
				if err == io.EOF && read != len(raw) {
					t.Fatalf("a clean end %d bytes before the end", len(raw)-read)
				}
				return
			}
			if typ != raw[read] || !bytes.Equal(payload, raw[read+5:read+5+len(payload)]) {
				t.Fatal("other bytes")
			}
			read += 5 + len(payload)
			buf = grown
		}
	})
}

func FuzzReadMessage(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x02{}"), 100)
	f.Add([]byte{0xff, 0xff, 0xff, 0xff}, 1<<20)
	f.Add([]byte("\x00\x00\x00\x0f{\"op\":\"x\",\"args\""), 100)
	f.Fuzz(func(t *testing.T, raw []byte, limit int) {
		r := bytes.NewReader(raw)
		var req agent.Request
		err := agent.ReadMessage(r, limit&0xfffff, &req)
		if err == nil {
			if n := int(binary.BigEndian.Uint32(raw)); n > limit&0xfffff || len(raw)-r.Len() != 4+n {
				t.Fatalf("read %d bytes of a message of %d", len(raw)-r.Len(), n)
			}
		}
	})
}

// What a size promises is not believed: a peer that says 8 MiB and sends
// nothing costs little.
func TestAMessageIsNotBelievedBeforeItIsThere(t *testing.T) {
	promise := binary.BigEndian.AppendUint32(nil, agent.MaxMessage)
	allocated := testing.AllocsPerRun(1, func() {
		var v any
		if err := agent.ReadMessage(bytes.NewReader(promise), agent.MaxMessage, &v); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("got %v", err)
		}
	})
	if allocated > 20 {
		t.Errorf("%v allocations", allocated)
	}
	var v any
	big := append(binary.BigEndian.AppendUint32(nil, 3<<20), bytes.Repeat([]byte(" "), 3<<20-4)...)
	if err := agent.ReadMessage(bytes.NewReader(append(big, "null"...)), agent.MaxMessage, &v); err != nil {
		t.Errorf("3 MiB: %v", err)
	}
}

func FuzzChunks(f *testing.F) {
	f.Add([]byte{agent.FrameChunk, 0, 0, 0, 1, 'x', agent.FrameEOF, 0, 0, 0, 0})
	f.Add([]byte{agent.FrameChunk, 0, 0, 0, 9, 'x'})
	f.Add([]byte{0x23, 0, 0, 0, 2, '{', '}'})
	f.Fuzz(func(t *testing.T, raw []byte) {
		got, err := io.ReadAll(agent.NewChunkReader(bytes.NewReader(raw)))
		if len(got) > len(raw) {
			t.Fatalf("%d bytes out of %d", len(got), len(raw))
		}
		// Never a short file: without the end frame it is an error.
		if err == nil && !bytes.Contains(raw, []byte{agent.FrameEOF}) {
			t.Fatalf("an end that nobody sent, after %q", got)
		}
	})
}

func TestChunksArriveAsTheyWereSent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.SliceOf(rapid.SliceOfN(rapid.Byte(), 0, 3000)).Draw(t, "parts")
		var wire, want bytes.Buffer
		w, finish := agent.NewChunkWriter(&wire)
		for _, p := range parts {
			w.Write(p)
			want.Write(p)
		}
		var failure error
		if rapid.Bool().Draw(t, "fails") {
			failure = &agent.Error{Code: agent.ErrNoSpace, Message: "full"}
		}
		finish(failure)
		cut := rapid.IntRange(0, wire.Len()).Draw(t, "cut")
		got, err := io.ReadAll(agent.NewChunkReader(bytes.NewReader(wire.Bytes()[:cut])))
		var e *agent.Error
		switch {
		case cut < wire.Len():
			if err == nil || errors.As(err, &e) {
				t.Fatalf("cut short: %v", err)
			}
		case failure != nil:
			if !errors.As(err, &e) || e.Code != agent.ErrNoSpace {
				t.Fatalf("got %v", err)
			}
		case err != nil || !bytes.Equal(got, want.Bytes()):
			t.Fatalf("%d bytes of %d, %v", len(got), want.Len(), err)
		}
		if !bytes.HasPrefix(want.Bytes(), got) {
			t.Fatal("other bytes")
		}
	})
}

// X11, X13: the ring keeps the exact end of a stream, as much as it may, and
// what an owner has not got yet is not lost while it heeds the room.
func TestTheRingKeepsAnExactSuffix(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		budget := rapid.SampledFrom([]int{0, 10 << 10, 64 << 10, 4 << 20}).Draw(t, "budget")
		r := agent.NewRing(budget)
		var all []byte
		delivered := int64(0)
		next := byte(0)
		t.Repeat(map[string]func(*rapid.T){
			"write": func(t *rapid.T) {
				p := make([]byte, rapid.IntRange(1, agent.ChunkSize).Draw(t, "n"))
				for i := range p {
					p[i] = next
					next += 7
				}
				r.Write(p)
				all = append(all, p...)
			},
			"write with room": func(t *rapid.T) {
				if delivered < r.Start() {
					if r.Room(delivered, 10) != 0 {
						t.Fatal("room although it is lost already")
					}
					return
				}
				n := r.Room(delivered, rapid.IntRange(1, agent.ChunkSize).Draw(t, "n"))
				if n == 0 { // half of it is for what was delivered
					if int64(r.Held())/2 > r.End()-delivered {
						t.Fatal("no room although there is some")
					}
					return
				}
				p := bytes.Repeat([]byte{next}, n)
				next++
				r.Write(p)
				all = append(all, p...)
				if r.Start() > delivered {
					t.Fatalf("lost %d bytes that nobody had got", r.Start()-delivered)
				}
			},
			"deliver": func(t *rapid.T) {
				delivered = rapid.Int64Range(delivered, max(delivered, r.End())).Draw(t, "to")
			},
			"free": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "seldom") == 0 {
					r.Free()
					if r.Left() != int64(budget) {
						t.Fatalf("%d of %d left after all was freed", r.Left(), budget)
					}
				}
			},
			"": func(t *rapid.T) {
				if r.End() != int64(len(all)) || r.Start() < 0 || r.Start() > r.End() {
					t.Fatalf("%d to %d of %d", r.Start(), r.End(), len(all))
				}
				if r.Held() > agent.RingSize || r.Left() < 0 || int64(r.Held()-agent.RingFloor) > int64(budget) {
					t.Fatalf("it holds %d, the budget has %d", r.Held(), r.Left())
				}
				off := rapid.Int64Range(max(0, r.Start()-2), r.End()+2).Draw(t, "off")
				got := make([]byte, rapid.IntRange(0, 5000).Draw(t, "len"))
				n := r.Read(got, off)
				if off < r.Start() || off >= r.End() {
					if n != 0 {
						t.Fatalf("%d bytes at %d of %d to %d", n, off, r.Start(), r.End())
					}
					return
				}
				if n != min(len(got), int(r.End()-off)) || !bytes.Equal(got[:n], all[off:off+int64(n)]) {
					t.Fatalf("%d other bytes at %d", n, off)
				}
			},
		})
	})
}
