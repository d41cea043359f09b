package ctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
)

// remote runs things on the host that is added.
type remote interface {
	// run runs a shell script with arguments ($1, $2, …) and what stdin has (nil:
	// nothing), and returns what it printed. A script that fails is a *remoteError.
	run(ctx context.Context, stdin io.Reader, script string, args ...string) (string, error)
	// name is the host for people.
	name() string
}

// remoteError is a script that failed on the other host.
type remoteError struct {
	status int
	said   string // its stderr, or else its stdout
}

func (e *remoteError) Error() string {
	if e.said == "" {
		return fmt.Sprintf("it ended with status %d and said nothing", e.status)
	}
	var lines []string
	for line := range strings.Lines(e.said) {
		if line = strings.TrimPrefix(strings.TrimSpace(line), "boxedctl: "); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "; ")
}

// sshRemote reaches a host by the system's ssh, with the keys, the agent and the
// configuration that the person has there.
type sshRemote struct {
	program string
	where   string   // user@host
	options []string // in front of where
}

// sshFailed is ssh's own status, when it is not that of the remote command.
const sshFailed = 255

// newSSH finds ssh. It asks for no password: it is called several times, and
// with the input of others on its stdin.
func newSSH(where, identity string, port int, options []string) (*sshRemote, error) {
	user, host, ok := strings.Cut(where, "@")
	if !ok {
		user, host = "", where
	}
	if host == "" || ok && user == "" || strings.HasPrefix(where, "-") || strings.ContainsFunc(where, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, usagef("%q is not a host to log in to", where).hint("write it like root@192.168.1.12")
	}
	if port < 0 || port > 65535 {
		return nil, usagef("--port must be between 1 and 65535")
	}
	program, err := exec.LookPath("ssh")
	if err != nil {
		return nil, (&problem{err: boxed.Errorf(boxed.CodeUnavailable, "there is no ssh on this machine")}).
			hint("install OpenSSH's client; or by hand: install boxed-node on %s, and there boxedctl cluster join -", where)
	}
	r := &sshRemote{program: program, where: where, options: []string{"-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"}}
	if identity != "" {
		r.options = append(r.options, "-i", identity)
	}
	if port != 0 {
		r.options = append(r.options, "-p", strconv.Itoa(port))
	}
	for _, o := range options {
		r.options = append(r.options, "-o", o)
	}
	return r, nil
}

func (r *sshRemote) name() string { return r.where }

// run passes the script and its arguments as words of one sh, each quoted: the
// remote login shell sees nothing that it could read otherwise.
func (r *sshRemote) run(ctx context.Context, stdin io.Reader, script string, args ...string) (string, error) {
	words := append([]string{"sh", "-c", script, "sh"}, args...)
	for i, w := range words {
		words[i] = shellQuote(w)
	}
	argv := append(append([]string{}, r.options...), "--", r.where, strings.Join(words, " "))
	cmd := exec.CommandContext(ctx, r.program, argv...)
	cmd.Stdin = stdin
	cmd.WaitDelay = 5 * time.Second // a master of the person's own ControlPersist may keep our pipes
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &firstBytes{w: &stdout, left: maxSaid}, &firstBytes{w: &stderr, left: maxSaid}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case err == nil, errors.Is(err, exec.ErrWaitDelay):
		return strings.TrimSpace(stdout.String()), nil
	case !errors.As(err, &exit):
		return "", err
	case exit.ExitCode() == sshFailed:
		return "", sshError(r.where, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(stdout.String()), &remoteError{exit.ExitCode(), firstOf(strings.TrimSpace(stderr.String()), strings.TrimSpace(stdout.String()))}
}

// sshError is why there is no session, with what helps.
func sshError(where, said string) error {
	p := &problem{err: boxed.Errorf(boxed.CodeNotReady, "ssh %s: %s", where, lastLine(firstOf(said, "no session")))}
	switch {
	case strings.Contains(said, "Host key verification failed"):
		return p.hint("its host key is not known here: run ssh %s once, compare the key, and confirm it", where)
	case strings.Contains(said, "Permission denied"):
		return p.hint("log in without a password: ssh-copy-id %s, or give --identity; ssh %s true must work", where, where)
	}
	return p.hint("see that this works: ssh %s true", where)
}

// maxSaid bounds what is kept of what a remote command prints, in bytes.
const maxSaid = 256 << 10

// firstBytes keeps the first bytes and drops the rest.
type firstBytes struct {
	w    io.Writer
	left int
}

func (l *firstBytes) Write(p []byte) (int, error) {
	keep := p[:min(len(p), l.left)]
	l.left -= len(keep)
	if _, err := l.w.Write(keep); err != nil {
		return 0, err
	}
	return len(p), nil
}

// shellQuote is s as one word of a POSIX shell.
func shellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }
