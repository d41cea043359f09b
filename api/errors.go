package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/boxed-mesh/boxed"
)

// statuses is the one table from codes to HTTP statuses.
var statuses = map[boxed.Code]int{
	boxed.CodeInvalid:         http.StatusBadRequest,
	boxed.CodeUnavailable:     http.StatusBadRequest,
	boxed.CodeUnauthenticated: http.StatusUnauthorized,
	boxed.CodeForbidden:       http.StatusForbidden,
	boxed.CodeNotFound:        http.StatusNotFound,
	boxed.CodeMethod:          http.StatusMethodNotAllowed,
	boxed.CodeConflict:        http.StatusConflict,
	boxed.CodeGone:            http.StatusGone,
	boxed.CodeCursorExpired:   http.StatusGone,
	boxed.CodeTooLarge:        http.StatusRequestEntityTooLarge,
	boxed.CodeMediaType:       http.StatusUnsupportedMediaType,
	boxed.CodeRange:           http.StatusRequestedRangeNotSatisfiable,
	boxed.CodeImage:           http.StatusUnprocessableEntity,
	boxed.CodeStartFailed:     http.StatusUnprocessableEntity,
	boxed.CodeQuota:           http.StatusTooManyRequests,
	boxed.CodeRateLimited:     http.StatusTooManyRequests,
	boxed.CodeCanceled:        499, // as nginx has it: the client is gone, only logs see it
	boxed.CodeInternal:        http.StatusInternalServerError,
	boxed.CodeLost:            http.StatusBadGateway,
	boxed.CodeExhausted:       http.StatusServiceUnavailable,
	boxed.CodeNotReady:        http.StatusServiceUnavailable,
	boxed.CodeDeadline:        http.StatusGatewayTimeout,
	boxed.CodeNoSpace:         http.StatusInsufficientStorage,
}

// Status is the HTTP status of a code; 500 for one that is not in the table.
func Status(code boxed.Code) int {
	if s, ok := statuses[code]; ok {
		return s
	}
	return http.StatusInternalServerError
}

// problem is the one shape of errors.
type problem struct {
	Code      boxed.Code     `json:"code"`
	Message   string         `json:"message"`
	Detail    map[string]any `json:"detail,omitempty"`
	RequestID string         `json:"request_id"`
}

func problemOf(err error, requestID string) problem {
	e := boxed.AsError(err)
	return problem{e.Code, e.Message, e.Detail, requestID}
}

func (p problem) json() []byte {
	raw, err := json.Marshal(p)
	if err != nil { // a detail that cannot be written: the rest still can
		p.Detail = nil
		raw, _ = json.Marshal(p)
	}
	return raw
}

// fail answers with an error. Nothing must have been written before.
func (c *call) fail(err error) {
	err = c.settle(err)
	e := boxed.AsError(err)
	c.code, c.err = e.Code, err
	h := c.w.Header()
	for _, name := range []string{"Content-Range", "Content-Disposition", "Last-Modified", "Location", "X-Boxed-File"} {
		h.Del(name)
	}
	h.Set("Content-Type", "application/json")
	status := Status(e.Code)
	switch {
	case e.Code == boxed.CodeRange && e.Detail["size"] != nil:
		h.Set("Content-Range", fmt.Sprintf("bytes */%v", e.Detail["size"]))
	case status == http.StatusUnauthorized:
		h.Set("WWW-Authenticate", `Bearer realm="boxed"`)
	case h.Get("Retry-After") != "":
	case status == http.StatusServiceUnavailable || e.Code == boxed.CodeRateLimited:
		h.Set("Retry-After", "2")
	}
	raw := problemOf(err, c.id).json()
	h.Set("Content-Length", strconv.Itoa(len(raw))) // so that the end is seen before the handler's
	c.w.WriteHeader(status)
	c.w.Write(raw)
}

// settle puts the reason that the server itself ended the call in front of
// whatever the port made of that.
func (c *call) settle(err error) error {
	if err == nil || c.ctx == nil || c.ctx.Err() == nil {
		return err
	}
	if cause := ended(c.ctx); cause != nil {
		return cause
	}
	return err
}

// ended is the server's reason for having ended ctx, as an error for the
// client, or nil.
func ended(ctx context.Context) *boxed.Error {
	cause := context.Cause(ctx)
	if errors.Is(cause, boxed.ErrGoingAway) {
		return boxed.Errorf(boxed.CodeLost, "the node is going away; what runs inside lives on, so attach to it again later").
			With("reason", "going_away")
	}
	var e *boxed.Error
	if errors.As(cause, &e) {
		return e
	}
	return nil
}

var errRevoked = &boxed.Error{Code: boxed.CodeUnauthenticated, Message: "the API key was revoked or has expired"}
