package ctl

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/boxed-mesh/boxed"
)

// defaultEndpoint is where a node listens that was told nothing.
const defaultEndpoint = "http://127.0.0.1:8080"

// localKeyName is the key of the node at defaultEndpoint, beside the contexts.
const localKeyName = "local.key"

// settings is the file of contexts. It holds no secret: a key is named by its
// file.
type settings struct {
	Current  string                 `yaml:"current,omitempty"`
	Contexts map[string]nodeContext `yaml:"contexts,omitempty"`
}

// nodeContext is one node that boxedctl knows by name, or several of one
// cluster: then Endpoints has all of their addresses and Endpoint the first.
// Pins are those of Endpoints, "" where there is none, unless one Pin is for all.
type nodeContext struct {
	Endpoint   string   `yaml:"endpoint" json:"endpoint"`
	Endpoints  []string `yaml:"endpoints,omitempty" json:"endpoints,omitempty"`
	APIKeyFile string   `yaml:"api_key_file,omitempty" json:"api_key_file,omitempty"`
	Pin        string   `yaml:"pin,omitempty" json:"pin,omitempty"`
	Pins       []string `yaml:"pins,omitempty" json:"pins,omitempty"`
}

// endpoint is one address of a node, and the certificate to trust there.
type endpoint struct{ url, pin string }

// all are the addresses in the order in which they are tried. A pin is for
// https only.
func (n nodeContext) all() []endpoint {
	urls := n.Endpoints
	if len(urls) == 0 {
		urls = []string{n.Endpoint}
	}
	list := make([]endpoint, len(urls))
	for i, u := range urls {
		pin := n.Pin
		if i < len(n.Pins) {
			pin = n.Pins[i]
		}
		if len(urls) > 1 && !strings.HasPrefix(u, "https://") {
			pin = ""
		}
		list[i] = endpoint{u, pin}
	}
	return list
}

// maxSettings bounds what is read of a file that should be small, in bytes.
const maxSettings = 1 << 20

// configDir is where boxedctl keeps its files.
func (a *app) configDir() (string, error) {
	if dir := a.getenv("XDG_CONFIG_HOME"); dir != "" {
		return filepath.Join(dir, "boxed"), nil
	}
	home := a.getenv("HOME")
	if home == "" {
		var err error
		if home, err = os.UserHomeDir(); err != nil {
			return "", usagef("there is no home directory to keep contexts in").hint("set HOME or XDG_CONFIG_HOME")
		}
	}
	return filepath.Join(home, ".config", "boxed"), nil
}

// loadSettings reads the contexts; no file is no context.
func (a *app) loadSettings() (*settings, error) {
	dir, err := a.configDir()
	if err != nil {
		return &settings{}, nil //nolint:nilerr // without a home there is nothing to read
	}
	path := filepath.Join(dir, "config.yaml")
	data, err := readSmall(path, maxSettings)
	if errors.Is(err, fs.ErrNotExist) {
		return &settings{}, nil
	}
	if err != nil {
		return nil, wrapf(plainPath(err), "read contexts")
	}
	var s settings
	if err := yaml.UnmarshalWithOptions(data, &s, yaml.Strict()); err != nil && len(bytes.TrimSpace(data)) > 0 {
		text, _, _ := strings.Cut(yaml.FormatError(err, false, false), "\n")
		return nil, usagef("%s: %s", path, text).hint("mend or remove the file; boxedctl context add writes it")
	}
	for name, c := range s.Contexts {
		if c.Endpoint == "" && len(c.Endpoints) > 0 {
			c.Endpoint = c.Endpoints[0]
			s.Contexts[name] = c
		}
	}
	return &s, nil
}

// saveSettings writes the contexts, whole or not at all.
func (a *app) saveSettings(s *settings) error {
	dir, err := a.configDir()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return wrapf(plainPath(err), "keep contexts")
	}
	path := filepath.Join(dir, "config.yaml")
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real // people link their configuration from elsewhere
	}
	data, err := yaml.MarshalWithOptions(s, yaml.Indent(2))
	if err != nil {
		return err
	}
	if err := writeByRename(path, bytes.NewReader(data), 0o600); err != nil {
		return wrapf(plainPath(err), "keep contexts")
	}
	return nil
}

