package client

import (
	"context"
	"encoding/base64"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/boxed-mesh/boxed"
)

// execWire is an ExecRequest as it is sent.
type execWire struct {
	boxed.ExecRequest
	ArgsBase64 [][]byte `json:"args_base64,omitempty"`
}

// execCall is the request of the one JSON call.
type execCall struct {
	execWire
	Stdin       *[]byte `json:"stdin_base64,omitempty"`
	HideOpen    *string `json:"stdin,omitempty"` // always nil: hides the embedded boolean
	HideTTY     *string `json:"tty,omitempty"`
	HideTTYSize *string `json:"size,omitempty"`
}

// wire prepares a request for JSON, which holds only UTF-8.
func wire(req boxed.ExecRequest) (execWire, error) {
	w := execWire{ExecRequest: req}
	for _, a := range req.Args {
		if !utf8.ValidString(a) {
			w.Args = nil
			for _, a := range req.Args {
				w.ArgsBase64 = append(w.ArgsBase64, []byte(a))
			}
			break
		}
	}
	for k, v := range req.Env {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return w, boxed.Errorf(boxed.CodeInvalid, "the environment must be UTF-8: %q is not", k).WithField("env")
		}
	}
	if !utf8.ValidString(req.Code) {
		return w, boxed.Errorf(boxed.CodeInvalid, "the code must be UTF-8; write a file and run that").WithField("code")
	}
	if !utf8.ValidString(req.Dir) {
		return w, boxed.Errorf(boxed.CodeInvalid, "the directory must be UTF-8").WithField("dir")
	}
	return w, nil
}

// ExecResult is a program's end with its collected output.
type ExecResult struct {
	ID boxed.ExecID
	boxed.ExitStatus
	// Stdout and Stderr are the first boxed.CollectedOutput bytes, or up to three
	// fewer where the limit would split a character.
	Stdout, Stderr []byte
	// Truncated: there was more; StdoutBytes and StderrBytes say how much.
	StdoutTruncated, StderrTruncated bool
}

// Run runs a program in one call and collects its output. The stream fields of
// req but Stdin are not used; Stdin is read to its end first and must fit the
// body of a call (about 11 MiB). A Timeout of 0 means 10 minutes; boxed.Never
// means none. If the call ends early, so does the program.
func (c *Client) Run(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*ExecResult, error) {
	if req.TTY {
		return nil, boxed.Errorf(boxed.CodeInvalid, "one call has no terminal; use Exec").WithField("tty")
	}
	w, err := wire(req)
	if err != nil {
		return nil, err
	}
	in := execCall{execWire: w}
	if req.Stdin != nil {
		raw, err := io.ReadAll(io.LimitReader(req.Stdin, 12<<20))
		if err != nil {
			return nil, &boxed.Error{Code: boxed.CodeInvalid, Message: "read stdin: " + err.Error(), Err: err}
		}
		in.Stdin = &raw
	}
	var out struct {
		ExecID boxed.ExecID `json:"exec_id"`
		boxed.ExitStatus
		Stdout          string `json:"stdout"`
		StdoutEncoding  string `json:"stdout_encoding"`
		StdoutTruncated bool   `json:"stdout_truncated"`
		Stderr          string `json:"stderr"`
		StderrEncoding  string `json:"stderr_encoding"`
		StderrTruncated bool   `json:"stderr_truncated"`
	}
	if err := c.call(ctx, http.MethodPost, sandboxPath(id)+"/exec", nil, in, &out); err != nil {
		return nil, err
	}
	res := &ExecResult{
		ID: out.ExecID, ExitStatus: out.ExitStatus,
		StdoutTruncated: out.StdoutTruncated, StderrTruncated: out.StderrTruncated,
	}
	if res.Stdout, err = decoded(out.Stdout, out.StdoutEncoding); err == nil {
		res.Stderr, err = decoded(out.Stderr, out.StderrEncoding)
	}
	return res, err
}

func decoded(s, encoding string) ([]byte, error) {
	if encoding != "base64" {
		return []byte(s), nil
	}
	raw, err := base64.StdEncoding.DecodeString(s)
	if err != nil {
		return nil, &boxed.Error{Code: boxed.CodeInternal, Message: "the node's answer is not base64", Err: err}
	}
	return raw, nil
}

