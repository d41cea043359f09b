package sandbox

import (
	"time"

	"github.com/boxed-mesh/boxed"
)

// Record is what is durable of one sandbox. It is written before each step that
// leaves something behind, so that whoever finds it after a crash can finish.
type Record struct {
	Sandbox boxed.Sandbox `json:"sandbox"`
	// Pooled is a warm sandbox that nobody has claimed.
	Pooled bool `json:"pooled,omitempty"`
	// Nonce is in the container's label, and nobody else knows it: with it the
	// container of a create that was cut short is known for ours.
	Nonce       string `json:"nonce"`
	ContainerID string `json:"container_id,omitempty"`
	Secret      string `json:"secret"` // of the agent link; "" once it has ended
	UID         int    `json:"uid"`
	Agent       string `json:"agent"`   // the program's path on this host
	BootID      string `json:"boot_id"` // of the machine's run in which it was started
	Key         string `json:"key"`     // of the pool that it fits
	// SpecHash tells the spec of a create with an idempotency key from another.
	SpecHash string `json:"spec_hash,omitempty"`
	// ImageEnv is the vetted environment of the image.
	ImageEnv map[string]string `json:"image_env,omitempty"`
	// Egress is what it may reach; nil is nothing.
	Egress *boxed.EgressGrant `json:"egress,omitempty"`
	// Left is what was left of the ttl when it was paused; boxed.Never for none.
	Left boxed.Duration `json:"left,omitempty"`
	// Ending is why it is being ended, written before the first step of destroy.
	Ending boxed.EndReason `json:"ending,omitempty"`
	// Why is the same for a person; Failed says whether it ends as failed.
	Why    string `json:"why,omitempty"`
	Failed bool   `json:"failed,omitempty"`
}

// Records keep Records, by sandbox ID. Put returns once the record survives a
// kill of this process.
type Records interface {
	Put(key string, r Record) error
	Delete(key string) error
	All() ([]Record, error)
}

// freeze pauses or resumes the sandbox and its clock.
func (r *Record) freeze(now time.Time, frozen bool) {
	s := &r.Sandbox
	if !frozen {
		r.expire(now, r.Left)
		s.State, s.PausedAt, r.Left = boxed.StateRunning, time.Time{}, 0
		return
	}
	r.Left = boxed.Never
	if !s.ExpiresAt.IsZero() {
		r.Left = max(1, boxed.Duration(s.ExpiresAt.Sub(now)))
	}
	s.State, s.PausedAt, s.ExpiresAt = boxed.StatePaused, now, time.Time{}
}

// expire sets the sandbox's deadline from now on.
func (r *Record) expire(now time.Time, in boxed.Duration) {
	if in == boxed.Never {
		r.Sandbox.ExpiresAt = time.Time{}
		return
	}
	r.Sandbox.ExpiresAt = now.Add(in.D())
}
