package transport

import (
	"context"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
)

// GateConfig is what a Gate decides by. Identity and Keys are required.
type GateConfig struct {
	Identity ed25519.PrivateKey
	// Keys are the cluster key in force, which is the only one that admits, and after
	// it others that are proved to nodes which may not have it yet. More than four are
	// not looked at.
	Keys func() []ClusterKey
	// Retired are keys that were in force, and that a node may still prove which has
	// not got the present one: it is given what Handover returns. Nil: none.
	Retired func(boxed.NodeID) []ClusterKey
	// Handover is how the present key is given on, of at most MaxHandover bytes: sealed
	// and signed, since who gives it has proved an old key only. Nil: nothing.
	Handover func() []byte
	// Rekeyed is called with what a node handed over to this one, which was away, and
	// which judges it. Nil: it is not taken.
	Rekeyed func(handover []byte)
	// Denied reports whether a node was removed from the cluster. Nil: none was.
	Denied func(boxed.NodeID) bool
}

// Gate makes connections between nodes of any byte stream: TLS 1.3 in which each
// side shows its own key, whose hash is its node ID, and then both prove that
// they know the cluster key. The proof is bound to the TLS connection, so it
// cannot be passed on; and neither side can find out the key from it. One
// connection serves one [Service], which the dialler names by ALPN.
type Gate struct {
	cfg  GateConfig
	id   boxed.NodeID
	cert tls.Certificate
}

// HandshakeTimeout bounds a handshake, from the first byte to the last.
const HandshakeTimeout = 10 * time.Second

// MaxHandover bounds what is handed over to a node that was away, in bytes.
const MaxHandover = 256 << 10

const (
	alpnPrefix = "boxed-"
	alpnSuffix = "/1" // of the handshake below
	exporter   = "EXPORTER-boxed-cluster"
	proofSize  = sha256.Size
	maxKeys    = 4
)

// What the side that was dialled answers to proofs.
const (
	welcome  = 0
	stranger = 1 // none of the proofs is for a cluster key of ours
	denied   = 2 // the node was removed
	rekeyed  = 3 // welcome, and a handover follows, after its length in four bytes
)

// NewGate makes a Gate.
func NewGate(cfg GateConfig) (*Gate, error) {
	if len(cfg.Identity) != ed25519.PrivateKeySize || cfg.Keys == nil {
		return nil, errors.New("transport: a gate needs an identity and keys")
	}
	if cfg.Denied == nil {
		cfg.Denied = func(boxed.NodeID) bool { return false }
	}
	if cfg.Retired == nil {
		cfg.Retired = func(boxed.NodeID) []ClusterKey { return nil }
	}
	public := cfg.Identity.Public().(ed25519.PublicKey)
	// Nothing of the certificate is looked at but its key.
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, cfg.Identity)
	if err != nil {
		return nil, fmt.Errorf("make the node's certificate: %w", err)
	}
	return &Gate{
		cfg: cfg, id: boxed.NodeIDOf(public),
		cert: tls.Certificate{Certificate: [][]byte{der}, PrivateKey: cfg.Identity},
	}, nil
}

// ID is the node's own.
func (g *Gate) ID() boxed.NodeID { return g.id }

// Dial makes a connection of raw, which was dialled. It closes raw when it fails.
// Errors: ErrStranger, ErrUnreachable.
func (g *Gate) Dial(ctx context.Context, raw net.Conn, want boxed.NodeID, service Service) (Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, HandshakeTimeout)
	defer cancel()
	records := newRecords(raw)
	conn := tls.Client(records, &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{g.cert}, NextProtos: []string{alpn(service)},
		InsecureSkipVerify:     true, // there is no authority: the peer's key is its name, and is checked by peerID
		SessionTicketsDisabled: true,
	})
	peer, err := g.admit(ctx, conn, records, func() (boxed.NodeID, error) { return g.dialled(ctx, conn, want) })
	if err != nil {
		raw.Close()
		if !errors.Is(err, ErrStranger) {
			err = unreachable(ctx, err)
		}
		return nil, fmt.Errorf("node %sat %s: %w", named(want), raw.RemoteAddr(), err)
	}
	return peer, nil
}

