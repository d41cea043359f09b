package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// writes is a program that writes to its outputs.
func writes(stdout, stderr string) func(context.Context, boxed.ExecRequest) (boxed.ExitStatus, error) {
	return func(_ context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
		io.WriteString(req.Stdout, stdout)
		io.WriteString(req.Stderr, stderr)
		return boxed.ExitStatus{Reason: boxed.ReasonExited, Code: 7, StdoutBytes: int64(len(stdout)), StderrBytes: int64(len(stderr))}, nil
	}
}

func TestExecCall(t *testing.T) {
	call := func(h *harness, body string) (map[string]any, answer) {
		a := h.do("POST", "/v1/sandboxes/x/exec", body)
		var out map[string]any
		json.Unmarshal(a.body, &out)
		return out, a
	}
	t.Run("returns the status and both outputs", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
			req.Started("abcdefghij23")
			st, err := writes("out", "err")(ctx, req)
			st.Reason, st.Signal, st.Message = boxed.ReasonOOM, "KILL", "the memory limit"
			st.DurationMS = 12
			return st, err
		}
		res, err := h.client.Run(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}})
		if err != nil {
			t.Fatal(err)
		}
		if string(res.Stdout) != "out" || string(res.Stderr) != "err" || res.ID != "abcdefghij23" || res.StdoutTruncated || res.StderrTruncated {
			t.Errorf("%+v", res)
		}
		want := boxed.ExitStatus{Reason: boxed.ReasonOOM, Code: 7, Signal: "KILL", Message: "the memory limit", StdoutBytes: 3, StderrBytes: 3, DurationMS: 12}
		if diff := cmp.Diff(want, res.ExitStatus); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("passes on the whole request, with a deadline of 10 minutes unless told", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		req := boxed.ExecRequest{
			Args: []string{"a", "", "\xff\x00"[:1]}, Env: map[string]string{"A": "b=c\n"}, Dir: "é", MaxOutput: 99,
		}
		if _, err := h.client.Run(t.Context(), sb.ID, req); err != nil {
			t.Fatal(err)
		}
		got := h.lastCall().(boxed.ExecRequest)
		req.Timeout = boxed.DefaultExecTimeout
		if diff := cmp.Diff(req, got, cmpopts.IgnoreFields(boxed.ExecRequest{}, "Stdout", "Stderr", "Started")); diff != "" {
			t.Error(diff)
		}
		for in, want := range map[boxed.Duration]boxed.Duration{boxed.Never: 0, boxed.Duration(time.Second): boxed.Duration(time.Second)} {
			req.Timeout = in
			if _, err := h.client.Run(t.Context(), sb.ID, req); err != nil || h.lastCall().(boxed.ExecRequest).Timeout != want {
				t.Error(in, err, h.lastCall())
			}
		}
		// The port's own word for no deadline, without streams:
		if st, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"false"}}); err != nil || st.Code != 1 || h.lastCall().(boxed.ExecRequest).Timeout != 0 {
			t.Error(st, err)
		}
	})
	t.Run("takes code in any spelling of its language", func(t *testing.T) {
		h := newHarness(t)
		h.add("x")
		for in, want := range map[string]string{"py": "python", "node": "javascript", "sh": "bash", "bash": "bash"} {
			if _, a := call(h, `{"language":"`+in+`","code":"x"}`); a.status != 200 || h.lastCall().(boxed.ExecRequest).Language != want {
				t.Errorf("%s: %s", in, a.body)
			}
		}
	})
	t.Run("takes a program of 1 MiB", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		code := strings.Repeat("# \"é\"\n", 1<<20/7)
		if _, err := h.client.Run(t.Context(), sb.ID, boxed.ExecRequest{Language: "python", Code: code}); err != nil || h.lastCall().(boxed.ExecRequest).Code != code {
			t.Error(err)
		}
	})
	t.Run("stdin is /dev/null, or the text, or the bytes", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		if out, _ := call(h, `{"args":["cat"]}`); out["stdout"] != "" || h.lastCall().(boxed.ExecRequest).Stdin != nil {
			t.Error(out)
		}
		if out, _ := call(h, `{"args":["cat"],"stdin":""}`); out["stdout"] != "" || h.lastCall().(boxed.ExecRequest).Stdin == nil {
			t.Error(out)
		}
		if out, _ := call(h, `{"args":["cat"],"stdin":"hé"}`); out["stdout"] != "hé" {
			t.Error(out)
		}
		res, err := h.client.Run(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"cat"}, Stdin: strings.NewReader("\xff\x00a")})
		if err != nil || string(res.Stdout) != "\xff\x00a" {
			t.Error(res, err)
		}
	})
	t.Run("output that is not UTF-8 comes in base64, the other stream as text", func(t *testing.T) {
		h := newHarness(t)
		h.add("x")
		h.fake.run = writes("a\xffb", "text\x00")
		out, _ := call(h, `{"args":["x"]}`)
		if out["stdout"] != "Yf9i" || out["stdout_encoding"] != "base64" || out["stderr"] != "text\x00" || out["stderr_encoding"] != "utf-8" {
			t.Error(out)
		}
	})
	t.Run("says that output was cut, and how much there was", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		for _, extra := range []int{0, 1} {
			want := strings.Repeat("x", boxed.CollectedOutput+extra)
			h.fake.run = writes(want, "")
			res, err := h.client.Run(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}})
			if err != nil {
				t.Fatal(err)
			}
			if len(res.Stdout) != boxed.CollectedOutput || res.StdoutTruncated != (extra == 1) || res.StdoutBytes != int64(len(want)) || res.StderrTruncated {
				t.Errorf("%d: %d bytes of %d, truncated %v", extra, len(res.Stdout), res.StdoutBytes, res.StdoutTruncated)
			}
		}
	})
	t.Run("an emoji that the cut would split, at each of its bytes, leaves text", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		for lead := range 5 {
			want := strings.Repeat("x", boxed.CollectedOutput-lead) + "🙂🙂"
			h.fake.run = writes(want, "")
			res, err := h.client.Run(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}})
			if err != nil || !strings.HasPrefix(want, string(res.Stdout)) || !res.StdoutTruncated || len(res.Stdout) < boxed.CollectedOutput-3 {
				t.Errorf("%d: %d bytes, %v", lead, len(res.Stdout), err)
			}
		}
	})
	t.Run("a program that cannot be started is an error, one that fails is not", func(t *testing.T) {
		h := newHarness(t)
		h.add("x")
		if _, a := call(h, `{"args":["missing"]}`); a.status != 422 || a.problem().Code != boxed.CodeStartFailed || a.problem().Detail["field"] != "args" {
			t.Errorf("%s", a.body)
		}
		if out, a := call(h, `{"args":["false"]}`); a.status != 200 || out["exit_code"] != 1.0 {
			t.Errorf("%s", a.body)
		}
	})
	t.Run("a lost link is an error, never an exit code", func(t *testing.T) {
		h := newHarness(t)
		h.add("x")
		h.fake.run = func(context.Context, boxed.ExecRequest) (boxed.ExitStatus, error) {
			return boxed.ExitStatus{}, boxed.Errorf(boxed.CodeLost, "the agent went away")
		}
		if _, a := call(h, `{"args":["x"]}`); a.status != 502 || strings.Contains(string(a.body), "exit_code") {
			t.Errorf("%s", a.body)
		}
	})
	t.Run("a client that leaves ends the program", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		ended := make(chan struct{})
		h.fake.run = func(ctx context.Context, _ boxed.ExecRequest) (boxed.ExitStatus, error) {
			<-ctx.Done()
			close(ended)
			return boxed.ExitStatus{Reason: boxed.ReasonCanceled}, nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			eventually(t, "it runs", func() bool { return h.called("Exec") == 1 })
			cancel()
		}()
		if _, err := h.client.Run(ctx, sb.ID, boxed.ExecRequest{Args: []string{"x"}}); !errors.Is(err, boxed.CodeCanceled) {
			t.Error(err)
		}
		<-ended
	})
}

