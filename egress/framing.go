package egress

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Bounds of what a client may send, in bytes where nothing else is said.
const (
	framingHead     = 64 << 10 // request line and fields
	framingFields   = 200      // fields of a head, number
	framingMethod   = 32
	framingTrailers = 8 << 10
	framingChunkExt = 256     // extensions of one chunk
	framingLength   = 1 << 62 // a body, or a chunk
	framingKeeps    = 512     // the largest buffer that an idle connection keeps

	refusalWrite  = 5 * time.Second        // for a client that does not read its refusal
	refusalLinger = 500 * time.Millisecond // for a client that still sends
	refusalDrain  = 256 << 10
)

// framingError says what is wrong with a request. Why never holds what the client
// sent.
type framingError struct {
	Status int // of HTTP
	Why    string
}

func (e *framingError) Error() string { return "request framing: " + e.Why }

func misframed(why string) error { return &framingError{http.StatusBadRequest, why} }

func oversized(why string) error {
	return &framingError{http.StatusRequestHeaderFieldsTooLarge, why}
}

// framingPhase is what comes next on the wire.
type framingPhase int

const (
	phaseHead      framingPhase = iota
	phaseData                   // of a body with a length, or of a chunk
	phaseChunkSize              // the line before a chunk's data
	phaseChunkEnd               // the line end after it
	phaseTrailers
	phaseRaw // no HTTP any more, for ever
)

// framingTurn is how far a connection is on the way from HTTP to something else.
type framingTurn int

const (
	turnNone  framingTurn = iota
	turnAsked             // a CONNECT or a websocket's head was passed on
	turnTaken             // and answered with yes
	turnDenied
)

// framing sits between a client's connection and a net/http Server and passes on
// only requests that are framed in exactly one way. The server alone is not enough:
// it takes a length together with chunks, drops the length, keeps the connection,
// and tells no handler. What two parsers can read in two ways is a request that
// only one of them judges.
//
// The bytes are the client's own, never changed, and no Read returns bytes of two
// messages.
//
// After a CONNECT or the head of a websocket everything is passed on, for ever. If
// the first thing written then is not the yes to it, the client is read no further:
// otherwise a denied CONNECT would be the way around all of this.
//
// One goroutine reads and one writes, as the server has it. The server must have a
// limit of 64 KiB or more for heads, and an idle timeout: from its second request
// on, a client's slow head is idleness to the server.
type framing struct {
	net.Conn

	r       *bufio.Reader
	phase   framingPhase
	after   framingPhase // phaseData
	left    uint64       // bytes of it
	piece   []byte       // head, chunk line or trailers
	line    int          // where the piece's present line begins
	whole   bool         // the piece was checked, and is passed on
	passed  int          // bytes of it
	refused *framingError
	// told is called once, with what is wrong, when a request is refused.
	told func(*framingError)
	// The client has had its last answer, and time to read it.
	lingered bool

	mu      sync.Mutex
	said    bool // the refusal is written; nothing comes after it
	turn    framingTurn
	connect bool   // the turn is a CONNECT's
	answer  []byte // the first bytes of the answer to it
}

func newFraming(conn net.Conn, told func(*framingError)) *framing {
	return &framing{Conn: conn, r: bufio.NewReaderSize(conn, 4<<10), told: told}
}

// raw says whether what is read now is no HTTP any more. It is true from when the
// server has all of the head that asked for it.
func (f *framing) raw() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.turn != turnNone
}

// Read passes on what was checked. It returns a *framingError once a request is
// refused, and for ever after. A Read that a deadline ended may be repeated.
func (f *framing) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for !f.whole && f.refused == nil {
		switch f.phase {
		case phaseData:
			return f.data(p)
		case phaseRaw:
			return f.beyond(p)
		}
		if err := f.next(); err != nil {
			if !errors.As(err, &f.refused) {
				return 0, err
			}
			f.told(f.refused)
		}
	}
	if f.refused != nil {
		// Between requests, and only by a Read of more than one byte: the server looks
		// ahead by one byte while a handler runs, and reads on when all is answered. In a
		// body, the answer is the handler's.
		if f.phase == phaseHead && len(p) > 1 {
			f.refuse()
		}
		return 0, f.refused
	}
	n := copy(p, f.piece[f.passed:])
	if f.passed += n; f.passed == len(f.piece) {
		f.release()
	}
	return n, nil
}

