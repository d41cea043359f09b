package boxed

import (
	"context"
	"iter"
	"net"
	"slices"
	"time"
)

// EgressEntry is the way by which a program inside a sandbox asked for the world.
type EgressEntry string

// The entries.
const (
	EntryHTTP   EgressEntry = "http"   // the HTTP proxy at 127.0.0.1:3128
	EntrySOCKS5 EgressEntry = "socks5" // the SOCKS5 proxy at 127.0.0.1:1080
	EntryName   EgressEntry = "name"   // a synthetic address, for programs that know of no proxy
	EntryDNS    EgressEntry = "dns"    // a look-up at 127.0.0.1:53
)

// EgressIntent is what an agent says of a connection that it hands to its host. The
// connection says whose it is; nothing here does.
type EgressIntent struct {
	Entry EgressEntry `json:"entry"`
	Host  string      `json:"host,omitempty"` // of entries name and dns
	Port  uint16      `json:"port,omitempty"` // of entry name
	Type  uint16      `json:"type,omitempty"` // of entry dns: the query's type
	Full  bool        `json:"full,omitempty"` // of entry dns: there is no address left for the name
}

// EgressConn is a sandbox's end of a connection.
type EgressConn interface {
	net.Conn
	CloseWrite() error
}

// EgressReason says why something was allowed or refused. The list is closed; it is
// what audit records, answers and events hold.
type EgressReason string

// The reasons.
const (
	EgressAllowed EgressReason = "allowed"

	// What was asked for is no question.
	EgressInvalidName    EgressReason = "invalid_name"    // not a host name, or one that could be taken for an address
	EgressInvalidRequest EgressReason = "invalid_request" // malformed, or framed in two ways at once
	EgressBadQuery       EgressReason = "bad_query"       // a DNS query of a type that is not answered

	// The policy says no.
	EgressNoProfile   EgressReason = "no_profile"   // the sandbox has no egress
	EgressHostDenied  EgressReason = "host_denied"  // by the operator, for everybody
	EgressListDenied  EgressReason = "list_denied"  // by the profile's deny list
	EgressNotListed   EgressReason = "not_listed"   // no rule names the host
	EgressPort        EgressReason = "port"         // a rule names the host, none the port
	EgressMethod      EgressReason = "method"       // no rule of the host allows the method
	EgressPath        EgressReason = "path"         // no rule of the host allows the path
	EgressGraphQL     EgressReason = "graphql"      // a credential that is limited by paths, and a request that none can limit
	EgressPlainHTTP   EgressReason = "plain_http"   // the rule wants TLS
	EgressUpgrade     EgressReason = "upgrade"      // a change of protocols that the rule does not allow
	EgressNotAnswered EgressReason = "not_answered" // on_deny is ask, and nobody allowed it in time
	EgressFrozen      EgressReason = "frozen"       // boxedctl egress freeze
	EgressChanged     EgressReason = "changed"      // a connection that was allowed, and no longer is
	EgressRevoked     EgressReason = "revoked"      // the secret was revoked

	// The address is not one to connect to.
	EgressNeverAddress   EgressReason = "never_address"   // this host, the mesh, loopback, metadata, …: nothing can allow it
	EgressPrivateAddress EgressReason = "private_address" // private or special; the operator may open it
	EgressNoAddress      EgressReason = "no_address"      // the name has none
	EgressResolveFailed  EgressReason = "resolve_failed"
	EgressConnectFailed  EgressReason = "connect_failed"
	EgressExitAway       EgressReason = "exit_away" // the node that is the way out does not answer

	// TLS is not what it says.
	EgressNotTLS      EgressReason = "not_tls"      // something else in a tunnel for TLS
	EgressNoSNI       EgressReason = "no_sni"       // a ClientHello without a name
	EgressSNI         EgressReason = "sni_mismatch" // another name than was asked for
	EgressECH         EgressReason = "encrypted_client_hello"
	EgressHost        EgressReason = "host_mismatch" // a Host that is not the connection's
	EgressRejectedCA  EgressReason = "client_rejected_ca"
	EgressUpstreamTLS EgressReason = "upstream_tls" // the destination's certificate is not good

	// Credentials.
	EgressForeignCredential EgressReason = "foreign_credential" // one that is not the sandbox's own placeholder
	EgressMisuse            EgressReason = "placeholder_misuse" // a placeholder where it does not belong
	EgressNoCredential      EgressReason = "no_credential"      // required, and none bound or given
	EgressHolderAway        EgressReason = "holder_away"        // the node that holds the secret does not answer

	// Limits.
	EgressTooMany   EgressReason = "too_many" // connections at once
	EgressTooFast   EgressReason = "too_fast" // connections or requests per second
	EgressTooMuch   EgressReason = "too_much" // bytes
	EgressNames     EgressReason = "too_many_names"
	EgressIdle      EgressReason = "idle"
	EgressTruncated EgressReason = "truncated"  // an answer that was cut off
	EgressAuditFull EgressReason = "audit_full" // nothing opens that cannot be recorded
)

