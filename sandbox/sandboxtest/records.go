package sandboxtest

import (
	"encoding/json"
	"maps"
	"slices"
	"sync"

	"github.com/boxed-mesh/boxed/sandbox"
)

// Records are durable records in memory: what one Manager wrote, the next one
// reads, as JSON. The zero Records are ready.
type Records struct {
	mu   sync.Mutex
	rows map[string][]byte
	fail func(key string, r sandbox.Record) error
	puts int
}

var _ sandbox.Records = (*Records)(nil)

// Fail has Put call f first; its error is Put's. Nil removes it.
func (r *Records) Fail(f func(key string, r sandbox.Record) error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail = f
}

// Puts is how often Put was called.
func (r *Records) Puts() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.puts
}

// Put implements sandbox.Records.
func (r *Records) Put(key string, rec sandbox.Record) error {
	raw, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	r.mu.Lock()
	r.puts++
	fail := r.fail
	r.mu.Unlock()
	if fail != nil {
		if err := fail(key, rec); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rows == nil {
		r.rows = map[string][]byte{}
	}
	r.rows[key] = raw
	return nil
}

// Delete implements sandbox.Records.
func (r *Records) Delete(key string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.rows, key)
	return nil
}

// All implements sandbox.Records.
func (r *Records) All() ([]sandbox.Record, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []sandbox.Record
	for _, key := range slices.Sorted(maps.Keys(r.rows)) {
		var rec sandbox.Record
		if err := json.Unmarshal(r.rows[key], &rec); err != nil {
			return nil, err
		}
		all = append(all, rec)
	}
	return all, nil
}

// Copy is what a Manager that starts now would find: later writes of the old
// one, which a kill would have prevented, do not reach it.
func (r *Records) Copy() *Records {
	r.mu.Lock()
	defer r.mu.Unlock()
	return &Records{rows: maps.Clone(r.rows)}
}
