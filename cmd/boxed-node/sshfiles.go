package main

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/boxed-mesh/boxed"
)

// authorizedKeys are public keys by owner, from files that are read again when
// they change.
type authorizedKeys struct {
	files       map[string]string
	authorities map[string]bool // keys that sign user certificates
	log         *slog.Logger

	mu   sync.Mutex
	read map[string]*keyFile // by owner
}

type keyFile struct {
	stamp time.Time
	size  int64
	keys  map[string]bool // by the key's bytes
}

// owner is whose key it is. A key that two owners have is nobody's. Errors: not_found,
// unauthenticated.
func (a *authorizedKeys) owner(key ssh.PublicKey) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var owners []string
	for owner, path := range a.files {
		if a.keysOf(owner, path)[string(key.Marshal())] {
			owners = append(owners, owner)
		}
	}
	switch len(owners) {
	case 0:
		return "", boxed.Errorf(boxed.CodeNotFound, "the key %s is not known", ssh.FingerprintSHA256(key))
	case 1:
		return owners[0], nil
	}
	return "", boxed.Errorf(boxed.CodeUnauthenticated, "the key %s is that of %d owners; leave it to one", ssh.FingerprintSHA256(key), len(owners))
}

// keysOf reads an owner's file. One that cannot be read lets nobody in.
func (a *authorizedKeys) keysOf(owner, path string) map[string]bool {
	fi, err := os.Stat(path)
	if err == nil && fi.Mode().Perm()&0o022 != 0 { // as OpenSSH, which refuses it too
		err = errors.New("others can write it; chmod go-w it")
	}
	if err != nil {
		a.complain(owner, path, err)
		return nil
	}
	f := a.read[owner]
	if f != nil && f.stamp.Equal(fi.ModTime()) && f.size == fi.Size() {
		return f.keys
	}
	text, err := readSmall(path)
	if err != nil {
		a.complain(owner, path, err)
		return nil
	}
	f = &keyFile{stamp: fi.ModTime(), size: fi.Size(), keys: map[string]bool{}}
	for n, line := range bytes.Split(text, []byte("\n")) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		key, _, options, _, err := ssh.ParseAuthorizedKey(line)
		switch {
		case err != nil:
			a.log.Warn("ssh: a line of an authorized_keys file is no public key", "path", path, "line", n+1, "err", err)
		case len(options) > 0: // to ignore from= or command= would let in more than was meant
			a.log.Warn("ssh: a key with options is left out: none is known here", "path", path, "line", n+1, "options", options)
		default:
			f.keys[string(key.Marshal())] = true
		}
	}
	if a.read == nil {
		a.read = map[string]*keyFile{}
	}
	a.read[owner] = f
	return f.keys
}

func (a *authorizedKeys) complain(owner, path string, err error) {
	a.log.Warn("ssh: an owner's keys cannot be read", "owner", owner, "path", path, "err", err)
}
