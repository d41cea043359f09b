package transport

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/boxed-mesh/boxed"
)

// MaxSummary bounds what gossip carries of one node, in bytes: memberlist's own
// limit of metadata.
const MaxSummary = 512

// summaryVersion is of the form below. Fields are added under new numbers, which
// older nodes pass over; a new version would be refused by them.
const summaryVersion = 1

// wireSummary is a boxed.NodeSummary in few bytes.
type wireSummary struct {
	Name     string            `cbor:"1,keyasint,omitempty"`
	Address  string            `cbor:"2,keyasint"`
	Version  string            `cbor:"3,keyasint,omitempty"`
	AtMS     int64             `cbor:"4,keyasint"`
	Flags    uint              `cbor:"5,keyasint,omitempty"`
	Place    boxed.PlaceRule   `cbor:"6,keyasint,omitempty"`
	Labels   map[string]string `cbor:"7,keyasint,omitempty"`
	Arch     string            `cbor:"8,keyasint,omitempty"`
	Runtimes []string          `cbor:"9,keyasint,omitempty"` // the default first, if there is one
	Total    [3]int64          `cbor:"10,keyasint"`
	Capacity [3]int64          `cbor:"11,keyasint"`
	Used     [3]int64          `cbor:"12,keyasint"`
	Idle     [3]int64          `cbor:"13,keyasint"`
	Warm     map[string]int    `cbor:"14,keyasint,omitempty"`
	Load     int               `cbor:"15,keyasint,omitempty"` // hundredths
	Problem  string            `cbor:"16,keyasint,omitempty"`
	Images   []uint32          `cbor:"17,keyasint,omitempty"`
}

const (
	flagReady = 1 << iota
	flagCordoned
	flagDraining
	flagDefault // Runtimes[0] is the default
)

// capacity is in MiB and thousandths of a core. What is promised is rounded up,
// and what can be promised down, so that rounding never makes room.
func capacity(c boxed.Capacity, up bool) [3]int64 {
	mib, milli := c.MemoryBytes/boxed.MiB, int64(c.CPUs*1000+1e-6)
	if up {
		mib, milli = (c.MemoryBytes+boxed.MiB-1)/boxed.MiB, int64(c.CPUs*1000+0.999999)
	}
	return [3]int64{mib, milli, int64(c.Sandboxes)}
}

func capacityOf(c [3]int64) (boxed.Capacity, bool) {
	ok := true
	for _, v := range c {
		ok = ok && v >= 0 && v < 1<<40
	}
	return boxed.Capacity{MemoryBytes: c[0] * boxed.MiB, CPUs: float64(c[1]) / 1000, Sandboxes: int(c[2])}, ok
}

// encodeSummary signs a summary. What does not fit is left out, from what helps
// least to what matters: problems, images, the names of warm templates, labels.
func encodeSummary(s boxed.NodeSummary, key ed25519.PrivateKey) ([]byte, error) {
	w := wireSummary{
		Name: clip(s.Name, boxed.MaxNodeName), Address: s.Address, Version: clip(s.Version, 32), AtMS: s.At.UnixMilli(), Place: s.Place,
		Labels: maps.Clone(s.Labels), Arch: s.Arch, Total: capacity(s.Total, false), Capacity: capacity(s.Capacity, false),
		Used: capacity(s.Used, true), Idle: capacity(s.Idle, false), Warm: maps.Clone(s.Warm),
		Load: int(min(max(s.Load, 0), 1000) * 100), Problem: clip(s.Problem, 96),
		Images: s.Images[:min(len(s.Images), boxed.MaxNodeImages)],
	}
	for flag, on := range map[uint]bool{flagReady: s.Ready, flagCordoned: s.Cordoned, flagDraining: s.Draining, flagDefault: s.Default != ""} {
		if on {
			w.Flags |= flag
		}
	}
	if s.Default != "" {
		w.Runtimes = append(w.Runtimes, s.Default)
	}
	for _, r := range s.Runtimes {
		if r != s.Default {
			w.Runtimes = append(w.Runtimes, r)
		}
	}
	for {
		body, err := cbor.Marshal(w)
		if err != nil {
			return nil, err
		}
		const head = 1 + ed25519.PublicKeySize + ed25519.SignatureSize
		if head+len(body) <= MaxSummary {
			out := append([]byte{summaryVersion}, key.Public().(ed25519.PublicKey)...)
			out = append(out, ed25519.Sign(key, signedSummary(body))...)
			return append(out, body...), nil
		}
		if !w.shorten() {
			return nil, errors.New("the node's summary does not fit 512 bytes")
		}
	}
}

