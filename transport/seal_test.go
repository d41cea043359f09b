package transport_test

import (
	"bytes"
	"crypto/ed25519"
	"testing"

	"github.com/boxed-mesh/boxed/transport"
)

// Case I12: what is sealed to one node another cannot read, with all that it has.
func TestASealedValueIsOneNodesOnly(t *testing.T) {
	a, b := newIdentity(), newIdentity()
	sealed, err := transport.Seal(a.Public().(ed25519.PublicKey), []byte("doc 1"), []byte("secret"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := transport.Open(a, []byte("doc 1"), sealed); err != nil || string(got) != "secret" {
		t.Errorf("got %q, %v", got, err)
	}
	if got, err := transport.Open(b, []byte("doc 1"), sealed); err == nil {
		t.Errorf("another node reads %q", got)
	}
	if got, err := transport.Open(a, []byte("doc 2"), sealed); err == nil {
		t.Errorf("out of another document it reads %q", got)
	}
	for i := range sealed {
		forged := bytes.Clone(sealed)
		forged[i] ^= 1
		if _, err := transport.Open(a, []byte("doc 1"), forged); err == nil {
			t.Fatalf("byte %d may be changed", i)
		}
	}
	if bytes.Contains(sealed, []byte("secret")) {
		t.Error("it is in the clear")
	}
}
