package ctl

import (
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// problem is an error with what to do next.
type problem struct {
	err  error
	next string
}

func (p *problem) Error() string { return p.err.Error() }
func (p *problem) Unwrap() error { return p.err }

// hint sets the next step.
func (p *problem) hint(format string, args ...any) *problem {
	p.next = fmt.Sprintf(format, args...)
	return p
}

// usagef is a command line that makes no sense. Its error is boxed's
// CodeInvalid.
func usagef(format string, args ...any) *problem {
	return &problem{err: boxed.Errorf(boxed.CodeInvalid, format, args...)}
}

// wrapf puts a few words before an error and keeps its kind.
func wrapf(err error, format string, args ...any) *problem {
	return &problem{err: fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), err)}
}

// fail prints err and returns the exit status that belongs to it.
func (a *app) fail(err error) int {
	var status exitStatus
	if errors.As(err, &status) {
		return int(status)
	}
	fmt.Fprintf(a.stderr, "%s: %s\n", a.self(), table.Inert(a.words(message(err))))
	if next := nextStep(err); next != "" && !a.quiet {
		fmt.Fprintf(a.stderr, "hint: %s\n", table.Inert(a.words(next)))
	}
	return exitOf(err)
}

// notice tells a person something that is not the command's result.
func (a *app) notice(format string, args ...any) {
	if !a.quiet {
		fmt.Fprintf(a.stderr, "%s: %s\n", a.self(), table.Inert(a.words(fmt.Sprintf(format, args...))))
	}
}

// program is how a command line of it begins.
func (a *app) program() string {
	if a.lobby != nil {
		return lobbyProgram
	}
	return "boxedctl"
}

// self is who speaks.
func (a *app) self() string {
	if a.lobby != nil {
		return "boxed"
	}
	return "boxedctl"
}

// message is one line for err. A field of the API is named as the flag that
// fills it.
func message(err error) string {
	text := strings.TrimSpace(err.Error())
	var e *boxed.Error
	if !errors.As(err, &e) {
		return text
	}
	if field := e.Field(); field != "" {
		name := field
		list, _, _ := strings.Cut(field, "[")
		if flag, ok := fieldFlags[list]; ok {
			name = flag
			for _, said := range []string{field, list} {
				if strings.Contains(text, said+":") {
					text = strings.Replace(text, said+":", flag+":", 1)
					break
				}
			}
		}
		if !strings.Contains(text, name) {
			text = name + ": " + text
		}
	}
	if id, ok := e.Detail["request_id"].(string); ok && e.Code == boxed.CodeInternal && !strings.Contains(text, id) {
		text += " (request " + id + ")"
	}
	return text
}

// fieldFlags maps fields of requests to the flags that set them.
var fieldFlags = map[string]string{
	"name": "--name", "labels": "--label", "template": "--template", "image": "--image", "env": "--env",
	"dir": "--dir", "ttl": "--ttl", "idle_timeout": "--idle-timeout", "runtime": "--runtime", "node": "--node",
	"timeout": "--timeout", "language": "--lang", "code": "the program", "owner": "--owner", "role": "--role",
	"limits.memory_bytes": "--memory", "limits.cpus": "--cpus", "limits.processes": "--processes",
	"limits.open_files": "--open-files", "limits.workspace_bytes": "--workspace-size",
	"limits.home_bytes": "--home-size", "limits.tmp_bytes": "--tmp-size",
	"limits.output_bytes": "--output-size", "limits.shm_bytes": "--shm-size",
	"placement.node_labels": "--node-label", "placement.isolation": "--isolation", "placement.near": "--near", "placement.apart": "--apart",
	"preset": "--preset", "hosts": "--host", "slot": "--slot", "paths": "--path", "methods": "--method", "author": "--author",
	"may": "--may", "held_by": "--held-by", "source": "--from-env or --from-command", "value": "the value", "for": "--for", "limit": "--limit",
	"egress.profile": "--egress", "egress.allow": "--allow", "egress.only": "--only", "egress.secrets": "--secret", "egress.repos": "--repo", "egress.on_deny": "--ask",
	"allow": "--allow", "secrets": "--secret", "repos": "--repo",
	"within": "--within", "listen": "--listen", "advertise": "--advertise", "token": "the token",
}

