package store

import "github.com/dgraph-io/badger/v4"

// OpenFormat opens a store as a program would whose own format is current.
func OpenFormat(o Options, current int, steps map[int]func(*badger.DB) error) (*Store, error) {
	return open(o, format{current: current, steps: steps})
}

// EventGap is how far numbers of events go on after a restart.
const EventGap = eventPending

// EventsWritten reports whether no appended event is still pending.
func (s *Store) EventsWritten() bool {
	s.events.mu.Lock()
	defer s.events.mu.Unlock()
	return s.events.written == s.events.next
}
