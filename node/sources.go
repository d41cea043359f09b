package node

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed/egress"
)

// Sources of a secret's value. All but that of a value which was given are read by the node,
// and stay in its memory.
const (
	sourceValue   = "value"
	SourceEnv     = "env"     // "env:NAME", of the node's own environment
	SourceCommand = "command" // "command:…", what a shell prints that the node runs
)

// CheckSourceKind judges one of those that an operator lets a node read.
func CheckSourceKind(kind string) error {
	if kind != SourceEnv && kind != SourceCommand {
		return fmt.Errorf("%.80q is neither %s nor %s", kind, SourceEnv, SourceCommand)
	}
	return nil
}

// How long a command may take that gives a secret, how long what it gave is believed before
// it is asked again, and how long at most while it fails; and the time between tries.
const (
	readLimit = 10 * time.Second
	readFresh = 5 * time.Minute
	readStale = 10 * time.Minute
	readAgain = 10 * time.Second
)

// sources reads the values that are this node's own, as far as its operator lets it: who
// may have a node run a command is as mighty as the node.
type sources struct {
	allowed []string
	log     *slog.Logger
	now     func() time.Time

	mu       sync.Mutex
	commands map[string]*command
}

// may reports whether the operator lets this node read a source of its kind.
func (s *sources) may(source string) bool {
	kind, _, _ := strings.Cut(source, ":")
	return slices.Contains(s.allowed, kind)
}

// reader reads a source; nil: it is not to be read. A command runs for the first time now.
func (s *sources) reader(source string) func() egress.Value {
	kind, what, _ := strings.Cut(source, ":")
	switch {
	case !s.may(source):
		s.log.Error("a secret is not read", "source", kind, "next", "the operator of the node allows it with egress.sources")
		return nil
	case kind == SourceEnv:
		return func() egress.Value { return usable(os.Getenv(what), s.log) }
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.commands[what]
	if c == nil {
		c = &command{text: what, log: s.log, now: s.now, first: make(chan struct{}), running: true}
		c.tried = s.now()
		if s.commands == nil {
			s.commands = map[string]*command{}
		}
		s.commands[what] = c
		go c.run()
	}
	return c.value
}

// usable is a value as one that is given must be, or none.
func usable(text string, log *slog.Logger) egress.Value {
	if text == "" {
		return egress.Value{}
	}
	if err := egress.CheckValue("", text); err != nil {
		log.Error("a secret that this node read is of no use", "err", err)
		return egress.Value{}
	}
	return egress.NewValue(text)
}

// settle waits until every command was read once, so that nobody waits for one later, and
// forgets those that are none of these any more.
func (s *sources) settle(used []string) {
	s.mu.Lock()
	var all []*command
	for what, c := range s.commands {
		if slices.Contains(used, SourceCommand+":"+what) {
			all = append(all, c)
		} else {
			delete(s.commands, what)
		}
	}
	s.mu.Unlock()
	for _, c := range all {
		<-c.first
	}
}

// command is a value that a command gives.
type command struct {
	text  string
	log   *slog.Logger
	now   func() time.Time
	first chan struct{} // closed when it was read, or not, for the first time

	mu      sync.Mutex
	last    egress.Value
	at      time.Time // of last
	tried   time.Time
	running bool
}

// value is what it gave last. It is asked again behind the caller's back: EC19, a value that
// is renewed by one and waited for by nobody (OpenShell#2049).
func (c *command) value() egress.Value {
	<-c.first
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if now.Sub(c.at) >= readFresh && now.Sub(c.tried) >= readAgain && !c.running {
		c.running, c.tried = true, now
		go c.run()
	}
	if now.Sub(c.at) >= readStale {
		return egress.Value{}
	}
	return c.last
}

func (c *command) run() {
	ctx, cancel := context.WithTimeout(context.Background(), readLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", c.text)
	cmd.WaitDelay = time.Second // for what it started and left behind
	out, err := cmd.Output()
	if err != nil {
		c.log.Error("read a secret by its command", "err", err) // the command itself may tell much
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running = false; err == nil {
		c.last, c.at = usable(strings.TrimSpace(string(out)), c.log), c.now()
	}
	select {
	case <-c.first:
	default:
		close(c.first)
	}
}
