package egress

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"

	"github.com/boxed-mesh/boxed"
)

// ParseProfile reads a profile as people write it, in YAML or JSON. An error names the
// line. Nothing is taken that the policy does not know: no other field, no field twice, no
// anchor, no second document, no list that is absent.
func ParseProfile(text []byte) (*boxed.EgressProfile, error) {
	if len(text) > boxed.MaxDocument/2 {
		return nil, boxed.Errorf(boxed.CodeTooLarge, "a profile of %d bytes, at most %d are allowed", len(text), boxed.MaxDocument/2)
	}
	if nested(string(text)) {
		return nil, boxed.Errorf(boxed.CodeInvalid, "lists and objects more than %d deep, and a profile has them 3 deep", maxNesting)
	}
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		return nil, badYAML(err)
	}
	if len(file.Docs) != 1 {
		return nil, boxed.Errorf(boxed.CodeInvalid, "a profile is one document, not %d", len(file.Docs))
	}
	var anchors anchorFinder
	ast.Walk(&anchors, file.Docs[0])
	if anchors.line > 0 {
		return nil, boxed.Errorf(boxed.CodeInvalid, "line %d: anchors and aliases are not allowed: write it out", anchors.line)
	}
	var p struct {
		Version int                 `json:"version"`
		Name    string              `json:"name"`
		Owner   string              `json:"owner"`
		Rules   *[]boxed.EgressRule `json:"rules"`
		Deny    []string            `json:"deny"`
		OnDeny  boxed.OnDeny        `json:"on_deny"`
		Exit    boxed.NodeID        `json:"exit"`
	}
	dec := yaml.NewDecoder(bytes.NewReader(text), yaml.DisallowUnknownField(), yaml.UseJSONUnmarshaler())
	if err := dec.Decode(&p); err != nil {
		return nil, badYAML(err)
	}
	if p.Rules == nil {
		return nil, boxed.Errorf(boxed.CodeInvalid, "rules is missing: an empty list allows nothing, none at all is a mistake").WithField("rules")
	}
	profile, err := CheckProfile(boxed.EgressProfile{
		Version: p.Version, Name: p.Name, Owner: p.Owner, Rules: *p.Rules, Deny: p.Deny, OnDeny: p.OnDeny, Exit: p.Exit,
	})
	return profile, atLine(file, err)
}

// maxNesting is how deep brackets may be: the parser's time is quadratic in it.
const maxNesting = 32

// nested reports whether a text is nested deeper than any profile, wherever that is.
func nested(text string) bool {
	depth := 0
	for _, c := range text {
		switch c {
		case '[', '{':
			depth++
		case ']', '}':
			depth--
		}
		if depth > maxNesting {
			return true
		}
	}
	return strings.Contains(text, strings.Repeat("- ", maxNesting))
}

// atLine adds the line of the field that an error names.
func atLine(file *ast.File, err error) error {
	var e *boxed.Error
	if !errors.As(err, &e) {
		return err
	}
	field, _ := e.Detail["field"].(string)
	path, perr := yaml.PathString("$." + field)
	if field == "" || perr != nil {
		return err
	}
	node, perr := path.FilterFile(file)
	if perr != nil || node == nil || node.GetToken() == nil {
		return err
	}
	return boxed.Errorf(e.Code, "line %d: %w", node.GetToken().Position.Line, err).WithField(field)
}

// badYAML is an error of the parser, which shows the line.
func badYAML(err error) error {
	text := yaml.FormatError(err, false, true)
	var e yaml.Error
	if errors.As(err, &e) && e.GetToken() != nil {
		text = fmt.Sprintf("line %d: %s", e.GetToken().Position.Line, e.GetMessage())
	}
	return boxed.Errorf(boxed.CodeInvalid, "%s", strings.TrimSpace(text))
}

// anchorFinder notes the first line with an anchor or alias.
type anchorFinder struct{ line int }

func (f *anchorFinder) Visit(n ast.Node) ast.Visitor {
	switch n.(type) {
	case *ast.AnchorNode, *ast.AliasNode, *ast.MergeKeyNode:
		if f.line == 0 {
			f.line = n.GetToken().Position.Line
		}
	}
	return f
}

// CheckProfile judges a profile and fills in what the node says of it.
func CheckProfile(p boxed.EgressProfile) (*boxed.EgressProfile, error) {
	invalid := func(field, format string, args ...any) error {
		return boxed.Errorf(boxed.CodeInvalid, field+": "+format, args...).WithField(field)
	}
	switch {
	case p.Version != 1:
		return nil, invalid("version", "%d is not 1, the one that there is", p.Version)
	case !boxed.ValidName(p.Name) || p.Name == NoProfile:
		return nil, invalid("name", "a name is 1 to 40 of a-z, 0-9 and -, and not %q", NoProfile)
	case p.Rules == nil:
		return nil, invalid("rules", "it is missing: an empty list allows nothing, none at all is a mistake")
	case p.OnDeny != "" && p.OnDeny != boxed.DenyRefuse && p.OnDeny != boxed.DenyAsk:
		return nil, invalid("on_deny", "it is refuse or ask, not %q", p.OnDeny)
	case p.Deny != nil && len(p.Deny) == 0:
		return nil, invalid("deny", "an empty list denies nothing; leave it away")
	}
	rules, err := compileRules(p.Rules, "")
	if err != nil {
		return nil, err
	}
	if err := order(rules); err != nil {
		return nil, err
	}
	for i, d := range p.Deny {
		if _, err := ParsePattern(d); err != nil {
			return nil, invalid(fmt.Sprintf("deny[%d]", i), "%v", err)
		}
	}
	p.Ready, p.Flags = false, flagsOf(&p)
	p.Hash = hashOf([]any{p.Rules, p.Deny, p.OnDeny, p.Exit})
	return &p, nil
}

// ParseCeiling reads what owners may allow at most: hosts, or host:port. A host alone is 80
// and 443 of it.
func ParseCeiling(list []string) ([]*Rule, error) {
	var out []*Rule
	for _, text := range list {
		r, err := allowRule(text)
		if err != nil {
			return nil, err
		}
		if _, _, given, _ := hostPort(text); !given {
			r.Ports = []uint16{80, 443}
		}
		out = append(out, r)
	}
	return out, nil
}
