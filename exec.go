package boxed

import (
	"io"
	"time"
)

// ExecRequest asks for one program to be run in a sandbox: either Args, or
// Language and Code.
//
// The stream fields belong to an attached exec. Stdin is read only when it is
// not nil (nil is /dev/null in the sandbox); Stdout and Stderr may be nil, which
// discards. They are written by one goroutine each and must not block for ever.
type ExecRequest struct {
	Args      []string          `json:"args,omitempty"`     // argv, byte for byte; at least one
	Language  string            `json:"language,omitempty"` // python, javascript or bash
	Code      string            `json:"code,omitempty"`     // at most MaxCodeBytes
	Env       map[string]string `json:"env,omitempty"`      // added to the sandbox's
	Dir       string            `json:"dir,omitempty"`      // absolute, or relative to the sandbox's; must exist
	TTY       bool              `json:"tty,omitempty"`      // one stream, on a terminal
	Size      Size              `json:"size,omitzero"`      // of the terminal; 0 means 80×24
	OpenStdin bool              `json:"stdin,omitempty"`    // keep stdin open for a detached exec or a stream
	Timeout   Duration          `json:"timeout,omitempty"`  // ends the whole tree; 0 means none (10 min for one JSON call)
	// Linger ends a detached exec that nobody has been attached to for that long; 0
	// means never. While somebody is attached, its output waits for the fastest reader,
	// where else the oldest is lost. At most MaxLinger.
	Linger    Duration `json:"linger,omitempty"`
	MaxOutput int64    `json:"output_limit,omitempty"` // bytes of both streams after which it is ended; 0 means none

	Stdin   io.Reader     `json:"-"`
	Stdout  io.Writer     `json:"-"`
	Stderr  io.Writer     `json:"-"`
	Resize  <-chan Size   `json:"-"`
	Signals <-chan string `json:"-"` // names without SIG: "TERM", "INT", "USR1", …
	Started func(ExecID)  `json:"-"` // called once, before any output
}

// Bounds of an exec.
const (
	MaxCodeBytes = 8 * MiB // of Code
	MaxArgBytes  = 2 * MiB // of Args and environment together, as Linux counts them
	MaxExecs     = 128     // living execs of one sandbox
)

// CollectedOutput is how much of each stream a JSON call returns, in bytes.
const CollectedOutput = 1 * MiB

// OutputRing is how much of each stream's end the agent keeps, in bytes, for
// readers that come late or come back.
const OutputRing = 1 * MiB

// MaxLinger bounds ExecRequest.Linger; the shortest is a second.
const MaxLinger = Duration(24 * time.Hour)

// ToolsPath is a program that every sandbox has. With the one argument "sftp-server" it
// speaks SFTP (version 3) on its standard input and output, with the rights of the
// sandbox's user.
const ToolsPath = "/run/boxed/tools"

// DefaultExecTimeout ends an exec of one JSON call that names no timeout.
const DefaultExecTimeout = Duration(10 * time.Minute)

// Size is a terminal's, in characters.
type Size struct {
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// ExitReason says how an exec ended. The list is closed.
type ExitReason string

// The reasons an exec ends.
const (
	ReasonExited      ExitReason = "exited"       // by itself; Code has its exit code
	ReasonSignaled    ExitReason = "signaled"     // by a signal, its own or asked for; Signal has it
	ReasonTimeout     ExitReason = "timeout"      // its timeout passed
	ReasonOOM         ExitReason = "oom"          // the sandbox's memory limit
	ReasonOutputLimit ExitReason = "output_limit" // it wrote more than output_limit
	ReasonCanceled    ExitReason = "canceled"     // the client went away or killed it
	ReasonLost        ExitReason = "lost"         // the sandbox ended under it, or the link broke; no exit code is known
)

// ExitStatus is how an exec ended, said exactly once.
type ExitStatus struct {
	Reason ExitReason `json:"reason"`
	// Code is the program's exit code, or 128 + the signal's number, or -1 where
	// none is known (lost). Never invented.
	Code        int    `json:"exit_code"`
	Signal      string `json:"signal,omitempty"`  // without SIG
	Message     string `json:"message,omitempty"` // for a person, where there is more to say
	StdoutBytes int64  `json:"stdout_bytes"`      // written by the program
	StderrBytes int64  `json:"stderr_bytes"`
	DurationMS  int64  `json:"duration_ms"`
}

// Exec is one exec as listed.
type Exec struct {
	ID        ExecID      `json:"id"`
	Args      []string    `json:"args,omitempty"` // clipped to 4 KiB
	Language  string      `json:"language,omitempty"`
	TTY       bool        `json:"tty,omitempty"`
	Detached  bool        `json:"detached"`
	Running   bool        `json:"running"`
	Viewers   int         `json:"viewers,omitempty"`   // who is attached at this moment
	Linger    Duration    `json:"linger,omitempty"`    // as asked for
	PID       int         `json:"pid,omitempty"`       // inside the sandbox
	Processes int         `json:"processes,omitempty"` // of its tree that still live
	StartedAt time.Time   `json:"started_at"`
	EndedAt   time.Time   `json:"ended_at,omitzero"`
	Status    *ExitStatus `json:"status,omitempty"`
}

// AttachRequest joins an exec that runs, or reads what is kept of one that has
// ended. Offsets count bytes from the exec's start; what lies before the kept
// part is reported to Gap and skipped.
type AttachRequest struct {
	StdoutOffset int64
	StderrOffset int64
	NoFollow     bool // return at the end of what is there now, with Reason "" while it runs

	Stdin   io.Reader // used only if the exec was started with stdin open
	Stdout  io.Writer
	Stderr  io.Writer
	Resize  <-chan Size
	Signals <-chan string
	Gap     func(stream string, bytes int64) // may be nil; stream is "stdout" or "stderr"
}

// Languages of ExecRequest.Language.
var languages = []string{"python", "javascript", "bash"}

// interpreters start each language as people talk to it.
var interpreters = map[string][][]string{
	"python":     {{"python3", "-i", "-q", "-u"}, {"python", "-i", "-u"}},
	"javascript": {{"node", "-i"}, {"nodejs", "-i"}},
	"bash":       {{"bash", "-i"}, {"sh", "-i"}},
}

// Interpreters are the programs that are a language's own prompt, the first of them that
// a sandbox has. language is one of Languages; for others there are none.
func Interpreters(language string) [][]string { return interpreters[language] }

// Languages lists what ExecRequest.Language may be.
func Languages() []string { return append([]string(nil), languages...) }

// CanonicalLanguage maps the usual spellings ("py", "js", "node", "sh", …) to
// one of Languages, and anything else to "".
func CanonicalLanguage(s string) string {
	switch s {
	case "python", "python3", "py":
		return "python"
	case "javascript", "js", "node", "nodejs":
		return "javascript"
	case "bash", "sh", "shell":
		return "bash"
	}
	return ""
}
