package egress

import "net"

// What tests of the framing need.
type (
	Framing      = framing
	FramingError = framingError
)

func NewFraming(conn net.Conn) *Framing { return newFraming(conn, func(*framingError) {}) }

func (f *framing) Raw() bool { return f.raw() }

// Upcoming says what the next Read is of.
func (f *framing) Upcoming() string {
	switch {
	case f.whole:
		return "piece"
	case f.phase == phaseHead:
		return "head"
	case f.phase == phaseData:
		return "data"
	case f.phase == phaseRaw:
		return "raw"
	}
	return "piece"
}

// Holds is how many bytes it keeps besides its reader's.
func (f *framing) Holds() int { return cap(f.piece) }