// nextStep says what a person may do about err, or "".
func nextStep(err error) string {
	for in := err; in != nil; in = errors.Unwrap(in) {
		if p, ok := in.(*problem); ok && p.next != "" {
			return p.next // the outermost one that has one
		}
	}
	var e *boxed.Error
	errors.As(err, &e)
	var cert *tls.CertificateVerificationError
	if errors.As(err, &cert) && len(cert.UnverifiedCertificates) > 0 {
		return fmt.Sprintf("if this is what `boxed-node fingerprint` prints on the node's host, trust it: --pin %x", sha256.Sum256(cert.UnverifiedCertificates[0].Raw))
	}
	switch boxed.CodeOf(err) {
	case boxed.CodeUnauthenticated:
		return "give a key by --api-key-file or BOXED_API_KEY, or keep one in a context: boxedctl context add --help"
	case boxed.CodeConflict:
		if ids := stringsOf(e, "ids"); len(ids) > 0 {
			return "it may be any of " + strings.Join(ids, ", ")
		}
	case boxed.CodeExhausted:
		return reasonsOf(e)
	case boxed.CodeUnavailable:
		return placementHint(e)
	case boxed.CodeGone:
		return "boxedctl inspect shows when and why it ended"
	case boxed.CodeNotReady:
		if hint := placementHint(e); hint != "" {
			return hint
		}
		if e != nil && e.Detail["node"] != nil {
			return "boxedctl node ls shows which nodes answer"
		}
		if e != nil && e.Err != nil {
			return "boxedctl context show says why this address; boxedctl doctor, on the node's host, what is wrong"
		}
		return "boxedctl node shows what the node lacks; boxedctl doctor, on its host, what mends it"
	case boxed.CodeQuota:
		if e != nil && e.Detail["of"] != nil { // not of sandboxes
			return ""
		}
		return "boxedctl ls shows what counts against it; boxedctl rm makes room"
	case boxed.CodeNoSpace:
		return "a sandbox's files are in its memory: remove some, or ask for more with --workspace-size and --memory"
	case boxed.CodeLost:
		return "whether it took effect is not known: boxedctl ls and boxedctl ps show what is there now"
	}
	return ""
}

// stringsOf reads a list of strings from an error's detail, as a Go value or as
// decoded JSON.
func stringsOf(e *boxed.Error, key string) []string {
	if e == nil {
		return nil
	}
	var out []string
	switch list := e.Detail[key].(type) {
	case []string:
		return list
	case []boxed.ID:
		for _, id := range list {
			out = append(out, string(id))
		}
	case []any:
		for _, v := range list {
			out = append(out, fmt.Sprint(v))
		}
	}
	return out
}

// placementHint is for a sandbox that no node takes: the reasons, if there are
// more than the message's.
func placementHint(e *boxed.Error) string {
	switch reasons := reasonsOf(e); {
	case reasons == "":
		return ""
	case strings.Contains(reasons, "; "):
		return reasons
	}
	return "boxedctl explain, with the same options, says which node would take it"
}