func TestDetached(t *testing.T) {
	t.Run("starts, lists, signals, waits, kills", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		e, err := h.client.StartExec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"a", "\xff"}, OpenStdin: true, TTY: true, Size: boxed.Size{Cols: 100, Rows: 30}})
		if err != nil || !e.Running || !e.Detached {
			t.Fatal(e, err)
		}
		if got := h.lastCall().(boxed.ExecRequest); !got.OpenStdin || got.Timeout != 0 || got.Size.Cols != 100 || got.Args[1] != "\xff" {
			t.Errorf("%+v", got)
		}
		if a := h.do("POST", "/v1/sandboxes/x/execs", `{"args":["a"]}`); a.status != 201 || !strings.HasPrefix(a.header.Get("Location"), "/v1/sandboxes/"+string(sb.ID)+"/execs/") {
			t.Errorf("%d %v", a.status, a.header)
		}
		if list, err := h.client.ListExecs(t.Context(), sb.ID); err != nil || len(list) != 2 {
			t.Error(list, err)
		}
		if err := h.client.SignalExec(t.Context(), sb.ID, e.ID, "sigterm", true); err != nil || h.lastCall() != "TERM true" && h.lastCall() != "TERMtrue" {
			t.Error(err, h.lastCall())
		}
		a := h.do("GET", "/v1/sandboxes/x/execs/"+string(e.ID)+"/wait?timeout=10ms", "")
		if a.status != 200 || !strings.Contains(string(a.body), `"running":true`) {
			t.Errorf("%d %s", a.status, a.body)
		}
		done := make(chan error, 1)
		go func() {
			got, err := h.client.WaitExec(t.Context(), sb.ID, e.ID)
			if err == nil && (got.Running || got.Status.Code != 137) {
				err = fmt.Errorf("%+v", got)
			}
			done <- err
		}()
		eventually(t, "it waits", func() bool { return h.called("Attach") >= 2 })
		if err := h.client.KillExec(t.Context(), sb.ID, e.ID); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
		if _, err := h.client.GetExec(t.Context(), sb.ID, "aaaaaaaaaaaa"); !errors.Is(err, boxed.CodeNotFound) {
			t.Error(err)
		}
		if a := h.do("GET", "/v1/sandboxes/x/execs", ""); strings.Contains(string(a.body), "null") {
			t.Errorf("%s", a.body)
		}
	})
	t.Run("output as plain bytes, with the place where it begins", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.fake.attach = ring("0123456789", 4)
		for _, c := range []struct{ query, body, offset string }{
			{"", "456789", "4"},
			{"?offset=4", "456789", "4"},
			{"?offset=6&follow=false", "6789", "6"},
			{"?offset=10", "", "10"},
			{"?stream=stderr", "", "0"},
		} {
			a := h.do("GET", "/v1/sandboxes/x/execs/abcdefghij23/output"+c.query, "")
			if a.status != 200 || string(a.body) != c.body || a.header.Get("X-Boxed-Offset") != c.offset {
				t.Errorf("%s: %d %q at %s", c.query, a.status, a.body, a.header.Get("X-Boxed-Offset"))
			}
		}
		h.fake.attach = func(_ context.Context, req boxed.AttachRequest) (boxed.ExitStatus, error) {
			io.WriteString(req.Stdout, "half")
			req.Gap("stdout", 5)
			io.WriteString(req.Stdout, "rest")
			return boxed.ExitStatus{Reason: boxed.ReasonExited}, nil
		}
		resp, err := h.http.Client().Do(authorized(t, h, "/v1/sandboxes/"+string(sb.ID)+"/execs/abcdefghij23/output"))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if b, err := io.ReadAll(resp.Body); err == nil || bytes.Contains(b, []byte("rest")) {
			t.Errorf("bytes are missing and it looks whole: %q", b)
		}
	})
}

func authorized(t *testing.T, h *harness, path string) *http.Request {
	req, err := http.NewRequest("GET", h.http.URL+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+userKey)
	return req
}

// ring is an exec that has written all of stdout and of which kept bytes from
// an offset on are still there.
func ring(stdout string, from int64) func(context.Context, boxed.AttachRequest) (boxed.ExitStatus, error) {
	return func(_ context.Context, req boxed.AttachRequest) (boxed.ExitStatus, error) {
		at := req.StdoutOffset
		if at < from && req.Gap != nil {
			req.Gap("stdout", from-at)
		}
		if at = max(at, from); req.Stdout != nil && at < int64(len(stdout)) {
			if _, err := io.WriteString(req.Stdout, stdout[at:]); err != nil {
				return boxed.ExitStatus{}, err
			}
		}
		return boxed.ExitStatus{Reason: boxed.ReasonExited, StdoutBytes: int64(len(stdout))}, nil
	}
}
