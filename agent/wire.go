package agent

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// Version is the wire's. Neighbouring versions work together: what a side does
// not know of the other's features it does not use.
const Version = 1

// Sizes on the wire, in bytes.
const (
	maxHello    = 4 << 10  // first frame of each side
	maxMessage  = 24 << 20 // a Request: an 8 MiB program in base64 plus its arguments, doubled
	maxResponse = 4 << 20  // a Response: MaxListing entries with long names
	maxAtOnce   = 64 << 10 // a Response that does not wait for a place; see Host.large
	maxFrame    = 1 << 20  // one frame of an exec's stream
	ChunkSize   = 64 << 10 // output is sent in frames of at most this
	RingSize    = 1 << 20  // kept of each output stream
	MaxExecs    = 128      // living execs
	MaxEnded    = 256      // ended execs that are remembered
	MaxListing  = 10_000   // entries of one directory listing
	MaxPorts    = 4096     // of a listing of ports
	DrainWindow = 200      // ms that output may still come after the leader's exit
)

// Hello is the guest's first frame on every connection.
type Hello struct {
	Version  int      `json:"version"`
	Features []string `json:"features"`
	Build    string   `json:"build"`            // hash of the program
	Secret   string   `json:"secret,omitempty"` // proves a re-dial or a bulk connection
	Bulk     string   `json:"bulk,omitempty"`   // the token of a bulk connection, "" for the control connection
	Direct   bool     `json:"direct,omitempty"` // a direct connection; see direct.go
	Egress   *Intent  `json:"egress,omitempty"` // what a program inside asks for; see egress.go
}

// Welcome is the host's first frame on every connection.
type Welcome struct {
	Version  int      `json:"version"`
	Features []string `json:"features"`
	Secret   string   `json:"secret,omitempty"` // on the first connection only
	Error    string   `json:"error,omitempty"`  // refused, and why
	Config   *Config  `json:"config,omitempty"` // on control connections
}

// Config tells the guest about its sandbox. It comes again with each control
// connection and may change between them.
type Config struct {
	UID     int    `json:"uid"` // of user code; its GID too
	Home    string `json:"home"`
	LeaseMS int64  `json:"lease_ms"` // it ends itself after so long without a host; 0 means never
	// Ready is what the first exec is likely to be; nil if nothing is known of it.
	Ready *ReadyConfig `json:"ready,omitempty"`
	// Egress opens the way out; nil closes it.
	Egress *EgressConfig `json:"egress,omitempty"`
}

// ReadyConfig is an exec whose interpreter may be started ahead of it.
type ReadyConfig struct {
	Language string   `json:"language"`
	Env      []string `json:"env"`
	Dir      string   `json:"dir"`
}

// Request opens a stream.
type Request struct {
	Op   string          `json:"op"`
	Args json.RawMessage `json:"args,omitempty"`
}

// Response answers it.
type Response struct {
	Error *Error          `json:"error,omitempty"`
	Value json.RawMessage `json:"value,omitempty"`
}

// Error is an error that crosses the wire.
type Error struct {
	Code    string `json:"code"` // one of the codes below
	Message string `json:"message"`
	Path    string `json:"path,omitempty"`
}

func (e *Error) Error() string { return e.Message }

// Codes of Error.
const (
	ErrInvalid     = "invalid"      // the request makes no sense; Path may name what
	ErrNotFound    = "not_found"    // no such file, exec or program
	ErrStartFailed = "start_failed" // the program exists but cannot be started
	ErrDenied      = "denied"       // the user may not do this
	ErrNoSpace     = "no_space"
	ErrConflict    = "conflict" // exists, not empty, is a directory, …
	ErrTooLarge    = "too_large"
	ErrExhausted   = "exhausted" // too many execs or processes
	ErrRange       = "range"
	ErrUnavailable = "unavailable" // this guest does not know the operation
	ErrInternal    = "internal"
)