// data passes on the data of a body or chunk.
func (f *framing) data(p []byte) (int, error) {
	if uint64(len(p)) > f.left {
		p = p[:f.left]
	}
	n, err := f.r.Read(p)
	if f.left -= uint64(n); f.left == 0 {
		f.phase = f.after
	}
	return n, err
}

// beyond passes on what follows a turn.
func (f *framing) beyond(p []byte) (int, error) {
	f.mu.Lock()
	denied := f.turn == turnDenied
	f.mu.Unlock()
	// Not for the look ahead: the no may be being written still.
	if denied && len(p) > 1 {
		f.linger()
		return 0, io.EOF
	}
	return f.r.Read(p)
}

// rest is what was read and not passed on, once it is no HTTP any more: for whoever takes
// the connection itself.
func (f *framing) rest() []byte {
	if f.phase != phaseRaw {
		return nil
	}
	rest, _ := f.r.Peek(f.r.Buffered())
	return rest
}

// release is called when the piece has been passed on.
func (f *framing) release() {
	f.whole, f.line, f.passed = false, 0, 0
	if f.piece = f.piece[:0]; cap(f.piece) > framingKeeps {
		f.piece = nil
	}
	if f.phase == phaseRaw {
		f.mu.Lock()
		f.turn = turnAsked
		f.mu.Unlock()
	}
}

// next reads and checks a line.
func (f *framing) next() error {
	switch f.phase {
	case phaseHead:
		line, err := f.readLine(framingHead, oversized("the head of the request is larger than 64 KiB"))
		if err != nil {
			return err
		}
		if line == "" {
			return f.head()
		}
	case phaseChunkSize:
		line, err := f.readLine(16+framingChunkExt+2, misframed("the line of a chunk's size is too long"))
		if err != nil {
			return err
		}
		return f.chunk(line)
	case phaseChunkEnd:
		if _, err := f.readLine(2, misframed("a chunk does not end where its size says")); err != nil {
			return err
		}
		f.phase, f.whole = phaseChunkSize, true
	case phaseTrailers:
		line, err := f.readLine(framingTrailers, oversized("the trailers are larger than 8 KiB"))
		if err != nil {
			return err
		}
		if line == "" {
			f.phase, f.whole = phaseHead, true
			return nil
		}
		return checkTrailer(line)
	}
	return nil
}

// readLine reads a line into the piece and returns it without its end. What it read
// when an error of the connection came is kept: the server ends its look ahead with
// a deadline.
func (f *framing) readLine(limit int, tooLong error) (string, error) {
	for {
		part, err := f.r.ReadSlice('\n')
		f.piece = append(f.piece, part...)
		if len(f.piece) > limit {
			return "", tooLong
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err == io.EOF && (len(f.piece) > 0 || f.phase != phaseHead):
			return "", io.ErrUnexpectedEOF
		case err != nil:
			return "", err
		}
		line, ok := strings.CutSuffix(string(f.piece[f.line:]), "\r\n")
		if !ok {
			return "", misframed("a line ends without a carriage return")
		}
		f.line = len(f.piece)
		return line, nil
	}
}

// head judges a whole head and sets what follows it.
func (f *framing) head() error {
	lines := strings.Split(strings.TrimSuffix(string(f.piece), "\r\n\r\n"), "\r\n")
	if len(lines)-1 > framingFields {
		return oversized("the request has more than 200 fields")
	}
	var h framingHeader
	if err := h.request(lines[0]); err != nil {
		return err
	}
	for _, line := range lines[1:] {
		if err := h.field(line); err != nil {
			return err
		}
	}
	if err := h.check(); err != nil {
		return err
	}
	switch {
	case h.method == http.MethodConnect || h.upgrades > 0:
		f.phase = phaseRaw
		f.mu.Lock()
		f.connect = h.method == http.MethodConnect
		f.mu.Unlock()
	case h.codings > 0:
		f.phase = phaseChunkSize
	case h.length > 0:
		f.phase, f.after, f.left = phaseData, phaseHead, h.length
	}
	f.whole = true
	return nil
}