var egressReasons = []EgressReason{
	EgressAllowed, EgressInvalidName, EgressInvalidRequest, EgressBadQuery, EgressNoProfile, EgressHostDenied,
	EgressListDenied, EgressNotListed, EgressPort, EgressMethod, EgressPath, EgressGraphQL, EgressPlainHTTP, EgressUpgrade,
	EgressNotAnswered, EgressFrozen, EgressChanged, EgressRevoked, EgressNeverAddress, EgressPrivateAddress, EgressNoAddress,
	EgressResolveFailed, EgressConnectFailed, EgressExitAway, EgressNotTLS, EgressNoSNI, EgressSNI, EgressECH, EgressHost,
	EgressRejectedCA, EgressUpstreamTLS, EgressForeignCredential, EgressMisuse, EgressNoCredential, EgressHolderAway,
	EgressTooMany, EgressTooFast, EgressTooMuch, EgressNames, EgressIdle, EgressTruncated, EgressAuditFull,
}

// Known reports whether this release has the reason: one of another node may be a later
// release's.
func (r EgressReason) Known() bool { return slices.Contains(egressReasons, r) }

// EgressMode says what the proxy does with a connection that a rule allows.
type EgressMode string

// The modes.
const (
	EgressTunnel    EgressMode = "tunnel"    // TLS that the proxy cannot read
	EgressIntercept EgressMode = "intercept" // TLS that ends at the proxy
)

// EgressProfile says what a sandbox may connect to. It is replicated to all nodes.
type EgressProfile struct {
	Version int    `json:"version"`         // 1
	Name    string `json:"name"`            // [a-z0-9-]{1,40}
	Owner   string `json:"owner,omitempty"` // "": of the operator, for everybody to name
	// Rules may be empty, which denies everything, but not absent.
	Rules []EgressRule `json:"rules"`
	Deny  []string     `json:"deny,omitempty"` // patterns; before all rules
	// OnDeny is what becomes of a connection that no rule names.
	OnDeny OnDeny `json:"on_deny,omitempty"`
	// Exit is the node that connections leave by; "" is the sandbox's own.
	Exit NodeID `json:"exit,omitempty"`

	// What follows is filled in by the node.
	Hash      string    `json:"hash,omitempty"` // of all that a person wrote
	Ready     bool      `json:"ready,omitempty"`
	Flags     []string  `json:"flags,omitempty"` // what to know of it, such as FlagExfiltration
	UpdatedAt time.Time `json:"updated_at,omitzero"`
}

// FlagExfiltration marks a profile by which data can go to anybody.
const FlagExfiltration = "exfiltration"

// OnDeny is what becomes of a connection that no rule names.
type OnDeny string

// The ways.
const (
	DenyRefuse OnDeny = "refuse" // at once; also ""
	DenyAsk    OnDeny = "ask"    // it is held for EgressAskLimit, and its owner asked
)

// EgressAskLimit is how long a connection waits for its owner.
const EgressAskLimit = 30 * time.Second

// EgressRule is a tuple: what it allows, it allows together. Rules are never merged.
type EgressRule struct {
	// Host is a name, "*." before a name for exactly one label more, an address, or "*" for
	// any name.
	Host  string     `json:"host"`
	Ports []uint16   `json:"ports,omitempty"` // default 443
	Mode  EgressMode `json:"mode,omitempty"`  // default tunnel
	// Methods and Paths need the mode intercept, or port 80. A path is a prefix that ends at
	// a "/", or exact; none is any.
	Methods []string `json:"methods,omitempty"`
	Paths   []string `json:"paths,omitempty"`
	// Credential names a secret, and whether nothing goes without it.
	Credential string         `json:"credential,omitempty"`
	Need       CredentialNeed `json:"need,omitempty"`
	Raw        bool           `json:"raw,omitempty"`       // any protocol, SSH say; not on ports 80 and 443
	AllowECH   bool           `json:"allow_ech,omitempty"` // an encrypted ClientHello, in a tunnel
	WebSocket  *bool          `json:"websocket,omitempty"` // intercepted; default: where there is no credential
}

// CredentialNeed says what becomes of a rule whose secret is not there.
type CredentialNeed string

