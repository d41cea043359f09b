package main

import (
	"slices"
	"strings"
)

// Sources are where a configuration comes from, besides the defaults.
type Sources struct {
	File    string            // path; "" is none
	Environ []string          // NAME=value; an empty value counts as unset
	Flags   map[string]string // by flag, without dashes
}

// Loaded is a configuration, and where each value of it comes from.
type Loaded struct {
	*Config
	// Origins has "file:line", "BOXED_NAME" or "--flag" by a setting's path.
	// What is not in it is a default.
	Origins  map[string]string
	Warnings []string // for people; nothing is wrong
}

// Load puts a configuration together: flag over environment over file over
// default. The error is [Problems], and has every mistake; the configuration is
// there nevertheless, for printing.
func Load(src Sources) (*Loaded, error) {
	l := &Loaded{Config: Default(), Origins: map[string]string{}}
	var problems Problems
	if src.File != "" {
		problems = readFile(src.File, l.Config, l.Origins)
	}
	problems = append(problems, l.readEnvironment(src.Environ)...)
	problems = append(problems, l.readFlags(src.Flags)...)
	// A value that could not be read was left at what it was before, so what
	// else could be said of it is of no interest.
	unread := map[string]bool{"": false}
	for _, p := range problems {
		unread[p.Setting] = p.Setting != ""
	}
	checked := append(l.Validate(), l.checkFiles()...)
	slices.SortStableFunc(checked, func(a, b Problem) int { return strings.Compare(a.Setting, b.Setting) })
	for _, p := range checked {
		if !unread[p.Setting] {
			p.Where = l.Origins[p.Setting]
			problems = append(problems, p)
		}
	}
	if len(problems) > 0 {
		return l, problems
	}
	return l, nil
}

func (l *Loaded) readEnvironment(environ []string) (problems Problems) {
	given := map[string]string{}
	for _, pair := range environ {
		if name, value, _ := strings.Cut(pair, "="); strings.HasPrefix(name, "BOXED_") && value != "" {
			given[name] = value
		}
	}
	for _, pair := range environ { // of other systems, and so without our prefix
		if value, ok := strings.CutPrefix(pair, egressEnviron+"="); ok && value != "" {
			l.Egress.AllowedHosts = allowedHosts(value)
			l.Origins["egress.allowed_hosts"] = egressEnviron
		}
	}
	known := []string{}
	for _, s := range l.settings() {
		known = append(known, s.env())
		if value, ok := given[s.env()]; ok {
			delete(given, s.env())
			problems = append(problems, l.set(s, s.env(), value)...)
		}
	}
	for name := range given { // scripts and boxedctl have variables of their own
		if near := nearest(name, known); near != "" && distance(name, near) <= 2 {
			l.Warnings = append(l.Warnings, "the environment has "+name+", which is no setting; was "+near+" meant?")
		}
	}
	slices.Sort(l.Warnings)
	return problems
}

func (l *Loaded) readFlags(flags map[string]string) (problems Problems) {
	for _, s := range l.settings() {
		if value, ok := flags[s.flag()]; ok {
			problems = append(problems, l.set(s, "--"+s.flag(), value)...)
		}
	}
	return problems
}

func (l *Loaded) set(s setting, origin, text string) Problems {
	if err := s.set(text); err != nil {
		message := err.Error()
		if s.secret {
			message = "it cannot be read"
		}
		return Problems{{Setting: s.path, Where: origin, Message: message}}
	}
	l.Origins[s.path] = origin
	return nil
}
