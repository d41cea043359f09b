package transport_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// What another process may send as a summary neither crashes nor passes unsigned.
func FuzzSummary(f *testing.F) {
	f.Add([]byte{1})
	f.Add(make([]byte, 512))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if s, err := transport.DecodeSummary(raw); err == nil {
			t.Errorf("random bytes are %+v", s)
		}
	})
}

// What was proved once is not proved again, and nothing else passes for it.
func TestASummaryThatIsKnownIsStillJudged(t *testing.T) {
	known := &transport.KnownSummaries{}
	raw := func(name string) []byte {
		t.Helper()
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		b, err := transport.EncodeSummary(boxed.NodeSummary{Name: name}, key)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	first, second, third := raw("first"), raw("second"), raw("third")
	for _, want := range []struct {
		raw  []byte
		name string
	}{{first, "first"}, {second, "second"}, {first, "first"}, {third, "third"}, {first, "first"}, {second, "second"}} {
		if s, err := known.Read("a", want.raw); err != nil || s.Name != want.name {
			t.Errorf("got %q, %v, want %q", s.Name, err, want.name)
		}
	}
	forged := bytes.Clone(second)
	forged[len(forged)-1] ^= 1
	for name, wrong := range map[string][]byte{"nothing": nil, "forged": forged, "cut": second[:len(second)-1]} {
		for _, of := range []string{"a", "never heard of"} {
			if s, err := known.Read(of, wrong); err == nil {
				t.Errorf("%s passed as %+v", name, s)
			}
		}
	}
}