// chunk judges the line before a chunk.
func (f *framing) chunk(line string) error {
	digits, extensions, extended := strings.Cut(line, ";")
	if len(digits) == 0 || len(digits) > 16 || strings.Trim(digits, "0123456789abcdefABCDEF") != "" {
		return misframed("the size of a chunk is not 1 to 16 hexadecimal digits")
	}
	size, err := strconv.ParseUint(digits, 16, 64)
	if err != nil || size > framingLength {
		return misframed("a chunk is too large")
	}
	if extended && len(extensions)+1 > framingChunkExt {
		return misframed("the extensions of a chunk are too long")
	}
	if !isFieldValue(extensions) {
		return misframed("a control character in the extensions of a chunk")
	}
	if size == 0 {
		// The last chunk goes with the trailers, so that they are judged before the server
		// knows that the body is complete.
		f.phase = phaseTrailers
		return nil
	}
	f.phase, f.after, f.left, f.whole = phaseData, phaseChunkEnd, size, true
	return nil
}

// Write passes on what the server answers.
func (f *framing) Write(p []byte) (int, error) {
	if !f.mayWrite(p) {
		return 0, net.ErrClosed
	}
	return f.Conn.Write(p)
}

// mayWrite says whether there is no refusal yet, and reads the answer to a turn. An
// interim answer is taken for a no.
func (f *framing) mayWrite(p []byte) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.turn != turnAsked {
		return !f.said
	}
	const status = len("HTTP/1.1 200")
	f.answer = append(f.answer, p[:min(len(p), status-len(f.answer))]...)
	if len(f.answer) < status {
		return true
	}
	f.turn = turnDenied
	code := string(f.answer[len("HTTP/1.1 "):])
	if (f.connect && code[0] == '2') || (!f.connect && code == "101") {
		f.turn = turnTaken
	}
	f.answer = nil
	return true
}

// CloseWrite passes on the end of what the server writes.
func (f *framing) CloseWrite() error { return closeWrite(f.Conn) }

// refuse answers a refused request, once, as the last thing on the connection.
func (f *framing) refuse() {
	f.mu.Lock()
	said := f.said
	f.said = true
	f.mu.Unlock()
	if said {
		return
	}
	body, _ := json.Marshal(map[string]string{ // which cannot fail
		"error": "egress_denied", "reason": string(boxed.EgressInvalidRequest), "hint": f.refused.Why,
	})
	answer := fmt.Sprintf("HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: application/json\r\n"+
		"Content-Length: %d\r\nX-Egress-Reason: %s\r\n\r\n%s",
		f.refused.Status, http.StatusText(f.refused.Status), len(body), boxed.EgressInvalidRequest, body)
	_ = f.Conn.SetWriteDeadline(time.Now().Add(refusalWrite))
	if _, err := io.WriteString(f.Conn, answer); err == nil {
		f.linger()
	}
}

// linger reads for a moment, once, what the client still sends after its last answer:
// closing with it unread would reset the connection and could take the answer along.
func (f *framing) linger() {
	if f.lingered {
		return
	}
	f.lingered = true
	_ = f.CloseWrite()
	_ = f.Conn.SetReadDeadline(time.Now().Add(refusalLinger))
	_, _ = io.CopyN(io.Discard, f.Conn, refusalDrain)
}

// framingHeader is what a head says about what follows it.
type framingHeader struct {
	method string
	minor  byte // '0' or '1', of HTTP/1.x
	length uint64
	// How often each is there.
	hosts, lengths, codings, upgrades, expects int
}

