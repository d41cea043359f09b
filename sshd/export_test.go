package sshd

import "time"

// SetHandshakeLimit changes it until the returned function is called.
func SetHandshakeLimit(d time.Duration) (restore func()) {
	old := handshakeLimit
	handshakeLimit = d
	return func() { handshakeLimit = old }
}

// SetWatch shortens what terminals are told before their end, for a test.
func SetWatch(look time.Duration, at ...time.Duration) (restore func()) {
	oldLook, oldAt := lookEvery, warnAt
	lookEvery, warnAt = look, at
	return func() { lookEvery, warnAt = oldLook, oldAt }
}
