package egress

import (
	"crypto/cipher"
	"crypto/rand"
	"errors"
	"fmt"

	"golang.org/x/crypto/chacha20poly1305"
)

// Sealer keeps what only this node may read.
type Sealer struct{ aead cipher.AEAD }

// NewSealer takes a key of 32 bytes.
func NewSealer(key []byte) (*Sealer, error) {
	aead, err := chacha20poly1305.NewX(key)
	if err != nil {
		return nil, err
	}
	return &Sealer{aead}, nil
}

// Seal encrypts text for a purpose, which Open must name.
func (s *Sealer) Seal(purpose string, text []byte) []byte {
	nonce := make([]byte, s.aead.NonceSize(), s.aead.NonceSize()+len(text)+s.aead.Overhead())
	rand.Read(nonce)
	return s.aead.Seal(nonce, nonce, text, []byte(purpose))
}

// Open is the text again.
func (s *Sealer) Open(purpose string, sealed []byte) ([]byte, error) {
	n := s.aead.NonceSize()
	if len(sealed) < n {
		return nil, errors.New("what was sealed is cut off")
	}
	text, err := s.aead.Open(nil, sealed[:n], sealed[n:], []byte(purpose))
	if err != nil {
		return nil, fmt.Errorf("it was sealed with another key, or changed: %w", err)
	}
	return text, nil
}