// Operations.
const (
	opExec     = "exec"      // ExecStart → Attached, then the exec's stream unless detached
	opAttach   = "attach"    // Attach → Attached, then the exec's stream
	opSignal   = "signal"    // Signal → nothing; streams of their own, so that unread stdin holds none up
	opResize   = "resize"    // Resize → nothing
	opKill     = "kill"      // Kill → nothing, once nothing of the tree is left
	opExecs    = "execs"     // nothing → []ExecInfo
	opConfig   = "config"    // Config → nothing
	opCanary   = "canary"    // Canary → CanaryResult
	opPing     = "ping"      // nothing → nothing
	opEnd      = "end"       // nothing → nothing; the guest exits
	opBulk     = "bulk"      // Bulk → nothing; the guest dials a bulk connection
	opStat     = "stat"      // Path → FileInfo
	opList     = "list"      // Path → []FileInfo
	opRead     = "read"      // Read → ReadInfo, then the bytes
	opWrite    = "write"     // Write → nothing; then chunks of content from the host, then Response of FileInfo
	opMkdir    = "mkdir"     // Path → nothing
	opRemove   = "remove"    // Path → nothing
	opMove     = "move"      // Move → nothing
	opReadTar  = "read_tar"  // Path → nothing, then chunks of a tar
	opWriteTar = "write_tar" // Path → nothing; then chunks from the host, then Response
	opPorts    = "ports"     // nothing → []Port
	opDial     = "dial"      // Dial → nothing, then raw bytes both ways
	opStats    = "stats"     // nothing → Stats
)

// ExecStart asks for a program.
type ExecStart struct {
	ID       string   `json:"id"`             // chosen by the host
	Argv     [][]byte `json:"argv,omitempty"` // byte for byte
	Language string   `json:"language,omitempty"`
	Code     []byte   `json:"code,omitempty"`
	Env      []string `json:"env,omitempty"` // KEY=value, complete
	Dir      string   `json:"dir"`           // absolute
	TTY      bool     `json:"tty,omitempty"`
	Cols     uint16   `json:"cols,omitempty"`
	Rows     uint16   `json:"rows,omitempty"`
	Stdin    bool     `json:"stdin,omitempty"` // false: /dev/null
	Detached bool     `json:"detached,omitempty"`
	// LingerMS ends a detached exec that nobody has been attached to for so long.
	// While somebody is, it waits for readers as one that is attached does.
	LingerMS  int64 `json:"linger_ms,omitempty"`
	TimeoutMS int64 `json:"timeout_ms,omitempty"`
	MaxOutput int64 `json:"max_output,omitempty"`
	// Rushed: others wait for the cores, so nothing is got ready for the next exec.
	Rushed bool `json:"rushed,omitempty"`
}

// ExecInfo describes an exec.
type ExecInfo struct {
	ID        string    `json:"id"`
	Args      []string  `json:"args,omitempty"`
	Language  string    `json:"language,omitempty"`
	TTY       bool      `json:"tty,omitempty"`
	Detached  bool      `json:"detached,omitempty"`
	Attached  int       `json:"attached,omitempty"` // readers at this moment
	LingerMS  int64     `json:"linger_ms,omitempty"`
	PID       int       `json:"pid"`
	Processes int       `json:"processes,omitempty"`
	Started   time.Time `json:"started"`
	Ended     time.Time `json:"ended,omitzero"`
	Exit      *Exit     `json:"exit,omitempty"`
}

// Exit is how an exec ended.
type Exit struct {
	Reason      string `json:"reason"` // exited, signaled, timeout, oom, output_limit, canceled
	Code        int    `json:"code"`   // 128 + signal for a signal
	Signal      string `json:"signal,omitempty"`
	StdoutBytes int64  `json:"stdout_bytes"`
	StderrBytes int64  `json:"stderr_bytes"`
	DurationMS  int64  `json:"duration_ms"`
}

func (e *Exit) frame() []byte {
	body, _ := json.Marshal(e) // strings and numbers
	frame := make([]byte, frameHead, frameHead+len(body))
	putFrameHead(frame, frameExit, len(body))
	return append(frame, body...)
}

// Reasons of Exit.
const (
	ExitExited      = "exited"
	ExitSignaled    = "signaled"
	ExitTimeout     = "timeout"
	ExitOOM         = "oom"
	ExitOutputLimit = "output_limit"
	ExitCanceled    = "canceled"
)

// Attach joins an exec at byte offsets.
type Attach struct {
	ID       string `json:"id"`
	Stdout   int64  `json:"stdout"`
	Stderr   int64  `json:"stderr"`
	NoFollow bool   `json:"no_follow,omitempty"` // end at what is there now
	Own      bool   `json:"own,omitempty"`       // leaving ends the exec, as for the stream that started it
}

