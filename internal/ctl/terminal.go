package ctl

import (
	"context"
	"os"
	"sync"

	"golang.org/x/term"

	"github.com/boxed-mesh/boxed"
)

// isTerminal reports whether f is one.
func isTerminal(f any) bool {
	file, ok := f.(*os.File)
	return ok && file != nil && term.IsTerminal(int(file.Fd()))
}

// terminalSize is the size of f's window, zero if f is no terminal.
func terminalSize(f any) boxed.Size {
	file, ok := f.(*os.File)
	if !ok || file == nil {
		return boxed.Size{}
	}
	cols, rows, err := term.GetSize(int(file.Fd()))
	if err != nil || cols < 1 || rows < 1 || cols > 65535 || rows > 65535 {
		return boxed.Size{}
	}
	return boxed.Size{Cols: uint16(cols), Rows: uint16(rows)}
}

// terminalWidth is the number of columns of f, 0 if f is no terminal.
func terminalWidth(f any) int { return int(terminalSize(f).Cols) }

// makeRaw hands every key to the program: the terminal neither echoes nor makes
// signals. restore undoes it and may be called more than once.
func makeRaw(f *os.File) (restore func(), err error) {
	state, err := term.MakeRaw(int(f.Fd()))
	if err != nil {
		return func() {}, err
	}
	return sync.OnceFunc(func() {
		_ = term.Restore(int(f.Fd()), state) // there is nothing left to try
	}), nil
}

// readHidden reads a line that the terminal f does not show, until ctx ends. The terminal
// is as it was then, though a read may be left behind.
func readHidden(ctx context.Context, f *os.File) ([]byte, error) {
	state, err := term.GetState(int(f.Fd()))
	if err != nil {
		return nil, err
	}
	type line struct {
		text []byte
		err  error
	}
	read := make(chan line, 1)
	go func() {
		text, err := term.ReadPassword(int(f.Fd()))
		read <- line{text, err}
	}()
	select {
	case l := <-read:
		return l.text, l.err
	case <-ctx.Done():
		_ = term.Restore(int(f.Fd()), state) // there is nothing left to try
		return nil, ctx.Err()
	}
}
