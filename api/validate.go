package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/boxed-mesh/boxed"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
)

// maxProblems is how many mistakes of one request are named.
const maxProblems = 8

// values are a request's parameters after they have been checked.
type values map[string][]string

func (v values) str(name string) string {
	if s := v[name]; len(s) > 0 {
		return s[0]
	}
	return ""
}

func (v values) has(name string) bool { return len(v[name]) > 0 }
func (v values) boolean(name string) bool {
	return v.str(name) == "true"
}

func (v values) integer(name string) int64 {
	n, _ := strconv.ParseInt(v.str(name), 10, 64) // checked before
	return n
}

func (v values) duration(name string) boxed.Duration {
	d, _ := boxed.ParseDuration(v.str(name)) // checked before
	return d
}

// checkParams checks path and query parameters and fills in what the document
// says a missing one means.
func (o *operation) checkParams(path map[string]string, rawQuery string) (values, error) {
	query, err := url.ParseQuery(rawQuery)
	if err != nil {
		return nil, boxed.Errorf(boxed.CodeInvalid, "the query cannot be read: check its %%-escapes").WithField("query")
	}
	v := make(values, len(o.params))
	for i := range o.params {
		p := &o.params[i]
		got := query[p.name]
		if p.in == "path" {
			got = []string{path[p.name]}
		} else {
			delete(query, p.name)
		}
		if len(got) == 0 {
			if p.required {
				return nil, invalidField(p.name, "this query parameter is required")
			}
			if p.fallback != "" {
				v[p.name] = []string{p.fallback}
			}
			continue
		}
		if err := p.check(got); err != nil {
			return nil, err
		}
		v[p.name] = got
	}
	for name := range query {
		return nil, invalidField(clip(name), "unknown query parameter")
	}
	return v, nil
}

func (p *parameter) check(got []string) error {
	if len(got) > 1 && p.kind != "array" {
		return invalidField(p.name, "given more than once")
	}
	for _, s := range got {
		if !utf8.ValidString(s) { // it would become another name on its way
			return invalidField(p.name, "is not UTF-8; a file whose name is not can be fetched or made as part of a tar")
		}
	}
	var value any = got[0]
	switch p.kind {
	case "integer":
		n, err := strconv.ParseInt(got[0], 10, 64)
		if err != nil {
			return invalidField(p.name, "must be an integer")
		}
		value = n
	case "boolean":
		switch got[0] {
		case "true":
			value = true
		case "false":
			value = false
		default:
			return invalidField(p.name, "must be true or false")
		}
	case "array":
		list := make([]any, len(got))
		for i, s := range got {
			list[i] = s
		}
		value = list
	}
	if err := p.schema.Validate(value); err != nil {
		return describe(err, p.name, value)
	}
	return nil
}

// check decodes a JSON body into a T after it has been checked against the
// operation's schema.
func check[T any](o *operation, raw []byte) (T, error) {
	var out T
	if !utf8.Valid(raw) {
		return out, boxed.Errorf(boxed.CodeInvalid, "the body is not UTF-8; bytes that are not belong in a base64 field")
	}
	if loneSurrogate(raw) {
		return out, boxed.Errorf(boxed.CodeInvalid, `the body has half of a surrogate pair (\ud800 to \udfff), which is no character`)
	}
	var tree any
	if err := json.Unmarshal(raw, &tree); err != nil {
		return out, notJSON(err)
	}
	if err := o.body.Validate(tree); err != nil {
		return out, describe(err, "", tree)
	}
	if err := noDuplicates(raw); err != nil {
		return out, err
	}
	if err := json.Unmarshal(raw, &out); err != nil {
		return out, notJSON(err)
	}
	return out, nil
}

