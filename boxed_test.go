package boxed_test

import (
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"pgregory.net/rapid"
)

func TestIDsNameTheirOwner(t *testing.T) {
	pub, _, _ := ed25519.GenerateKey(nil)
	node := boxed.NodeIDOf(pub)
	id := boxed.NewID(node)
	parsed, err := boxed.ParseID(string(id))
	if err != nil || parsed.Node() != node || len(parsed.Random()) != 10 || len(id) > 63 {
		t.Errorf("%s: %v", id, err)
	}
	for _, bad := range []string{"", "x", string(node), string(id) + "x", string(id)[1:], "ABCDEFGHIJ-" + string(node), "../../../../-" + string(node)} {
		if _, err := boxed.ParseID(bad); !errors.Is(err, boxed.CodeInvalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestDurationsReadBack(t *testing.T) {
	for text, want := range map[string]boxed.Duration{
		"90s": boxed.Duration(90 * time.Second), "1h30m": boxed.Duration(90 * time.Minute), "2d": boxed.Duration(48 * time.Hour),
		"never": boxed.Never, "0s": 0, "1h": boxed.Duration(time.Hour), "10m": boxed.Duration(10 * time.Minute),
	} {
		d, err := boxed.ParseDuration(text)
		if err != nil || d != want {
			t.Errorf("%q is %v, %v", text, d, err)
		}
	}
	for _, bad := range []string{"", "1", "-1s", "1x", "d", "99999999d", "1d2h3"} {
		if d, err := boxed.ParseDuration(bad); err == nil {
			t.Errorf("%q is %v", bad, d)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		d := boxed.Duration(rapid.Int64Range(0, int64(boxed.Never)).Draw(t, "d"))
		back, err := boxed.ParseDuration(d.String())
		if err != nil || back != d {
			t.Fatalf("%d is %q, which is %d, %v", d, d, back, err)
		}
	})
	if got := boxed.Duration(time.Hour).String(); got != "1h" {
		t.Errorf("got %q", got)
	}
}

func TestErrorsKeepTheirCode(t *testing.T) {
	cause := errors.New("cause")
	err := fmt.Errorf("outer: %w", boxed.Errorf(boxed.CodeGone, "ended: %w", cause).WithField("id"))
	if !errors.Is(err, boxed.CodeGone) || errors.Is(err, boxed.CodeLost) || !errors.Is(err, cause) || boxed.CodeOf(err) != boxed.CodeGone {
		t.Errorf("%v", err)
	}
	// What nobody meant for a caller does not reach one.
	if e := boxed.AsError(fmt.Errorf("secret path")); e.Code != boxed.CodeInternal || e.Message == "secret path" {
		t.Errorf("%+v", e)
	}
}

func TestTmpfsGivesWayToMemory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		asked := boxed.Limits{MemoryBytes: rapid.Int64Range(96, 4096).Draw(t, "MiB") * boxed.MiB}
		l := asked.Or(boxed.DefaultLimits()).FitTmpfs(asked)
		if l.TmpfsBytes() > l.MemoryBytes-boxed.MemoryHeadroom || l.WorkspaceBytes < boxed.MiB {
			t.Fatalf("%+v", l)
		}
	})
}

func TestDocumentsAreTheirAuthors(t *testing.T) {
	_, key, _ := ed25519.GenerateKey(nil)
	var clock boxed.Clock
	now := time.Now()
	d := boxed.Document{Kind: "key", Key: "a", Stamp: clock.Next(now), Body: json.RawMessage(`{}`)}
	d.Sign(key)
	if !d.Verify() {
		t.Fatal("not the author's")
	}
	for name, change := range map[string]func(*boxed.Document){
		"kind":      func(d *boxed.Document) { d.Kind = "ke"; d.Key = "ya" },
		"body":      func(d *boxed.Document) { d.Body = json.RawMessage(`{"a":1}`) },
		"stamp":     func(d *boxed.Document) { d.Stamp.Counter++ },
		"tombstone": func(d *boxed.Document) { d.Tombstone = true },
		"revoked":   func(d *boxed.Document) { d.Revoked = true },
	} {
		forged := d
		if change(&forged); forged.Verify() {
			t.Errorf("a changed %s is still the author's", name)
		}
	}
	later := d
	later.Stamp = clock.Next(now)
	revoked := d
	revoked.Revoked = true
	if !later.Supersedes(&d) || d.Supersedes(&later) || later.Supersedes(&revoked) || !revoked.Supersedes(&later) || !d.Supersedes(nil) {
		t.Error("the order is wrong")
	}
	if clock.Observe(boxed.Stamp{WallMS: now.Add(2 * time.Minute).UnixMilli()}, now) {
		t.Error("a stamp from the future was taken")
	}
}
