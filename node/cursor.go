package node

import (
	"bytes"
	"encoding/base64"
	"maps"
	"slices"

	"github.com/fxamacker/cbor/v2"

	"github.com/boxed-mesh/boxed"
)

// maxCursor bounds a cursor, in characters: one that tells of a thousand nodes is
// as long.
const maxCursor = 48 << 10

// places is an opaque cursor: how far each node has been read. A node that is not
// in it has not been read at all, so what comes back or joins between two pages is
// listed from its beginning, and nothing is listed twice. Most nodes are read up
// to the same place, so they are kept by place.
type places struct {
	at map[boxed.NodeID]string
	// start is when a stream of events began, in milliseconds: a node that is not in
	// it is read from there. 0 for lists.
	start int64
}

// wirePlaces is places as they are written.
type wirePlaces struct {
	_     struct{} `cbor:",toarray"`
	Start int64
	At    []wirePlace
}

// wirePlace is the nodes that have been read up to one place.
type wirePlace struct {
	_     struct{} `cbor:",toarray"`
	Place string
	Nodes []boxed.NodeID
}

// after is the place up to which a node has been read, or "".
func (p places) after(id boxed.NodeID) string { return p.at[id] }

// read is p, and the node read up to place.
func (p places) read(id boxed.NodeID, place string) places {
	at := maps.Clone(p.at)
	if at == nil {
		at = map[boxed.NodeID]string{}
	}
	at[id] = place
	return places{at, p.start}
}

// String is the cursor as it is handed out: the same for the same places.
func (p places) String() string {
	by := map[string][]boxed.NodeID{}
	for id, place := range p.at {
		by[place] = append(by[place], id)
	}
	var list []wirePlace
	for _, place := range slices.Sorted(maps.Keys(by)) {
		ids := by[place]
		slices.Sort(ids)
		list = append(list, wirePlace{Place: place, Nodes: ids})
	}
	var b bytes.Buffer
	if err := cbor.NewEncoder(&b).Encode(wirePlaces{Start: p.start, At: list}); err != nil {
		return "" // strings and lists of them can always be encoded
	}
	return base64.RawURLEncoding.EncodeToString(b.Bytes())
}

// parsePlaces reads what String wrote. field is what the caller calls it.
func parsePlaces(field, cursor string) (places, error) {
	p := places{at: map[boxed.NodeID]string{}}
	if cursor == "" {
		return p, nil
	}
	bad := invalid(field, "%.40q is not from an earlier answer", cursor)
	if len(cursor) > maxCursor {
		return p, bad
	}
	raw, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil {
		return p, bad
	}
	var wire wirePlaces
	if err := cbor.Unmarshal(raw, &wire); err != nil {
		return p, bad
	}
	p.start = wire.Start
	for _, place := range wire.At {
		for _, id := range place.Nodes {
			if !id.Valid() || place.Place == "" || len(place.Place) > 256 {
				return p, bad
			}
			p.at[id] = place.Place
		}
	}
	return p, nil
}

func parseCursor(cursor string) (places, error) { return parsePlaces("cursor", cursor) }
