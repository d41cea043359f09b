package node_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/binary"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
)

// Case I10: an assertion is good once, for its one request, from the node that
// signed it, and never for more than a user. Everything else is refused and logged.
func TestAnAssertionIsGoodOnceAndForOneRequest(t *testing.T) {
	identity := func() (ed25519.PrivateKey, boxed.NodeID) {
		public, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return key, boxed.NodeIDOf(public)
	}
	entryKey, entry := identity()
	otherKey, other := identity()
	ownerKey, owner := identity()
	var log strings.Builder
	logger := slog.New(slog.NewTextHandler(&log, nil))
	judge := node.NewAssertions(ownerKey, []boxed.NodeID{entry}, logger)
	signer := node.NewAssertions(entryKey, nil, logger)
	admin := boxed.Principal{Owner: "ann@example.com", Role: boxed.RoleAdmin}
	sign := func(by *node.Assertions) string {
		t.Helper()
		text, err := by.Sign(admin, "GET", "/v1/sandboxes/x", owner)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}

	text := sign(signer)
	who, err := judge.Verify(t.Context(), text, entry, "GET", "/v1/sandboxes/x")
	if err != nil || who.Owner != "ann@example.com" || who.Role != boxed.RoleUser {
		t.Fatalf("got %+v, %v", who, err)
	}
	refused := 0
	for name, tc := range map[string]struct {
		text, method, path string
		from               boxed.NodeID
		by                 *node.Assertions
	}{
		"replayed":                    {text, "GET", "/v1/sandboxes/x", entry, judge},
		"for another method":          {sign(signer), "DELETE", "/v1/sandboxes/x", entry, judge},
		"for another path":            {sign(signer), "GET", "/v1/sandboxes/y", entry, judge},
		"for another node":            {sign(signer), "GET", "/v1/sandboxes/x", entry, node.NewAssertions(otherKey, nil, logger)},
		"passed on by another":        {sign(signer), "GET", "/v1/sandboxes/x", other, judge},
		"from a node that may not":    {sign(node.NewAssertions(otherKey, nil, logger)), "GET", "/v1/sandboxes/x", other, judge},
		"signed by another":           {sign(node.NewAssertions(otherKey, nil, logger)), "GET", "/v1/sandboxes/x", entry, judge},
		"changed":                     {"A" + text[1:], "GET", "/v1/sandboxes/x", entry, judge},
		"nothing":                     {"", "GET", "/v1/sandboxes/x", entry, judge},
		"far too long":                {strings.Repeat("A", 1<<20), "GET", "/v1/sandboxes/x", entry, judge},
		"not of the wire, but base64": {"AAAA", "GET", "/v1/sandboxes/x", entry, judge},
	} {
		if who, err := tc.by.Verify(t.Context(), tc.text, tc.from, tc.method, tc.path); boxed.CodeOf(err) != boxed.CodeUnauthenticated || who != (boxed.Principal{}) {
			t.Errorf("%s: got %+v, %v", name, who, err)
		}
		refused++
	}
	if lines := strings.Count(log.String(), "an assertion was refused"); lines != refused {
		t.Errorf("%d of %d refusals are in the log", lines, refused)
	}
	if strings.Contains(log.String(), text) {
		t.Error("the log holds an assertion")
	}
}

// I10: what a node fills with its nonces is its own; none is taken twice for as
// long as its assertion holds, and none is remembered for good.
func TestNoncesOfANodeAreItsOwn(t *testing.T) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := node.NewAssertions(key, nil, slog.New(slog.DiscardHandler))
	nonce := func(n int) (b [16]byte) {
		binary.BigEndian.PutUint64(b[:], uint64(n))
		return b
	}
	start := time.Now()
	for n := range node.MaxNonces {
		if err := a.TakeNonce("busy", nonce(n), start); err != nil {
			t.Fatalf("nonce %d: %v", n, err)
		}
	}
	if err := a.TakeNonce("busy", nonce(node.MaxNonces), start); err == nil || !strings.Contains(err.Error(), "vouched for") {
		t.Errorf("one too many: %v", err)
	}
	if err := a.TakeNonce("other", nonce(0), start); err != nil {
		t.Errorf("another node's: %v", err)
	}
	for _, later := range []time.Duration{time.Second, node.NonceTurn, node.NonceTurn + time.Second} {
		if err := a.TakeNonce("busy", nonce(7), start.Add(later)); err == nil {
			t.Errorf("a nonce was taken again after %v", later)
		}
	}
	if err := a.TakeNonce("busy", nonce(node.MaxNonces), start.Add(node.NonceTurn+time.Second)); err != nil {
		t.Errorf("in the next turn: %v", err)
	}
	if err := a.TakeNonce("busy", nonce(7), start.Add(3*node.NonceTurn)); err != nil {
		t.Errorf("long after: %v", err)
	}
}