// noDuplicates refuses an object that has a name twice. What was validated has
// the last of the two; decoding merges them.
func noDuplicates(raw []byte) error {
	type object struct {
		names map[string]bool // nil for an array
		value bool            // the next token is a value, not a name
	}
	var open []object
	for dec := json.NewDecoder(bytes.NewReader(raw)); ; {
		token, err := dec.Token()
		if err != nil {
			return nil // at the end; what is no JSON was refused before
		}
		if len(open) > 0 {
			if top := &open[len(open)-1]; top.names != nil && !top.value && token != json.Delim('}') {
				name := token.(string)
				if top.names[name] {
					return invalidField(name, "is there twice")
				}
				top.names[name], top.value = true, true
				continue
			} else if top.value {
				top.value = false
			}
		}
		switch token {
		case json.Delim('{'):
			open = append(open, object{names: map[string]bool{}})
		case json.Delim('['):
			open = append(open, object{})
		case json.Delim('}'), json.Delim(']'):
			open = open[:len(open)-1]
		}
	}
}

func notJSON(err error) error {
	var known *boxed.Error
	var typ *json.UnmarshalTypeError
	var syntax *json.SyntaxError
	switch {
	case errors.As(err, &known):
		return known
	case errors.As(err, &typ) && typ.Field != "":
		return invalidField(typ.Field, "must be "+typ.Type.String()+", not "+typ.Value)
	case errors.As(err, &syntax):
		return boxed.Errorf(boxed.CodeInvalid, "the body is not JSON: %v at byte %d", syntax, syntax.Offset)
	}
	return boxed.Errorf(boxed.CodeInvalid, "the body is not JSON that this call takes: %v", err)
}

// loneSurrogate reports whether JSON text has an escape that is half of a
// character. encoding/json would replace it silently.
func loneSurrogate(raw []byte) bool {
	for {
		i := bytes.IndexByte(raw, '\\')
		if i < 0 || i+1 >= len(raw) {
			return false
		}
		if raw[i+1] != 'u' {
			raw = raw[i+2:]
			continue
		}
		raw = raw[i:]
		switch u := hex4(raw); {
		case u >= 0xdc00 && u <= 0xdfff:
			return true
		case u >= 0xd800 && u <= 0xdbff:
			if len(raw) < 12 || raw[6] != '\\' || raw[7] != 'u' {
				return true
			}
			if low := hex4(raw[6:]); low < 0xdc00 || low > 0xdfff {
				return true
			}
			raw = raw[12:]
		default:
			raw = raw[2:]
		}
	}
}

// hex4 reads `\u` and four hexadecimal digits; -1 if it is not that.
func hex4(raw []byte) int64 {
	if len(raw) < 6 {
		return -1
	}
	n, err := strconv.ParseUint(string(raw[2:6]), 16, 32)
	if err != nil {
		return -1
	}
	return int64(n)
}

// readJSON reads a JSON body within its bound.
func (c *call) readJSON() ([]byte, error) {
	if err := c.bodyType([]string{"application/json"}); err != nil {
		return nil, err
	}
	limit := c.s.cfg.MaxJSON
	if c.r.ContentLength > limit {
		return nil, tooLarge(limit)
	}
	raw, err := c.readHeld(c.body(c.s.cfg.JSONIdle), limit)
	switch {
	case err == errTooMuch:
		return nil, tooLarge(limit)
	case err != nil:
		return nil, c.readError(err)
	case len(raw) == 0:
		return nil, boxed.Errorf(boxed.CodeInvalid, "this call needs a JSON body")
	}
	return raw, c.stillValid()
}

// stillValid refuses a key that was revoked while the body came: whoever holds
// a body back must not act later than a fresh request could.
func (c *call) stillValid() error {
	if c.who.Key == "" {
		return nil
	}
	revoked, stop := c.s.cfg.Auth.Watch(c.who.Key)
	defer stop()
	select {
	case <-revoked:
		return errRevoked
	default:
		return nil
	}
}

func tooLarge(limit int64) error {
	return boxed.Errorf(boxed.CodeTooLarge, "the body is larger than %d bytes; files of any size go by PUT …/files or …/tar", limit).
		With("limit", limit)
}