// Accept makes a connection of raw, which was accepted, to one of the services.
// It closes raw when it fails.
func (g *Gate) Accept(ctx context.Context, raw net.Conn, services []Service) (Conn, Service, error) {
	ctx, cancel := context.WithTimeout(ctx, HandshakeTimeout)
	defer cancel()
	var offered []string
	for _, s := range services {
		offered = append(offered, alpn(s))
	}
	records := newRecords(raw)
	conn := tls.Server(records, &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{g.cert}, NextProtos: offered,
		ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
	})
	var service Service
	peer, err := g.admit(ctx, conn, records, func() (id boxed.NodeID, err error) {
		service, id, err = g.accepted(ctx, conn)
		return id, err
	})
	if err != nil {
		raw.Close()
		return nil, "", fmt.Errorf("from %s: %w", raw.RemoteAddr(), err)
	}
	return peer, service, nil
}

// admit runs a handshake within ctx.
func (g *Gate) admit(ctx context.Context, conn *tls.Conn, raw *records, handshake func() (boxed.NodeID, error)) (Conn, error) {
	stop := context.AfterFunc(ctx, func() { conn.NetConn().SetDeadline(time.Unix(1, 0)) })
	id, err := handshake()
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	return &gated{Conn: conn, raw: raw, peer: boxed.Peer{Node: id, Address: conn.RemoteAddr().String()}}, nil
}

func (g *Gate) dialled(ctx context.Context, conn *tls.Conn, want boxed.NodeID) (boxed.NodeID, error) {
	if err := conn.HandshakeContext(ctx); err != nil {
		if refused(err) {
			return "", fmt.Errorf("%w: it serves no such connection, or is no boxed-node (%w)", ErrStranger, err)
		}
		return "", err
	}
	state := conn.ConnectionState()
	id, err := peerID(state)
	switch {
	case err != nil:
		return "", err
	case want != "" && id != want:
		return "", fmt.Errorf("%w: node %s answers there, not the one that is wanted", ErrStranger, id)
	case id == g.id:
		return "", fmt.Errorf("%w: this node itself answers there, or another daemon that was given a copy of its key", ErrStranger)
	case g.cfg.Denied(id):
		return "", fmt.Errorf("%w: node %s was removed from the cluster", ErrStranger, id)
	case state.NegotiatedProtocol == "":
		return "", fmt.Errorf("%w: it is no boxed-node", ErrStranger)
	}
	keys := g.keys()
	if len(keys) == 0 {
		return "", fmt.Errorf("%w: this node has no cluster key", ErrStranger)
	}
	hello := []byte{byte(len(keys))}
	for _, k := range keys {
		proof, err := prove(k, "dial", state)
		if err != nil {
			return "", err
		}
		hello = append(hello, proof...)
	}
	if _, err := conn.Write(hello); err != nil {
		return "", err
	}
	answer := make([]byte, 1+proofSize)
	if _, err := io.ReadFull(conn, answer); err != nil {
		return "", fmt.Errorf("it hung up over the proof of the cluster key: %w", err)
	}
	var handover []byte
	switch answer[0] {
	case welcome:
	case rekeyed:
		var err error
		if handover, err = readHandover(conn); err != nil {
			return "", fmt.Errorf("it hung up over the new cluster key: %w", err)
		}
	case denied:
		return "", fmt.Errorf("%w: it says that this node was removed from the cluster; start it with a new key to join again", ErrStranger)
	default:
		return "", fmt.Errorf("%w: the cluster keys differ; join with a token that `boxedctl cluster token` prints on a node of that cluster", ErrStranger)
	}
	for i, k := range keys {
		if i > 0 && !slices.Contains(g.cfg.Retired(id), k) {
			continue
		}
		if proof, err := prove(k, "accept", state); err == nil && hmac.Equal(proof, answer[1:]) {
			if answer[0] == rekeyed && g.cfg.Rekeyed != nil {
				g.cfg.Rekeyed(handover)
			}
			return id, nil
		}
	}
	return "", fmt.Errorf("%w: it does not know the cluster key", ErrStranger)
}

