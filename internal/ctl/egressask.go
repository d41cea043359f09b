package ctl

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdEgressAsk() *cli.Command {
	return &cli.Command{
		Name:      "ask",
		Usage:     "answer for connections that wait for you",
		UsageText: "boxedctl egress ask [SANDBOX] [--allow HOST…] [--deny-all] [--for DURATION]",
		Description: fmt.Sprintf("A sandbox that was made with --ask holds a connection that nothing allows for %s. This shows each of yours that waits: y allows the host for as long as the sandbox lives, "+
			"a time like 10m for so long, n or nothing refuses. It goes on until interrupted. "+
			"--allow and --deny-all answer by themselves; where there is no terminal one of them is needed.", boxed.EgressAskLimit) +
			examples("boxedctl egress ask", "boxedctl egress ask build --allow pypi.org --allow files.pythonhosted.org --deny-all --for 1h"),
		Flags: []cli.Flag{
			&cli.StringSliceFlag{Name: "allow", Usage: "allow `HOST`, or HOST:PORT, *.HOST, * without asking; may be repeated"},
			&cli.BoolFlag{Name: "deny-all", Usage: "refuse every other one without asking"},
			&cli.StringFlag{Name: "for", Usage: "what is allowed is so for `DURATION`, not for as long as the sandbox lives"},
			&cli.StringFlag{Name: "owner", Usage: "for the sandboxes of `OWNER`, * for everybody's; administrators only"},
		},
		Action: a.ask,
	}
}

func (a *app) ask(c *cli.Context) error {
	words, err := a.operands(c, 0, 1)
	if err != nil {
		return err
	}
	k := &asker{a: a, allow: c.StringSlice("allow"), denyAll: c.Bool("deny-all"), owner: c.String("owner"), names: map[boxed.ID]string{}}
	k.person = isTerminal(a.stdin) && !k.denyAll
	if !k.person && !k.denyAll && len(k.allow) == 0 {
		return usagef("nobody is there to answer").hint("say --deny-all, or --allow HOST for what may be reached")
	}
	if k.span, err = parseSpan(c); err != nil {
		return err
	}
	if k.svc, err = a.connect(); err != nil {
		return err
	}
	if len(words) == 1 {
		if k.only, err = sandboxID(c.Context, k.svc, words[0]); err != nil {
			return err
		}
	}
	if k.owner == "" && k.only == "" {
		// Administrators hear of everybody's; a node without SSH cannot say who asks.
		info, err := k.svc.SSHInfo(c.Context)
		if err != nil && boxed.CodeOf(err) != boxed.CodeUnavailable {
			return err
		}
		if info != nil {
			k.owner = info.Owner
		}
	}
	if k.person {
		a.notice("waiting for connections that ask; Ctrl-C ends it")
	}
	return k.run(c.Context)
}

// The times of questions.
const (
	// askSettle is how long a question must have been there before it is put: of those
	// that the node tells of first, most are answered, and that comes right behind.
	askSettle = 300 * time.Millisecond
	// askGuard is how long after a question has gone by itself a line is held to be meant
	// for it, and not for the next.
	askGuard = time.Second
	// askStale is how much older a question may be than one that waits: clocks differ.
	askStale = 5 * time.Minute
)

// asker verdicts questions about connections that wait: by its rules, or by a person.
type asker struct {
	a       *app
	svc     service
	only    boxed.ID
	owner   string // "" and "*" are all that are seen
	allow   []string
	denyAll bool
	person  bool
	span    boxed.Duration
	names   map[boxed.ID]string

	open    []asked
	shown   string    // the question that the person sees
	guarded time.Time // what is typed before is not for it
}

type asked struct {
	boxed.Event
	since time.Time // by this machine's clock
}

