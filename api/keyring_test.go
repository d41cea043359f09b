package api_test

import (
	"context"
	"errors"
	"strings"
	"sync"

	"github.com/boxed-mesh/boxed"
)

// keyring is an Authenticator with two keys that can be revoked.
type keyring struct {
	mu      sync.Mutex
	revoked map[string]chan struct{}
	seen    map[string]bool // keys that were authenticated
}

func (k *keyring) asked(id string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.seen[id]
}

const (
	userKey  = "boxed_user"
	adminKey = "boxed_admin"
)

func newKeyring() *keyring {
	return &keyring{revoked: map[string]chan struct{}{"user": make(chan struct{}), "admin": make(chan struct{})}, seen: map[string]bool{}}
}

func (k *keyring) Authenticate(_ context.Context, secret string) (boxed.Principal, error) {
	id := strings.TrimPrefix(secret, "boxed_")
	k.mu.Lock()
	defer k.mu.Unlock()
	ch := k.revoked[id]
	if ch == nil || !strings.HasPrefix(secret, "boxed_") {
		return boxed.Principal{}, errors.New("no such key")
	}
	select {
	case <-ch:
		return boxed.Principal{}, errors.New("revoked")
	default:
	}
	k.seen[id] = true
	return boxed.Principal{Owner: map[string]string{"user": "ada", "admin": "root"}[id], Role: boxed.Role(id), Key: id}, nil
}

func (k *keyring) Watch(id string) (<-chan struct{}, func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.revoked[id], func() {}
}

func (k *keyring) revoke(id string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	close(k.revoked[id])
}