// The needs.
const (
	CredentialRequired CredentialNeed = "required" // nothing goes; also ""
	CredentialOptional CredentialNeed = "optional" // the host is an ordinary tunnel
)

// EgressSpec is what a sandbox asks for.
type EgressSpec struct {
	Profile string   `json:"profile,omitempty"` // "": the one called default, of the owner, the operator or the node
	Allow   []string `json:"allow,omitempty"`   // "host" or "host:port", besides the profile
	// Only narrows the profile to these hosts; each must be one that it allows.
	Only    []string    `json:"only,omitempty"`
	Secrets []SecretUse `json:"secrets,omitempty"`
	// Repos are what the ready profile github may read, as "owner/name".
	Repos  []string `json:"repos,omitempty"`
	OnDeny OnDeny   `json:"on_deny,omitempty"` // "": the profile's
	// Admin says that its owner administers. The node fills it in.
	Admin bool `json:"-"`
}

// SecretUse attaches a secret to a sandbox.
type SecretUse struct {
	Name string `json:"name"` // or "OWNER/NAME", where several share one of the name
	// Repos limits a secret of a code host to these repositories, as "owner/name".
	Repos    []string `json:"repos,omitempty"`
	ReadOnly bool     `json:"read_only,omitempty"`
}

// Secret is a credential as listed: never its value.
type Secret struct {
	Name   string `json:"name"` // [a-z0-9-]{1,40}
	Owner  string `json:"owner"`
	Preset string `json:"preset"` // anthropic, openai, github, gitlab, npm, pypi, aws, generic
	// Hosts are where it is used; a preset has its own.
	Hosts []string `json:"hosts,omitempty"`
	// Slot is where it stands in a request: bearer, basic, basic:USER, header:NAME,
	// query:NAME or sigv4; a preset has its own.
	Slot    string   `json:"slot,omitempty"`
	Paths   []string `json:"paths,omitempty"`   // that it is good for; none is all
	Methods []string `json:"methods,omitempty"` // none is all
	Env     []string `json:"env,omitempty"`     // variables that hold the placeholder inside
	Author  string   `json:"author,omitempty"`  // of commits: "Name <mail>"
	// May are the owners that may attach it besides its own; "*" is everybody.
	May []string `json:"may,omitempty"`
	// Nodes may use it: it is sealed to them. All is every node that was known when it was
	// set.
	Nodes []NodeID `json:"nodes,omitempty"`
	All   bool     `json:"all,omitempty"`
	// HeldBy is the one node that has it and uses it for the others.
	HeldBy NodeID `json:"held_by,omitempty"`
	// Source is where the value is from: "value", or "env:NAME" or "command:…" of the node
	// itself, which stays there.
	Source    string    `json:"source,omitempty"`
	Version   int       `json:"version"` // grows with each rotation
	CreatedAt time.Time `json:"created_at,omitzero"`
	UpdatedAt time.Time `json:"updated_at,omitzero"`
	RevokedAt time.Time `json:"revoked_at,omitzero"`
	// Here says whether the node that answers can use it.
	Here bool `json:"here"`
}

// SecretRequest sets a secret, or rotates it: sandboxes that use it go on with the new
// value.
type SecretRequest struct {
	Secret
	Value string `json:"value,omitempty"` // at most MaxSecret bytes
}

// MaxSecret bounds the value of a secret, in bytes.
const MaxSecret = 16 << 10

// EgressAllowance lets a sandbox reach one host more.
type EgressAllowance struct {
	Host string   `json:"host"`          // "host" or "host:port"; the port is 443 unless given
	For  Duration `json:"for,omitempty"` // 0: for as long as the sandbox lives
}

// EgressQuery asks what would happen.
type EgressQuery struct {
	Host   string `json:"host"`             // "host" or "host:port"
	Method string `json:"method,omitempty"` // of a request that the proxy can read; "" asks about the connection alone
	Path   string `json:"path,omitempty"`
}

// EgressAnswer is what would happen, and by which rule. Nothing was connected to.
type EgressAnswer struct {
	Allowed    bool         `json:"allowed"`
	Reason     EgressReason `json:"reason"`
	Detail     string       `json:"detail,omitempty"`
	Hint       string       `json:"hint,omitempty"`
	Rule       string       `json:"rule,omitempty"`
	Mode       EgressMode   `json:"mode,omitempty"`
	Credential string       `json:"credential,omitempty"`
	Addresses  []string     `json:"addresses,omitempty"` // that the name has now
}

