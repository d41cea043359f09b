package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"

	"github.com/boxed-mesh/boxed"
)

// maxProblem bounds an error's body, in bytes.
const maxProblem = 256 << 10

// problem is the API's one shape of errors.
type problem struct {
	Code      boxed.Code     `json:"code"`
	Message   string         `json:"message"`
	Detail    map[string]any `json:"detail"`
	RequestID string         `json:"request_id"`
}

// err is the problem as an error. The request's ID is in its Detail, for a
// person to quote.
func (p problem) err() *boxed.Error {
	e := &boxed.Error{Code: p.Code, Message: p.Message, Detail: p.Detail}
	if p.RequestID != "" {
		e = e.With("request_id", p.RequestID)
	}
	return e
}

// responseError reads an error from an answer, and closes its body.
func responseError(resp *http.Response) error {
	defer resp.Body.Close()
	raw, _ := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
	var p problem
	if err := json.Unmarshal(raw, &p); err == nil && p.Code != "" {
		return p.err()
	}
	// Not a boxed-node, or a proxy in front of it.
	code := boxed.CodeInternal
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		code = boxed.CodeUnauthenticated
	case resp.StatusCode == http.StatusForbidden:
		code = boxed.CodeForbidden
	case resp.StatusCode == http.StatusRequestEntityTooLarge:
		code = boxed.CodeTooLarge
	case resp.StatusCode == http.StatusGatewayTimeout:
		code = boxed.CodeDeadline
	case resp.StatusCode == http.StatusBadGateway || resp.StatusCode == http.StatusServiceUnavailable:
		code = boxed.CodeNotReady
	}
	return boxed.Errorf(code, "the answer is not a boxed-node's: %s; is the endpoint right?", resp.Status).With("status", resp.StatusCode)
}

// transportError is what it means that no answer came.
func (c *Client) transportError(ctx context.Context, err error) error {
	var known *boxed.Error
	var op *net.OpError
	switch {
	case ctx.Err() != nil:
		return contextError(ctx)
	case errors.As(err, &known):
		return known // from reading the caller's own body
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, os.ErrNotExist):
		return &boxed.Error{
			Code: boxed.CodeNotReady, Err: err,
			Message: fmt.Sprintf("no boxed-node answers at %s: is it running? (make up)", c.name),
		}
	case errors.As(err, &op) && op.Op == "dial":
		return &boxed.Error{Code: boxed.CodeNotReady, Err: err, Message: fmt.Sprintf("cannot reach %s: %v", c.name, op.Err)}
	case broke(err):
		return &boxed.Error{
			Code: boxed.CodeLost, Err: err,
			Message: fmt.Sprintf("the connection to %s broke before the answer came; the outcome is not known", c.name),
		}
	}
	return &boxed.Error{Code: boxed.CodeNotReady, Err: err, Message: fmt.Sprintf("cannot speak to %s: %v", c.name, unwrapURL(err))}
}

// broke reports whether a connection that was there has gone.
func broke(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)
}

func unwrapURL(err error) error {
	if inner := errors.Unwrap(err); inner != nil {
		return inner // without the URL, which url.Error repeats
	}
	return err
}

// contextError is the end of the caller's own context.
func contextError(ctx context.Context) error {
	return boxed.AsError(ctx.Err())
}
