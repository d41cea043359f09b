package main

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/boxed-mesh/boxed/node"
)

// adminKey is the API key of the configuration. Where there is none it is made
// and kept in c.KeyPath, for the loopback listener that checkExposure insists
// on in that case. made says that this was the first start.
func adminKey(c *Config) (secret string, made bool, err error) {
	if c.APIKey != "" {
		return c.APIKey, false, nil
	}
	path := c.KeyPath()
	secret, err = readSecret(path)
	if !errors.Is(err, fs.ErrNotExist) {
		return secret, false, err
	}
	secret = node.NewKeySecret()
	if err := writeNew(path, []byte(secret+"\n"), 0o600); err != nil {
		return "", false, fmt.Errorf("keep the API key that was made: %w", err)
	}
	return secret, true, nil
}

func readSecret(path string) (string, error) {
	b, err := readSmall(path)
	if err != nil {
		return "", fmt.Errorf("read the API key: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// warnIfPublic complains of a secret that other users can read. It does not
// refuse it: secrets are handed over in files that a node cannot chmod.
func warnIfPublic(path string, log *slog.Logger) {
	if fi, err := os.Stat(path); err == nil && fi.Mode().Perm()&0o004 != 0 {
		log.Warn("a secret can be read by every user of the host; chmod 600 it", "path", path)
	}
}

// identity is the node's own key, made at the first start. Its public half is
// the node's ID, so to lose the file is to become another node.
func identity(path string) (ed25519.PrivateKey, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return newIdentity(path)
	} else if err != nil {
		return nil, fmt.Errorf("read the node's identity: %w", err)
	}
	broken := fmt.Errorf("%s does not hold the node's identity; put back a copy, or move it away to become a new node (whose sandboxes then are not this one's)", path)
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, broken
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, broken
	}
	private, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, broken
	}
	return private, nil
}

func newIdentity(path string) (ed25519.PrivateKey, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	if err := writeNew(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		return nil, fmt.Errorf("keep the node's identity: %w", err)
	}
	return key, nil
}

// writeNew makes a file, whole or not at all, readable by nobody else in
// between, and on the disk when it returns. What a crash leaves of it has a name
// that the next attempt uses again.
func writeNew(path string, content []byte, mode fs.FileMode) (err error) {
	dir := filepath.Dir(path)
	temp := filepath.Join(dir, "."+filepath.Base(path)+".new")
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	_, err = f.Write(content)
	if err := errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