// request judges the first line of a head.
func (h *framingHeader) request(line string) error {
	if strings.HasPrefix(line, "PRI * HTTP/2") {
		return misframed("this is HTTP/1.1 only, and the client began with HTTP/2")
	}
	method, rest, _ := strings.Cut(line, " ")
	target, version, ok := strings.Cut(rest, " ")
	switch {
	case !ok || target == "" || strings.ContainsFunc(target, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return misframed("the first line is not a method, a target and a version with one space between them")
	case version != "HTTP/1.0" && version != "HTTP/1.1":
		return misframed("the version is not HTTP/1.0 or HTTP/1.1")
	case !isToken(method) || len(method) > framingMethod:
		return misframed("the method is not a name of at most 32 letters")
	case strings.EqualFold(method, http.MethodTrace) || strings.EqualFold(method, "TRACK"):
		return &framingError{http.StatusMethodNotAllowed, "the method gives back what it was sent, credentials too"}
	}
	h.method, h.minor = method, version[len("HTTP/1.")]
	return nil
}

// field judges one field of a head.
func (h *framingHeader) field(line string) error {
	name, value, err := splitField(line)
	if err != nil {
		return err
	}
	switch strings.ToLower(name) {
	case "host":
		h.hosts++
	case "content-length":
		h.lengths++
		if value == "" || len(value) > 19 || strings.Trim(value, "0123456789") != "" {
			return misframed("Content-Length is not a plain number")
		}
		if h.length, err = strconv.ParseUint(value, 10, 64); err != nil || h.length > framingLength {
			return misframed("Content-Length is too large")
		}
	case "transfer-encoding":
		h.codings++
		if !strings.EqualFold(value, "chunked") {
			return misframed("Transfer-Encoding is not chunked")
		}
	case "expect":
		h.expects++
		if !strings.EqualFold(value, "100-continue") {
			return misframed("Expect is not 100-continue")
		}
	case "upgrade":
		// What else there is, h2c above all, would be a way in that nobody judges.
		h.upgrades++
		if !strings.EqualFold(value, "websocket") {
			return misframed("Upgrade is not websocket; the client can be told to stay with HTTP/1.1")
		}
	}
	return nil
}

// check judges the head as a whole.
func (h *framingHeader) check() error {
	switch {
	case h.hosts > 1:
		return misframed("more than one Host")
	case h.hosts == 0 && h.minor != '0':
		return misframed("no Host")
	case h.lengths > 1:
		return misframed("more than one Content-Length")
	case h.codings > 1:
		return misframed("more than one Transfer-Encoding")
	case h.lengths > 0 && h.codings > 0:
		return misframed("both Content-Length and Transfer-Encoding")
	case h.codings > 0 && h.minor == '0':
		return misframed("Transfer-Encoding in HTTP/1.0")
	case h.expects > 1:
		return misframed("more than one Expect")
	case h.upgrades > 1:
		return misframed("more than one Upgrade")
	case h.upgrades > 0 && (h.method != http.MethodGet || h.minor == '0'):
		return misframed("a websocket begins with GET and HTTP/1.1")
	case (h.upgrades > 0 || h.method == http.MethodConnect) && (h.length > 0 || h.codings > 0):
		// Body or already tunnel: two ways to read it.
		return misframed("a body with CONNECT, or with a websocket's head")
	}
	return nil
}

// checkTrailer judges one trailer. Those that say where a request goes, who sends it
// or where it ends come too late to be judged.
func checkTrailer(line string) error {
	name, _, err := splitField(line)
	if err != nil {
		return err
	}
	switch strings.ToLower(name) {
	case "connection", "content-encoding", "content-length", "content-range", "content-type", "cookie", "expect",
		"authorization", "host", "keep-alive", "proxy-authorization", "proxy-connection", "te", "trailer",
		"transfer-encoding", "upgrade":
		return misframed("a trailer that belongs into the head")
	}
	return nil
}

// splitField splits and judges a field of a head or a trailer.
func splitField(line string) (name, value string, err error) {
	if line[0] == ' ' || line[0] == '\t' {
		return "", "", misframed("a field goes on over a second line")
	}
	name, value, ok := strings.Cut(line, ":")
	if !ok || !isToken(name) {
		return "", "", misframed("a field has no proper name before a colon")
	}
	if !isFieldValue(value) {
		return "", "", misframed("a control character in the value of a field")
	}
	return name, strings.Trim(value, " \t"), nil
}

func isFieldValue(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < ' ' && c != '\t') || c == 0x7f {
			return false
		}
	}
	return true
}

// isToken says whether s is a token as RFC 9110 section 5.6.2 has it.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := 'a' <= c|0x20 && c|0x20 <= 'z'
		if !letter && (c < '0' || c > '9') && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return s != ""
}
