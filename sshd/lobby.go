package sshd

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/anmitsu/go-shlex"
	"golang.org/x/term"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// lobbyName is the user name that means no sandbox: `ssh boxed` for whom it is also the
// host's.
const lobbyName = "boxed"

// maxLobbyLine bounds a command of the lobby, in bytes.
const maxLobbyLine = 16 << 10

// inLobby reports whether a session asks for no sandbox: by the lobby's name, or by the
// name of whom the key has proved to be the owner.
func (s *Server) inLobby(c *caller) bool {
	return s.cfg.Lobby != nil && (c.user == lobbyName || c.user == c.who.Owner)
}

// lobby runs a command of the lobby, or on a terminal lets people choose.
func (x *session) lobby(command string) (boxed.ExitStatus, error) {
	if x.sftp {
		return boxed.ExitStatus{}, boxed.Errorf(boxed.CodeInvalid, "there are no files in the lobby; name a sandbox: SANDBOX@…")
	}
	if len(command) > maxLobbyLine {
		return boxed.ExitStatus{}, boxed.Errorf(boxed.CodeTooLarge, "a command of the lobby has at most %d bytes", maxLobbyLine)
	}
	if command == "" && x.tty {
		return boxed.ExitStatus{Reason: boxed.ReasonExited}, x.choose()
	}
	code, err := x.lobbyLine(command, newlines{x.ch, x.tty}, newlines{x.ch.Stderr(), x.tty})
	return boxed.ExitStatus{Reason: boxed.ReasonExited, Code: code}, err
}

func (x *session) lobbyLine(line string, out, errs io.Writer) (int, error) {
	words, err := shlex.Split(line, true)
	if err != nil {
		return 0, boxed.Errorf(boxed.CodeInvalid, "that is no command line: %w", err)
	}
	return x.s.cfg.Lobby(x.ctx, words, out, errs, x.tty), nil
}

// newlines writes for a terminal that is in raw mode, or for none.
type newlines struct {
	io.Writer
	raw bool
}

func (w newlines) Write(p []byte) (int, error) {
	if !w.raw {
		return w.Writer.Write(p)
	}
	if _, err := w.Writer.Write([]byte(strings.ReplaceAll(string(p), "\n", "\r\n"))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// shown is how many sandboxes the lobby offers to choose from.
const shown = 20

// choose is the lobby on a terminal: it shows sandboxes, enters the one that is chosen,
// and is there again after it.
func (x *session) choose() error {
	for {
		list, err := x.s.cfg.Service.List(x.c.ctx, boxed.Filter{States: []boxed.State{boxed.StateRunning, boxed.StatePaused}, Limit: shown})
		if err != nil {
			return err
		}
		ref, err := x.ask(list.Sandboxes)
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		w := wanted{ref: ref}
		if ref == "new" {
			w.ref = ""
		}
		if err := x.visit(w); err != nil {
			if x.ctx.Err() != nil {
				return err
			}
			x.say(err.Error())
		}
	}
}

// visit is a shell in a sandbox, from the lobby.
func (x *session) visit(w wanted) error {
	t, err := x.s.enterWanted(x.c, w)
	if err != nil {
		return err
	}
	defer x.leaveTarget(t)
	argvs, _, err := programs(t, "", true)
	if err != nil {
		return err
	}
	defer x.noted(t, "")()
	if x.recorded, err = x.record(t); err != nil {
		return err
	}
	defer func() {
		x.recorded.close()
		x.recorded = nil
	}()
	_, err = x.terminal(t, argvs, x.environ())
	return err
}

// ask lets a person choose a sandbox, and serves commands until then. The error is
// io.EOF when they have had enough.
func (x *session) ask(list []boxed.Sandbox) (ref string, err error) {
	in := x.stdin()
	defer in.leave()
	screen := term.NewTerminal(struct {
		io.Reader
		io.Writer
	}{in, x.ch}, "boxed> ")
	size := x.size()
	screen.SetSize(int(max(size.Cols, 20)), int(max(size.Rows, 5)))
	for i, sb := range list {
		fmt.Fprintf(screen, "%3d  %-12s %-20s %s\n", i+1, sb.ID.Random(), table.Inert(sb.Name), sb.State)
	}
	fmt.Fprintf(screen, "A number or a name is a shell in that sandbox, new in a new one; help has the commands, exit leaves.\n")
	for {
		line, err := screen.ReadLine()
		if err != nil {
			return "", io.EOF // or the client has gone
		}
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
			continue
		case len(words) == 1 && (words[0] == "exit" || words[0] == "quit" || words[0] == "logout"):
			return "", io.EOF
		case len(words) == 1 && words[0] == "new":
			return "new", nil
		}
		if n, err := strconv.Atoi(words[0]); err == nil && len(words) == 1 {
			if n < 1 || n > len(list) {
				fmt.Fprintf(screen, "there is no number %d\n", n)
				continue
			}
			return string(list[n-1].ID), nil
		}
		if len(words) == 1 {
			if sb, err := x.s.cfg.Service.Resolve(x.c.ctx, words[0]); err == nil {
				return string(sb.ID), nil
			}
		}
		if _, err := x.lobbyLine(line, screen, screen); err != nil {
			fmt.Fprintln(screen, table.Inert(err.Error()))
		}
	}
}