func (g *Gate) accepted(ctx context.Context, conn *tls.Conn) (Service, boxed.NodeID, error) {
	if err := conn.HandshakeContext(ctx); err != nil {
		return "", "", err
	}
	state := conn.ConnectionState()
	service, ok := serviceOf(state.NegotiatedProtocol)
	if !ok {
		return "", "", fmt.Errorf("%w: it names no service", ErrStranger)
	}
	id, err := peerID(state)
	if err != nil {
		return "", "", err
	}
	var count [1]byte
	if _, err := io.ReadFull(conn, count[:]); err != nil {
		return "", "", err
	}
	if count[0] == 0 || count[0] > maxKeys {
		return "", "", fmt.Errorf("%w: it sends %d proofs", ErrStranger, count[0])
	}
	proofs := make([]byte, int(count[0])*proofSize)
	if _, err := io.ReadFull(conn, proofs); err != nil {
		return "", "", err
	}
	status, cause := byte(welcome), error(nil)
	key, known := proved(g.keys()[:min(1, len(g.keys()))], proofs, state)
	if !known {
		if key, known = proved(g.cfg.Retired(id), proofs, state); known {
			status = rekeyed
		}
	}
	switch {
	case g.cfg.Denied(id): // first: it is to learn that joining again does not help
		status, cause = denied, fmt.Errorf("%w: node %s was removed", ErrStranger, id)
	case !known:
		status, cause = stranger, fmt.Errorf("%w: node %s does not know the cluster key", ErrStranger, id)
	case id == g.id:
		status, cause = stranger, fmt.Errorf("%w: it has this node's own key; two daemons must not share one", ErrStranger)
	}
	answer := make([]byte, 1+proofSize)
	answer[0] = status
	if status == welcome || status == rekeyed {
		proof, err := prove(key, "accept", state)
		if err != nil {
			return "", "", err
		}
		copy(answer[1:], proof)
	}
	if status == rekeyed {
		var handover []byte
		if g.cfg.Handover != nil {
			handover = g.cfg.Handover()
		}
		answer = append(binary.BigEndian.AppendUint32(answer, uint32(len(handover))), handover...)
	}
	if _, err := conn.Write(answer); err != nil {
		return "", "", err
	}
	return service, id, cause
}

func readHandover(r io.Reader) ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(head[:])
	if size > MaxHandover {
		return nil, fmt.Errorf("%d bytes of it", size)
	}
	handover := make([]byte, size)
	_, err := io.ReadFull(r, handover)
	return handover, err
}

// proved finds the key of keys that one of the proofs is for.
func proved(keys []ClusterKey, proofs []byte, state tls.ConnectionState) (ClusterKey, bool) {
	for _, k := range keys {
		want, err := prove(k, "dial", state)
		if err != nil {
			break
		}
		for p := proofs; len(p) >= proofSize; p = p[proofSize:] {
			if hmac.Equal(want, p[:proofSize]) {
				return k, true
			}
		}
	}
	return ClusterKey{}, false
}

func (g *Gate) keys() []ClusterKey {
	keys := g.cfg.Keys()
	return keys[:min(len(keys), maxKeys)]
}

// prove is what only a holder of the key can say, on this connection and from
// this side.
func prove(k ClusterKey, side string, state tls.ConnectionState) ([]byte, error) {
	secret, err := state.ExportKeyingMaterial(exporter, nil, 32)
	if err != nil {
		return nil, err
	}
	mac := hmac.New(sha256.New, k.derive("proof"))
	mac.Write([]byte(side))
	mac.Write(secret)
	return mac.Sum(nil), nil
}

// peerID is the name of the key that the other side has shown, and, since the
// handshake is over, has proved to hold.
func peerID(state tls.ConnectionState) (boxed.NodeID, error) {
	if len(state.PeerCertificates) != 1 {
		return "", fmt.Errorf("%w: it shows %d certificates", ErrStranger, len(state.PeerCertificates))
	}
	public, ok := state.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
	if !ok {
		return "", fmt.Errorf("%w: its key is no node's", ErrStranger)
	}
	return boxed.NodeIDOf(public), nil
}

func alpn(s Service) string { return alpnPrefix + string(s) + alpnSuffix }

func serviceOf(protocol string) (Service, bool) {
	name, ok := strings.CutPrefix(protocol, alpnPrefix)
	if !ok {
		return "", false
	}
	name, ok = strings.CutSuffix(name, alpnSuffix)
	return Service(name), ok && name != ""
}

// refused reports whether the other side ended the TLS handshake on purpose, or
// does not speak TLS.
func refused(err error) bool {
	var op *net.OpError
	var record tls.RecordHeaderError
	return errors.As(err, &op) && op.Op == "remote error" || errors.As(err, &record)
}

// unreachable says that no answer came, and for how long it was waited.
func unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return fmt.Errorf("%w: %w", ErrUnreachable, err)
}

func named(id boxed.NodeID) string {
	if id == "" {
		return ""
	}
	return string(id) + " "
}
