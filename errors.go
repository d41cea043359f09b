package boxed

import (
	"context"
	"errors"
	"fmt"
)

// Code says what kind of error it is. The list is closed: a caller may switch
// on it, and each front door has one table from it to its own statuses.
type Code string

// The codes. Each is also an error, so errors.Is(err, boxed.CodeNotFound) works.
const (
	CodeInvalid         Code = "invalid"         // the request is wrong; Field says where
	CodeUnavailable     Code = "unavailable"     // well formed, but this node or release has no such thing
	CodeUnauthenticated Code = "unauthenticated" // no valid key
	CodeForbidden       Code = "forbidden"       // a valid key that may not do this
	CodeNotFound        Code = "not_found"       // absent, or not visible to this caller
	CodeConflict        Code = "conflict"        // the present state does not allow it
	CodeGone            Code = "gone"            // ended; Detail["reason"] says why
	CodeTooLarge        Code = "too_large"       // a body, a field or a result over its bound
	CodeImage           Code = "image"           // the image cannot be had; Detail["reason"] is an ImageReason
	CodeQuota           Code = "quota"           // the owner's own limit
	CodeRateLimited     Code = "rate_limited"    // too many requests or failures; try later
	CodeExhausted       Code = "exhausted"       // no room on any node that fits; Detail["nodes"] has the reasons
	CodeNotReady        Code = "not_ready"       // the node cannot serve now (engine down, draining); try later
	CodeNoSpace         Code = "no_space"        // a disk or a sandbox's tmpfs is full
	CodeDeadline        Code = "deadline"        // a deadline passed before the answer was there
	CodeCanceled        Code = "canceled"        // the caller went away or asked to stop
	CodeLost            Code = "lost"            // the link to the sandbox or its node broke; the outcome is unknown
	CodeStartFailed     Code = "start_failed"    // the program could not be started; nothing ran
	CodeCursorExpired   Code = "cursor_expired"  // events before this cursor are no longer kept
	CodeRange           Code = "range"           // a byte range outside the file
	CodeMethod          Code = "method"          // the path exists, the method does not
	CodeMediaType       Code = "media_type"      // a body of a type that the call does not take
	CodeInternal        Code = "internal"        // our fault
)

// Error lets a bare code be a target of errors.Is.
func (c Code) Error() string { return string(c) }

// Error is an error that a caller may act on.
type Error struct {
	Code    Code           // what kind
	Message string         // for a person; says what to do next
	Detail  map[string]any // further facts for programs: "field", "reason", "nodes", …
	Err     error          // the cause, for logs; never sent to a client
}

// Errorf makes an Error. A %w verb sets its cause.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Err: errors.Unwrap(err)}
}

// Error is the message.
func (e *Error) Error() string { return e.Message }

// Unwrap is the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is reports whether target is this error's code, or an *Error with the same code.
func (e *Error) Is(target error) bool {
	if code, ok := target.(Code); ok {
		return e.Code == code
	}
	return false
}

// WithField names the field of the request that is wrong, as a JSON path like
// "limits.memory_bytes".
func (e *Error) WithField(field string) *Error { return e.With("field", field) }

// With adds one fact to Detail and returns e.
func (e *Error) With(key string, value any) *Error {
	if e.Detail == nil {
		e.Detail = map[string]any{}
	}
	e.Detail[key] = value
	return e
}

// Field is the field named by WithField, or "".
func (e *Error) Field() string {
	f, _ := e.Detail["field"].(string)
	return f
}

// CodeOf finds the code of err: that of the first *Error in its chain, or
// deadline and canceled for the context's errors, or internal; "" for nil.
func CodeOf(err error) Code {
	var e *Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, context.DeadlineExceeded):
		return CodeDeadline
	case errors.Is(err, context.Canceled):
		return CodeCanceled
	}
	return CodeInternal
}

// AsError is err as an *Error: itself, or one with the code of CodeOf and, for
// what nobody meant a caller to see, a message without the cause's text.
func AsError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	switch code := CodeOf(err); code {
	case CodeDeadline:
		return &Error{Code: code, Message: "the deadline passed", Err: err}
	case CodeCanceled:
		return &Error{Code: code, Message: "canceled", Err: err}
	default:
		return &Error{Code: CodeInternal, Message: "internal error; the node's log has the cause under this request's ID", Err: err}
	}
}

// ImageReason tells apart why an image cannot be had.
type ImageReason string

// The reasons an image cannot be had.
const (
	ImageNotFound     ImageReason = "not_found"
	ImageUnauthorized ImageReason = "unauthorized"
	ImageNoRoute      ImageReason = "no_route"
	ImageNoSpace      ImageReason = "no_space"
	ImageTimeout      ImageReason = "timeout"
	ImageUnusable     ImageReason = "unusable" // wrong architecture, or its configuration is out of bounds
)

// ErrGoingAway is the cause ([context.Cause]) of a context that ends because
// this daemon stops, not because its caller left. What runs for such a context
// is left running: an exec can be attached to again once the daemon is back.
var ErrGoingAway = errors.New("the daemon is going away")
