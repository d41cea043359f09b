package agent

import (
	"io"
	"net"
	"time"
)

// Handler does on the guest's side what requests ask for. The program
// boxed-agent has the real one; a test may script one. Errors that should reach
// the host are *Error.
type Handler interface {
	// Configure is called for each control connection, before any request of it.
	Configure(Config) error
	// Spawn starts a program. It must not block on the program.
	Spawn(ExecStart) (Process, error)
	Files
	// Ports lists listening TCP sockets, without the guest's own.
	Ports() ([]Port, error)
	// Dial connects to a loopback port.
	Dial(port uint16) (net.Conn, error)
	// Stats describes the guest; Execs is filled in by the caller.
	Stats() Stats
	// End ends the guest and all that runs in it. It does not return.
	End(reason string)
}

// Process is one started program and all of its descendants.
type Process interface {
	PID() int
	// Stdin is nil unless ExecStart.Stdin or TTY was asked for.
	Stdin() io.WriteCloser
	// Stdout is the pipe's or terminal's end; Stderr is nil on a terminal.
	Stdout() Output
	Stderr() Output
	// Wait returns the leader's end.
	Wait() WaitStatus
	// WaitFor is Wait for at most so long, and reports whether it has ended.
	WaitFor(time.Duration) (WaitStatus, bool)
	// Signal signals the leader, or all with tree. Signalling what has ended is nil.
	Signal(name string, tree bool) error
	// KillTree kills every process of the exec and returns when none is left.
	KillTree() error
	// Resize sets the terminal's size.
	Resize(cols, rows uint16) error
	// Count is how many processes of the tree live.
	Count() int
	// Release is called once the streams are closed.
	Release()
}

// Output is one output of a process.
type Output interface {
	io.ReadCloser
	// TryRead reads what is there, and returns ErrInterrupted if nothing is. It is
	// called before any Read, not beside one.
	TryRead(p []byte) (int, error)
	// Interrupt makes a Read return ErrInterrupted at once, or after so many
	// milliseconds; until then, and after the next Interrupt, it returns data.
	Interrupt(afterMS int)
	// Pending is how many bytes can be read without waiting.
	Pending() int
}

// WaitStatus is how a leader ended.
type WaitStatus struct {
	Code   int    // its exit code; 128 + signal if it was signaled
	Signal string // without SIG, or ""
	OOM    bool   // the sandbox's memory limit killed it or one of its children
}

// Files is the guest's file system as its user sees it. Paths are absolute.
type Files interface {
	Stat(path string) (FileInfo, error)
	// List returns at most MaxListing entries, else ErrTooLarge.
	List(path string) ([]FileInfo, error)
	// Open opens a regular file; links and FIFOs are refused.
	Open(path string) (io.ReadSeekCloser, FileInfo, error)
	// Create begins a file that appears under its path at Commit.
	Create(Write) (NewFile, error)
	Mkdir(Path) error
	Remove(Path) error
	Move(Move) error
	ReadTar(path string, w io.Writer) error
	WriteTar(path string, r io.Reader) error
}

// NewFile is a file being written.
type NewFile interface {
	io.Writer
	Commit() (FileInfo, error)
	Abort() // after Commit it does nothing
}
