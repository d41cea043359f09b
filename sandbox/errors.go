package sandbox

import (
	"context"
	"errors"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// agentCodes maps what an agent answers to what callers see.
var agentCodes = map[string]boxed.Code{
	agent.ErrInvalid:     boxed.CodeInvalid,
	agent.ErrNotFound:    boxed.CodeNotFound,
	agent.ErrStartFailed: boxed.CodeStartFailed,
	agent.ErrDenied:      boxed.CodeForbidden,
	agent.ErrNoSpace:     boxed.CodeNoSpace,
	agent.ErrConflict:    boxed.CodeConflict,
	agent.ErrTooLarge:    boxed.CodeTooLarge,
	agent.ErrExhausted:   boxed.CodeQuota,
	agent.ErrRange:       boxed.CodeRange,
	agent.ErrUnavailable: boxed.CodeUnavailable,
}

// linkError is an error of the agent link as callers see it. What an agent
// says is text from a sandbox: its code is from a closed list, its message is
// only shown.
func (b *box) linkError(err error) error {
	var answer *agent.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &answer):
		code, known := agentCodes[answer.Code]
		if !known {
			code = boxed.CodeInternal
		}
		e := &boxed.Error{Code: code, Message: clip(answer.Message), Err: err}
		if answer.Path != "" {
			e.With("path", clip(answer.Path))
		}
		return e
	case errors.Is(err, agent.ErrClosed), errors.Is(err, agent.ErrLost):
		if gone := b.alive(); gone != nil {
			return gone
		}
		message := "the link to the sandbox's agent broke; what was asked for may have happened"
		if errors.Is(err, agent.ErrClosed) {
			message = "the node is stopping; the sandbox lives on"
		}
		return &boxed.Error{Code: boxed.CodeLost, Message: message, Err: err}
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	return boxed.Errorf(boxed.CodeInternal, "agent: %w", err)
}

// execError is linkError for a program that did not start: what was not found
// is the program, not the sandbox.
func (b *box) execError(err error) error {
	mapped := b.linkError(err)
	var e *boxed.Error
	var answer *agent.Error
	if !errors.As(err, &answer) || !errors.As(mapped, &e) {
		return mapped
	}
	switch answer.Code {
	case agent.ErrNotFound:
		e.Code = boxed.CodeStartFailed
		e.With("reason", "not_found")
	case agent.ErrStartFailed:
		e.With("reason", "not_executable")
	case agent.ErrInvalid:
		if answer.Path != "" {
			e.With("field", answer.Path)
		}
	}
	return e
}

// clip bounds text from a sandbox.
func clip(s string) string {
	const most = 1 << 10
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}