// Signal signals an exec.
type Signal struct {
	ID     string `json:"id"`
	Signal string `json:"signal"` // name without SIG
	Tree   bool   `json:"tree,omitempty"`
}

// Kill ends an exec's whole tree, also what its leader left behind.
type Kill struct {
	ID     string `json:"id"`
	Reason string `json:"reason"` // becomes Exit.Reason if the leader still runs
}

// Resize sets the size of an exec's terminal.
type Resize struct {
	ID   string `json:"id"`
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// Attached answers an Attach, and an ExecStart that is not detached.
type Attached struct {
	Info  ExecInfo `json:"info"`
	Stdin int64    `json:"stdin"` // bytes of stdin that the guest has taken so far
}

// Path names a file.
type Path struct {
	Path      string `json:"path"`
	Parents   bool   `json:"parents,omitempty"`
	Recursive bool   `json:"recursive,omitempty"`
}

// Read names a part of a file.
type Read struct {
	Path   string `json:"path"`
	Offset int64  `json:"offset"`
	Length int64  `json:"length"` // < 0: to the end
}

// ReadInfo precedes the bytes of a read.
type ReadInfo struct {
	Info   FileInfo `json:"info"`
	Offset int64    `json:"offset"`
	Length int64    `json:"length"`
}

// Write announces a file; its content follows in chunks.
type Write struct {
	Path    string `json:"path"`
	Mode    uint32 `json:"mode,omitempty"`
	Parents bool   `json:"parents,omitempty"`
}

// Move renames.
type Move struct {
	From string `json:"from"`
	To   string `json:"to"`
}

// FileInfo describes a directory entry; links are not followed.
type FileInfo struct {
	Name    string    `json:"name"`
	Path    string    `json:"path"`
	Type    string    `json:"type"` // file, dir, symlink, fifo, socket, device
	Size    int64     `json:"size"`
	Mode    uint32    `json:"mode"`
	ModTime time.Time `json:"mod_time"`
	Target  string    `json:"target,omitempty"`
}

// Port is a listening TCP socket.
type Port struct {
	Port    uint16 `json:"port"`
	Address string `json:"address"`
	Process string `json:"process,omitempty"`
}

// Dial names a loopback port.
type Dial struct {
	Port uint16 `json:"port"`
}

// Bulk asks for a bulk connection.
type Bulk struct {
	Token string `json:"token"`
}

// Stats is what the guest knows of itself.
type Stats struct {
	RSSBytes  int64 `json:"rss_bytes"` // of the agent
	Execs     int   `json:"execs"`
	Processes int   `json:"processes"`
}

// Frame types of an exec's stream. Each frame is a type byte, a big-endian
// uint32 length and so many bytes.
const (
	frameStdin   = 0x01 // → guest; empty: end of file
	frameStdout  = 0x11 // → host
	frameStderr  = 0x12 // → host
	frameGap     = 0x13 // → host; frameStdout or frameStderr, big-endian uint64: bytes that are no longer kept
	frameExit    = 0x14 // → host; JSON Exit, the last frame
	frameAlive   = 0x15 // → host; empty, the end of an attach that does not follow
	frameNoRead  = 0x16 // → host; empty: the program no longer reads stdin
	frameRequest = 0x17 // → guest; JSON Request, on direct connections only
	frameChunk   = 0x21 // both; bytes of a file or tar
	frameEOF     = 0x22 // both; empty: all chunks were sent
	frameError   = 0x23 // both; JSON Error: what was sent is not all there is
)

// writeFrame sends one frame with a single Write.
func writeFrame(w io.Writer, typ byte, payload []byte) error {
	buf := make([]byte, frameHead+len(payload))
	putFrameHead(buf, typ, len(payload))
	copy(buf[frameHead:], payload)
	_, err := w.Write(buf)
	return err
}

// frameHead is the size of a frame's head: its type and the payload's length.
const frameHead = 5

func putFrameHead(buf []byte, typ byte, n int) {
	buf[0] = typ
	binary.BigEndian.PutUint32(buf[1:], uint32(n))
}

// readFrame reads one frame into buf, which grows to at most maxFrame.
func readFrame(r *bufio.Reader, buf []byte) (typ byte, payload, grown []byte, err error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, buf, err
	}
	n := int(binary.BigEndian.Uint32(head[1:]))
	if n > maxFrame {
		return 0, nil, buf, &errProtocol{fmt.Sprintf("frame of %d bytes, at most %d are allowed", n, maxFrame)}
	}
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	_, err = io.ReadFull(r, buf)
	return head[0], buf, buf, noEOF(err)
}

