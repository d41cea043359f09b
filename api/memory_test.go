package api_test

import (
	"context"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/boxed-mesh/boxed/internal/frame"
)

// Requests that are under way hold no more memory than there is for them. What is
// too much is refused with advice, an owner cannot take the part of others, small
// requests are always served, and all of it is there again afterwards.
func TestRequestsHoldNoMoreThanTheirMemory(t *testing.T) {
	h := newHarness(t, func(c *api.Config) { c.MaxHeld = 1 << 20 }) // half of it for each owner
	sb := h.add("x")
	h.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
		switch req.Args[0] {
		case "hold":
			req.Started("abcdefghij23")
			<-ctx.Done()
			return boxed.ExitStatus{}, ctx.Err()
		case "write":
			for range 8 {
				req.Stdout.Write(make([]byte, 64<<10))
			}
		}
		return boxed.ExitStatus{Reason: boxed.ReasonExited}, nil
	}
	exec := "/v1/sandboxes/" + string(sb.ID) + "/exec"
	large := `{"args":["x"],"stdin":"` + strings.Repeat("a", 200<<10) + `"}`

	if a := h.do("POST", exec, large); a.status != http.StatusOK {
		t.Errorf("with all of it there: %d %s", a.status, a.body)
	}
	// Half of a body holds memory for as long as the rest does not come.
	half, err := net.Dial("tcp", h.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer half.Close()
	for _, part := range []string{
		"POST " + exec + " HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer " + userKey +
			"\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n",
		large,
	} {
		if _, err := half.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "half a body is held", func() bool { return h.server.Held() > 300<<10 })
	refused := h.do("POST", exec, large)
	if p := refused.problem(); refused.status != http.StatusServiceUnavailable || p.Code != boxed.CodeExhausted ||
		!strings.Contains(p.Message, "files") || refused.header.Get("Retry-After") == "" {
		t.Errorf("%d %+v %v", refused.status, p, refused.header)
	}
	if a := h.do("POST", exec, `{"args":["x"],"stdin":"abc"}`); a.status != http.StatusOK {
		t.Errorf("a small request: %d %s", a.status, a.body)
	}
	if a := h.do("POST", exec, large, "Authorization", "Bearer "+adminKey); a.status != http.StatusOK {
		t.Errorf("another owner: %d %s", a.status, a.body)
	}
	// Output is not refused but cut, and says so.
	result, err := h.client.Run(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"write"}})
	if err != nil || !result.StdoutTruncated || len(result.Stdout) == 0 || result.StdoutBytes != 512<<10 {
		t.Errorf("%d bytes, %+v, %v", len(result.Stdout), result.ExitStatus, err)
	}
	half.Close()
	eventually(t, "the half body is forgotten", func() bool { return h.do("POST", exec, large).status == http.StatusOK })

	// Input that no program reads.
	conn := h.socket(exec + "/stream")
	h.sendText(conn, `{"args":["hold"],"stdin":true}`)
	for range 6 {
		h.send(conn, frame.Frame{Type: frame.Stdin, Payload: make([]byte, 64<<10)})
	}
	list, _ := frames(conn)
	if p := lastError(t, list); p.Code != boxed.CodeExhausted {
		t.Errorf("%+v", p)
	}
	// What a program reads is given back: much more than there is goes through.
	h.run = func(ctx context.Context, req boxed.ExecRequest) (boxed.ExitStatus, error) {
		n, buf := int64(0), make([]byte, 32<<10)
		for {
			got, err := req.Stdin.Read(buf)
			if n += int64(got); err != nil {
				return boxed.ExitStatus{Reason: boxed.ReasonExited, StdoutBytes: n}, nil
			}
		}
	}
	st, err := h.client.Exec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}, Stdin: strings.NewReader(strings.Repeat("a", 8<<20))})
	if err != nil || st.StdoutBytes != 8<<20 {
		t.Error(st, err)
	}
	eventually(t, "nothing is held", func() bool { return h.server.Held() == 0 })
}
