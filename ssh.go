package boxed

import (
	"context"
	"io"
	"net"
	"time"
)

// SSHLabel is the label of a sandbox that ends with its shell over SSH; its value is
// SSHLabelNew.
const (
	SSHLabel    = "boxed.ssh"
	SSHLabelNew = "new"
)

// SSHKey is a public key that an owner comes in with over SSH. It is replicated to all
// nodes of a cluster.
type SSHKey struct {
	ID          string    `json:"id"`
	Owner       string    `json:"owner"`
	PublicKey   string    `json:"public_key"`  // "ssh-ed25519 AAAA…", without a comment
	Fingerprint string    `json:"fingerprint"` // "SHA256:…"
	Comment     string    `json:"comment,omitempty"`
	CreatedAt   time.Time `json:"created_at"`
	ExpiresAt   time.Time `json:"expires_at,omitzero"` // zero: never
	RevokedAt   time.Time `json:"revoked_at,omitzero"` // zero: valid
}

// SSHKeyRequest adds a public key.
type SSHKeyRequest struct {
	Owner     string `json:"owner,omitempty"` // admins only; "" is the caller
	PublicKey string `json:"public_key"`      // a line of an authorized_keys file, without options
	Comment   string `json:"comment,omitempty"`
	// Proof is that the caller has the private key: an SSHSIG signature of
	// [SSHInfo.Challenge] in the namespace [SSHNamespace], as `ssh-keygen -Y sign` makes
	// it. Admins need none: a public key is public, and who could have another's taken
	// for his own would have that one work in his sandboxes.
	Proof string   `json:"proof,omitempty"`
	TTL   Duration `json:"ttl,omitempty"` // 0: for ever
}

// SSHNamespace is that of the signatures of SSHKeyRequest.Proof.
const SSHNamespace = "ssh-key@boxed"

// SSHInfo says how a node's SSH front door is found and known.
type SSHInfo struct {
	Owner     string   `json:"owner"` // who asks
	Role      Role     `json:"role"`
	Challenge string   `json:"challenge"`           // what Proof signs: the owner and the cluster
	Listen    string   `json:"listen,omitempty"`    // "" where it only serves tunnels
	Authority string   `json:"authority"`           // public key that signs the nodes' host keys, for @cert-authority
	HostKeys  []string `json:"host_keys,omitempty"` // of this node
}

// Recording is what a terminal showed, as an asciicast of version 2. It is kept on the
// node that the session came in by.
type Recording struct {
	ID        string    `json:"id"`
	Sandbox   ID        `json:"sandbox"`
	Owner     string    `json:"owner"`
	StartedAt time.Time `json:"started_at"`
	Bytes     int64     `json:"bytes"`
}

// SSH are the public keys of owners, and the way to a node's SSH front door.
type SSH interface {
	// AddSSHKey adds a key. Errors: invalid, forbidden (no proof, or another's), conflict
	// (another owner has it).
	AddSSHKey(ctx context.Context, req SSHKeyRequest) (*SSHKey, error)
	// ListSSHKeys is the caller's own, and every key for admins; newest first, with
	// revoked and expired ones.
	ListSSHKeys(ctx context.Context) ([]SSHKey, error)
	// RevokeSSHKey makes a key worthless for ever and ends its sessions. It is
	// idempotent. Errors: not_found.
	RevokeSSHKey(ctx context.Context, id string) error
	SSHInfo(ctx context.Context) (*SSHInfo, error)
	// ListRecordings are those on this node that the caller may read, newest first.
	ListRecordings(ctx context.Context) ([]Recording, error)
	// ReadRecording reads one; the caller closes it. Errors: not_found.
	ReadRecording(ctx context.Context, id string) (io.ReadCloser, error)
	// DialSSH is a connection to the SSH front door as the caller: it asks for no key.
	DialSSH(ctx context.Context) (net.Conn, error)
}
