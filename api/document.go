package api

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"
	"sync"

	"github.com/boxed-mesh/boxed"
	"github.com/goccy/go-yaml"
	"github.com/santhosh-tekuri/jsonschema/v6"
)

//go:embed openapi.yaml
var documentYAML []byte

// document is openapi.yaml, read and compiled.
//
// Why not a validator of whole requests: measured on this project's test machine
// (one core of a Xeon) with the create and exec calls alone, per request and
// without decoding into Go types,
//
//	                                             exec      create   allocations
//	getkin/kin-openapi v0.153, openapi3filter    474 µs    936 µs   3,501; 5,104
//	pb33f/libopenapi-validator v0.16              36 µs     34 µs     326;   250
//	jsonschema/v6, compiled once                  11 µs     19 µs      94;   170
//
// kin-openapi hands OpenAPI 3.1 schemas to santhosh-tekuri/jsonschema, which is
// correct, but marshals and compiles them anew for each value, and it reads a
// streamed body into memory. libopenapi keeps its schemas, but its errors carry
// no path for unknown and missing fields. Both let unknown query parameters in.
// So the engine that kin-openapi uses is used directly, compiled once per
// process, and kin-openapi checks in a test that the document is valid OpenAPI
// 3.1 and that its examples fit. BenchmarkValidate has the whole cost with
// decoding: 26 µs and 42 µs; BenchmarkExec all that the server adds: 56 µs.
type document struct {
	tree       yaml.MapSlice  // in the order of the file
	root       map[string]any // the same, for look-ups
	json       []byte
	operations map[string]*operation // by "METHOD /path"
}

// operation is one call of the document.
type operation struct {
	id       string
	open     bool // needs no key
	params   []parameter
	body     *jsonschema.Schema // of a JSON body; nil if there is none
	media    []string           // types of a body that is not JSON
	optional bool               // the body may be missing
}

// parameter is one path or query parameter.
type parameter struct {
	name, in string
	required bool
	kind     string // string, integer, boolean or array (of strings)
	fallback string // what a missing one means, as text
	schema   *jsonschema.Schema
}

const documentURL = "boxed:///openapi.json"

// loadDocument reads the embedded document once. It cannot fail in a build that
// passed its tests.
var loadDocument = sync.OnceValues(func() (*document, error) {
	d := &document{operations: map[string]*operation{}}
	if err := yaml.UnmarshalWithOptions(documentYAML, &d.tree, yaml.UseOrderedMap()); err != nil {
		return nil, fmt.Errorf("read openapi.yaml: %w", err)
	}
	var err error
	if d.json, err = marshalOrdered(d.tree); err != nil {
		return nil, fmt.Errorf("read openapi.yaml: %w", err)
	}
	root, err := jsonschema.UnmarshalJSON(bytes.NewReader(d.json))
	if err != nil {
		return nil, fmt.Errorf("read openapi.yaml: %w", err)
	}
	d.root = root.(map[string]any)
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft2020)
	c.RegisterFormat(&jsonschema.Format{Name: "boxed-duration", Validate: validDuration})
	c.AssertFormat()
	c.AssertContent()
	if err := c.AddResource(documentURL, root); err != nil {
		return nil, err
	}
	for path, item := range object(d.root["paths"]) {
		for method, op := range object(item) {
			if method == "parameters" {
				continue
			}
			where := []string{"paths", path, method}
			o, err := d.operation(c, where, object(op), array(object(item)["parameters"]))
			if err != nil {
				return nil, fmt.Errorf("%s %s: %w", method, path, err)
			}
			d.operations[strings.ToUpper(method)+" "+path] = o
		}
	}
	return d, nil
})

func validDuration(v any) error {
	s, ok := v.(string)
	if !ok {
		return nil
	}
	_, err := boxed.ParseDuration(s)
	return err
}