// EgressReply answers a question about a connection that waits.
type EgressReply struct {
	Question string   `json:"question"` // Event.Question of an EventEgressAsk
	Allow    bool     `json:"allow"`
	For      Duration `json:"for,omitempty"` // of the host; 0: for as long as the sandbox lives
}

// EgressFilter selects audit records. The zero filter selects the caller's.
type EgressFilter struct {
	Sandbox ID     // "": every one of the caller's on the node that answers
	Denied  bool   // refusals only
	After   uint64 // records with a higher number
	Limit   int    // the newest so many; 0 is 100
	Follow  bool   // go on as they are written
	Owner   string // admins only: "*" is everybody's
}

// Egress is what sandboxes may reach. Where a call names a sandbox, the node that owns it
// answers.
type Egress interface {
	GetEgress(ctx context.Context, id ID) (*EgressStatus, error)
	// SetEgress changes what a running sandbox may reach; connections that are no longer
	// allowed end. Errors: invalid, not_found (a profile or secret), forbidden.
	SetEgress(ctx context.Context, id ID, spec EgressSpec) (*EgressStatus, error)
	AllowEgress(ctx context.Context, id ID, a EgressAllowance) (*EgressStatus, error)
	CheckEgress(ctx context.Context, id ID, q EgressQuery) (*EgressAnswer, error)
	// SuggestEgress is a profile of what the sandbox asked for, the narrowest first.
	SuggestEgress(ctx context.Context, id ID) (*EgressProfile, error)
	AnswerEgress(ctx context.Context, id ID, r EgressReply) error
	// EgressLog yields audit records, the oldest first.
	EgressLog(ctx context.Context, f EgressFilter) iter.Seq2[EgressRecord, error]
	// VerifyAudit checks that the audit log of the node that answers is as it was written.
	// Only admins may.
	VerifyAudit(ctx context.Context) (*AuditReport, error)
	// RelayEgress is for nodes only; see [EgressRelay]. ctx bounds the call alone. Errors:
	// forbidden, with Detail["reason"] an EgressReason, and not_ready.
	RelayEgress(ctx context.Context, r EgressRelay) (net.Conn, error)
}

// AuditReport is what a node found of its own audit log.
type AuditReport struct {
	Records int          `json:"records"`
	First   uint64       `json:"first"` // its Seq; what was before it is no longer kept
	Last    uint64       `json:"last"`
	Files   int          `json:"files"`
	Broken  []AuditBreak `json:"broken"` // at most 1000
}

// AuditBreak is a place where a log is not as it was written.
type AuditBreak struct {
	File string `json:"file"`
	Line int    `json:"line,omitempty"` // from 1; 0 is the file as a whole
	Why  string `json:"why"`
}

// EgressRelay is what a node asks another for: to be the way out of a connection, or with
// a secret, to make the requests that use it. It never has an address: whoever dials has
// resolved and judged.
type EgressRelay struct {
	Sandbox    ID     `json:"sandbox"` // its ID names the node that asks
	Profile    string `json:"profile,omitempty"`
	Generation uint64 `json:"generation,omitempty"`
	Host       string `json:"host"`
	Port       uint16 `json:"port"`
	// Secret is held by the node that is asked. What follows on the connection are requests
	// of HTTP/1.1 with the placeholder in them.
	Secret      string   `json:"secret,omitempty"`
	Repos       []string `json:"repos,omitempty"`
	ReadOnly    bool     `json:"read_only,omitempty"`
	Placeholder string   `json:"placeholder,omitempty"`
}

// EgressChange is what applying a profile does.
type EgressChange struct {
	Profile  *EgressProfile `json:"profile"`
	Widened  []string       `json:"widened"`  // what was not allowed before, for a person
	Narrowed []string       `json:"narrowed"` // what was
	Applied  bool           `json:"applied"`
}

// EgressFreeze shuts the egress of sandboxes on all nodes, and ends what is open.
type EgressFreeze struct {
	ID     string            `json:"id,omitempty"`
	Owner  string            `json:"owner,omitempty"`  // admins only, but for one's own
	Labels map[string]string `json:"labels,omitempty"` // all of these
	All    bool              `json:"all,omitempty"`    // admins only: everybody's
	By     string            `json:"by,omitempty"`
	At     time.Time         `json:"at,omitzero"`
}