// names lists the contexts in order.
func (s *settings) names() []string { return slices.Sorted(maps.Keys(s.Contexts)) }

// byName finds a context; the error names those that exist.
func (s *settings) byName(name string) (nodeContext, error) {
	if c, ok := s.Contexts[name]; ok {
		return c, nil
	}
	p := usagef("there is no context %q", name)
	switch near := nearest(name, s.names()); {
	case near != "":
		return nodeContext{}, p.hint("did you mean %s?", near)
	case len(s.Contexts) > 0:
		return nodeContext{}, p.hint("there is %s", oneOf(s.names()))
	}
	return nodeContext{}, p.hint("boxedctl context add %s --endpoint URL --api-key-file FILE makes it", name)
}

// byEndpoint finds the context of an endpoint, the current one first. It is as
// if that endpoint were its only one.
func (s *settings) byEndpoint(url string) (string, nodeContext, bool) {
	for _, name := range append([]string{s.Current}, s.names()...) {
		c, ok := s.Contexts[name]
		if !ok {
			continue
		}
		for _, e := range c.all() {
			if e.url == url {
				return name, nodeContext{Endpoint: url, APIKeyFile: c.APIKeyFile, Pin: e.pin}, true
			}
		}
	}
	return "", nodeContext{}, false
}

// parseEndpoint checks a node's address and writes it in one way.
func parseEndpoint(s string) (string, error) {
	u, err := url.Parse(s)
	bad := usagef("%q is not a node's address", s).hint("write it like %s or https://box.example.org", defaultEndpoint)
	switch {
	case err != nil || u.Opaque != "" || u.Host == "" && u.Scheme != "":
		if err == nil && !strings.Contains(s, "://") {
			return "", bad.hint("did you mean http://%s?", s)
		}
		return "", bad
	case u.Scheme == "":
		return "", bad.hint("did you mean http://%s?", s)
	case u.Scheme != "http" && u.Scheme != "https":
		return "", bad
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return "", bad
	}
	return strings.TrimRight(u.String(), "/"), nil
}

// parsePin checks a certificate's SHA-256: 64 hex digits, colons allowed.
func parsePin(s string) (string, error) {
	hex := strings.ToLower(strings.ReplaceAll(s, ":", ""))
	hex = strings.TrimPrefix(hex, "sha256")
	if len(hex) != 64 || strings.Trim(hex, "0123456789abcdef") != "" {
		return "", usagef("%q is not the SHA-256 of a certificate", s).hint("it has 64 hexadecimal digits; `boxed-node fingerprint` prints it on the node's host")
	}
	return hex, nil
}

// readKey reads an API key from a file.
func (a *app) readKey(path string) (string, error) {
	data, err := readSmall(path, 4096)
	if err != nil {
		return "", wrapf(plainPath(err), "read the API key")
	}
	if keyIsPublic(path) {
		a.notice("%s can be read by others: chmod 600 it", path)
	}
	key := strings.TrimSpace(string(data))
	if key == "" || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return "", usagef("%s does not hold an API key", path).hint("a key is one word on one line")
	}
	return key, nil
}

// readSmall reads a regular file of at most limit bytes.
func readSmall(path string, limit int64) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.IsDir() || info.Size() > limit {
		return nil, boxed.Errorf(boxed.CodeInvalid, "%s is not a file of at most %d bytes", path, limit)
	}
	return os.ReadFile(path)
}

// target is a node to speak to.
type target struct {
	Endpoint string
	Key      string     // "" sends none
	Pin      string     // SHA-256 of the certificate in hex, "" trusts the system's authorities
	Others   []endpoint // of the same cluster, where Endpoint does not answer
	Context  string     // its name, "" if the endpoint was given in another way
	Origin   string     // where the choice comes from, for people
}

// all are the endpoints in the order in which they are tried.
func (t target) all() []endpoint { return append([]endpoint{{t.Endpoint, t.Pin}}, t.Others...) }

// urls are the addresses of all.
func (t target) urls() []string {
	var list []string
	for _, e := range t.all() {
		list = append(list, e.url)
	}
	return list
}

// flags are the global flags that choose a target.
type targetFlags struct {
	context, endpoint, key, keyFile, pin string
}

