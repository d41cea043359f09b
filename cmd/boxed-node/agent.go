package main

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/boxed-mesh/boxed"
)

//go:embed all:bin
var embedded embed.FS

// agentProgram is the program that is process 1 of every sandbox: the file at
// path, or the embedded one for "".
func agentProgram(path string, bin fs.FS) ([]byte, error) {
	if path != "" {
		b, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read the agent: %w", err)
		}
		return b, nil
	}
	b, err := fs.ReadFile(bin, "bin/boxed-agent-"+runtime.GOARCH)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, boxed.Errorf(boxed.CodeUnavailable, "this boxed-node was built without an agent for %s: run `make build`, or name one with --agent", runtime.GOARCH)
	}
	return b, err
}

// toolsProgram is the program at boxed.ToolsPath: the file beside the agent at path, or
// the embedded one for "". Without one there is no SFTP.
func toolsProgram(path string, bin fs.FS) ([]byte, error) {
	var b []byte
	var err error
	if path != "" {
		b, err = os.ReadFile(filepath.Join(filepath.Dir(path), toolsName))
	} else {
		b, err = fs.ReadFile(bin, "bin/"+toolsName+"-"+runtime.GOARCH)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

const toolsName = "boxed-tools"

// agentHash names a program: the start of its SHA-256, "" for none.
func agentHash(program []byte) string {
	if program == nil {
		return ""
	}
	return fmt.Sprintf("%x", sha256.Sum256(program))[:16]
}

// agentDir holds agents by the hash of their content: <dir>/<16 hex digits of
// the SHA-256>/boxed-agent. A sandbox's agent is mounted from there, so each
// stays until no sandbox uses it, whatever the daemon is upgraded to.
type agentDir string

// install puts a program into the directory, where it is 0755 and cannot be
// told from a damaged one: what is there already is read and compared.
func (d agentDir) install(program []byte) (path string, err error) {
	dir := filepath.Join(string(d), agentHash(program))
	path = filepath.Join(dir, "boxed-agent")
	for _, p := range []string{string(d), dir} {
		// Containers mount the file by its path, which other users need not list.
		if err := os.Mkdir(p, 0o711); err != nil && !errors.Is(err, fs.ErrExist) {
			return "", fmt.Errorf("install the agent: %w", err)
		}
		if err := os.Chmod(p, 0o711); err != nil { // whatever the umask
			return "", fmt.Errorf("install the agent: %w", err)
		}
	}
	if err := installProgram(path, program); err != nil {
		return "", fmt.Errorf("install the agent: %w", err)
	}
	return path, nil
}

// installTools puts the tools beside the agent that install put there. Sandboxes have
// links to what was there when they were made.
func (d agentDir) installTools(agent string, program []byte) (path string, err error) {
	if program == nil {
		return "", nil
	}
	path = filepath.Join(filepath.Dir(agent), toolsName)
	if err := installProgram(path, program); err != nil {
		return "", fmt.Errorf("install the sandboxes' tools: %w", err)
	}
	return path, nil
}

func installProgram(path string, program []byte) error {
	fi, statErr := os.Stat(path)
	there, readErr := os.ReadFile(path)
	if statErr == nil && readErr == nil && fi.Mode().Perm() == 0o755 && bytes.Equal(there, program) {
		return nil
	}
	return writeNew(path, program, 0o755)
}

// prune removes the agents that are neither current nor in use. inUse is asked
// with paths that install returned, now or in an earlier run.
func (d agentDir) prune(current string, inUse func(path string) bool) error {
	entries, err := os.ReadDir(string(d))
	if err != nil {
		return fmt.Errorf("prune agents: %w", err)
	}
	var errs []error
	for _, e := range entries {
		dir := filepath.Join(string(d), e.Name())
		if path := filepath.Join(dir, "boxed-agent"); path != current && !inUse(path) {
			errs = append(errs, os.RemoveAll(dir))
		}
	}
	return errors.Join(errs...)
}
