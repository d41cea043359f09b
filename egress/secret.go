package egress

import (
	"fmt"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// CheckSecret judges what a secret says of itself. Errors: invalid.
func CheckSecret(s boxed.Secret) error {
	invalid := func(field, format string, args ...any) error {
		return boxed.Errorf(boxed.CodeInvalid, field+": "+format, args...).WithField(field)
	}
	p := presets()[s.Preset]
	if p == nil {
		return invalid("preset", "%.80q is none of %s", s.Preset, strings.Join(PresetNames(), ", "))
	}
	for i, h := range s.Hosts {
		host, err := ParseConfigHost(h)
		if err != nil {
			return invalid(fmt.Sprintf("hosts[%d]", i), "%v", err)
		}
		if host.IsAddr() {
			return invalid(fmt.Sprintf("hosts[%d]", i), "a secret needs a name: certificates have one")
		}
	}
	if len(s.Hosts) == 0 && (s.Preset == "generic" || s.Preset == "aws") {
		return invalid("hosts", "the preset %s has none of its own: say where the secret is used", s.Preset)
	}
	if p.repos { // whose rules come of --repo and --read-only
		switch {
		case len(s.Hosts) > 1:
			return invalid("hosts", "a secret of the preset %s is for one host", s.Preset)
		case len(s.Paths) > 0:
			return invalid("paths", "a secret of the preset %s is limited where it is attached, by repositories", s.Preset)
		case len(s.Methods) > 0:
			return invalid("methods", "a secret of the preset %s is limited where it is attached, to reading", s.Preset)
		case s.Slot != "":
			return invalid("slot", "the preset %s has its own", s.Preset)
		}
	}
	if s.Slot != "" {
		if _, err := parseSlot(s.Slot); err != nil {
			return invalid("slot", "%v", err)
		}
	}
	for _, v := range s.Env {
		if !isVariable(v) {
			return invalid("env", "%.80q is no name of a variable", v)
		}
	}
	if strings.ContainsFunc(s.Author, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return invalid("author", "it is one line, as in Name <mail@example.com>")
	}
	for _, e := range p.endpoints(s, boxed.SecretUse{Name: s.Name}) {
		rule := e.rule
		rule.Mode, rule.Credential = boxed.EgressIntercept, s.Name
		if _, err := compileRule(rule); err != nil {
			return invalid("paths", "%v", err)
		}
	}
	return nil
}

// isVariable reports whether a shell could set the name, and a sandbox is better for it.
func isVariable(name string) bool {
	if name == "" || len(name) > 128 || name[0] >= '0' && name[0] <= '9' || strings.HasPrefix(name, "LD_") || name == "PATH" {
		return false
	}
	return !strings.ContainsFunc(name, func(r rune) bool {
		return !(r == '_' || r >= '0' && r <= '9' || r|0x20 >= 'a' && r|0x20 <= 'z')
	})
}

// CheckValue judges a credential: it goes into a header, where a line break would be another
// one. Errors never have it.
func CheckValue(presetName, value string) error {
	invalid := func(text string) error { return boxed.Errorf(boxed.CodeInvalid, "value: %s", text).WithField("value") }
	switch {
	case len(value) > boxed.MaxSecret:
		return invalid(fmt.Sprintf("it has %d bytes, at most %d are allowed", len(value), boxed.MaxSecret))
	case strings.ContainsFunc(value, func(r rune) bool { return r < '!' || r > '~' }):
		return invalid("a credential is printable ASCII without spaces or line breaks")
	case len(value) < minScan:
		return invalid(fmt.Sprintf("it has fewer than %d characters: so short a text could not be kept out of answers", minScan))
	}
	if presetName == "aws" {
		if id, key, ok := strings.Cut(value, ":"); !ok || len(id) < 16 || len(key) < 16 {
			return invalid("it is KEY_ID:SECRET_KEY")
		}
	}
	return nil
}