// Exec runs a program and returns when it has ended and its output has been
// written. With any stream field it uses a WebSocket, and ends the program when
// ctx ends or the connection breaks. It does not wait for a Read on req.Stdin
// that is still blocked when the program has ended; that Read's goroutine ends
// with the Read.
func (c *Client) Exec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (boxed.ExitStatus, error) {
	streams := req.Stdin != nil || req.Stdout != nil || req.Stderr != nil || req.Resize != nil ||
		req.Signals != nil || req.Started != nil || req.TTY
	if !streams {
		if req.Timeout == 0 {
			req.Timeout = boxed.Never // as the port has it; the JSON call has another default
		}
		res, err := c.Run(ctx, id, req)
		if err != nil {
			return boxed.ExitStatus{}, err
		}
		return res.ExitStatus, nil
	}
	req.OpenStdin = req.Stdin != nil
	w, err := wire(req)
	if err != nil {
		return boxed.ExitStatus{}, err
	}
	s := &stream{
		stdin: req.Stdin, stdout: req.Stdout, stderr: req.Stderr,
		resize: req.Resize, signals: req.Signals, started: req.Started,
	}
	return s.run(ctx, c, sandboxPath(id)+"/exec/stream", url.Values{}, w)
}

// StartExec starts a program that outlives the call.
func (c *Client) StartExec(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*boxed.Exec, error) {
	w, err := wire(req)
	if err != nil {
		return nil, err
	}
	return ask[boxed.Exec](ctx, c, http.MethodPost, sandboxPath(id)+"/execs", nil, w)
}

// Attach streams an exec from the offsets. Leaving does not end it.
func (c *Client) Attach(ctx context.Context, id boxed.ID, exec boxed.ExecID, req boxed.AttachRequest) (boxed.ExitStatus, error) {
	q := url.Values{
		"stdout_offset": {strconv.FormatInt(req.StdoutOffset, 10)},
		"stderr_offset": {strconv.FormatInt(req.StderrOffset, 10)},
	}
	if req.NoFollow {
		q.Set("follow", "false")
	}
	if req.Stdin != nil {
		q.Set("stdin", "true")
	}
	s := &stream{
		stdin: req.Stdin, stdout: req.Stdout, stderr: req.Stderr,
		resize: req.Resize, signals: req.Signals, gap: req.Gap,
	}
	return s.run(ctx, c, execPath(id, exec)+"/stream", q, nil)
}

// GetExec describes an exec.
func (c *Client) GetExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) (*boxed.Exec, error) {
	return get[boxed.Exec](ctx, c, execPath(id, exec), nil)
}

// WaitExec returns when the exec has ended.
func (c *Client) WaitExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) (*boxed.Exec, error) {
	for {
		e, err := get[boxed.Exec](ctx, c, execPath(id, exec)+"/wait", url.Values{"timeout": {patience(ctx)}})
		if err != nil || !e.Running {
			return e, err
		}
		if ctx.Err() != nil {
			return nil, contextError(ctx)
		}
	}
}

// ListExecs lists the execs of a sandbox.
func (c *Client) ListExecs(ctx context.Context, id boxed.ID) ([]boxed.Exec, error) {
	out, err := get[struct {
		Execs []boxed.Exec `json:"execs"`
	}](ctx, c, sandboxPath(id)+"/execs", nil)
	if err != nil {
		return nil, err
	}
	return out.Execs, nil
}

// SignalExec signals an exec. "SIGTERM" and "term" are taken as "TERM".
func (c *Client) SignalExec(ctx context.Context, id boxed.ID, exec boxed.ExecID, signal string, tree bool) error {
	in := map[string]any{"signal": strings.TrimPrefix(strings.ToUpper(signal), "SIG"), "tree": tree}
	return c.call(ctx, http.MethodPost, execPath(id, exec)+"/signal", nil, in, nil)
}

// KillExec ends an exec's whole tree.
func (c *Client) KillExec(ctx context.Context, id boxed.ID, exec boxed.ExecID) error {
	return c.call(ctx, http.MethodDelete, execPath(id, exec), nil, nil, nil)
}
