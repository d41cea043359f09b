package api_test

import (
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
	"github.com/getkin/kin-openapi/openapi3"
	"github.com/google/go-cmp/cmp"
)

func loadDocument(t *testing.T) *openapi3.T {
	t.Helper()
	raw, err := os.ReadFile("openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := openapi3.NewLoader().LoadFromData(raw)
	if err != nil {
		t.Fatal(err)
	}
	return doc
}

func TestDocument(t *testing.T) {
	t.Run("is valid OpenAPI 3.1 and its examples fit", func(t *testing.T) {
		// ttl and timeout have a format of our own, which the engine ignores here.
		if err := loadDocument(t).Validate(t.Context(), openapi3.EnableExamplesValidation()); err != nil {
			t.Fatal(err)
		}
	})
	// That every route is in the document and the reverse, New itself checks:
	// newHarness fails otherwise. This is the other half: nothing is documented
	// that a server does not answer.
	t.Run("every call is answered with something but 404 and 405", func(t *testing.T) {
		h := newHarness(t)
		h.fake.events = func(context.Context, boxed.Cursor) iter.Seq2[boxed.Event, error] {
			return func(yield func(boxed.Event, error) bool) { yield(boxed.Event{}, boxed.CodeCursorExpired) }
		}
		for path, item := range loadDocument(t).Paths.Map() {
			for method := range item.Operations() {
				at := strings.NewReplacer("{id}", "none", "{exec}", "!", "{port}", "0", "{key}", "!").Replace(path)
				a := h.do(method, at, "")
				if p := a.problem(); p.Code == boxed.CodeMethod || (a.status == 404 && strings.Contains(p.Message, "no such call")) {
					t.Errorf("%s %s: %s", method, path, a.body)
				}
			}
		}
	})
	t.Run("says whether a call needs a key", func(t *testing.T) {
		h := newHarness(t)
		for path, item := range loadDocument(t).Paths.Map() {
			for method, op := range item.Operations() {
				open := op.Security != nil && len(*op.Security) == 0
				a := h.do(method, path, "", "Authorization", "")
				if got := a.status != http.StatusUnauthorized; got != open {
					t.Errorf("%s %s: open %v, answered %d", method, path, open, a.status)
				}
			}
		}
	})
	t.Run("has the fields of the Go types and no others", func(t *testing.T) {
		doc := loadDocument(t)
		for name, v := range map[string]any{
			"Spec": boxed.Spec{}, "Update": boxed.Update{}, "Limits": boxed.Limits{}, "File": boxed.File{},
			"ExitStatus": boxed.ExitStatus{}, "Exec": boxed.Exec{}, "Size": boxed.Size{}, "FileInfo": boxed.FileInfo{},
			"Port": boxed.Port{}, "Sandbox": boxed.Sandbox{}, "List": boxed.List{}, "Stats": boxed.Stats{},
			"Event": boxed.Event{}, "KeyRequest": boxed.KeyRequest{}, "Key": boxed.Key{}, "NewKey": boxed.NewKey{},
			"NodeInfo": boxed.NodeInfo{}, "NodeList": boxed.NodeList{}, "NodeSummary": boxed.NodeSummary{}, "Explanation": boxed.Explanation{}, "ClusterStatus": boxed.ClusterStatus{}, "Capacity": boxed.Capacity{}, "PoolInfo": boxed.PoolInfo{}, "Template": boxed.Template{},
		} {
			schema := doc.Components.Schemas[name]
			if schema == nil {
				t.Errorf("%s is missing", name)
				continue
			}
			want, required := jsonFields(reflect.TypeOf(v))
			var got []string
			for p := range schema.Value.Properties {
				got = append(got, p)
			}
			slices.Sort(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %s", name, diff)
			}
			if schema.Value.AdditionalProperties.Has == nil { // an answer: what is always there is required
				slices.Sort(schema.Value.Required)
				if diff := cmp.Diff(required, schema.Value.Required); diff != "" {
					t.Errorf("%s required: %s", name, diff)
				}
			}
		}
		wire, _ := jsonFields(reflect.TypeOf(boxed.ExecRequest{}))
		var got []string
		for p := range doc.Components.Schemas["ExecRequest"].Value.Properties {
			if p != "args_base64" {
				got = append(got, p)
			}
		}
		slices.Sort(got)
		if diff := cmp.Diff(wire, got); diff != "" {
			t.Errorf("ExecRequest: %s", diff)
		}
	})
	t.Run("bounds every string and list of a request", func(t *testing.T) {
		doc := loadDocument(t)
		var walk func(at string, s *openapi3.SchemaRef)
		walk = func(at string, s *openapi3.SchemaRef) {
			v := s.Value
			switch {
			case v.Type.Is("string") && v.MaxLength == nil && len(v.Enum) == 0 && v.ContentEncoding == "" && !strings.Contains(v.Pattern, "{16}") && !strings.Contains(v.Pattern, "{3}"):
				t.Errorf("%s: no maxLength", at)
			case v.Type.Is("array") && v.MaxItems == nil:
				t.Errorf("%s: no maxItems", at)
			case v.Type.Is("integer") && (v.Max == nil || v.Min == nil):
				t.Errorf("%s: no bounds", at)
			case v.Type.Is("object") && v.AdditionalProperties.Schema == nil && (v.AdditionalProperties.Has == nil || *v.AdditionalProperties.Has):
				t.Errorf("%s: unknown fields are let in", at)
			}
			for name, p := range v.Properties {
				walk(at+"."+name, p)
			}
			if v.Items != nil {
				walk(at+"[]", v.Items)
			}
		}
		for path, item := range doc.Paths.Map() {
			for method, op := range item.Operations() {
				if op.RequestBody == nil {
					continue
				}
				if m := op.RequestBody.Value.Content["application/json"]; m != nil {
					walk(method+" "+path, m.Schema)
				}
			}
		}
	})
	t.Run("explains exactly the codes that have a status", func(t *testing.T) {
		code := loadDocument(t).Components.Schemas["Error"].Value.Properties["code"].Value
		meanings, _ := code.Extensions["x-meanings"].(map[string]any)
		var listed []string
		for _, c := range code.Enum {
			name := c.(string)
			listed = append(listed, name)
			if api.Status(boxed.Code(name)) == http.StatusInternalServerError && name != "internal" {
				t.Errorf("%s has no status", name)
			}
			if meanings[name] == nil {
				t.Errorf("%s has no meaning", name)
			}
		}
		root, err := os.ReadFile("../errors.go")
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)^\tCode\w+ +Code = "(\w+)"`).FindAllStringSubmatch(string(root), -1) {
			if !slices.Contains(listed, m[1]) {
				t.Errorf("%s is not in the document", m[1])
			}
			listed = slices.DeleteFunc(listed, func(s string) bool { return s == m[1] })
		}
		if len(listed) > 0 || len(meanings) != len(code.Enum) {
			t.Errorf("no such codes: %v", listed)
		}
	})
	t.Run("describes the answers that are given", func(t *testing.T) {
		h := newHarness(t)
		sb := h.add("x")
		h.files["/f"] = []byte("x")
		e, _ := h.fake.StartExec(t.Context(), sb.ID, boxed.ExecRequest{Args: []string{"x"}})
		h.fake.end(e.ID, boxed.ExitStatus{Reason: boxed.ReasonExited})
		doc := loadDocument(t)
		at := strings.NewReplacer("{id}", "x", "{exec}", string(e.ID))
		for _, c := range []struct{ method, path, query, body string }{
			{"POST", "/v1/sandboxes", "", `{"labels":{"a":"b"}}`},
			{"GET", "/v1/sandboxes", "?limit=5", ""},
			{"GET", "/v1/sandboxes/{id}", "", ""},
			{"PATCH", "/v1/sandboxes/{id}", "", `{"ttl":"2h"}`},
			{"GET", "/v1/sandboxes/{id}/wait", "?state=running", ""},
			{"POST", "/v1/sandboxes/{id}/pause", "", ""},
			{"POST", "/v1/sandboxes/{id}/resume", "", ""},
			{"GET", "/v1/sandboxes/{id}/stats", "", ""},
			{"POST", "/v1/sandboxes/{id}/exec", "", `{"args":["echo"]}`},
			{"POST", "/v1/sandboxes/{id}/execs", "", `{"args":["echo"]}`},
			{"GET", "/v1/sandboxes/{id}/execs", "", ""},
			{"GET", "/v1/sandboxes/{id}/execs/{exec}", "", ""},
			{"GET", "/v1/sandboxes/{id}/execs/{exec}/wait", "", ""},
			{"GET", "/v1/sandboxes/{id}/files/stat", "?path=/f", ""},
			{"GET", "/v1/sandboxes/{id}/files/list", "?path=/", ""},
			{"GET", "/v1/sandboxes/{id}/ports", "", ""},
			{"GET", "/v1/node", "", ""},
			{"GET", "/healthz", "", ""},
			{"GET", "/readyz", "", ""},
			{"GET", "/version", "", ""},
			{"POST", "/v1/keys", "", `{"owner":"a","role":"user"}`},
			{"GET", "/v1/keys", "", ""},
			{"GET", "/v1/sandboxes/{id}/files", "?path=/nope", ""},
		} {
			a := h.do(c.method, at.Replace(c.path)+c.query, c.body, "Authorization", "Bearer "+adminKey)
			op := doc.Paths.Value(c.path).GetOperation(c.method)
			resp := op.Responses.Status(a.status)
			if resp == nil {
				resp = op.Responses.Default()
			}
			var v any
			if err := json.Unmarshal(a.body, &v); err != nil {
				t.Errorf("%s %s: %v", c.method, c.path, err)
				continue
			}
			schema := resp.Value.Content["application/json"].Schema.Value
			if err := schema.VisitJSON(v, openapi3.EnableJSONSchema2020()); err != nil {
				t.Errorf("%s %s: %d %s: %v", c.method, c.path, a.status, a.body, err)
			}
		}
	})
	t.Run("is served as YAML and as the same JSON", func(t *testing.T) {
		h := newHarness(t)
		raw, _ := os.ReadFile("openapi.yaml")
		if a := h.do("GET", "/openapi.yaml", "", "Authorization", ""); string(a.body) != string(raw) {
			t.Errorf("not the file: %d", a.status)
		}
		a := h.do("GET", "/openapi.json", "", "Authorization", "")
		doc, err := openapi3.NewLoader().LoadFromData(a.body)
		if err != nil {
			t.Fatal(err)
		}
		want, _ := json.Marshal(loadDocument(t))
		got, _ := json.Marshal(doc)
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Error(diff)
		}
	})
}

// jsonFields are the names of a type's JSON fields, and those of them that are
// always written.
func jsonFields(t reflect.Type) (all, always []string) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous:
			a, b := jsonFields(f.Type)
			all, always = append(all, a...), append(always, b...)
		case name != "-" && name != "":
			all = append(all, name)
			if opts == "" {
				always = append(always, name)
			}
		}
	}
	slices.Sort(all)
	slices.Sort(always)
	return all, always
}