// reasonsOf lists why each node could not take a sandbox.
func reasonsOf(e *boxed.Error) string {
	if e == nil {
		return ""
	}
	var parts []string
	switch nodes := e.Detail["nodes"].(type) {
	case map[string]any:
		for node, why := range nodes {
			parts = append(parts, fmt.Sprintf("%s: %v", node, why))
		}
	case map[string]string:
		for node, why := range nodes {
			parts = append(parts, node+": "+why)
		}
	case []any:
		for _, v := range nodes {
			if r, ok := v.(map[string]any); ok && r["message"] != nil {
				v = fmt.Sprintf("%v: %v", r["node"], r["message"])
			}
			parts = append(parts, fmt.Sprint(v))
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, "; ")
}

// flagError rewords what the flag package says of a bad value.
func flagError(c *cli.Command, err error) error {
	text := err.Error()
	if rest, ok := strings.CutPrefix(text, "invalid value "); ok {
		value, rest, _ := strings.Cut(rest, " for flag -")
		name, _, _ := strings.Cut(rest, ":")
		for _, f := range c.Flags {
			if slices.Contains(f.Names(), name) {
				return usagef("--%s does not take %s", name, value).hint("%s", flagUsage(f))
			}
		}
	}
	return usagef("%s", text)
}

func unknownFlag(l *commandLine, root *cli.Command, arg string) error {
	name, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
	var names []string
	for _, f := range slices.Concat(l.command.Flags, root.Flags) {
		names = append(names, f.Names()...)
	}
	p := usagef("%s has no flag %s", strings.Join(append([]string{"boxedctl"}, l.path...), " "), strings.SplitN(arg, "=", 2)[0])
	if near := nearest(name, names); near != "" {
		return p.hint("did you mean --%s?", near)
	}
	return p.hint("%s --help lists them", strings.Join(append([]string{"boxedctl"}, l.path...), " "))
}

// others maps what people know from elsewhere to the command that does it.
var others = map[string]string{
	"stop": "rm", "terminate": "rm", "remove": "rm", "start": "create", "new": "create", "ssh": "shell", "connect": "shell",
	"enter": "shell", "interact": "repl", "upload": "cp", "download": "cp", "copy": "cp", "images": "node", "info": "node",
	"top": "stats", "extend": "renew", "port-forward": "forward", "describe": "inspect", "login": "context", "status": "get",
	"nodes": "node", "cordon": "node", "drain": "node", "join": "cluster", "mesh": "cluster", "place": "explain",
	"network": "egress", "firewall": "egress", "allow": "egress", "profile": "egress", "freeze": "egress",
}

// noSuchCommand is the action of a command that only has subcommands.
func (a *app) noSuchCommand(c *cli.Command) error {
	if len(a.line.operands) == 0 {
		return a.help(a.line.command, a.line.path)
	}
	given := a.line.operands[0]
	var names []string
	for _, sub := range c.Subcommands {
		if !sub.Hidden {
			names = append(names, sub.Names()...)
		}
	}
	self := strings.Join(append([]string{a.program()}, a.line.path...), " ")
	p := usagef("%s has no command %q", self, given)
	near := nearest(given, names)
	if other, ok := others[given]; ok && len(a.line.path) == 0 {
		near = other
	}
	if near != "" {
		return p.hint("did you mean %s %s?", self, near)
	}
	return p.hint("%s --help lists them", self)
}

// nearest is the candidate closest to word, or "" if none is close.
func nearest(word string, candidates []string) string {
	best, bestDistance := "", 1+min(2, len(word)/2)
	for _, c := range candidates {
		if len(c) < 2 {
			continue
		}
		d := distance(word, c)
		if d > 1 && len(word) > 2 && strings.HasPrefix(c, word) {
			d = 1
		}
		if d < bestDistance {
			best, bestDistance = c, d
		}
	}
	return best
}

// distance counts the letters to add, drop, replace or swap with a neighbour.
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range b {
		rows[0][j+1] = j + 1
	}
	for i := range len(a) {
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			d := min(rows[i][j]+cost, rows[i][j+1]+1, rows[i+1][j]+1)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				d = min(d, rows[i-1][j-1]+1)
			}
			rows[i+1][j+1] = d
		}
	}
	return rows[len(a)][len(b)]
}

// oneOf writes alternatives as people do: "a, b or c".
func oneOf(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}

// plainPath is err without the operation that os puts in front of the path.
func plainPath(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return fmt.Errorf("%s: %w", pe.Path, pe.Err)
	}
	return err
}
