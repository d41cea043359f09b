package boxed

import (
	"context"
	"crypto/ed25519"
	"hash/fnv"
	"time"
)

// NodeState says what a node knows of another.
type NodeState string

// The states. A node that is removed from the cluster has none: it is no longer
// listed.
const (
	NodeAlive   NodeState = "alive"
	NodeSilent  NodeState = "silent"  // it does not answer; its sandboxes go on, as far as anybody knows
	NodeStopped NodeState = "stopped" // its daemon was stopped; its sandboxes go on
)

// PlaceRule says whose sandboxes a node takes.
type PlaceRule string

// The rules.
const (
	PlaceAny   PlaceRule = "any"   // what any node places
	PlaceOwn   PlaceRule = "own"   // only what is asked of this node itself: a laptop
	PlaceNever PlaceRule = "never" // none: a node that is only a way in
)

// NodeSummary is what the nodes of a mesh tell each other about themselves: a
// hint, some seconds old, never authority. A node admits by its own books.
type NodeSummary struct {
	ID      NodeID `json:"id"`
	Name    string `json:"name"`
	Address string `json:"address,omitempty"` // where other nodes reach it
	// Key is the public key that the ID is derived from, once it is known.
	Key     ed25519.PublicKey `json:"key,omitempty"`
	Version string            `json:"version"`
	State   NodeState         `json:"state"`
	Since   time.Time         `json:"since,omitzero"` // when it came to be in that state, as this node saw it
	At      time.Time         `json:"at,omitzero"`    // of the summary, by the node's own clock

	Ready    bool              `json:"ready"`
	Problem  string            `json:"problem,omitempty"` // why it is not, or what limps
	Cordoned bool              `json:"cordoned,omitempty"`
	Draining bool              `json:"draining,omitempty"` // it is stopping
	Place    PlaceRule         `json:"place,omitempty"`
	Labels   map[string]string `json:"labels,omitempty"`

	Arch     string         `json:"arch"`
	Runtimes []string       `json:"runtimes"`
	Default  string         `json:"default_runtime,omitempty"`
	Total    Capacity       `json:"total"`    // the machine
	Capacity Capacity       `json:"capacity"` // what it may promise
	Used     Capacity       `json:"used"`     // promised to sandboxes that somebody asked for
	Idle     Capacity       `json:"idle"`     // held by warm ones, which give way
	Warm     map[string]int `json:"warm,omitempty"`
	// Images are hashes, by ImageHash, of references of images that are there.
	Images []uint32 `json:"-"`
	Load   float64  `json:"load"` // of the last minute, per core

	// Proven: it has proved to the node that answers, over a connection, that it belongs
	// to the cluster. What is only heard of has not.
	Proven bool `json:"proven,omitempty"`
	// RTT and Ahead are measured by the node that answers, in milliseconds: how long
	// a question to the other takes, and how far its clock is ahead.
	RTT   float64 `json:"rtt_ms,omitempty"`
	Ahead int64   `json:"clock_ahead_ms,omitempty"`
}

// ImageHash is short, for summaries: that two references share one costs a pull.
func ImageHash(ref string) uint32 {
	h := fnv.New32a()
	h.Write([]byte(ref))
	return h.Sum32()
}

// Bounds of what a summary tells. All of it must fit 512 bytes.
const (
	MaxNodeName       = 40
	MaxNodeLabels     = 16
	MaxNodeImages     = 16
	MaxNodeLabelBytes = 160 // of all keys and values
)

// Drain is how far the emptying of a node has come.
type Drain struct {
	Since    time.Time `json:"since"`
	Deadline time.Time `json:"deadline"` // what is left by then is ended
	Waiting  []ID      `json:"waiting"`  // sandboxes that have not ended
}

// NodeList is the mesh as the node that answers sees it.
type NodeList struct {
	Nodes []NodeSummary `json:"nodes"` // the one that answers first
}

// Verdict says why a node would take a sandbox, or would not.
type Verdict struct {
	Node    NodeID `json:"node"`
	Name    string `json:"name,omitempty"`
	Chosen  bool   `json:"chosen"`
	Fits    bool   `json:"fits"`
	Reason  string `json:"reason,omitempty"` // of the scheduler's list
	Message string `json:"message"`
}

// Explanation says where a sandbox would go, and why not elsewhere.
type Explanation struct {
	Verdicts []Verdict `json:"verdicts"`
}

// MeshFault is something that keeps a node out, or is wrong between two nodes.
type MeshFault struct {
	At      time.Time `json:"at"`
	Peer    string    `json:"peer"` // an ID or an address
	Message string    `json:"message"`
}

// HeldDocument is a document that is not taken yet: its stamp lies more than
// [MaxClockSkew] ahead of this node's clock.
type HeldDocument struct {
	Kind   string    `json:"kind"`
	Key    string    `json:"key"`
	Author NodeID    `json:"author"`
	Stamp  time.Time `json:"stamp"`
}

// ClusterStatus is what a node knows of its cluster. Without an ID it is in none.
type ClusterStatus struct {
	ID      string         `json:"id,omitempty"`
	Key     string         `json:"key_id,omitempty"`  // names the cluster key; not the key
	Network string         `json:"network,omitempty"` // tcp or tailnet
	Nodes   []NodeSummary  `json:"nodes"`             // the one that answers first
	Faults  []MeshFault    `json:"faults"`
	Held    []HeldDocument `json:"held"`
	Removed []NodeID       `json:"removed"`
	Tailnet *Tailnet       `json:"tailnet,omitempty"` // how this node stands on the tailnet, where it uses one
}

// Tailnet is how a node stands on its tailnet.
type Tailnet struct {
	State     string    `json:"state"` // starting, needs_login, needs_approval, running, expired or stopped
	Name      string    `json:"name,omitempty"`
	Address   string    `json:"address,omitempty"`
	LoginURL  string    `json:"login_url,omitempty"`
	KeyExpiry time.Time `json:"key_expiry,omitzero"`
	Problem   string    `json:"problem,omitempty"`
	Next      string    `json:"next,omitempty"` // what to do about it
	// Blocked are machines with the node tag that do not answer where nodes do: the
	// tailnet's policy probably does not let this one through.
	Blocked []string `json:"blocked,omitempty"`
}

// ClusterRequest makes a cluster, or joins one with a token.
type ClusterRequest struct {
	Token string `json:"token,omitempty"` // of Cluster.Token on a node of the cluster; "" makes a cluster
	// Listen is the address and port for other nodes; "" is the configuration's.
	Listen string `json:"listen,omitempty"`
	// Advertise is what other nodes dial; "" is found out.
	Advertise string `json:"advertise,omitempty"`
}

// Cluster is for operators: it makes a node one of many. Only admins may, and
// never through another node.
type Cluster interface {
	// StartCluster makes a cluster, or joins one. Errors: conflict (the node is in
	// one), invalid (the token), not_ready (no node of the cluster lets it in).
	StartCluster(ctx context.Context, req ClusterRequest) (*ClusterStatus, error)
	// ClusterToken is what the next node joins with. It is a secret.
	ClusterToken(ctx context.Context) (string, error)
	ClusterStatus(ctx context.Context) (*ClusterStatus, error)
	// RemoveNode puts a node on the deny-list for good and replaces the cluster key.
	RemoveNode(ctx context.Context, ref string) (*ClusterStatus, error)
	// RotateClusterKey replaces the cluster key.
	RotateClusterKey(ctx context.Context) (*ClusterStatus, error)
	// LeaveCluster takes this node out. Its sandboxes stay.
	LeaveCluster(ctx context.Context) error
}