// bodyType refuses bodies of other types. A body without a type is taken as
// bytes, never as JSON: browsers send such bodies across origins.
func (c *call) bodyType(accept []string) error {
	if enc := c.r.Header.Get("Content-Encoding"); enc != "" && !strings.EqualFold(enc, "identity") {
		return boxed.Errorf(boxed.CodeMediaType, "a body with Content-Encoding is not taken; send it as it is")
	}
	types := c.r.Header.Values("Content-Type")
	if len(types) == 0 && accept[0] != "application/json" {
		return nil
	}
	if len(types) == 1 {
		media, params, err := mime.ParseMediaType(types[0])
		if cs := params["charset"]; err == nil && (cs == "" || strings.EqualFold(cs, "utf-8")) {
			for _, a := range accept {
				if media == a {
					return nil
				}
			}
		}
	}
	return boxed.Errorf(boxed.CodeMediaType, "this call takes a body of type %s", strings.Join(accept, " or ")).
		WithField("Content-Type")
}

func invalidField(field, message string) *boxed.Error {
	return boxed.Errorf(boxed.CodeInvalid, "%s: %s", field, message).WithField(field)
}

// readInto decodes and checks the JSON body of a call.
func readInto[T any](c *call) (T, error) {
	raw, err := c.readJSON()
	if err != nil {
		var zero T
		return zero, err
	}
	return check[T](c.op, raw)
}

// describe says what is wrong with a value, field by field in the order of
// their names, without repeating the value.
func describe(err error, base string, value any) error {
	var ve *jsonschema.ValidationError
	if !errors.As(err, &ve) {
		return boxed.Errorf(boxed.CodeInvalid, "the request does not fit the document: %v", err)
	}
	d := description{base: base, value: value}
	d.collect(ve)
	if len(d.found) == 0 {
		return boxed.Errorf(boxed.CodeInvalid, "the request does not fit the document")
	}
	slices.SortStableFunc(d.found, func(a, b fault) int { return strings.Compare(a.Field, b.Field) })
	first := d.found[0]
	e := boxed.Errorf(boxed.CodeInvalid, "%s", first.Message)
	if first.Field != "" {
		e = invalidField(first.Field, first.Message)
	}
	if len(d.found) > 1 {
		e = e.With("problems", d.found)
	}
	return e
}

type fault struct {
	Field   string `json:"field"`
	Message string `json:"message"`
}

type description struct {
	base  string
	value any
	found []fault
}

func (d *description) collect(ve *jsonschema.ValidationError) {
	if len(d.found) >= maxProblems {
		return
	}
	add := func(field, message string) { d.found = append(d.found, fault{field, message}) }
	at := fieldPath(d.base, ve.InstanceLocation)
	switch k := ve.ErrorKind.(type) {
	case *kind.AdditionalProperties:
		for _, name := range k.Properties[:min(len(k.Properties), maxProblems)] {
			add(join(at, clip(name)), "unknown field")
		}
	case *kind.Required:
		for _, name := range k.Missing {
			add(join(at, name), "this field is required")
		}
	case *kind.OneOf:
		add(at, oneOf(ve, k))
	case *kind.PropertyNames:
		// The library's location of this kind is not its own copy and is overwritten
		// by what it looks at next (jsonschema v6.0.3): only its length is right.
		if where, ok := findName(d.value, k.Property, len(ve.InstanceLocation)); ok {
			at = fieldPath(d.base, where)
		}
		add(join(at, clip(k.Property)), "this name is not allowed here")
	default:
		if len(ve.Causes) > 0 {
			for _, cause := range ve.Causes {
				d.collect(cause)
			}
			return
		}
		add(at, plain(ve.ErrorKind))
	}
}

// findName finds the object that has a name, so many steps down.
func findName(v any, name string, depth int) ([]string, bool) {
	switch v := v.(type) {
	case map[string]any:
		if depth == 0 {
			_, ok := v[name]
			return nil, ok
		}
		for _, key := range slices.Sorted(maps.Keys(v)) {
			if rest, ok := findName(v[key], name, depth-1); ok {
				return append([]string{key}, rest...), true
			}
		}
	case []any:
		for i, e := range v {
			if rest, ok := findName(e, name, depth-1); depth > 0 && ok {
				return append([]string{strconv.Itoa(i)}, rest...), true
			}
		}
	}
	return nil, false
}

