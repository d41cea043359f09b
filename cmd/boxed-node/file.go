package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// maxConfigFile bounds the configuration file, in bytes.
const maxConfigFile = 1 << 20

// fileReader walks the configuration file. The walk is ours, and not a decoder's,
// because it must find every mistake in one go and remember the line of every
// value.
type fileReader struct {
	name     string
	cfg      *Config
	byPath   map[string]setting
	origins  map[string]string
	problems Problems
}

// readFile sets what the file says. The problems are all that it found.
func readFile(name string, cfg *Config, origins map[string]string) Problems {
	r := &fileReader{name: name, cfg: cfg, origins: origins}
	r.index()
	text, err := readSmall(name)
	if err != nil {
		return Problems{{Where: name, Message: "the configuration file cannot be read: " + err.Error()}}
	}
	// Duplicate keys are found by the walk: the parser would stop at the first.
	file, err := parser.ParseBytes(text, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		return Problems{r.syntax(err)}
	}
	for i, doc := range file.Docs {
		switch {
		case doc.Body == nil:
		case i > 0:
			r.problem(doc.Body, "", "a second document in one file is not read")
		default:
			r.mapping("", doc.Body)
		}
	}
	return r.problems
}

func readSmall(name string) ([]byte, error) {
	fi, err := os.Stat(name)
	if err != nil {
		return nil, err
	}
	if fi.IsDir() || fi.Size() > maxConfigFile {
		return nil, fmt.Errorf("%s is not a file of at most %d bytes", name, maxConfigFile)
	}
	return os.ReadFile(name)
}

func (r *fileReader) index() {
	r.byPath = map[string]setting{}
	for _, s := range r.cfg.settings() {
		r.byPath[s.path] = s
	}
}

// mapping reads the pairs of a mapping whose path is prefix, "" at the top.
func (r *fileReader) mapping(prefix string, node ast.Node) {
	pairs, ok := pairsOf(node)
	if !ok {
		r.problem(node, prefix, "it takes settings of its own, like `name: value`")
		return
	}
	seen := map[string]int{}
	for _, pair := range pairs {
		key := pair.Key.GetToken()
		if _, merge := pair.Key.(*ast.MergeKeyNode); merge {
			r.problem(pair.Key, prefix, "merge keys are not supported; write the settings out")
			continue
		}
		path := strings.TrimPrefix(prefix+"."+key.Value, ".")
		if line, again := seen[key.Value]; again {
			r.problem(pair.Key, path, fmt.Sprintf("it is set twice, first in line %d", line))
			continue
		}
		seen[key.Value] = key.Position.Line
		r.pair(path, pair)
	}
}

func (r *fileReader) pair(path string, pair *ast.MappingValueNode) {
	if r.cfg.named(path) {
		r.index()
	}
	if s, ok := r.byPath[path]; ok {
		if err := r.value(s, pair.Value); err != nil {
			r.problem(pair.Key, path, err.Error())
		} else {
			r.origins[path] = r.at(pair.Key)
		}
		return
	}
	if r.isGroup(path) {
		if _, empty := pair.Value.(*ast.NullNode); !empty { // a heading with all of its settings commented out
			r.mapping(path, pair.Value)
		}
		return
	}
	message := "there is no such setting"
	if strings.HasPrefix(path, "templates.") && strings.Count(path, ".") == 1 {
		message = "a template's name is [a-z0-9-]{1,40}"
	} else if near := nearest(path, r.names()); near != "" {
		message += "; did you mean " + near + "?"
	}
	r.problem(pair.Key, path, message)
}

// isGroup reports whether path is where settings lie, or may lie.
func (r *fileReader) isGroup(path string) bool {
	if path == "templates" || path == "quotas.owners" {
		return true
	}
	for p := range r.byPath {
		if strings.HasPrefix(p, path+".") {
			return true
		}
	}
	return false
}

// names is what a mistyped path may have meant.
func (r *fileReader) names() []string {
	var names []string
	for p := range r.byPath {
		names = append(names, p)
		if group, _, ok := strings.Cut(p, "."); ok {
			names = append(names, group)
		}
	}
	return names
}

func (r *fileReader) value(s setting, node ast.Node) error {
	switch v := s.value.(type) {
	case *map[string]string:
		return r.stringMap(v, node)
	default:
		if seq, ok := node.(*ast.SequenceNode); ok {
			items := []string{}
			for _, item := range seq.Values {
				text, err := scalar(item)
				if err != nil {
					return err
				}
				items = append(items, text)
			}
			return s.setList(items)
		}
		text, err := scalar(node)
		if err != nil {
			return err
		}
		return s.set(text)
	}
}

func (r *fileReader) stringMap(into *map[string]string, node ast.Node) error {
	pairs, ok := pairsOf(node)
	if !ok {
		return fmt.Errorf("it takes pairs like `NAME: value`")
	}
	m := map[string]string{}
	for _, pair := range pairs {
		name := pair.Key.GetToken().Value
		if _, again := m[name]; again {
			return fmt.Errorf("%s is set twice", name)
		}
		text, err := scalar(pair.Value)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		m[name] = text
	}
	*into = m
	return nil
}

func pairsOf(node ast.Node) ([]*ast.MappingValueNode, bool) {
	switch n := node.(type) {
	case *ast.MappingNode:
		return n.Values, true
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{n}, true
	}
	return nil, false
}

// scalar is the text of a plain value, whatever type YAML takes it for: what
// it means depends on the setting.
func scalar(node ast.Node) (string, error) {
	switch n := node.(type) {
	case *ast.StringNode:
		return n.Value, nil
	case *ast.LiteralNode:
		return n.Value.Value, nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode, *ast.InfinityNode, *ast.NanNode:
		return n.GetToken().Value, nil
	case *ast.NullNode:
		return "", fmt.Errorf("it has no value; give it one, or take the line out")
	case *ast.AnchorNode, *ast.AliasNode, *ast.TagNode:
		return "", fmt.Errorf("anchors, aliases and tags are not supported; write the value out")
	}
	return "", fmt.Errorf("it takes one value")
}

func (r *fileReader) problem(node ast.Node, path, message string) {
	r.problems = append(r.problems, Problem{Setting: path, Where: r.at(node), Message: message})
}

func (r *fileReader) at(node ast.Node) string {
	if t := node.GetToken(); t != nil && t.Position != nil {
		return fmt.Sprintf("%s:%d", r.name, t.Position.Line)
	}
	return r.name
}

// syntax is the parser's complaint, which starts like "[3:7] …" and shows the
// lines around.
func (r *fileReader) syntax(err error) Problem {
	first, _, _ := strings.Cut(err.Error(), "\n")
	var line, column int
	if _, scanErr := fmt.Sscanf(first, "[%d:%d]", &line, &column); scanErr == nil {
		_, message, _ := strings.Cut(first, "] ")
		return Problem{Where: fmt.Sprintf("%s:%d", r.name, line), Message: message}
	}
	return Problem{Where: r.name, Message: first}
}

// nearest is the candidate that s is most likely a slip of, or "".
func nearest(s string, candidates []string) string {
	best, least := "", len(s)/4+2
	for _, c := range candidates {
		if d := distance(s, c); d < least || d == least && d <= len(s)/4+1 && c < best {
			best, least = c, d
		}
	}
	return best
}

// distance is Levenshtein's.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = min(diagonal, row[j], row[j+1]) + 1
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
