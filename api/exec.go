package api

import (
	"bytes"
	"encoding/base64"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/boxed-mesh/boxed"
)

// execWire is an ExecRequest as it arrives.
type execWire struct {
	boxed.ExecRequest
	ArgsBase64 [][]byte `json:"args_base64"`
}

// execCall is the request of the one JSON call. Its Stdin hides the boolean of
// the embedded request.
type execCall struct {
	execWire
	Stdin       *string `json:"stdin"`
	StdinBase64 []byte  `json:"stdin_base64"`
}

// request is the port's form, after what a schema cannot say has been checked.
func (w execWire) request() (boxed.ExecRequest, error) {
	req := w.ExecRequest
	if w.ArgsBase64 != nil {
		req.Args = make([]string, len(w.ArgsBase64))
		for i, a := range w.ArgsBase64 {
			req.Args[i] = string(a)
		}
	}
	total := 0
	for i, a := range req.Args {
		if strings.IndexByte(a, 0) >= 0 {
			return req, invalidField("args["+strconv.Itoa(i)+"]", "must not hold a NUL")
		}
		total += len(a) + 1
	}
	for k, v := range req.Env {
		if strings.IndexByte(v, 0) >= 0 {
			return req, invalidField("env."+clip(k), "must not hold a NUL")
		}
		total += len(k) + len(v) + 2
	}
	switch {
	case total > boxed.MaxArgBytes:
		return req, invalidField("args", "arguments and environment are more than 2 MiB together; use code, stdin or a file")
	case len(req.Code) > boxed.MaxCodeBytes:
		return req, invalidField("code", "must be at most 8 MiB; write a file and run that")
	case strings.IndexByte(req.Dir, 0) >= 0:
		return req, invalidField("dir", "must not hold a NUL")
	}
	if req.Language != "" {
		req.Language = boxed.CanonicalLanguage(req.Language)
	}
	return req, nil
}

// endless maps "never" to the port's own word for no timeout.
func endless(d boxed.Duration) boxed.Duration {
	if d == boxed.Never {
		return 0
	}
	return d
}

// execResult is the answer of the one JSON call.
type execResult struct {
	ExecID boxed.ExecID `json:"exec_id"`
	boxed.ExitStatus
	Stdout          string `json:"stdout"`
	StdoutEncoding  string `json:"stdout_encoding"`
	StdoutTruncated bool   `json:"stdout_truncated"`
	Stderr          string `json:"stderr"`
	StderrEncoding  string `json:"stderr_encoding"`
	StderrTruncated bool   `json:"stderr_truncated"`
}

func (c *call) exec() error {
	in, err := readInto[execCall](c)
	if err != nil {
		return err
	}
	req, err := in.request()
	if err != nil {
		return err
	}
	switch {
	case in.Stdin != nil && in.StdinBase64 != nil:
		return invalidField("stdin", "excludes stdin_base64")
	case in.Stdin != nil:
		req.Stdin = strings.NewReader(*in.Stdin)
	case in.StdinBase64 != nil:
		req.Stdin = bytes.NewReader(in.StdinBase64)
	}
	req.OpenStdin = req.Stdin != nil
	if req.Timeout == 0 {
		req.Timeout = boxed.DefaultExecTimeout
	}
	req.Timeout = endless(req.Timeout)
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	var out execResult
	var started onceID
	stdout, stderr := collector{held: &c.held}, collector{held: &c.held}
	req.Stdout, req.Stderr, req.Started = &stdout, &stderr, started.set
	status, err := c.s.cfg.Service.Exec(c.ctx, id, req)
	if err = c.outcome(err); err != nil {
		return err
	}
	out.ExecID, out.ExitStatus = started.get(), status
	out.Stdout, out.StdoutEncoding, out.StdoutTruncated = stdout.text()
	out.Stderr, out.StderrEncoding, out.StderrTruncated = stderr.text()
	out.StdoutBytes, out.StderrBytes = max(status.StdoutBytes, stdout.total), max(status.StderrBytes, stderr.total)
	return c.reply(http.StatusOK, out)
}

// outcome is the error that a call ends with: the server's own reason for
// having ended it comes before a status or an error that only follows from it.
func (c *call) outcome(err error) error {
	if c.ctx.Err() != nil {
		if own := ended(c.ctx); own != nil {
			return own
		}
	}
	return err
}

// onceID hands an exec's ID from the port's goroutine to the handler's.
type onceID struct {
	mu sync.Mutex
	id boxed.ExecID
}

func (o *onceID) set(id boxed.ExecID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.id = id
}

func (o *onceID) get() boxed.ExecID {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.id
}

// collector keeps the first CollectedOutput bytes, as far as there is memory for
// them, and counts the rest.
type collector struct {
	held  *holding
	buf   []byte
	full  bool
	total int64
}

// collectCost is how many bytes are held for each that is collected: the buffer
// and the answer that is made of it.
const collectCost = 2

func (c *collector) Write(p []byte) (int, error) {
	c.total += int64(len(p))
	some := p[:min(len(p), boxed.CollectedOutput-len(c.buf))]
	if c.full = c.full || !c.held.take(collectCost*len(some)); !c.full {
		c.buf = append(c.buf, some...)
	}
	return len(p), nil
}