// oneOf names the alternatives of a schema whose oneOf lists required fields.
func oneOf(ve *jsonschema.ValidationError, k *kind.OneOf) string {
	if len(k.Subschemas) > 0 {
		return "gives more than one of these: args, args_base64, language with code"
	}
	var ways []string
	for _, cause := range ve.Causes {
		if r, ok := cause.ErrorKind.(*kind.Required); ok {
			ways = append(ways, strings.Join(r.Missing, " with "))
		}
	}
	return "needs exactly one of these: " + strings.Join(ways, "; ")
}

// plain says what one keyword wants. It never holds the value, which may be
// somebody's code or secret.
func plain(k jsonschema.ErrorKind) string {
	switch k := k.(type) {
	case *kind.Type:
		return "must be " + article(strings.Join(k.Want, " or ")) + ", not " + article(k.Got)
	case *kind.Enum:
		want := make([]string, len(k.Want))
		for i, w := range k.Want {
			want[i] = fmt.Sprint(w)
		}
		return "must be one of " + strings.Join(want, ", ")
	case *kind.Pattern:
		return "must match " + k.Want
	case *kind.Format:
		if k.Want == "boxed-duration" && k.Err != nil {
			return "must be a duration within range, like 90s, 10m, 1h30m or 2d"
		}
		return "must be a " + k.Want
	case *kind.ContentEncoding:
		return "must be " + k.Want
	case *kind.MinLength:
		return fmt.Sprintf("must have at least %d characters", k.Want)
	case *kind.MaxLength:
		return fmt.Sprintf("must have at most %d characters, not %d", k.Want, k.Got)
	case *kind.MinItems:
		return fmt.Sprintf("must have at least %d entries", k.Want)
	case *kind.MaxItems:
		return fmt.Sprintf("must have at most %d entries, not %d", k.Want, k.Got)
	case *kind.MinProperties:
		return fmt.Sprintf("must have at least %d fields", k.Want)
	case *kind.MaxProperties:
		return fmt.Sprintf("must have at most %d fields, not %d", k.Want, k.Got)
	case *kind.Minimum:
		return "must be at least " + k.Want.RatString()
	case *kind.Maximum:
		return "must be at most " + k.Want.RatString()
	}
	return "does not fit the document"
}

func article(noun string) string {
	if strings.ContainsRune("aeiou", rune(noun[0])) {
		return "an " + noun
	}
	return "a " + noun
}

// fieldPath writes an instance's location as "limits.memory_bytes" or
// "files[3].path".
func fieldPath(base string, at []string) string {
	path := base
	for _, part := range at {
		if _, err := strconv.Atoi(part); err == nil {
			path += "[" + part + "]"
			continue
		}
		path = join(path, clip(part))
	}
	return path
}

func join(base, name string) string {
	if base == "" {
		return name
	}
	return base + "." + name
}

// clip bounds and defuses a caller's string for a message.
func clip(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r == utf8.RuneError {
			return '?'
		}
		return r
	}, s)
	if len(s) > 80 {
		s = strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}

// readError turns what went wrong while a body was read into an error for the
// client.
func (c *call) readError(err error) error {
	var known *boxed.Error
	switch {
	case errors.As(err, &known):
		return known
	case ended(c.ctx) != nil:
		return ended(c.ctx)
	case isTimeout(err): // before ctx, which net/http ends for any failed read
		return boxed.Errorf(boxed.CodeDeadline, "the body stopped arriving")
	case c.ctx.Err() != nil:
		return c.ctx.Err()
	case errors.Is(err, http.ErrBodyReadAfterClose):
		return err
	}
	return &boxed.Error{Code: boxed.CodeCanceled, Message: "the body broke off", Err: err}
}
