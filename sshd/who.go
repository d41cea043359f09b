package sshd

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/gliderlabs/ssh"
	gossh "golang.org/x/crypto/ssh"
	"golang.org/x/sys/cpu"
)

// keyExtension is where a connection's permissions have the key that was proved, and
// knownExtension says that none was asked for.
const (
	keyExtension   = "boxed-key"
	knownExtension = "boxed-known"
)

func (s *Server) serverConfig(ctx ssh.Context) *gossh.ServerConfig {
	config := &gossh.ServerConfig{
		Config:       gossh.Config{Ciphers: ciphers()},
		MaxAuthTries: maxTries,
		NoClientAuth: true, // as the callback says
		NoClientAuthCallback: func(gossh.ConnMetadata) (*gossh.Permissions, error) {
			peer, ok := ctx.Value(peerKey{}).(*peerConn)
			if !ok || peer.who == nil {
				return nil, errNoKey
			}
			if _, err := peer.who(ctx); err != nil {
				return nil, err
			}
			peer.proven()
			return &gossh.Permissions{Extensions: map[string]string{knownExtension: "yes"}}, nil
		},
		// Whoever offers a key has not proved it (CVE-2024-45337): what counts is
		// noted here, of the one that was signed with.
		VerifiedPublicKeyCallback: func(_ gossh.ConnMetadata, key gossh.PublicKey, _ *gossh.Permissions, _ string) (*gossh.Permissions, error) {
			if peer, ok := ctx.Value(peerKey{}).(*peerConn); ok {
				peer.proven()
			}
			return &gossh.Permissions{Extensions: map[string]string{keyExtension: string(key.Marshal())}}, nil
		},
		AuthLogCallback: func(conn gossh.ConnMetadata, method string, err error) {
			if err != nil && method != "none" && s.lines.Allow() {
				s.cfg.Log.Info("ssh: refused", "addr", conn.RemoteAddr(), "user", clip(conn.User()), "method", method)
			}
		},
	}
	return config
}

// ciphers are those that the library thinks secure. Where the processor has
// instructions for AES, those with ChaCha20 are left out: clients prefer them, and Go
// has no assembly for it there, so that a file takes half as long again
// (bench/results/ssh.csv). Every client has one of the others.
func ciphers() []string {
	all := gossh.SupportedAlgorithms().Ciphers
	if !cpu.X86.HasAES {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(name string) bool { return name == gossh.CipherChaCha20Poly1305 })
}

// errNoKey is the answer to one who shows nothing.
var errNoKey = errors.New("a key is asked for")

// offered reports whether a key is worth a proof.
func (s *Server) offered(ctx ssh.Context, key ssh.PublicKey) bool {
	_, err := s.cfg.Identify(ctx, key, ctx.RemoteAddr())
	return err == nil
}

// who is whose the connection is, by the key that was proved or where it came from.
func (s *Server) who(ctx context.Context, conn *gossh.ServerConn) (Identity, error) {
	if conn.Permissions == nil {
		return Identity{}, errors.New("no key was proved")
	}
	if peer, ok := ctx.Value(peerKey{}).(*peerConn); ok && peer.who != nil && conn.Permissions.Extensions[knownExtension] != "" {
		who, err := peer.who(ctx)
		return Identity{Principal: who}, err
	}
	key, err := gossh.ParsePublicKey([]byte(conn.Permissions.Extensions[keyExtension]))
	if err != nil {
		return Identity{}, fmt.Errorf("no key was proved: %w", err)
	}
	return s.cfg.Identify(ctx, key, conn.RemoteAddr())
}
