package api_test

import (
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// X8, superradcompany/microsandbox#706: what came of input that nobody reads was
// swallowed. Whoever writes into the pipe that a program was given as its input
// is told when the program reads it no more, and does not wait for ever.
func TestAWriterOfInputIsToldThatNobodyReads(t *testing.T) {
	h := newHarness(t)
	sb := h.add("x")
	in, w := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		_, err := io.Copy(w, rand.NewChaCha8([32]byte{}))
		wrote <- err
	}()
	st, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"false"}, Stdin: in})
	if err != nil || st.Code != 1 {
		t.Error(st, err)
	}
	select {
	case err := <-wrote:
		if err == nil {
			t.Error("it looks as if all of it was read")
		}
	case <-time.After(5 * time.Second):
		t.Error("the writer hangs")
		in.Close()
		<-wrote
	}
}