// shorten leaves one thing out; false if there is nothing left to leave out.
func (w *wireSummary) shorten() bool {
	switch {
	case len(w.Problem) > 16:
		w.Problem = clip(w.Problem, len(w.Problem)/2)
	case len(w.Images) > 0:
		w.Images = w.Images[:len(w.Images)-1]
	case len(w.Warm) > 0:
		delete(w.Warm, slices.Max(slices.Collect(maps.Keys(w.Warm))))
	case len(w.Runtimes) > 4:
		w.Runtimes = w.Runtimes[:len(w.Runtimes)-1]
	case len(w.Labels) > 0:
		delete(w.Labels, slices.Max(slices.Collect(maps.Keys(w.Labels))))
	default:
		return false
	}
	return true
}

func signedSummary(body []byte) []byte { return append([]byte("boxed node summary v1\n"), body...) }

// decoding bounds what a summary may unfold to.
var decoding = func() cbor.DecMode {
	mode, err := cbor.DecOptions{MaxArrayElements: 64, MaxMapPairs: 64, MaxNestedLevels: 4, DupMapKey: cbor.DupMapKeyEnforcedAPF, UTF8: cbor.UTF8RejectInvalid}.DecMode()
	if err != nil {
		panic(err) // the options above are constants
	}
	return mode
}()

// decodeSummary reads what [encodeSummary] wrote, and proves whose it is.
func decodeSummary(raw []byte) (s boxed.NodeSummary, err error) {
	const head = 1 + ed25519.PublicKeySize + ed25519.SignatureSize
	if len(raw) < head || len(raw) > MaxSummary {
		return s, fmt.Errorf("a summary of %d bytes", len(raw))
	}
	if raw[0] != summaryVersion {
		return s, fmt.Errorf("it tells of itself in version %d of the protocol, and this node knows %d; bring both to neighbouring releases", raw[0], summaryVersion)
	}
	key := ed25519.PublicKey(slices.Clone(raw[1 : 1+ed25519.PublicKeySize]))
	body := raw[head:]
	if !ed25519.Verify(key, signedSummary(body), raw[1+ed25519.PublicKeySize:head]) {
		return s, errors.New("its summary is not signed by itself")
	}
	var w wireSummary
	if err := decoding.Unmarshal(body, &w); err != nil {
		return s, fmt.Errorf("its summary cannot be read: %w", err)
	}
	s = boxed.NodeSummary{
		ID: boxed.NodeIDOf(key), Key: key, Name: w.Name, Address: w.Address, Version: w.Version, At: time.UnixMilli(w.AtMS).UTC(),
		Ready: w.Flags&flagReady != 0, Cordoned: w.Flags&flagCordoned != 0, Draining: w.Flags&flagDraining != 0,
		Place: w.Place, Labels: w.Labels, Arch: w.Arch, Runtimes: append([]string{}, w.Runtimes...), Warm: w.Warm,
		Load: float64(w.Load) / 100, Problem: w.Problem, Images: w.Images,
	}
	if w.Flags&flagDefault != 0 && len(w.Runtimes) > 0 {
		s.Default = w.Runtimes[0]
	}
	for from, to := range map[*[3]int64]*boxed.Capacity{&w.Total: &s.Total, &w.Capacity: &s.Capacity, &w.Used: &s.Used, &w.Idle: &s.Idle} {
		c, ok := capacityOf(*from)
		if !ok {
			return s, errors.New("its summary has impossible numbers")
		}
		*to = c
	}
	return s, nil
}

// knownSummaries remembers the last summaries of each node that were proved:
// gossip brings each a dozen times, and to check a signature is most of what it
// costs.
type knownSummaries struct {
	mu   sync.Mutex
	last map[string]*[2]knownSummary // by the name that they came under
}

type knownSummary struct {
	raw     []byte
	summary boxed.NodeSummary
}

// read is decodeSummary. What it returns is shared, and not to be changed.
func (p *knownSummaries) read(name string, raw []byte) (boxed.NodeSummary, error) {
	p.mu.Lock()
	if two := p.last[name]; two != nil {
		for _, one := range two {
			if one.raw != nil && bytes.Equal(one.raw, raw) {
				p.mu.Unlock()
				return one.summary, nil
			}
		}
	}
	p.mu.Unlock()
	s, err := decodeSummary(raw)
	if err != nil {
		return s, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	two := p.last[name]
	if two == nil {
		if p.last == nil || len(p.last) >= maxNodes { // names are free to make up
			p.last = map[string]*[2]knownSummary{}
		}
		two = &[2]knownSummary{}
		p.last[name] = two
	}
	two[1] = two[0]
	two[0] = knownSummary{bytes.Clone(raw), s}
	return s, nil
}

func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && s[n]&0xc0 == 0x80 { // not within a character
		n--
	}
	return s[:n]
}
