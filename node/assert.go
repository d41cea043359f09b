package node

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/boxed-mesh/boxed"
)

// AssertionHeader carries an assertion from node to node.
const AssertionHeader = "X-Boxed-Assertion"

// Bounds of an assertion.
const (
	assertionLife = 30 * time.Second
	maxAssertion  = 1024   // bytes of the header
	maxNonces     = 65_536 // of one node that are remembered, in each turn of nonceTurn
	nonceTurn     = 2 * assertionLife
)

// assertion is what one node says of a caller whom it alone can know, by the
// tailnet or by SSH: who asks, for this one request to this one node. It never
// makes an administrator.
type assertion struct {
	Owner  string       `cbor:"1,keyasint"`
	Method string       `cbor:"2,keyasint"`
	Path   string       `cbor:"3,keyasint"`
	Target boxed.NodeID `cbor:"4,keyasint"`
	AtMS   int64        `cbor:"5,keyasint"`
	Nonce  []byte       `cbor:"6,keyasint"`
	// What the caller is granted at most.
	Sandboxes   int   `cbor:"7,keyasint,omitempty"`
	MemoryBytes int64 `cbor:"8,keyasint,omitempty"`
}

// signedAssertion is it with the key of the node that says so.
type signedAssertion struct {
	_    struct{} `cbor:",toarray"`
	Key  []byte
	Sig  []byte
	Body []byte
}

func (a signedAssertion) signed() []byte { return append([]byte("boxed assertion v1\n"), a.Body...) }

// Assertions makes and judges assertions. It is safe for concurrent use.
type Assertions struct {
	identity ed25519.PrivateKey
	self     boxed.NodeID
	may      []boxed.NodeID // who may assert; empty: every node of the cluster
	log      *slog.Logger
	now      func() time.Time

	mu     sync.Mutex
	nonces map[boxed.NodeID]*nonces
}

// nonces are what one node used in this turn and in the one before, which is for
// as long as an assertion can be shown again. Each node has its own: what one of
// them fills is not the others' to lack.
type nonces struct {
	now, before map[[16]byte]struct{}
	turned      time.Time
}

// NewAssertions makes Assertions of a node. may are the nodes that may vouch for
// callers; empty: all of the cluster.
func NewAssertions(identity ed25519.PrivateKey, may []boxed.NodeID, log *slog.Logger) *Assertions {
	return &Assertions{
		identity: identity, self: boxed.NodeIDOf(identity.Public().(ed25519.PublicKey)), may: may, log: log,
		now: time.Now, nonces: map[boxed.NodeID]*nonces{},
	}
}

// Sign vouches for the caller of one request.
func (a *Assertions) Sign(who boxed.Principal, method, path string, target boxed.NodeID) (string, error) {
	nonce := make([]byte, 16)
	rand.Read(nonce)
	body, err := cbor.Marshal(assertion{Owner: who.Owner, Method: method, Path: path, Target: target, AtMS: a.now().UnixMilli(), Nonce: nonce, Sandboxes: who.Sandboxes, MemoryBytes: who.MemoryBytes})
	if err != nil {
		return "", err
	}
	s := signedAssertion{Key: a.identity.Public().(ed25519.PublicKey), Body: body}
	s.Sig = ed25519.Sign(a.identity, s.signed())
	raw, err := cbor.Marshal(s)
	return base64.RawURLEncoding.EncodeToString(raw), err
}

// Verify is the caller that the node from vouches for, who is a user and never
// more. What is refused is logged; the error has code unauthenticated.
func (a *Assertions) Verify(_ context.Context, text string, from boxed.NodeID, method, path string) (boxed.Principal, error) {
	as, err := a.judge(text, from, method, path)
	if err != nil {
		a.log.Warn("an assertion was refused", "peer", from, "err", err)
		return boxed.Principal{}, boxed.Errorf(boxed.CodeUnauthenticated, "the node that passed this on may not, or wrongly, vouch for its caller")
	}
	return boxed.Principal{Owner: as.Owner, Role: boxed.RoleUser, Sandboxes: as.Sandboxes, MemoryBytes: as.MemoryBytes}, nil
}

func (a *Assertions) judge(text string, from boxed.NodeID, method, path string) (as assertion, err error) {
	if len(text) > maxAssertion {
		return as, errors.New("it is too long")
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil {
		return as, err
	}
	var s signedAssertion
	if err := cbor.Unmarshal(raw, &s); err != nil {
		return as, err
	}
	if len(s.Key) != ed25519.PublicKeySize || boxed.NodeIDOf(s.Key) != from || !ed25519.Verify(s.Key, s.signed(), s.Sig) {
		return as, errors.New("it is not signed by the node that sent it")
	}
	if len(a.may) > 0 && !slices.Contains(a.may, from) {
		return as, errors.New("that node may not vouch for callers (mesh.vouch)")
	}
	if err := cbor.Unmarshal(s.Body, &as); err != nil {
		return as, err
	}
	age := a.now().Sub(time.UnixMilli(as.AtMS))
	switch {
	case as.Target != a.self:
		return as, fmt.Errorf("it is for node %.20q", as.Target)
	case as.Method != method || as.Path != path:
		return as, fmt.Errorf("it is for %.10q %.100q", as.Method, as.Path)
	case age > assertionLife || age < -assertionLife:
		return as, fmt.Errorf("it was made %v ago; are the clocks right?", age.Round(time.Second))
	case keyValidOwner(as.Owner, boxed.RoleUser) != nil:
		return as, errors.New("it names no owner")
	case len(as.Nonce) != 16:
		return as, errors.New("it has no nonce")
	}
	return as, a.take(from, [16]byte(as.Nonce))
}

// take takes a nonce of a node, once. When too many are remembered none is taken:
// a replay is not to be had by filling the memory.
func (a *Assertions) take(from boxed.NodeID, nonce [16]byte) error {
	now := a.now()
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.nonces[from]
	if n == nil {
		for id, other := range a.nonces {
			if now.Sub(other.turned) > 2*nonceTurn {
				delete(a.nonces, id)
			}
		}
		n = &nonces{now: map[[16]byte]struct{}{}, turned: now}
		a.nonces[from] = n
	}
	if now.Sub(n.turned) > nonceTurn {
		n.before, n.now, n.turned = n.now, map[[16]byte]struct{}{}, now
	}
	_, seen := n.now[nonce]
	if _, seenBefore := n.before[nonce]; seen || seenBefore {
		return errors.New("it was used before")
	}
	if len(n.now) >= maxNonces {
		return fmt.Errorf("that node has vouched for %d calls within %v", maxNonces, nonceTurn)
	}
	n.now[nonce] = struct{}{}
	return nil
}

// vouching adds an assertion to requests whose caller has no key to show.
type vouching struct {
	next   http.RoundTripper
	vouch  *Assertions
	target boxed.NodeID
}

func (v vouching) RoundTrip(r *http.Request) (*http.Response, error) {
	who := boxed.PrincipalFrom(r.Context())
	if v.vouch == nil || who.Owner == "" || boxed.CredentialFrom(r.Context()) != "" || r.Header.Get("Authorization") != "" || r.Header.Get("X-Boxed-API-Key") != "" {
		return v.next.RoundTrip(r)
	}
	text, err := v.vouch.Sign(who, r.Method, r.URL.EscapedPath(), v.target)
	if err != nil {
		return nil, err
	}
	r = r.Clone(r.Context())
	r.Header.Set(AssertionHeader, text)
	return v.next.RoundTrip(r)
}
