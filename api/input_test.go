package api_test

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
)

func TestBadInput(t *testing.T) {
	h := newHarness(t)
	sb := h.add("x")
	at := "/v1/sandboxes/" + string(sb.ID)
	long := strings.Repeat("x", 5000)
	for name, c := range map[string]struct {
		method, path, body string
		field              string
	}{
		"unknown field":             {"POST", "/v1/sandboxes", `{"nam":"x"}`, "nam"},
		"unknown nested field":      {"POST", "/v1/sandboxes", `{"limits":{"memory":1}}`, "limits.memory"},
		"field in another case":     {"POST", "/v1/sandboxes", `{"Name":"x"}`, "Name"},
		"wrong type":                {"POST", "/v1/sandboxes", `{"limits":{"memory_bytes":"1"}}`, "limits.memory_bytes"},
		"null":                      {"POST", "/v1/sandboxes", `{"name":null}`, "name"},
		"negative limit":            {"POST", "/v1/sandboxes", `{"limits":{"cpus":-1}}`, "limits.cpus"},
		"integer with a fraction":   {"POST", "/v1/sandboxes", `{"limits":{"processes":1.5}}`, "limits.processes"},
		"integer written as 1e2":    {"POST", "/v1/sandboxes", `{"limits":{"processes":1e2}}`, "limits.processes"},
		"huge number":               {"POST", "/v1/sandboxes", `{"limits":{"memory_bytes":1e300}}`, "limits.memory_bytes"},
		"bad name":                  {"POST", "/v1/sandboxes", `{"name":"-x"}`, "name"},
		"bad duration":              {"POST", "/v1/sandboxes", `{"ttl":"soon"}`, "ttl"},
		"duration as a number":      {"POST", "/v1/sandboxes", `{"ttl":60}`, "ttl"},
		"duration out of range":     {"POST", "/v1/sandboxes", `{"ttl":"99999999999999h"}`, "ttl"},
		"label with =":              {"POST", "/v1/sandboxes", `{"labels":{"a=b":"c"}}`, "labels.a=b"},
		"label not a string":        {"POST", "/v1/sandboxes", `{"labels":{"a":1}}`, "labels.a"},
		"file without content":      {"POST", "/v1/sandboxes", `{"files":[{"path":"a","content":""},{"path":"b"}]}`, "files[1].content"},
		"file not base64":           {"POST", "/v1/sandboxes", `{"files":[{"path":"a","content":"*"}]}`, "files[0].content"},
		"bad node":                  {"POST", "/v1/sandboxes", `{"node":"x"}`, "node"},
		"egress without a profile":  {"POST", "/v1/sandboxes", `{"egress":{"profile":""}}`, "egress.profile"},
		"egress that asks oddly":    {"POST", "/v1/sandboxes", `{"egress":{"on_deny":"shout"}}`, "egress.on_deny"},
		"not JSON":                  {"POST", "/v1/sandboxes", `{"name":`, ""},
		"two values":                {"POST", "/v1/sandboxes", `{}{}`, ""},
		"an array":                  {"POST", "/v1/sandboxes", `[]`, ""},
		"no body":                   {"POST", "/v1/sandboxes", ``, ""},
		"not UTF-8":                 {"POST", "/v1/sandboxes", "{\"name\":\"\xff\"}", ""},
		"half a surrogate pair":     {"POST", at + "/exec", `{"args":["\ud83d"]}`, ""},
		"wrong half first":          {"POST", at + "/exec", `{"args":["\\\udc00"]}`, ""},
		"nothing to change":         {"PATCH", at, `{}`, ""},
		"no program":                {"POST", at + "/exec", `{"dir":"/"}`, ""},
		"two programs":              {"POST", at + "/exec", `{"args":["a"],"language":"bash","code":"x"}`, ""},
		"language without code":     {"POST", at + "/exec", `{"language":"bash"}`, ""},
		"unknown language":          {"POST", at + "/exec", `{"language":"cobol","code":"x"}`, "language"},
		"args a string":             {"POST", at + "/exec", `{"args":"ls -l"}`, "args"},
		"no args":                   {"POST", at + "/exec", `{"args":[]}`, "args"},
		"NUL in args":               {"POST", at + "/exec", `{"args":["a","b\u0000"]}`, "args[1]"},
		"NUL in env":                {"POST", at + "/exec", `{"args":["a"],"env":{"A":"\u0000"}}`, "env.A"},
		"env name with =":           {"POST", at + "/exec", `{"args":["a"],"env":{"A=B":""}}`, "env.A=B"},
		"long dir":                  {"POST", at + "/exec", `{"args":["a"],"dir":"` + long + `"}`, "dir"},
		"boolean stdin in a call":   {"POST", at + "/exec", `{"args":["a"],"stdin":true}`, "stdin"},
		"stdin twice":               {"POST", at + "/exec", `{"args":["a"],"stdin":"x","stdin_base64":"eA=="}`, "stdin"},
		"terminal in a call":        {"POST", at + "/exec", `{"args":["a"],"tty":true}`, "tty"},
		"too many bytes of args":    {"POST", at + "/exec", `{"args":["` + strings.Repeat(strings.Repeat("x", 130000)+`","`, 17) + `"]}`, "args"},
		"text stdin when detached":  {"POST", at + "/execs", `{"args":["a"],"stdin":"x"}`, "stdin"},
		"bad signal":                {"POST", at + "/execs/abcdefghij23/signal", `{"signal":"9; rm"}`, "signal"},
		"bad exec ID":               {"GET", at + "/execs/nope", ``, "exec"},
		"bad reference":             {"GET", "/v1/sandboxes/A%2FB", ``, "id"},
		"unknown query parameter":   {"GET", "/v1/sandboxes?stat=running", ``, "stat"},
		"query on a call with none": {"DELETE", at + "?force=true", ``, "force"},
		"repeated parameter":        {"GET", "/v1/sandboxes?limit=1&limit=2", ``, "limit"},
		"limit not a number":        {"GET", "/v1/sandboxes?limit=ten", ``, "limit"},
		"limit too high":            {"GET", "/v1/sandboxes?limit=1001", ``, "limit"},
		"unknown state":             {"GET", "/v1/sandboxes?state=happy", ``, "state[0]"},
		"label without =":           {"GET", "/v1/sandboxes?label=a", ``, "label[0]"},
		"label asked twice":         {"GET", "/v1/sandboxes?label=a=1&label=a=2", ``, "label"},
		"wait without a state":      {"GET", at + "/wait", ``, "state"},
		"wait too long":             {"GET", at + "/wait?state=paused&timeout=1h", ``, "timeout"},
		"wait for ever":             {"GET", at + "/wait?state=paused&timeout=never", ``, "timeout"},
		"boolean as 1":              {"GET", at + "/execs/abcdefghij23/output?follow=1", ``, "follow"},
		"negative offset":           {"GET", at + "/execs/abcdefghij23/output?offset=-1", ``, "offset"},
		"unknown stream":            {"GET", at + "/execs/abcdefghij23/output?stream=stdin", ``, "stream"},
		"no path":                   {"GET", at + "/files", ``, "path"},
		"empty path":                {"GET", at + "/files?path=", ``, "path"},
		"NUL in a path":             {"GET", at + "/files?path=a%00b", ``, "path"},
		"bad mode":                  {"PUT", at + "/files?path=a&mode=0888", ``, "mode"},
		"setuid mode":               {"PUT", at + "/files?path=a&mode=4755", ``, "mode"},
		"port 0":                    {"GET", at + "/ports/0/tunnel", ``, "port"},
		"port too high":             {"GET", at + "/ports/65536/tunnel", ``, "port"},
		"bad escape in the query":   {"GET", "/v1/sandboxes?name=%zz", ``, "query"},
		"WebSocket without upgrade": {"GET", at + "/exec/stream", ``, "Upgrade"},
	} {
		t.Run(name, func(t *testing.T) {
			before := len(h.calls)
			headers := []string{}
			if c.method == "PUT" {
				headers = []string{"Content-Type", "application/octet-stream"}
			}
			if name == "no body" {
				headers = []string{"Content-Type", "application/json"}
			}
			a := h.do(c.method, c.path, c.body, headers...)
			p := a.problem()
			field, _ := p.Detail["field"].(string)
			if a.status != 400 || p.Code != boxed.CodeInvalid || field != c.field || p.Message == "" {
				t.Errorf("%d %.300s", a.status, a.body)
			}
			if p.RequestID == "" || p.RequestID != a.header.Get("X-Request-ID") {
				t.Errorf("request ID %q, header %q", p.RequestID, a.header.Get("X-Request-ID"))
			}
			if strings.Contains(p.Message, long) {
				t.Error("the message repeats the value")
			}
			if len(h.calls) != before {
				t.Errorf("something was called: %v", h.calls[before:])
			}
		})
	}
}