// text is what was kept, as text or in base64, and whether there was more. A
// character that the limit has cut is left out, so that text stays text.
func (c *collector) text() (s, encoding string, truncated bool) {
	kept := c.buf
	truncated = c.total > int64(len(kept))
	if truncated {
		kept = whole(kept)
	}
	if utf8.Valid(kept) {
		return string(kept), "utf-8", truncated
	}
	return base64.StdEncoding.EncodeToString(c.buf), "base64", truncated
}

// whole cuts an incomplete character off the end.
func whole(p []byte) []byte {
	for i := 1; i < utf8.UTFMax && i <= len(p); i++ {
		if b := p[len(p)-i]; utf8.RuneStart(b) {
			if !utf8.FullRune(p[len(p)-i:]) {
				return p[:len(p)-i]
			}
			break
		}
	}
	return p
}

func (c *call) startExec() error {
	in, err := readInto[execWire](c)
	if err != nil {
		return err
	}
	req, err := in.request()
	if err != nil {
		return err
	}
	req.Timeout = endless(req.Timeout)
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	e, err := c.s.cfg.Service.StartExec(c.ctx, id, req)
	if err != nil {
		return err
	}
	c.w.Header().Set("Location", "/v1/sandboxes/"+string(id)+"/execs/"+string(e.ID))
	return c.reply(http.StatusCreated, e)
}

func (c *call) listExecs() error {
	id, err := c.sandbox()
	if err != nil {
		return err
	}
	list, err := c.s.cfg.Service.ListExecs(c.ctx, id)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]any{"execs": never(list)})
}

// never is a slice that is never null in JSON.
func never[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

func (c *call) execRef() (boxed.ID, boxed.ExecID, error) {
	id, err := c.sandbox()
	return id, boxed.ExecID(c.v.str("exec")), err
}

func (c *call) getExec() error {
	id, exec, err := c.execRef()
	if err != nil {
		return err
	}
	e, err := c.s.cfg.Service.GetExec(c.ctx, id, exec)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, e)
}

func (c *call) killExec() error {
	id, exec, err := c.execRef()
	if err != nil {
		return err
	}
	if err := c.s.cfg.Service.KillExec(c.ctx, id, exec); err != nil {
		return err
	}
	return c.noContent()
}

func (c *call) signalExec() error {
	in, err := readInto[struct {
		Signal string `json:"signal"`
		Tree   bool   `json:"tree"`
	}](c)
	if err != nil {
		return err
	}
	id, exec, err := c.execRef()
	if err != nil {
		return err
	}
	if err := c.s.cfg.Service.SignalExec(c.ctx, id, exec, in.Signal, in.Tree); err != nil {
		return err
	}
	return c.noContent()
}

func (c *call) waitExec() error {
	id, exec, err := c.execRef()
	if err != nil {
		return err
	}
	ctx, cancel, err := c.patience()
	if err != nil {
		return err
	}
	defer cancel()
	e, err := c.s.cfg.Service.GetExec(ctx, id, exec)
	if err == nil && e.Running {
		// The port has no wait of its own: to attach without writers is to wait.
		if _, err = c.s.cfg.Service.Attach(ctx, id, exec, boxed.AttachRequest{}); err == nil || c.polled(ctx, err) {
			e, err = c.s.cfg.Service.GetExec(c.ctx, id, exec)
		}
	}
	if err = c.outcome(err); err != nil {
		return err
	}
	return c.reply(http.StatusOK, e)
}

// execOutput streams one of an exec's outputs as plain bytes. The header waits
// for the first byte, because only then is known whether a part is missing.
func (c *call) execOutput() error {
	id, exec, err := c.execRef()
	if err != nil {
		return err
	}
	offset := c.v.integer("offset")
	w := &plainOutput{w: c.writer(), offset: offset}
	defer w.w.rest()
	skip := int64(1) << 53 // of the other stream: all of it
	req := boxed.AttachRequest{NoFollow: !c.v.boolean("follow")}
	stream := c.v.str("stream")
	req.Gap = func(s string, n int64) {
		if s == stream {
			w.gap(n)
		}
	}
	if stream == "stdout" {
		req.Stdout, req.StdoutOffset, req.StderrOffset = w, offset, skip
	} else {
		req.Stderr, req.StderrOffset, req.StdoutOffset = w, offset, skip
	}
	_, err = c.s.cfg.Service.Attach(c.ctx, id, exec, req)
	if err = c.outcome(err); err != nil {
		return err
	}
	if w.lost {
		return boxed.Errorf(boxed.CodeLost, "bytes in the middle are no longer kept")
	}
	w.header()
	return nil
}

type plainOutput struct {
	w      *idleWriter
	offset int64
	began  bool
	lost   bool
}

func (p *plainOutput) gap(n int64) {
	if p.began {
		p.lost = true
		return
	}
	p.offset += n
}

func (p *plainOutput) header() {
	if p.began {
		return
	}
	p.began = true
	h := p.w.c.w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("X-Boxed-Offset", strconv.FormatInt(p.offset, 10))
	p.w.c.w.WriteHeader(http.StatusOK)
}

func (p *plainOutput) Write(b []byte) (int, error) {
	if p.lost {
		return 0, errors.New("bytes are missing")
	}
	p.header()
	n, err := p.w.Write(b)
	if err == nil {
		err = p.w.flush() // somebody is looking at it
	}
	return n, err
}

var _ io.Writer = (*plainOutput)(nil)
