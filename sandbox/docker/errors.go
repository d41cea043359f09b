package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/client"

	"github.com/boxed-mesh/boxed"
)

// engineError gives an error of the engine the code that a caller can act on.
// verb says what was tried.
func (d *Driver) engineError(verb string, err error) error {
	var known *boxed.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return err
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s: %w", verb, err)
	case errors.Is(err, os.ErrPermission), errors.Is(err, syscall.EACCES), isPermissionText(err):
		return &boxed.Error{
			Code: boxed.CodeNotReady, Err: err,
			Message: fmt.Sprintf("the Docker engine at %s refuses this user: run boxed-node as root", d.client.DaemonHost()),
		}
	case isUnreachable(err):
		return &boxed.Error{
			Code: boxed.CodeNotReady, Err: err,
			Message: fmt.Sprintf("no Docker engine answers at %s: start it (systemctl start docker), or name another by docker.host", d.client.DaemonHost()),
		}
	case isNoSpace(err):
		return &boxed.Error{
			Code: boxed.CodeNoSpace, Err: err,
			Message: "the disk of the Docker engine is full: free some (docker image prune), then try again",
		}
	case errdefs.IsNotFound(err):
		return &boxed.Error{Code: boxed.CodeNotFound, Message: verb + ": it does not exist", Err: err}
	case errdefs.IsUnavailable(err):
		return &boxed.Error{Code: boxed.CodeNotReady, Message: "the Docker engine cannot serve now: " + oneLine(err), Err: err}
	}
	return fmt.Errorf("%s: %w", verb, err)
}

// isUnreachable reports whether no engine took the request, or it went away
// before it answered.
func isUnreachable(err error) bool {
	var op *net.OpError
	return client.IsErrConnectionFailed(err) || errors.As(err, &op) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// isPermissionText: the client makes a text of its own of EACCES, without the cause.
func isPermissionText(err error) bool {
	return client.IsErrConnectionFailed(err) && strings.Contains(err.Error(), "permission denied")
}

// isNoSpace: the engine reports ENOSPC and EDQUOT as text, under 500.
func isNoSpace(err error) bool {
	text := err.Error()
	return errors.Is(err, syscall.ENOSPC) || strings.Contains(text, "no space left on device") || strings.Contains(text, "disk quota exceeded")
}

// oneLine is err's text for a person: one line, bounded, nothing that could
// steer a terminal.
func oneLine(err error) string {
	const most = 400
	text := strings.TrimPrefix(err.Error(), "Error response from daemon: ")
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}

// notOurs is the answer about a container that does not exist or belongs to
// somebody else: the two look the same.
func notOurs(id string) *boxed.Error {
	const short = 12
	if len(id) > short {
		id = id[:short]
	}
	return boxed.Errorf(boxed.CodeNotFound, "no container %q of this node", id)
}