func TestErrors(t *testing.T) {
	t.Run("each code has the status of the table, and comes back as itself", func(t *testing.T) {
		h := newHarness(t)
		for code, status := range map[boxed.Code]int{
			boxed.CodeInvalid: 400, boxed.CodeUnavailable: 400, boxed.CodeUnauthenticated: 401, boxed.CodeForbidden: 403,
			boxed.CodeNotFound: 404, boxed.CodeMethod: 405, boxed.CodeConflict: 409, boxed.CodeGone: 410,
			boxed.CodeCursorExpired: 410, boxed.CodeTooLarge: 413, boxed.CodeMediaType: 415, boxed.CodeRange: 416,
			boxed.CodeImage: 422, boxed.CodeStartFailed: 422, boxed.CodeQuota: 429, boxed.CodeRateLimited: 429,
			boxed.CodeCanceled: 499, boxed.CodeInternal: 500, boxed.CodeLost: 502, boxed.CodeExhausted: 503,
			boxed.CodeNotReady: 503, boxed.CodeDeadline: 504, boxed.CodeNoSpace: 507,
		} {
			h.fake.create = func(ctx contextT, spec boxed.Spec) (*boxed.Sandbox, error) {
				return nil, fmt.Errorf("place: %w", boxed.Errorf(code, "because").With("reason", "r").With("nodes", []string{"a"}))
			}
			a := h.do("POST", "/v1/sandboxes", "{}", "X-Request-ID", "mine")
			if a.status != status {
				t.Errorf("%s: %d", code, a.status)
			}
			if want := status == 503 || code == boxed.CodeRateLimited; (a.header.Get("Retry-After") != "") != want {
				t.Errorf("%s: Retry-After %q", code, a.header.Get("Retry-After"))
			}
			_, err := h.client.Create(t.Context(), boxed.Spec{})
			var e *boxed.Error
			if !errors.As(err, &e) || e.Code != code || e.Message != "because" || e.Detail["reason"] != "r" || e.Detail["request_id"] == "" {
				t.Errorf("%s: %#v", code, err)
			}
		}
	})
	t.Run("what nobody meant to show is not shown, but logged", func(t *testing.T) {
		h := newHarness(t)
		h.fake.create = func(contextT, boxed.Spec) (*boxed.Sandbox, error) { return nil, errors.New("secret path /x") }
		a := h.do("POST", "/v1/sandboxes", "{}")
		if a.status != 500 || strings.Contains(string(a.body), "secret") {
			t.Errorf("%s", a.body)
		}
		eventually(t, "the log has the cause", func() bool { return strings.Contains(h.log.String(), "secret path /x") })
	})
	t.Run("no such path, no such method, in the same shape", func(t *testing.T) {
		h := newHarness(t)
		for _, path := range []string{"/", "/v1", "/v1/", "/v2/sandboxes", "/v1/sandboxes/", "/v1//sandboxes", "/v1/sandboxes/x/../y", "/docs/"} {
			if a := h.do("GET", path, ""); a.status != 404 || a.problem().Code != boxed.CodeNotFound {
				t.Errorf("%s: %d %s", path, a.status, a.body)
			}
		}
		a := h.do("PUT", "/v1/sandboxes", "{}")
		if a.status != 405 || a.problem().Code != boxed.CodeMethod || a.header.Get("Allow") != "GET, POST" {
			t.Errorf("%d %v %s", a.status, a.header, a.body)
		}
		if a := h.do("HEAD", "/healthz", ""); a.status != 200 {
			t.Error(a.status)
		}
	})
	t.Run("a body that is too large", func(t *testing.T) {
		h := newHarness(t)
		big := `{"image":"` + strings.Repeat("x", 17<<20) + `"}`
		a := h.do("POST", "/v1/sandboxes", big)
		if a.status != 413 || a.problem().Code != boxed.CodeTooLarge {
			t.Errorf("%d %s", a.status, a.body)
		}
		req, _ := http.NewRequest("POST", h.http.URL+"/v1/sandboxes", struct{ *strings.Reader }{strings.NewReader(big)})
		req.ContentLength = -1
		req.Header.Set("Authorization", "Bearer "+userKey)
		req.Header.Set("Content-Type", "application/json")
		if resp, err := h.http.Client().Do(req); err != nil {
			t.Log(err) // the server may close while the client still writes
		} else {
			if resp.Body.Close(); resp.StatusCode != 413 {
				t.Error(resp.Status)
			}
		}
	})
	t.Run("a body of the wrong type", func(t *testing.T) {
		h := newHarness(t)
		for _, c := range []string{"", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json; charset=latin1", "application/jsonp"} {
			if a := h.do("POST", "/v1/sandboxes", "{}", "Content-Type", c); a.status != 415 {
				t.Errorf("%s: %d", c, a.status)
			}
		}
		for _, c := range []string{"application/json; charset=utf-8", "Application/JSON"} {
			if a := h.do("POST", "/v1/sandboxes", "{}", "Content-Type", c); a.status != 201 {
				t.Errorf("%s: %d %s", c, a.status, a.body)
			}
		}
		if a := h.do("POST", "/v1/sandboxes", "{}", "Content-Encoding", "gzip"); a.status != 415 {
			t.Error(a.status)
		}
	})
}

func FuzzBody(f *testing.F) {
	for _, s := range []string{execBody, createBody, `{"args":["\ud83d\ude42"]}`, `{"args_base64":["AA=="],"env":{"A=B":1}}`, `[[[[`, `{"ttl":"1h1h"}`, `{"args":[1e999]}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		for _, op := range []string{"POST /v1/sandboxes", "POST /v1/sandboxes/{id}/exec", "POST /v1/sandboxes/{id}/execs", "POST /v1/keys"} {
			if err := api.CheckBody(op, raw); err != nil && !errors.Is(err, boxed.CodeInvalid) {
				t.Fatalf("%s: %v", op, err)
			}
		}
	})
}