// frameReader reads frames of an exec's stream into a buffer that holds at least
// two.
type frameReader struct {
	*bufio.Reader
	src source
}

// source reads at most so many bytes at once, if that is not 0.
type source struct {
	io.Reader
	most int
}

func (s *source) Read(p []byte) (int, error) {
	if s.most > 0 && len(p) > s.most {
		p = p[:s.most]
	}
	n, err := s.Reader.Read(p)
	if s.most > 0 {
		s.most = max(1, s.most-n)
	}
	return n, err
}

func newFrameReader() *frameReader {
	r := &frameReader{}
	r.Reader = bufio.NewReaderSize(&r.src, streamBuffer)
	return r
}

// use reads from another source; nil gives the last one up.
func (r *frameReader) use(src io.Reader) {
	r.src = source{Reader: src}
	r.Reset(&r.src)
}

// peek reads one frame whose payload stays in the buffer, where it is valid until
// r is used again; the caller discards so many bytes. So no byte is copied twice:
// bufio moves what it has to the front before it reads more, so little beyond a
// frame is read.
func (r *frameReader) peek() (typ byte, payload []byte, size int, err error) {
	head, err := r.Peek(frameHead)
	if err != nil {
		if len(head) > 0 {
			err = noEOF(err)
		}
		return 0, nil, 0, err
	}
	typ = head[0]
	n := int(binary.BigEndian.Uint32(head[1:]))
	size = frameHead + n
	if size > r.Size() {
		return 0, nil, 0, &errProtocol{fmt.Sprintf("frame of %d bytes, at most %d are allowed here", n, r.Size()-frameHead)}
	}
	r.src.most = max(0, size-r.Buffered()) + frameHead
	payload, err = r.Peek(size)
	r.src.most = 0
	if err != nil {
		return 0, nil, 0, noEOF(err)
	}
	return typ, payload[frameHead:], size, nil
}

// writeMessage sends v as JSON behind its length.
func writeMessage(w io.Writer, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if len(body) > maxMessage {
		return &Error{Code: ErrTooLarge, Message: fmt.Sprintf("message of %d bytes, at most %d are allowed", len(body), maxMessage)}
	}
	buf := make([]byte, 4, 4+len(body))
	binary.BigEndian.PutUint32(buf, uint32(len(body)))
	_, err = w.Write(append(buf, body...))
	return err
}

// readMessage reads what writeMessage wrote; limit bounds its size. It reads
// not a byte more, so r need not be buffered.
func readMessage(r io.Reader, limit int, v any) error {
	n, err := readSize(r, limit)
	if err != nil {
		return err
	}
	return readSized(r, n, v)
}

// readSize reads how long the message is that follows.
func readSize(r io.Reader, limit int) (int, error) {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint32(head[:]))
	if n > limit {
		return 0, &errProtocol{fmt.Sprintf("message of %d bytes, at most %d are allowed", n, limit)}
	}
	return n, nil
}

// readSized reads the message whose size was read.
func readSized(r io.Reader, n int, v any) error {
	body, err := readBody(r, n)
	if err != nil {
		return noEOF(err)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return &errProtocol{"a message that is not one: " + err.Error()}
	}
	return nil
}

// readBody reads n bytes. The peer's word for the size is not believed before a
// good part of the bytes is there.
func readBody(r io.Reader, n int) ([]byte, error) {
	body := make([]byte, 0, min(n, 64<<10))
	for len(body) < n {
		if len(body) == cap(body) {
			body = append(make([]byte, 0, min(n, 4*cap(body))), body...)
		}
		free := body[len(body):cap(body)]
		if _, err := io.ReadFull(r, free); err != nil {
			return nil, err
		}
		body = body[:cap(body)]
	}
	return body, nil
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