func (d *document) operation(c *jsonschema.Compiler, where []string, op map[string]any, shared []any) (*operation, error) {
	o := &operation{id: text(op["operationId"])}
	if sec, ok := op["security"]; ok {
		o.open = len(array(sec)) == 0
	}
	groups := []struct {
		at   []string
		list []any
	}{
		{append(where[:2:2], "parameters"), shared},
		{append(where[:3:3], "parameters"), array(op["parameters"])},
	}
	for _, g := range groups {
		for i := range g.list {
			p, err := d.parameter(c, append(g.at[:len(g.at):len(g.at)], fmt.Sprint(i)))
			if err != nil {
				return nil, err
			}
			o.params = append(o.params, p)
		}
	}
	body := object(op["requestBody"])
	if len(body) == 0 {
		return o, nil
	}
	o.optional = body["required"] != true
	for media, m := range object(body["content"]) {
		if media != "application/json" {
			o.media = append(o.media, media)
			continue
		}
		if object(m)["schema"] == nil {
			return nil, fmt.Errorf("the body has no schema")
		}
		var err error
		if o.body, err = d.compile(c, append(where[:3:3], "requestBody", "content", media, "schema")); err != nil {
			return nil, err
		}
	}
	return o, nil
}

func (d *document) parameter(c *jsonschema.Compiler, at []string) (parameter, error) {
	at, v := d.follow(at)
	raw := object(v)
	p := parameter{name: text(raw["name"]), in: text(raw["in"]), required: raw["required"] == true}
	at = append(at[:len(at):len(at)], "schema")
	s := object(d.at(at))
	if def, ok := s["default"]; ok {
		p.fallback = fmt.Sprint(def)
	}
	_, resolved := d.follow(at)
	if p.kind = text(object(resolved)["type"]); p.kind == "" {
		return p, fmt.Errorf("parameter %s has no type", p.name)
	}
	if def, ok := object(resolved)["default"]; ok && p.fallback == "" {
		p.fallback = fmt.Sprint(def)
	}
	var err error
	p.schema, err = d.compile(c, at)
	return p, err
}

// compile compiles the schema at a path of the document.
func (d *document) compile(c *jsonschema.Compiler, at []string) (*jsonschema.Schema, error) {
	var b strings.Builder
	b.WriteString(documentURL + "#")
	for _, part := range at {
		part = strings.ReplaceAll(strings.ReplaceAll(part, "~", "~0"), "/", "~1")
		b.WriteString("/" + strings.NewReplacer("%", "%25", "{", "%7B", "}", "%7D").Replace(part))
	}
	return c.Compile(b.String())
}

// follow resolves references until what is there is not one.
func (d *document) follow(at []string) ([]string, any) {
	for range 8 {
		v := d.at(at)
		ref := text(object(v)["$ref"])
		if ref == "" {
			return at, v
		}
		at = strings.Split(strings.TrimPrefix(ref, "#/"), "/")
	}
	return at, nil
}

// at is what lies at a path of the document, or nil.
func (d *document) at(path []string) any {
	var v any = d.root
	for _, part := range path {
		switch node := v.(type) {
		case map[string]any:
			v = node[part]
		case []any:
			i := 0
			if _, err := fmt.Sscan(part, &i); err != nil || i < 0 || i >= len(node) {
				return nil
			}
			v = node[i]
		default:
			return nil
		}
	}
	return v
}

func object(v any) map[string]any { m, _ := v.(map[string]any); return m }
func array(v any) []any           { a, _ := v.([]any); return a }
func text(v any) string           { s, _ := v.(string); return s }

// marshalOrdered writes a YAML tree as JSON in the order of the file.
func marshalOrdered(v any) ([]byte, error) {
	var b bytes.Buffer
	if err := writeOrdered(&b, v); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func writeOrdered(b *bytes.Buffer, v any) error {
	switch v := v.(type) {
	case yaml.MapSlice:
		b.WriteByte('{')
		for i, item := range v {
			if i > 0 {
				b.WriteByte(',')
			}
			key, _ := json.Marshal(fmt.Sprint(item.Key))
			b.Write(key)
			b.WriteByte(':')
			if err := writeOrdered(b, item.Value); err != nil {
				return err
			}
		}
		b.WriteByte('}')
	case []any:
		b.WriteByte('[')
		for i, item := range v {
			if i > 0 {
				b.WriteByte(',')
			}
			if err := writeOrdered(b, item); err != nil {
				return err
			}
		}
		b.WriteByte(']')
	default:
		raw, err := json.Marshal(v)
		if err != nil {
			return err
		}
		b.Write(raw)
	}
	return nil
}
