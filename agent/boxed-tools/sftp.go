package main

import (
	"errors"
	"io"
	"os"

	"github.com/pkg/sftp"
)

// stdio is a program's standard input and output.
type stdio struct {
	io.Reader
	io.WriteCloser
}

// serveSFTP speaks SFTP with whoever started it, as what it was started as: the
// sandbox's user, on the sandbox's files. What a client sends is parsed here, and
// not on the host.
func serveSFTP() error {
	// Without a directory of its own it leaves the targets of links as they are.
	server, err := sftp.NewServer(stdio{os.Stdin, os.Stdout}, sftp.WithAllocator())
	if err != nil {
		return err
	}
	if err := server.Serve(); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
