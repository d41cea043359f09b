package api_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/google/go-cmp/cmp"
)

func TestSandboxes(t *testing.T) {
	t.Run("creates what was asked for", func(t *testing.T) {
		h := newHarness(t)
		want := boxed.Spec{
			Name: "build", Labels: map[string]string{"a b": "c=d", "é": "🙂"}, Image: "python:3.12-slim",
			Env: map[string]string{"A": "1"}, Dir: "/workspace", Limits: boxed.Limits{MemoryBytes: 256 << 20, CPUs: 0.5},
			TTL: boxed.Never, IdleTimeout: boxed.Duration(90 * time.Second),
			Files: []boxed.File{{Path: "a/b", Content: []byte{0, 255, 1}, Mode: 0o755}},
			Node:  testNode, Workspace: &boxed.Workspace{Kind: "memory"}, Egress: &boxed.EgressSpec{Profile: "x"},
		}
		sb, err := h.client.Create(t.Context(), want)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, h.lastCall()); diff != "" {
			t.Error(diff)
		}
		if h.who != (boxed.Principal{Owner: "ada", Role: boxed.RoleUser, Key: "user"}) {
			t.Errorf("asked as %+v", h.who)
		}
		got, err := h.client.Get(t.Context(), sb.ID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(sb, got); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("answers 201 with its place, and labels that are never null", func(t *testing.T) {
		h := newHarness(t)
		a := h.do("POST", "/v1/sandboxes", "{}")
		var sb boxed.Sandbox
		if err := json.Unmarshal(a.body, &sb); err != nil || a.status != 201 {
			t.Fatal(a.status, string(a.body))
		}
		if a.header.Get("Location") != "/v1/sandboxes/"+string(sb.ID) {
			t.Error(a.header)
		}
		if !strings.Contains(string(a.body), `"labels":{}`) {
			t.Errorf("%s", a.body)
		}
		if a := h.do("GET", "/v1/sandboxes", ""); !strings.Contains(string(a.body), `"labels":{}`) {
			t.Errorf("%s", a.body)
		}
	})
	t.Run("lists by label, state, name, owner and page", func(t *testing.T) {
		h := newHarness(t)
		want := boxed.Filter{
			Labels: map[string]string{"a": "b=c", "d": ""}, States: []boxed.State{"running", "failed"},
			Name: "build", Owner: "*", Limit: 7, Cursor: "next",
		}
		if _, err := h.client.List(t.Context(), want); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, h.lastCall()); diff != "" {
			t.Error(diff)
		}
		if a := h.do("GET", "/v1/sandboxes", ""); string(a.body) != `{"sandboxes":[]}`+"\n" {
			t.Errorf("%s", a.body)
		}
	})
	t.Run("finds by ID without a look-up, by name and by prefix", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("build")
		if _, err := h.client.Stats(t.Context(), sb.ID); err != nil || h.called("Resolve") != 0 {
			t.Error(err, h.calls)
		}
		for _, ref := range []string{string(sb.ID), "build", string(sb.ID)[:6]} {
			got, err := h.client.Resolve(t.Context(), ref)
			if err != nil || got.ID != sb.ID {
				t.Errorf("%s: %v %v", ref, got, err)
			}
			if a := h.do("GET", "/v1/sandboxes/"+ref+"/stats", ""); a.status != 200 {
				t.Errorf("%s: %s", ref, a.body)
			}
		}
		h.add("build")
		_, err := h.client.Resolve(t.Context(), "build")
		var e *boxed.Error
		if !errors.As(err, &e) || e.Code != boxed.CodeConflict || len(e.Detail["ids"].([]any)) != 2 {
			t.Error(err)
		}
	})
	t.Run("renews, pauses, resumes, destroys", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		ttl := boxed.Duration(2 * time.Hour)
		got, err := h.client.Update(t.Context(), sb.ID, boxed.Update{TTL: &ttl})
		if err != nil || got.TTL != ttl {
			t.Error(got, err)
		}
		if got, err = h.client.Pause(t.Context(), sb.ID); err != nil || got.State != boxed.StatePaused {
			t.Error(got, err)
		}
		if got, err = h.client.Resume(t.Context(), sb.ID); err != nil || got.State != boxed.StateRunning {
			t.Error(got, err)
		}
		if err := h.client.Destroy(t.Context(), sb.ID); err != nil {
			t.Error(err)
		}
	})
	t.Run("waits until the state or the end, over several polls", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		a := h.do("GET", "/v1/sandboxes/x/wait?state=paused&timeout=10ms", "")
		if a.status != 200 || !strings.Contains(string(a.body), `"state":"running"`) {
			t.Errorf("%s", a.body)
		}
		done := make(chan error, 1)
		go func() {
			got, err := h.client.Wait(t.Context(), sb.ID, boxed.StatePaused)
			if err == nil && got.State != boxed.StateStopped {
				err = fmt.Errorf("state %s", got.State)
			}
			done <- err
		}()
		eventually(t, "the wait has begun", func() bool { return h.called("Wait") >= 2 })
		if err := h.client.Destroy(t.Context(), sb.ID); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Run("keys are for administrators", func(t *testing.T) {
		h := newHarness(t)
		req := boxed.KeyRequest{Owner: "ada", Role: boxed.RoleUser, TTL: boxed.Duration(time.Hour)}
		if _, err := h.client.CreateKey(t.Context(), req); !errors.Is(err, boxed.CodeForbidden) {
			t.Error(err)
		}
		admin := h.as(adminKey)
		if k, err := admin.CreateKey(t.Context(), req); err != nil || k.Secret == "" {
			t.Error(k, err)
		}
		if keys, err := admin.ListKeys(t.Context()); err != nil || len(keys) != 1 {
			t.Error(keys, err)
		}
		if err := admin.RevokeKey(t.Context(), "k1"); err != nil || h.lastCall() != "k1" {
			t.Error(err)
		}
	})
	t.Run("describes the node without nulls", func(t *testing.T) {
		h := newHarness(t)
		if n, err := h.client.NodeInfo(t.Context()); err != nil || n.ID != testNode {
			t.Error(n, err)
		}
		if a := h.do("GET", "/v1/node", ""); strings.Contains(string(a.body), "null") {
			t.Errorf("%s", a.body)
		}
	})
}
