package node

import (
	"time"

	"github.com/boxed-mesh/boxed"
)

// NoteMet is what a Cluster does now and then while so many others are there.
func (c *Cluster) NoteMet(others int) { c.noteMet(others) }

// TakeNonce takes a nonce of a node at a time.
func (a *Assertions) TakeNonce(from boxed.NodeID, nonce [16]byte, at time.Time) error {
	a.now = func() time.Time { return at }
	return a.take(from, nonce)
}

// Bounds of nonces.
const (
	MaxNonces = maxNonces
	NonceTurn = nonceTurn
)
