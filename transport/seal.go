package transport

import (
	"crypto/ecdh"
	"crypto/ed25519"
	"crypto/hpke"
	"crypto/sha512"
	"fmt"

	"filippo.io/edwards25519"
)

// Seal encrypts a value so that only the holder of a node's key can read it. bound
// is what the value belongs to: it must be the same to open it. It is HPKE (RFC
// 9180) to the X25519 form of the node's Ed25519 key.
func Seal(to ed25519.PublicKey, bound, value []byte) ([]byte, error) {
	point, err := new(edwards25519.Point).SetBytes(to)
	if err != nil {
		return nil, fmt.Errorf("seal: not a node's key: %w", err)
	}
	public, err := ecdh.X25519().NewPublicKey(point.BytesMontgomery())
	if err != nil {
		return nil, err
	}
	key, err := hpke.NewDHKEMPublicKey(public)
	if err != nil {
		return nil, err
	}
	return hpke.Seal(key, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), sealInfo(bound), value)
}

// Open decrypts what was sealed to the key.
func Open(key ed25519.PrivateKey, bound, sealed []byte) ([]byte, error) {
	digest := sha512.Sum512(key.Seed())
	private, err := ecdh.X25519().NewPrivateKey(digest[:32]) // RFC 8032: the scalar of an Ed25519 key, clamped by X25519
	if err != nil {
		return nil, err
	}
	k, err := hpke.NewDHKEMPrivateKey(private)
	if err != nil {
		return nil, err
	}
	value, err := hpke.Open(k, hpke.HKDFSHA256(), hpke.ChaCha20Poly1305(), sealInfo(bound), sealed)
	if err != nil {
		return nil, fmt.Errorf("open: it is not sealed to this node, or not for this purpose: %w", err)
	}
	return value, nil
}

func sealInfo(bound []byte) []byte { return append([]byte("boxed sealed v1\n"), bound...) }
