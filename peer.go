package boxed

import (
	"context"
	"time"
)

// Role is what a principal may do.
type Role string

// The roles.
const (
	RoleUser  Role = "user"  // own sandboxes, within quota
	RoleAdmin Role = "admin" // everybody's, and keys
)

// Principal is who asks. It travels in the context, put there by a front door.
type Principal struct {
	Owner string // whose sandboxes
	Role  Role
	Key   string // ID of the API key, "" for other identities
	// Sandboxes and MemoryBytes are what a tailnet's policy grants at most, living and
	// in all; 0 is no bound but the owner's quota.
	Sandboxes   int
	MemoryBytes int64
}

// Admin reports whether p administers.
func (p Principal) Admin() bool { return p.Role == RoleAdmin }

// MaySee reports whether p may know that owner's sandboxes exist.
func (p Principal) MaySee(owner string) bool { return p.Admin() || (owner != "" && p.Owner == owner) }

type principalKey struct{}

// WithPrincipal says who asks in calls made with the returned context.
func WithPrincipal(ctx context.Context, p Principal) context.Context {
	return context.WithValue(ctx, principalKey{}, p)
}

// PrincipalFrom is who asks; the zero Principal may do nothing.
func PrincipalFrom(ctx context.Context) Principal {
	p, _ := ctx.Value(principalKey{}).(Principal)
	return p
}

type requestIDKey struct{}

// WithRequestID carries a request's ID for logs.
func WithRequestID(ctx context.Context, id string) context.Context {
	return context.WithValue(ctx, requestIDKey{}, id)
}

// RequestIDFrom is the request's ID, or "".
func RequestIDFrom(ctx context.Context) string {
	id, _ := ctx.Value(requestIDKey{}).(string)
	return id
}

type credentialKey struct{}

// WithCredential carries the API key that a caller showed, for the one use of
// showing it again to the node that owns a sandbox. It is never logged or kept.
func WithCredential(ctx context.Context, secret string) context.Context {
	return context.WithValue(ctx, credentialKey{}, secret)
}

// CredentialFrom is the API key that the caller showed, or "".
func CredentialFrom(ctx context.Context) string {
	s, _ := ctx.Value(credentialKey{}).(string)
	return s
}

type hopKey struct{}

// WithHop says that another node passed the call on. Such a call is served here
// or nowhere.
func WithHop(ctx context.Context, from NodeID) context.Context {
	return context.WithValue(ctx, hopKey{}, from)
}

// HopFrom is the node that passed the call on, or "".
func HopFrom(ctx context.Context) NodeID {
	id, _ := ctx.Value(hopKey{}).(NodeID)
	return id
}

// Peer is the other end of a connection, as far as the transport knows it.
type Peer struct {
	Node    NodeID // "" unless it proved to be a node
	Login   string // a tailnet login, "" on other networks
	Address string
}

// Key is an API key as listed: never its secret.
type Key struct {
	ID        string    `json:"id"`
	Owner     string    `json:"owner"`
	Role      Role      `json:"role"`
	Comment   string    `json:"comment,omitempty"`
	CreatedAt time.Time `json:"created_at"`
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	RevokedAt time.Time `json:"revoked_at,omitzero"`
}

// KeyRequest asks for an API key.
type KeyRequest struct {
	Owner   string   `json:"owner"`
	Role    Role     `json:"role"`
	Comment string   `json:"comment,omitempty"`
	TTL     Duration `json:"ttl,omitempty"` // 0: never expires
}

// NewKey is a key with its secret, shown once.
type NewKey struct {
	Key
	Secret string `json:"secret"` // "boxed_" + 52 base32 characters (256 bits)
}

// NodeInfo describes one node.
type NodeInfo struct {
	ID         NodeID           `json:"id"`
	Name       string           `json:"name"`
	Version    string           `json:"version"`
	Ready      bool             `json:"ready"`
	Problems   []string         `json:"problems"` // why it is not ready, or what limps
	Draining   bool             `json:"draining"`
	Arch       string           `json:"arch"` // amd64 or arm64
	Runtimes   []string         `json:"runtimes"`
	Default    string           `json:"default_runtime"`
	Engine     string           `json:"engine"` // its version
	Cgroup     int              `json:"cgroup"` // 1 or 2
	Templates  []Template       `json:"templates"`
	Capacity   Capacity         `json:"capacity"`
	Used       Capacity         `json:"used"`
	Sandboxes  int              `json:"sandboxes"`
	Pool       []PoolInfo       `json:"pool"`
	WarmHits   int64            `json:"warm_hits"`
	WarmMisses map[string]int64 `json:"warm_misses"` // by reason
	StartedAt  time.Time        `json:"started_at"`

	Cordoned bool              `json:"cordoned,omitempty"`
	Drain    *Drain            `json:"drain,omitempty"` // an operator empties it
	Place    PlaceRule         `json:"place,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`
}

// Capacity is what a node can promise, or has promised.
type Capacity struct {
	MemoryBytes int64   `json:"memory_bytes"`
	CPUs        float64 `json:"cpus"`
	Sandboxes   int     `json:"sandboxes"`
}

// PoolInfo is the state of one kind of warm sandbox.
type PoolInfo struct {
	Template string `json:"template"`
	Image    string `json:"image"`
	Runtime  string `json:"runtime"`
	Ready    int    `json:"ready"`
	Filling  int    `json:"filling"`
	Size     int    `json:"size"`
	Problem  string `json:"problem,omitempty"`
}

// Template is a named image with limits, environment and a pool.
type Template struct {
	Name    string            `json:"name" yaml:"-"`
	Image   string            `json:"image" yaml:"image"`
	Limits  Limits            `json:"limits" yaml:"limits"`
	Env     map[string]string `json:"env,omitempty" yaml:"env"`
	Runtime string            `json:"runtime,omitempty" yaml:"runtime"`
	Pool    int               `json:"pool" yaml:"pool"` // warm sandboxes to hold
	// Warm is the language of which an interpreter waits in each warm sandbox for
	// the first program: WarmPython, which "" is too, or WarmNone.
	Warm string `json:"warm,omitempty" yaml:"warm"`
}

// Values of Template.Warm. A waiting Python holds 7 MiB of its sandbox's memory.
const (
	WarmPython = "python"
	WarmNone   = "none"
)

// DefaultTemplate is the template of a Spec that names neither template nor image.
const DefaultTemplate = "default"
