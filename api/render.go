package api

//go:generate go test . -run TestPages -update

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/boxed-mesh/boxed"
	"github.com/goccy/go-yaml"
)

// Markdown is the document as Markdown: docs/api.md, and the text of /docs.
func Markdown() ([]byte, error) {
	doc, err := loadDocument()
	if err != nil {
		return nil, err
	}
	r := &renderer{doc: doc}
	r.all()
	return r.b.Bytes(), nil
}

// renderer writes the document in the order of its file.
type renderer struct {
	doc *document
	b   bytes.Buffer
}

func (r *renderer) printf(format string, args ...any) { fmt.Fprintf(&r.b, format, args...) }

// para writes text as paragraphs of its own.
func (r *renderer) para(s string) {
	if s = strings.TrimSpace(s); s != "" {
		r.printf("%s\n\n", s)
	}
}

func (r *renderer) all() {
	info := ordered(r.doc.tree, "info")
	r.printf("# The %s API, %s\n\n", get(info, "title"), get(info, "version"))
	r.para(get(info, "summary"))
	r.para(get(info, "description"))
	tags, _ := value(r.doc.tree, "tags").([]any)
	for _, t := range tags {
		tag, _ := t.(yaml.MapSlice)
		r.printf("## %s\n\n", get(tag, "name"))
		r.para(get(tag, "description"))
		for _, path := range ordered(r.doc.tree, "paths") {
			item, _ := path.Value.(yaml.MapSlice)
			for _, op := range item {
				o, ok := op.Value.(yaml.MapSlice)
				if ok && slices.Contains(texts(value(o, "tags")), get(tag, "name")) {
					r.call(fmt.Sprint(op.Key), fmt.Sprint(path.Key), item, o)
				}
			}
		}
	}
	r.codes()
	r.printf("## Schemas\n\n")
	for _, s := range ordered(ordered(r.doc.tree, "components"), "schemas") {
		r.schema(fmt.Sprint(s.Key), asMap(s.Value))
	}
}

func (r *renderer) call(method, path string, item, op yaml.MapSlice) {
	r.printf("<a id=\"call-%s\"></a>\n\n### %s\n\n", get(op, "operationId"), get(op, "summary"))
	lock := ""
	if sec, ok := value(op, "security").([]any); ok && len(sec) == 0 {
		lock = " (no key needed)"
	}
	r.printf("`%s %s`%s\n\n", strings.ToUpper(method), path, lock)
	r.para(get(op, "description"))
	r.params(item, op)
	r.body(asMap(value(op, "requestBody")))
	r.responses(asMap(value(op, "responses")))
	if codes := texts(value(op, "x-errors")); len(codes) > 0 {
		for i, c := range codes {
			codes[i] = fmt.Sprintf("`%s` %d", c, Status(boxed.Code(c)))
		}
		r.printf("Errors: %s.\n\n", strings.Join(codes, ", "))
	}
}

func (r *renderer) params(item, op yaml.MapSlice) {
	var rows [][]string
	for _, list := range []any{value(item, "parameters"), value(op, "parameters")} {
		all, _ := list.([]any)
		for _, p := range all {
			p := r.resolve(asMap(p))
			schema := asMap(value(p, "schema"))
			what := get(p, "description")
			if value(p, "required") == true && get(p, "in") == "query" {
				what += " Required."
			}
			rows = append(rows, []string{"`" + get(p, "name") + "`", get(p, "in"), r.kind(schema), join2(what, r.bounds(schema))})
		}
	}
	r.table([]string{"parameter", "in", "type", ""}, rows)
}

func (r *renderer) body(b yaml.MapSlice) {
	for _, c := range asMap(value(b, "content")) {
		media := fmt.Sprint(c.Key)
		m := asMap(c.Value)
		if schema := asMap(value(m, "schema")); schema != nil {
			r.printf("Body: %s.\n\n", r.kind(schema))
		} else {
			r.printf("Body: `%s`, streamed.\n\n", media)
		}
		r.examples(m)
	}
}

