package ctl

import (
	"bytes"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// program is what run and exec are to run: a command line, or code in a
// language, or a file that is copied in and started by itself.
type program struct {
	argv []string // a command line, if there is no source

	source   []byte
	language string   // "" for a file that says itself how to run it
	name     string   // of the source, for messages of interpreters
	args     []string // of the source
}

// extensions tell the language of a file.
var extensions = map[string]string{
	".py": "python", ".js": "javascript", ".mjs": "javascript", ".cjs": "javascript", ".sh": "bash", ".bash": "bash",
}

// codeProgram is the program of -c CODE.
func codeProgram(code, language string, args []string) (*program, error) {
	language, err := parseLanguage(firstOf(language, "python"))
	if err != nil {
		return nil, err
	}
	return checkSize(&program{source: []byte(code), language: language, name: "main" + extensionOf(language), args: args})
}

// fileProgram is the program in a file, or on stdin for "-".
func (a *app) fileProgram(file, language string, args []string) (*program, error) {
	language, err := parseLanguage(language)
	if err != nil {
		return nil, err
	}
	var source []byte
	name := filepath.Base(file)
	if file == "-" {
		name = "main"
		if isTerminal(a.stdin) {
			a.notice("reading the program from the terminal; Ctrl-D ends it")
		}
		source, err = io.ReadAll(io.LimitReader(a.stdin, boxed.MaxCodeBytes+1))
	} else {
		source, err = readProgram(file)
	}
	if err != nil {
		return nil, wrapf(plainPath(err), "read the program")
	}
	p := &program{source: source, language: language, name: name, args: args}
	if p.language == "" {
		p.language = extensions[strings.ToLower(filepath.Ext(file))]
	}
	if p.language == "" {
		lang, itself := interpreter(source)
		switch {
		case lang != "" || itself:
			p.language = lang
		case file == "-":
			p.language = "python"
		default:
			return nil, usagef("the language of %s is not clear", file).
				hint("say --lang %s, or begin the file with a line like #!/usr/bin/env python3", strings.Join(boxed.Languages(), "|"))
		}
	}
	if file == "-" && p.language != "" {
		p.name += extensionOf(p.language)
	}
	return checkSize(p)
}

// readProgram reads at most one byte more than may be sent.
func readProgram(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.IsDir() {
		return nil, &fs.PathError{Op: "read", Path: file, Err: errIsDirectory}
	}
	return io.ReadAll(io.LimitReader(f, boxed.MaxCodeBytes+1))
}

func checkSize(p *program) (*program, error) {
	switch {
	case len(p.source) > boxed.MaxCodeBytes:
		return nil, boxed.Errorf(boxed.CodeTooLarge, "the program has more than %d MiB", boxed.MaxCodeBytes/boxed.MiB)
	case len(p.source) == 0:
		return nil, usagef("the program is empty")
	}
	return p, nil
}

func extensionOf(language string) string {
	return map[string]string{"python": ".py", "javascript": ".js", "bash": ".sh"}[language]
}

// interpreter reads a file's first bytes: the language of its #! line, if we
// know it, or whether the kernel can run the file as it is.
func interpreter(source []byte) (language string, itself bool) {
	if bytes.HasPrefix(source, []byte("\x7fELF")) {
		return "", true
	}
	rest, ok := bytes.CutPrefix(source, []byte("#!"))
	if !ok {
		return "", false
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	words := strings.Fields(string(line))
	if len(words) > 0 && path.Base(words[0]) == "env" {
		words = words[1:]
		for len(words) > 0 && strings.HasPrefix(words[0], "-") {
			words = words[1:]
		}
	}
	if len(words) == 0 {
		return "", false
	}
	name := path.Base(words[0])
	// python3.11 is python to us only without options: -I, say, has a meaning.
	if len(words) == 1 {
		if lang := boxed.CanonicalLanguage(strings.TrimRight(name, "0123456789.")); lang != "" {
			return lang, false
		}
	}
	return "", true
}

// looksLikeCode tells code that was given in place of a file: the earlier
// program took it there. A file of such a name would have been found.
func looksLikeCode(s string) bool {
	if extensions[strings.ToLower(filepath.Ext(s))] != "" && !strings.ContainsAny(s, "\n;(") {
		return false
	}
	return strings.ContainsAny(s, "\n;()='\" ")
}
