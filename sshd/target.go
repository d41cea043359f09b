package sshd

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
)

// wanted is what a user name asks for: a sandbox, and options after a plus.
type wanted struct {
	ref string // the ID, a prefix of it or the name of a sandbox; "" makes one

	template string // of one that is made
	keep     bool   // it stays when its session is over

	fresh  bool   // a shell of its own, though one waits for somebody to come back
	attach bool   // the shell that was started last, also while somebody is in it
	repl   string // a language
}

// parseUser reads a user name. "new", "new+TEMPLATE" and "new+keep" make a sandbox;
// what else there is is one that is there, "SANDBOX+new", "SANDBOX+attach" and
// "SANDBOX+repl.LANGUAGE" in it.
func parseUser(user string) (wanted, error) {
	first, rest, _ := strings.Cut(user, "+")
	w := wanted{ref: first}
	if first == "new" {
		w.ref = ""
	} else if first == "" {
		return w, boxed.Errorf(boxed.CodeInvalid, "%q names no sandbox", user)
	}
	for _, o := range strings.FieldsFunc(rest, func(r rune) bool { return r == '+' }) {
		language, repl := strings.CutPrefix(o, "repl.")
		switch {
		case repl && w.repl == "":
			if w.repl = boxed.CanonicalLanguage(language); w.repl == "" {
				return w, noREPL(language)
			}
		case w.ref == "" && o == "keep":
			w.keep = true
		case w.ref == "" && w.template == "" && !repl:
			w.template = o
		case w.ref == "":
			return w, boxed.Errorf(boxed.CodeInvalid, "%q names two templates: %q and %q", user, w.template, o)
		case o == "new":
			w.fresh = true
		case o == "attach":
			w.attach = true
		default:
			return w, boxed.Errorf(boxed.CodeInvalid, "%q is no option of a sandbox; there are %s+new, +attach and +repl.LANGUAGE", o, w.ref)
		}
	}
	if w.fresh && w.attach {
		return w, boxed.Errorf(boxed.CodeInvalid, "%q asks for a new shell and for the last one", user)
	}
	return w, nil
}

func noREPL(language string) error {
	return boxed.Errorf(boxed.CodeInvalid, "there is no REPL of %q; there is one of %s", language, strings.Join(boxed.Languages(), ", "))
}

// target is the sandbox that a session is in.
type target struct {
	wanted
	id   boxed.ID
	node boxed.NodeID
	// made says that this session made it, to end with its shell or command unless it
	// is kept. One that somebody comes back to has the label.
	made, brief bool
}

// newIdle ends a sandbox that `new` made when it is idle: it ends with its shell, and
// nobody may be there to see that end. Its ttl is renewed as long as somebody is in it.
const newIdle = boxed.Duration(5 * time.Minute)

// endLimit is how long the end of a sandbox that was made for one session may take.
const endLimit = 30 * time.Second

// enter takes the user name for a sandbox, and makes it if it asks for a new one, once
// per connection. A paused one goes on. left must be called.
func (s *Server) enter(c *caller) (*target, error) {
	w, err := parseUser(c.user)
	if err != nil {
		return nil, err
	}
	return s.enterWanted(c, w)
}

func (s *Server) enterWanted(c *caller, w wanted) (_ *target, err error) {
	if w.ref == "" {
		c.peer.making.Lock()
		defer c.peer.making.Unlock()
		if c.peer.made == nil {
			if c.peer.made, err = s.makeNew(c, w); err != nil {
				return nil, err
			}
		}
		c.peer.users++
		t := *c.peer.made
		return &t, nil
	}
	return s.find(c, w)
}

// find is the sandbox that is there.
func (s *Server) find(c *caller, w wanted) (*target, error) {
	if w.ref == "" {
		c.peer.making.Lock()
		defer c.peer.making.Unlock()
		if c.peer.made == nil {
			return nil, boxed.Errorf(boxed.CodeNotFound, "there is no sandbox yet; it is made for a shell or a command")
		}
		return c.peer.made, nil
	}
	sb, err := s.cfg.Service.Resolve(c.ctx, w.ref)
	if err != nil {
		return nil, err
	}
	if sb.State == boxed.StatePaused {
		if sb, err = s.cfg.Service.Resume(c.ctx, sb.ID); err != nil {
			return nil, err
		}
	}
	return &target{wanted: w, id: sb.ID, node: sb.Node, brief: sb.Labels[boxed.SSHLabel] == boxed.SSHLabelNew}, nil
}

func (s *Server) makeNew(c *caller, w wanted) (*target, error) {
	spec := boxed.Spec{Template: w.template}
	if !w.keep {
		spec.IdleTimeout, spec.Labels = newIdle, map[string]string{boxed.SSHLabel: boxed.SSHLabelNew}
	}
	sb, err := s.cfg.Service.Create(c.ctx, spec)
	if err != nil {
		return nil, err
	}
	return &target{wanted: w, id: sb.ID, node: sb.Node, made: true, brief: !w.keep}, nil
}

// left ends a sandbox that is only there for a session that is over, unless somebody
// is in another shell of it, or may come back to one, or it was kept meanwhile.
func (s *Server) left(c *caller, t *target) {
	if t.made {
		c.peer.making.Lock()
		c.peer.users--
		last := c.peer.users == 0
		if last {
			c.peer.made = nil
		}
		c.peer.making.Unlock()
		if !last {
			return
		}
	}
	if !t.brief {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), endLimit)
	defer cancel()
	err := func() error {
		sb, err := s.cfg.Service.Get(ctx, t.id)
		if err != nil || sb.State.Ended() || sb.Labels[boxed.SSHLabel] != boxed.SSHLabelNew {
			return err
		}
		execs, err := s.cfg.Service.ListExecs(ctx, t.id)
		if err != nil || slices.ContainsFunc(execs, func(e boxed.Exec) bool { return e.Running && (e.Linger > 0 || e.Detached) }) {
			return err
		}
		return s.cfg.Service.Destroy(ctx, t.id)
	}()
	if err != nil && boxed.CodeOf(err) != boxed.CodeGone {
		s.cfg.Log.Warn("ssh: end a sandbox whose session is over", "sandbox", t.id, "err", fmt.Sprint(err))
	}
}
