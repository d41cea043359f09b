package main

import (
	"bytes"
	"cmp"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Bounds of all recordings of a node; the oldest go first.
const (
	maxRecordings     = 256 << 20 // bytes
	maxRecordingAge   = 30 * 24 * time.Hour
	recordingIDLen    = 16
	recordingSuffix   = ".cast"
	recordingTimeForm = "20060102T150405Z"
)

// recordings are files of a directory, <time>.<id>.<sandbox>.<owner, in hex>.cast, mode
// 0600: their names say all that a list does.
type recordings struct {
	dir string
	mu  sync.Mutex // while one is made, and old ones go
}

// create makes a recording.
func (r *recordings) create(rec boxed.Recording) (io.WriteCloser, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := os.MkdirAll(r.dir, 0o700); err != nil {
		return nil, err
	}
	if err := r.prune(); err != nil {
		return nil, err
	}
	name := strings.Join([]string{
		rec.StartedAt.UTC().Format(recordingTimeForm), boxed.NewToken(recordingIDLen), string(rec.Sandbox), hex.EncodeToString([]byte(rec.Owner)),
	}, ".") + recordingSuffix
	return os.OpenFile(filepath.Join(r.dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
}

// prune removes what is too old, and the oldest of what is too much.
func (r *recordings) prune() error {
	all, err := r.list()
	if err != nil {
		return err
	}
	kept := int64(0)
	for _, f := range all { // the newest first
		if kept += f.Bytes; kept > maxRecordings || time.Since(f.StartedAt) > maxRecordingAge {
			if err := os.Remove(filepath.Join(r.dir, f.file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

type recordingFile struct {
	boxed.Recording
	file string
}

// list is all of them, the newest first.
func (r *recordings) list() ([]recordingFile, error) {
	entries, err := os.ReadDir(r.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	var all []recordingFile
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), recordingSuffix)
		parts := strings.Split(name, ".")
		if !ok || len(parts) != 4 {
			continue
		}
		at, err := time.Parse(recordingTimeForm, parts[0])
		owner, ownerErr := hex.DecodeString(parts[3])
		info, infoErr := e.Info()
		if errors.Join(err, ownerErr, infoErr) != nil || !info.Mode().IsRegular() {
			continue
		}
		all = append(all, recordingFile{boxed.Recording{
			ID: parts[1], Sandbox: boxed.ID(parts[2]), Owner: string(owner), StartedAt: at, Bytes: info.Size(),
		}, e.Name()})
	}
	slices.SortFunc(all, func(a, b recordingFile) int {
		return cmp.Or(b.StartedAt.Compare(a.StartedAt), cmp.Compare(a.ID, b.ID))
	})
	return all, nil
}

// of are those that a caller may read.
func (r *recordings) of(who boxed.Principal) ([]recordingFile, error) {
	all, err := r.list()
	return slices.DeleteFunc(all, func(f recordingFile) bool { return !who.Admin() && (who.Owner == "" || f.Owner != who.Owner) }), err
}

// open reads one that the caller may read.
func (r *recordings) open(who boxed.Principal, id string) (io.ReadCloser, error) {
	all, err := r.of(who)
	if err != nil {
		return nil, err
	}
	for _, f := range all {
		if f.ID != id {
			continue
		}
		file, err := os.Open(filepath.Join(r.dir, f.file))
		if err != nil {
			return nil, err
		}
		// To the last whole line: it may be written at this moment.
		text, err := io.ReadAll(io.LimitReader(file, maxRecordings))
		file.Close()
		if err != nil {
			return nil, err
		}
		return io.NopCloser(bytes.NewReader(text[:bytes.LastIndexByte(text, '\n')+1])), nil
	}
	return nil, boxed.Errorf(boxed.CodeNotFound, "this node has no recording %q; they are kept where their session came in", id).WithField("id")
}