// Policies are profiles, secrets and freezes: small documents that every node has.
type Policies interface {
	ListProfiles(ctx context.Context) ([]EgressProfile, error)
	// GetProfile finds the caller's own, the operator's, or a ready one.
	GetProfile(ctx context.Context, name string) (*EgressProfile, error)
	// ApplyProfile takes a profile in YAML or JSON, or with dry only says what it would
	// change. Errors: invalid with the line.
	ApplyProfile(ctx context.Context, text []byte, dry bool) (*EgressChange, error)
	DeleteProfile(ctx context.Context, name string) error

	ListSecrets(ctx context.Context) ([]Secret, error)
	SetSecret(ctx context.Context, req SecretRequest) (*Secret, error)
	// RevokeSecret ends its use on every node that is connected.
	RevokeSecret(ctx context.Context, name string) error

	Freeze(ctx context.Context, f EgressFreeze) (*EgressFreeze, error)
	Freezes(ctx context.Context) ([]EgressFreeze, error)
	Thaw(ctx context.Context, id string) error
}

// Files of a sandbox's egress: certificates that are trusted besides the image's, and all of
// them together, which who writes the first makes of it.
const (
	EgressCAFile     = "ca.pem"
	EgressBundleFile = "bundle.pem"
)

// EgressGrant is what the record of a sandbox keeps of its egress.
type EgressGrant struct {
	Spec EgressSpec        `json:"spec"`
	Env  map[string]string `json:"env,omitempty"` // of every exec
	// Files lie in the directory that is mounted into the sandbox, by name.
	Files map[string][]byte `json:"-"`
	// State is sealed: only the node that made it reads it.
	State []byte `json:"state,omitempty"`
	// Canary is a name that the sandbox must not reach.
	Canary string `json:"canary,omitempty"`
}

// EgressState is whether a sandbox reaches what it may.
type EgressState string

// The states.
const (
	EgressOpen     EgressState = "open"
	EgressClosed   EgressState = "closed" // it may reach nothing
	EgressDegraded EgressState = "degraded"
)

// EgressStatus is a sandbox's egress.
type EgressStatus struct {
	State   EgressState `json:"state"`
	Reason  string      `json:"reason,omitempty"` // of degraded, and of closed where that is not the spec's
	Profile string      `json:"profile,omitempty"`
	Flags   []string    `json:"flags,omitempty"`
	// Generation and Hash are of the policy in force on the sandbox's node.
	Generation uint64       `json:"generation,omitempty"`
	Hash       string       `json:"hash,omitempty"`
	Rules      []EgressRule `json:"rules,omitempty"` // in force, those of secrets and of allow included
	Secrets    []string     `json:"secrets,omitempty"`
	// Allowed are hosts that it was allowed since it was made.
	Allowed []EgressGranted `json:"allowed,omitempty"`
	// Untranslated are secrets that a rule has as optional and that are not bound.
	Untranslated []string `json:"untranslated,omitempty"`
}

// EgressGranted is a host that was allowed to a sandbox that lives.
type EgressGranted struct {
	// Admin: an admin allowed it, whom the operator's ceiling does not bind.
	Admin bool      `json:"admin,omitempty"`
	Host  string    `json:"host"`
	Until time.Time `json:"until,omitzero"` // zero: for as long as it lives
}

// EgressRecord is one line of the audit log: something was asked for, and this became
// of it. It never holds a header, a query, a body or a placeholder.
type EgressRecord struct {
	Seq        uint64            `json:"seq"`
	At         time.Time         `json:"at"`
	Node       NodeID            `json:"node"`
	Sandbox    ID                `json:"sandbox"`
	Owner      string            `json:"owner"`
	Labels     map[string]string `json:"labels,omitempty"`
	Generation uint64            `json:"generation,omitempty"` // of the policy
	Entry      EgressEntry       `json:"entry"`
	Host       string            `json:"host,omitempty"`
	Port       uint16            `json:"port,omitempty"`
	Address    string            `json:"address,omitempty"` // that was dialled
	SNI        string            `json:"sni,omitempty"`
	Method     string            `json:"method,omitempty"`
	Path       string            `json:"path,omitempty"` // intercepted only
	Status     int               `json:"status,omitempty"`
	Allowed    bool              `json:"allowed"`
	Reason     EgressReason      `json:"reason"`
	Detail     string            `json:"detail,omitempty"` // for a person
	Rule       string            `json:"rule,omitempty"`
	Credential string            `json:"credential,omitempty"` // its name
	Up         int64             `json:"up,omitempty"`         // bytes out of the sandbox
	Down       int64             `json:"down,omitempty"`       // bytes into it
	MS         int64             `json:"ms,omitempty"`
	Count      int               `json:"count,omitempty"` // of equal denials that are this one record; 0 is 1
	Exit       NodeID            `json:"exit,omitempty"`
	End        bool              `json:"end,omitempty"` // the end of a connection that an earlier record opened
	Prev       string            `json:"prev"`          // hash of the record before, hex
}