// run goes on until ctx or the stream of events ends, or nobody types any more.
func (k *asker) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	events, done := make(chan boxed.Event), make(chan error, 1)
	go func() { done <- k.follow(ctx, events) }()
	defer func() {
		cancel()
		<-done
	}()
	var lines chan string
	if k.person {
		lines = make(chan string)
		go k.read(ctx, lines)
	}
	for {
		var settled <-chan time.Time
		if len(k.open) > 0 && k.shown == "" {
			settled = time.After(time.Until(k.open[0].since.Add(askSettle)))
		}
		select {
		case e := <-events:
			k.heard(e)
		case line, more := <-lines:
			if !more {
				return nil
			}
			k.typed(ctx, line)
		case <-settled:
			k.put(ctx)
		case err := <-done:
			done <- nil
			return err
		}
	}
}

// follow passes on what happens to questions.
func (k *asker) follow(ctx context.Context, to chan<- boxed.Event) error {
	for e, err := range k.svc.Events(ctx, boxed.CursorOldest) {
		if err != nil {
			return err
		}
		if e.Type != boxed.EventEgressAsk && e.Type != boxed.EventEgressEnd || k.only != "" && e.Sandbox != k.only ||
			k.owner != "" && k.owner != "*" && e.Owner != k.owner {
			continue
		}
		select {
		case to <- e:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// read passes on what a person types. It is left behind in its read when the command ends.
func (k *asker) read(ctx context.Context, to chan<- string) {
	defer close(to)
	in := bufio.NewScanner(k.a.stdin)
	for in.Scan() {
		select {
		case to <- strings.ToLower(strings.TrimSpace(in.Text())):
		case <-ctx.Done():
			return
		}
	}
}

// heard takes in an event.
func (k *asker) heard(e boxed.Event) {
	if e.Type == boxed.EventEgressAsk {
		if time.Since(e.At) > boxed.EgressAskLimit+askStale { // its node ended before it was answered
			return
		}
		k.open = append(k.open, asked{e, time.Now()})
		return
	}
	k.open = slices.DeleteFunc(k.open, func(q asked) bool { return q.Question == e.Question })
	if k.shown == e.Question {
		fmt.Fprintln(k.a.stderr)
		k.a.notice("%s no longer waits: %s", e.Message, firstOf(e.Reason, "it is over"))
		k.shown, k.guarded = "", time.Now().Add(askGuard)
	}
}

// put verdicts the first question by the rules, or shows it to the person.
func (k *asker) put(ctx context.Context) {
	q := k.open[0]
	switch {
	case slices.ContainsFunc(k.allow, func(p string) bool { return matchesHost(p, q.Message) }):
		k.answer(ctx, true, k.span)
	case k.denyAll:
		k.answer(ctx, false, 0)
	case k.person:
		k.shown = q.Question
		if soon := time.Now().Add(askSettle); k.guarded.Before(soon) { // nobody reads so fast
			k.guarded = soon
		}
		k.prompt(ctx)
	default:
		k.open = k.open[1:]
		k.a.notice("%s asks for %s, and is left without an answer", k.name(ctx, q.Sandbox), q.Message)
	}
}

func (k *asker) prompt(ctx context.Context) {
	q := k.open[0]
	fmt.Fprintf(k.a.stderr, "%s asks for %s [y/N/10m] ", table.Inert(k.name(ctx, q.Sandbox)), table.Inert(q.Message))
}

// typed takes in a line that a person typed.
func (k *asker) typed(ctx context.Context, line string) {
	if k.shown == "" {
		return
	}
	if time.Now().Before(k.guarded) {
		k.a.notice("that came too soon to be meant for this one")
		k.prompt(ctx)
		return
	}
	switch line {
	case "y", "yes":
		k.answer(ctx, true, k.span)
		return
	case "n", "no", "":
		k.answer(ctx, false, 0)
		return
	}
	span, err := boxed.ParseDuration(line)
	if err != nil || span == 0 || span == boxed.Never {
		k.a.notice("y allows it, n refuses it, and a time like 10m allows it for so long")
		k.prompt(ctx)
		return
	}
	k.answer(ctx, true, span)
}

// answer verdicts the first question, and says so.
func (k *asker) answer(ctx context.Context, allow bool, span boxed.Duration) {
	q := k.open[0]
	k.open, k.shown = k.open[1:], ""
	err := k.svc.AnswerEgress(ctx, q.Sandbox, boxed.EgressReply{Question: q.Question, Allow: allow, For: span})
	if err != nil {
		// One that cannot be answered must not leave those behind it waiting.
		k.a.notice("%s: %s", q.Message, message(err))
		return
	}
	verdict, style, rest := "refused", table.Bad, ""
	if allow {
		verdict, style, rest = "allowed", table.Good, "  "+spanText(span)
	}
	switch k.a.output {
	case outputJSON:
		err = k.a.printJSONLine(struct {
			Sandbox  boxed.ID       `json:"sandbox"`
			Question string         `json:"question"`
			Host     string         `json:"host"`
			Allowed  bool           `json:"allowed"`
			For      boxed.Duration `json:"for,omitempty"`
		}{q.Sandbox, q.Question, q.Message, allow, span})
	case outputName:
		_, err = fmt.Fprintln(k.a.stdout, table.Inert(q.Question))
	default:
		_, err = fmt.Fprintf(k.a.stdout, "%s  %s  %s  %s%s\n", time.Now().Format("15:04:05"), table.Inert(k.name(ctx, q.Sandbox)),
			table.Paint(verdict, style, k.a.color), table.Inert(q.Message), rest)
	}
	if err != nil {
		k.a.notice("%s", message(err))
	}
}

// name is how people call a sandbox.
func (k *asker) name(ctx context.Context, id boxed.ID) string {
	if k.names[id] == "" {
		k.names[id] = id.Random()
		if sb, err := k.svc.Get(ctx, id); err == nil && sb.Name != "" {
			k.names[id] = sb.Name
		}
	}
	return k.names[id]
}

// matchesHost reports whether a pattern, as --allow takes it, is for a host that was asked
// for: "*" is any name, and "*." stands for exactly one label.
func matchesHost(pattern, host string) bool {
	p, pPort := hostPort(pattern)
	h, hPort := hostPort(host)
	if suffix, wild := strings.CutPrefix(p, "*."); wild {
		label, rest, _ := strings.Cut(h, ".")
		return pPort == hPort && label != "" && rest == suffix
	}
	return pPort == hPort && (p == h || p == "*")
}

// hostPort reads "host" or "host:port".
func hostPort(text string) (host, port string) {
	text = strings.ToLower(text)
	if host, port, err := net.SplitHostPort(text); err == nil {
		return host, port
	}
	return text, "443"
}

func (a *app) cmdEgressAnswer() *cli.Command {
	return &cli.Command{
		Name:      "answer",
		Usage:     "answer one question about a connection",
		UsageText: "boxedctl egress answer SANDBOX QUESTION allow|deny [--for DURATION]",
		Description: "An event of type egress.ask has the question (boxedctl events -f -o json). What is allowed is so for as long as the sandbox lives, or --for so long." +
			examples("boxedctl egress answer build q3kd7v2mab allow --for 10m", "boxedctl egress answer build q3kd7v2mab deny"),
		Flags: []cli.Flag{&cli.StringFlag{Name: "for", Usage: "allow the host for `DURATION`, like 10m"}},
		Action: func(c *cli.Context) error {
			words, err := a.operands(c, 3, 3)
			if err != nil {
				return err
			}
			span, err := parseSpan(c)
			if err != nil {
				return err
			}
			allow := words[2] == "allow"
			switch {
			case !slices.Contains(verdicts, words[2]):
				return usagef("the answer is %s, not %q", oneOf(verdicts), words[2])
			case !allow && c.IsSet("for"):
				return usagef("--for says how long something is allowed")
			}
			svc, id, err := a.reach(c.Context, words[0])
			if err != nil {
				return err
			}
			return svc.AnswerEgress(c.Context, id, boxed.EgressReply{Question: words[1], Allow: allow, For: span})
		},
	}
}

var verdicts = []string{"allow", "deny"}