// resolve chooses the node: flag, else environment, else the current context,
// else the node of this host. The key of a context goes to that context's
// endpoint only: one typed by hand never gets a key that was meant for another.
func (a *app) resolve(f targetFlags) (target, error) {
	s, err := a.loadSettings()
	if err != nil {
		return target{}, err
	}
	t, node, err := a.chooseNode(s, f)
	if err != nil {
		return target{}, err
	}
	if pin := firstOf(f.pin, a.getenv("BOXED_PIN")); pin != "" {
		node.Pin, node.Pins = pin, nil
	}
	list, err := node.checked()
	if err != nil {
		return target{}, err
	}
	t.Endpoint, t.Pin, t.Others = list[0].url, list[0].pin, list[1:]
	t.Key, err = a.chooseKey(f, node)
	return t, err
}

// checked are the addresses with their pins written in one way.
func (n nodeContext) checked() ([]endpoint, error) {
	list := n.all()
	secure := false
	for i := range list {
		var err error
		if list[i].url, err = parseEndpoint(list[i].url); err != nil {
			return nil, err
		}
		secure = secure || strings.HasPrefix(list[i].url, "https://")
		if list[i].pin == "" {
			continue
		}
		if list[i].pin, err = parsePin(list[i].pin); err != nil {
			return nil, err
		}
	}
	if n.Pin != "" && !secure {
		return nil, usagef("--pin is for https, the endpoint is %s", list[0].url)
	}
	return list, nil
}

func (a *app) chooseNode(s *settings, f targetFlags) (target, nodeContext, error) {
	if f.context != "" && f.endpoint != "" {
		return target{}, nodeContext{}, usagef("--context and --endpoint exclude each other")
	}
	named := func(name, origin string) (target, nodeContext, error) {
		node, err := s.byName(name)
		return target{Context: name, Origin: origin}, node, err
	}
	given := func(endpoint, origin string) (target, nodeContext, error) {
		endpoint, err := parseEndpoint(endpoint)
		if err != nil {
			return target{}, nodeContext{}, err
		}
		if name, node, ok := s.byEndpoint(endpoint); ok {
			return target{Context: name, Origin: origin}, node, nil
		}
		return target{Origin: origin}, nodeContext{Endpoint: endpoint}, nil
	}
	switch {
	case f.endpoint != "":
		return given(f.endpoint, "--endpoint")
	case f.context != "":
		return named(f.context, "--context")
	case a.getenv("BOXED_ENDPOINT") != "":
		return given(a.getenv("BOXED_ENDPOINT"), "BOXED_ENDPOINT")
	case a.getenv("BOXED_CONTEXT") != "":
		return named(a.getenv("BOXED_CONTEXT"), "BOXED_CONTEXT")
	case s.Current != "":
		return named(s.Current, "the current context")
	}
	return given(defaultEndpoint, "the default")
}

func (a *app) chooseKey(f targetFlags, node nodeContext) (string, error) {
	switch {
	case f.key != "" && f.keyFile != "":
		return "", usagef("--api-key and --api-key-file exclude each other")
	case f.key != "":
		return f.key, nil
	case f.keyFile != "":
		return a.readKey(f.keyFile)
	case a.getenv("BOXED_API_KEY") != "":
		return a.getenv("BOXED_API_KEY"), nil
	case a.getenv("BOXED_API_KEY_FILE") != "":
		return a.readKey(a.getenv("BOXED_API_KEY_FILE"))
	case node.APIKeyFile != "":
		return a.readKey(node.APIKeyFile)
	case node.Endpoint != defaultEndpoint && node.Endpoint != strings.Replace(defaultEndpoint, "127.0.0.1", "localhost", 1):
		return "", nil
	}
	dir, err := a.configDir()
	if err != nil {
		return "", nil //nolint:nilerr // without a home there is no local key either
	}
	key, err := a.readKey(filepath.Join(dir, localKeyName))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return key, err
}

func firstOf(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}

// describe is the target for people.
func (t target) describe() string {
	text := strings.Join(t.urls(), ", ")
	if t.Context != "" {
		text += fmt.Sprintf(" (context %s)", t.Context)
	}
	return text
}
