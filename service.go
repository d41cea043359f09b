package boxed

import (
	"context"
	"io"
	"iter"
	"net"
)

// Service is the port of boxed: what every front door offers and every client
// speaks. The node implements it in process, api/client over HTTP.
//
// The caller is the context's [Principal] in process, and the API key over
// HTTP. A sandbox that the caller may not see does not exist for it: every
// method answers [CodeNotFound]. A sandbox that has ended answers [CodeGone]
// with the reason to everything but Get, List, Wait and Destroy.
type Service interface {
	// Create returns when the sandbox is running. Errors: invalid, unavailable,
	// image, quota, exhausted, not_ready, conflict (the name is taken).
	Create(ctx context.Context, spec Spec) (*Sandbox, error)
	// Get returns living sandboxes and end records.
	Get(ctx context.Context, id ID) (*Sandbox, error)
	List(ctx context.Context, f Filter) (List, error)
	// Wait returns when the sandbox is in the state, or has ended.
	Wait(ctx context.Context, id ID, until State) (*Sandbox, error)
	// Exec runs a program and returns when it has ended and all of its output
	// has been written. When ctx ends, so does the whole tree of the program.
	// A command that fails is a status, never an error; an error means that we
	// do not know a status, or that nothing ran (start_failed, invalid).
	Exec(ctx context.Context, id ID, req ExecRequest) (ExitStatus, error)
	// Destroy ends the sandbox and returns when it is gone. It is idempotent.
	Destroy(ctx context.Context, id ID) error
	// Events yields what happens after the cursor until ctx ends or the caller
	// stops. The error is the last thing yielded.
	Events(ctx context.Context, after Cursor) iter.Seq2[Event, error]
}

// Lifecycle changes living sandboxes.
type Lifecycle interface {
	// Resolve finds a sandbox by ID, by name or by a prefix of the ID's random
	// part (at least MinPrefixLen). An ambiguous one is a conflict whose
	// Detail["ids"] has the candidates.
	Resolve(ctx context.Context, ref string) (*Sandbox, error)
	Update(ctx context.Context, id ID, u Update) (*Sandbox, error)
	Pause(ctx context.Context, id ID) (*Sandbox, error)  // its clocks stop
	Resume(ctx context.Context, id ID) (*Sandbox, error) // they go on
	Stats(ctx context.Context, id ID) (*Stats, error)
}

// Execs are programs that outlive the call that started them.
type Execs interface {
	// StartExec returns once the program runs; its streams are kept in a ring
	// of OutputRing bytes each.
	StartExec(ctx context.Context, id ID, req ExecRequest) (*Exec, error)
	// Attach streams from the offsets until the exec has ended. Leaving does not
	// end a detached exec.
	Attach(ctx context.Context, id ID, exec ExecID, req AttachRequest) (ExitStatus, error)
	GetExec(ctx context.Context, id ID, exec ExecID) (*Exec, error)
	ListExecs(ctx context.Context, id ID) ([]Exec, error)
	// SignalExec signals the leader, or with tree every process of the exec.
	SignalExec(ctx context.Context, id ID, exec ExecID, signal string, tree bool) error
	// KillExec ends the whole tree, also what its leader left behind.
	KillExec(ctx context.Context, id ID, exec ExecID) error
}

// Files reads and writes a sandbox's files with the user's rights. Paths are
// absolute or relative to the sandbox's working directory. Reading anything but
// a regular file, or a directory as tar, is refused.
type Files interface {
	Stat(ctx context.Context, id ID, path string) (*FileInfo, error)
	ListFiles(ctx context.Context, id ID, path string) ([]FileInfo, error) // at most 10,000, else too_large
	ReadFile(ctx context.Context, id ID, req ReadRequest) (*FileReader, error)
	WriteFile(ctx context.Context, id ID, req WriteRequest) (*FileInfo, error)
	Mkdir(ctx context.Context, id ID, path string, parents bool) error
	Remove(ctx context.Context, id ID, path string, recursive bool) error
	Move(ctx context.Context, id ID, from, to string) error
	// ReadTar streams path (a directory's content, or one file) as a tar.
	ReadTar(ctx context.Context, id ID, path string) (io.ReadCloser, error)
	// WriteTar unpacks into the directory path, which is made if missing.
	// Entries that would land outside are refused and end the call.
	WriteTar(ctx context.Context, id ID, path string, tar io.Reader) error
}

// Ports reaches a sandbox's loopback.
type Ports interface {
	ListPorts(ctx context.Context, id ID) ([]Port, error)
	// Dial connects to a loopback TCP port inside. The caller closes it.
	Dial(ctx context.Context, id ID, port uint16) (net.Conn, error)
}

// Admin is for operators.
type Admin interface {
	CreateKey(ctx context.Context, req KeyRequest) (*NewKey, error)
	ListKeys(ctx context.Context) ([]Key, error)
	RevokeKey(ctx context.Context, keyID string) error
}

// Nodes describes the node that answers.
type Nodes interface {
	NodeInfo(ctx context.Context) (*NodeInfo, error)
}

// Fleet is the nodes of the mesh. A node is named by its ID, or where that is
// not ambiguous by its name or a prefix of the ID.
type Fleet interface {
	// ListNodes are the nodes that there are, those that are silent too.
	ListNodes(ctx context.Context) (NodeList, error)
	// GetNode describes one node, by its own word.
	GetNode(ctx context.Context, ref string) (*NodeInfo, error)
	// CordonNode keeps new sandboxes away from a node, or lets them in again, which
	// also ends a drain. Only admins may.
	CordonNode(ctx context.Context, ref string, on bool) (*NodeInfo, error)
	// DrainNode cordons a node and ends the sandboxes that are left after a time,
	// with the reason drained. It returns at once; NodeInfo.Drain says what it waits
	// for. Only admins may.
	DrainNode(ctx context.Context, ref string, within Duration) (*NodeInfo, error)
	// Explain says where a sandbox would be placed now, and why not elsewhere.
	Explain(ctx context.Context, spec Spec) (*Explanation, error)
	// Claim is for nodes only: one that makes a sandbox under an idempotency key of
	// the caller's tells the others, which answer with the sandbox if they have it
	// (else nil). With done it says that it is over.
	Claim(ctx context.Context, idempotencyKey string, done bool) (*Sandbox, error)
}

// API is all of it, as one node's front doors serve it.
type API interface {
	Service
	Lifecycle
	Execs
	Files
	Ports
	Nodes
	Fleet
	Egress
}
