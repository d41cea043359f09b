package api_test

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
)

func TestSmoke(t *testing.T) {
	h := newHarness(t)
	ctx := t.Context()
	sb, err := h.client.Create(ctx, boxed.Spec{Name: "build", Labels: map[string]string{"a": "b"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.client.Resolve(ctx, "build"); err != nil {
		t.Fatal(err)
	}
	if l, err := h.client.List(ctx, boxed.Filter{Labels: map[string]string{"a": "b=c"}}); err != nil || len(l.Sandboxes) != 1 {
		t.Fatal(l, err)
	}
	res, err := h.client.Run(ctx, sb.ID, boxed.ExecRequest{Args: []string{"echo", "hi"}})
	if err != nil || string(res.Stdout) != "hi\n" || res.ID == "" {
		t.Fatal(res, err)
	}
	var out bytes.Buffer
	st, err := h.client.Exec(ctx, sb.ID, boxed.ExecRequest{Args: []string{"cat"}, Stdin: strings.NewReader("hello"), Stdout: &out})
	if err != nil || out.String() != "hello" || st.Reason != boxed.ReasonExited {
		t.Fatal(st, err, out.String())
	}
	pr, pw := io.Pipe()
	st, err = h.client.Exec(ctx, sb.ID, boxed.ExecRequest{Args: []string{"false"}, Stdin: pr, Stdout: &out})
	pw.Close()
	if err != nil || st.Code != 1 {
		t.Fatal(st, err)
	}
	if _, err = h.client.Exec(ctx, sb.ID, boxed.ExecRequest{Args: []string{"missing"}, Stdout: &out}); boxed.CodeOf(err) != boxed.CodeStartFailed {
		t.Fatal(err)
	}
	if err := h.client.Destroy(ctx, sb.ID); err != nil {
		t.Fatal(err)
	}
}
