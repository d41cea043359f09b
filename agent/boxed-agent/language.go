package main

import (
	"errors"
	"os"
	"path"
	"regexp"

	"github.com/boxed-mesh/boxed/agent"
)

// language says how code of one language becomes a program.
type language struct {
	interpreters []string // the first that the image has is used
	file         string
}

var languages = map[string]language{
	"python":     {[]string{"python3", "python"}, "main.py"},
	"javascript": {[]string{"node", "nodejs"}, "main.js"},
	"bash":       {[]string{"bash", "sh"}, "main.sh"},
}

// esModule finds code that node takes only as a module, which before version 22
// it tells by the file's name.
var esModule = regexp.MustCompile(`(?m)^\s*(import\s*[\w*{"']|export\s+(default|const|let|var|function|class|async|\{))`)

// prepareCode has the code put into a file in a directory of its own below /tmp, so
// that a program of any size runs and tracebacks name a file and show its lines.
// The modules of the working directory stay in reach. The caller removes the
// directory, also after an error.
func prepareCode(start *agent.ExecStart, put func(name string) error) (argv []string, dir string, err error) {
	lang, ok := languages[start.Language]
	if !ok {
		return nil, "", &agent.Error{Code: agent.ErrInvalid, Message: "unknown language " + start.Language, Path: "language"}
	}
	var interpreter string
	for _, name := range lang.interpreters {
		if full, err := lookPath(name, *start); err == nil {
			interpreter = full
			break
		}
	}
	if interpreter == "" {
		return nil, "", &agent.Error{
			Code: agent.ErrNotFound, Path: "language",
			Message: "this image has no " + lang.interpreters[0] + "; choose an image that has it, or run a program of the image with args",
		}
	}
	file := lang.file
	if start.Language == "javascript" && esModule.Match(start.Code) {
		file = "main.mjs"
	}
	dir = "/tmp/boxed-" + start.ID
	if err := makeCodeDir(*start, dir); err != nil {
		return nil, dir, fileError(err, dir)
	}
	if err := put(path.Join(dir, file)); err != nil {
		return nil, dir, fileError(err, dir)
	}
	if start.Language == "python" {
		pythonPath := start.Dir
		if old := getenv(start.Env, "PYTHONPATH"); old != "" {
			pythonPath += ":" + old
		}
		start.Env = append(start.Env, "PYTHONPATH="+pythonPath)
	}
	return []string{interpreter, path.Join(dir, file)}, dir, nil
}

func makeCodeDir(start agent.ExecStart, dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if start.Language == "javascript" {
		os.Symlink(path.Join(start.Dir, "node_modules"), path.Join(dir, "node_modules"))
	}
	return nil
}

// writeFile makes a file, and opens none: user code that is quick must not put a
// FIFO there.
func writeFile(name string, code []byte) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(code)
	return errors.Join(err, f.Close())
}

// fileError is err as one that the host understands.
func fileError(err error, name string) error {
	var known *agent.Error
	if err == nil || errors.As(err, &known) {
		return err
	}
	e := &agent.Error{Code: agent.ErrInternal, Path: name, Message: name + ": " + plain(err)}
	for _, k := range fileCodes {
		if errors.Is(err, k.err) {
			e.Code = k.code
			if k.message != "" {
				e.Message = name + " " + k.message
			}
			break
		}
	}
	return e
}

// plain is the cause without the path, which may be a temporary one.
func plain(err error) string {
	var p *os.PathError
	var l *os.LinkError
	switch {
	case errors.As(err, &p):
		return p.Err.Error()
	case errors.As(err, &l):
		return l.Err.Error()
	}
	return err.Error()
}