func (r *renderer) examples(m yaml.MapSlice) {
	show := func(v any) {
		raw, err := marshalOrdered(v)
		if err != nil {
			return
		}
		var out bytes.Buffer
		if len(raw) > 100 {
			json.Indent(&out, raw, "", "  ")
		} else {
			out.Write(raw)
		}
		r.printf("```json\n%s\n```\n\n", out.String())
	}
	if v := value(m, "example"); v != nil {
		show(v)
	}
	for _, e := range asMap(value(m, "examples")) {
		show(value(asMap(e.Value), "value"))
	}
}

func (r *renderer) responses(list yaml.MapSlice) {
	for _, resp := range list {
		if fmt.Sprint(resp.Key) == "default" {
			continue
		}
		v := r.resolve(asMap(resp.Value))
		r.printf("- **%v** %s", resp.Key, get(v, "description"))
		for _, c := range asMap(value(v, "content")) {
			if schema := asMap(value(asMap(c.Value), "schema")); schema != nil {
				r.printf(" %s", r.kind(schema))
			} else {
				r.printf(" `%v`", c.Key)
			}
		}
		for _, h := range asMap(value(v, "headers")) {
			r.printf(" `%v`: %s", h.Key, get(asMap(h.Value), "description"))
		}
		r.printf("\n")
	}
	r.printf("\n")
	for _, resp := range list {
		for _, c := range asMap(value(r.resolve(asMap(resp.Value)), "content")) {
			r.examples(asMap(c.Value))
		}
	}
}

// codes writes the table of codes and statuses, from the table that serves.
func (r *renderer) codes() {
	errorSchema := ordered(ordered(ordered(r.doc.tree, "components"), "schemas"), "Error")
	meanings := ordered(ordered(ordered(errorSchema, "properties"), "code"), "x-meanings")
	var rows [][]string
	for _, m := range meanings {
		code := fmt.Sprint(m.Key)
		rows = append(rows, []string{"`" + code + "`", fmt.Sprint(Status(boxed.Code(code))), fmt.Sprint(m.Value)})
	}
	r.printf("## Errors\n\n")
	r.table([]string{"code", "status", "meaning"}, rows)
}

func (r *renderer) schema(name string, s yaml.MapSlice) {
	r.printf("<a id=\"schema-%s\"></a>\n\n### %s\n\n", name, name)
	r.para(get(s, "description"))
	props := asMap(value(s, "properties"))
	if len(props) == 0 {
		plain := slices.DeleteFunc(slices.Clone(s), func(i yaml.MapItem) bool { return i.Key == "description" })
		r.para(upper(join2(r.kind(plain)+".", r.bounds(plain))))
		return
	}
	if ways, ok := value(s, "oneOf").([]any); ok {
		var list []string
		for _, w := range ways {
			list = append(list, "`"+strings.Join(texts(value(asMap(w), "required")), "` with `")+"`")
		}
		r.printf("Exactly one of %s is required.\n\n", strings.Join(list, ", "))
	}
	required := texts(value(s, "required"))
	answer := value(s, "additionalProperties") != false
	var rows [][]string
	for _, p := range props {
		field, schema := fmt.Sprint(p.Key), asMap(p.Value)
		what := get(schema, "description")
		switch is := slices.Contains(required, field); {
		case is && !answer:
			what = join2(what, "Required.")
		case !is && answer:
			what = join2(what, "May be missing.")
		}
		rows = append(rows, []string{"`" + field + "`", r.kind(schema), join2(what, r.bounds(schema))})
	}
	r.table([]string{"field", "type", ""}, rows)
	if list, ok := value(s, "examples").([]any); ok {
		for _, e := range list {
			r.examples(yaml.MapSlice{{Key: "example", Value: e}})
		}
	}
}

// kind is a schema's type in a word, with a link where it has a name.
func (r *renderer) kind(s yaml.MapSlice) string {
	if ref := get(s, "$ref"); ref != "" {
		name := ref[strings.LastIndex(ref, "/")+1:]
		return "[" + name + "](#schema-" + name + ")"
	}
	if v := value(s, "const"); v != nil {
		return fmt.Sprintf("`%v`", v)
	}
	switch t := get(s, "type"); t {
	case "array":
		return "list of " + r.kind(asMap(value(s, "items")))
	case "object":
		if more, ok := value(s, "additionalProperties").(yaml.MapSlice); ok {
			return "map of string to " + r.kind(more)
		}
		if props := asMap(value(s, "properties")); len(props) > 0 {
			var list []string
			for _, p := range props {
				list = append(list, fmt.Sprintf("`%v`: %s", p.Key, r.kind(asMap(p.Value))))
			}
			return "object with " + strings.Join(list, ", ")
		}
		return "object"
	case "string":
		if f := get(s, "format"); f == "date-time" {
			return "time (RFC 3339)"
		}
		if get(s, "contentEncoding") == "base64" {
			return "string (base64)"
		}
		return t
	default:
		return t
	}
}

// bounds are a schema's limits in words.
func (r *renderer) bounds(s yaml.MapSlice) string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if list := texts(value(s, "enum")); len(list) > 0 {
		add("One of `%s`.", strings.Join(list, "`, `"))
	}
	switch lo, hi := value(s, "minimum"), value(s, "maximum"); {
	case lo != nil && hi != nil:
		add("%v to %v.", lo, hi)
	case lo != nil:
		add("At least %v.", lo)
	}
	for _, b := range []struct{ key, text string }{
		{"maxLength", "At most %v characters."},
		{"maxItems", "At most %v entries."},
		{"maxProperties", "At most %v fields."},
		{"pattern", "Matches `%v`."},
		{"default", "Default `%v`."},
	} {
		if v := value(s, b.key); v != nil {
			add(b.text, v)
		}
	}
	if names := asMap(value(s, "propertyNames")); names != nil {
		add("Names match `%s`.", get(names, "pattern"))
	}
	return strings.Join(out, " ")
}

func (r *renderer) table(head []string, rows [][]string) {
	if len(rows) == 0 {
		return
	}
	clean := strings.NewReplacer("\n", " ", "|", "\\|")
	r.printf("| %s |\n|%s\n", strings.Join(head, " | "), strings.Repeat("---|", len(head)))
	for _, row := range rows {
		for i := range row {
			row[i] = clean.Replace(strings.TrimSpace(row[i]))
		}
		r.printf("| %s |\n", strings.Join(row, " | "))
	}
	r.printf("\n")
}

func (r *renderer) resolve(m yaml.MapSlice) yaml.MapSlice {
	ref := get(m, "$ref")
	if ref == "" {
		return m
	}
	var at any = r.doc.tree
	for part := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
		at = value(asMap(at), part)
	}
	return asMap(at)
}

func asMap(v any) yaml.MapSlice { m, _ := v.(yaml.MapSlice); return m }

func value(m yaml.MapSlice, key string) any {
	for _, item := range m {
		if item.Key == key {
			return item.Value
		}
	}
	return nil
}

func ordered(m yaml.MapSlice, key string) yaml.MapSlice { return asMap(value(m, key)) }

func get(m yaml.MapSlice, key string) string {
	if v := value(m, key); v != nil {
		return fmt.Sprint(v)
	}
	return ""
}

func texts(v any) []string {
	list, _ := v.([]any)
	out := make([]string, len(list))
	for i, e := range list {
		out[i] = fmt.Sprint(e)
	}
	return out
}

func join2(a, b string) string { return strings.TrimSpace(strings.TrimSpace(a) + " " + b) }

func upper(s string) string {
	if s != "" && s[0] >= 'a' && s[0] <= 'z' {
		return string(s[0]-'a'+'A') + s[1:]
	}
	return s
}
