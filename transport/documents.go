package transport

import (
	"context"
	"crypto/ed25519"
	"errors"
	"hash/fnv"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/boxed-mesh/boxed"
)

// DocumentStore keeps documents. store.Store is one.
type DocumentStore interface {
	PutDocument(boxed.Document) (bool, error)
	ReplaceDocument(boxed.Document) error
	Ahead(*boxed.Document) bool
	Document(kind, key string) (*boxed.Document, error)
	Documents(kind string) ([]boxed.Document, error)
	AllDocuments(func(boxed.Document) error) error
	DropDocuments(keep func(boxed.Document) bool) error
	DocumentsChanged() <-chan struct{}
}

// Bounds of the exchange of documents.
const (
	documentBatch = 256 << 10 // bytes of bodies in one message
	maxDigest     = 200_000   // documents that one comparison tells of
	maxHeld       = 256       // documents that are held back
	heldEvery     = 5 * time.Second
	heldFor       = time.Hour // since it was last sent
	sendAtOnce    = 8
	sendQueue     = 1024
)

// DocumentsConfig is what Documents need. All but Trusted, Log and Now is required;
// Peers and Send are a Membership's, which may be made later: they are called
// only from Run.
type DocumentsConfig struct {
	Store    DocumentStore
	Clock    *boxed.Clock // the store's
	Identity ed25519.PrivateKey
	// Peers are the other nodes that are there.
	Peers func() []boxed.NodeID
	Send  func(boxed.NodeID, []byte) error
	// Trusted reports whether an author may write documents of a kind. Nil trusts
	// every node.
	Trusted func(kind string, author ed25519.PublicKey) bool
	Log     *slog.Logger
	Now     func() time.Time
}

// Documents keeps the documents of a store and those of all other nodes alike.
// What is put here is sent to every node that is there at once; what a node
// missed it gets when two nodes compare all they have, which they do every few
// seconds and whenever one joins. Who wins is in [boxed.Document.Supersedes], and
// depends on neither order nor path.
type Documents struct {
	cfg   DocumentsConfig
	id    boxed.NodeID
	queue chan delivery
	// sending is true while a delivery is under way.
	sending atomic.Bool

	mu   sync.Mutex
	held map[string]held // by kind, key and signature
}

var _ Exchange = (*Documents)(nil)

// held is a document that waits for the clock.
type held struct {
	boxed.HeldDocument
	doc  boxed.Document
	seen time.Time // when it was last sent
}

// delivery is documents, by reference, that a node is to get; without any it gets
// the digest, and answers with what this node lacks.
type delivery struct {
	to   boxed.NodeID // "": all
	refs []documentRef
}

// The first byte of a message.
const (
	messageDocuments = 'd'
	messageDigest    = 'g'
)

type documentRef struct{ kind, key string }

// NewDocuments makes Documents. Until Run nothing is sent.
func NewDocuments(cfg DocumentsConfig) *Documents {
	if cfg.Trusted == nil {
		cfg.Trusted = func(string, ed25519.PublicKey) bool { return true }
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	id := boxed.NodeIDOf(cfg.Identity.Public().(ed25519.PublicKey))
	return &Documents{cfg: cfg, id: id, queue: make(chan delivery, sendQueue), held: map[string]held{}}
}

// PutDocument stores a document of this node and gives it to all others.
func (d *Documents) PutDocument(doc boxed.Document) (bool, error) {
	took, err := d.cfg.Store.PutDocument(doc)
	if took {
		d.enqueue(delivery{refs: []documentRef{{doc.Kind, doc.Key}}})
	}
	return took, err
}

// Flush waits until what was put has been sent, or for so long.
func (d *Documents) Flush(limit time.Duration) {
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if len(d.queue) == 0 && !d.sending.Load() {
			return
		}
	}
}

// Document is the store's.
func (d *Documents) Document(kind, key string) (*boxed.Document, error) {
	return d.cfg.Store.Document(kind, key)
}

// Documents is the store's.
func (d *Documents) Documents(kind string) ([]boxed.Document, error) {
	return d.cfg.Store.Documents(kind)
}

// DocumentsChanged is the store's.
func (d *Documents) DocumentsChanged() <-chan struct{} { return d.cfg.Store.DocumentsChanged() }

// enqueue drops what finds no room: the next comparison finds it missing.
func (d *Documents) enqueue(v delivery) {
	select {
	case d.queue <- v:
	default:
		d.cfg.Log.Warn("too many documents are on their way; the rest goes with the next comparison")
	}
}

// Run sends what is to be sent, and tries what is held back, until ctx ends.
func (d *Documents) Run(ctx context.Context) error {
	tick := time.NewTicker(heldEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			d.retryHeld()
			if err := d.SetRight(); err != nil {
				d.cfg.Log.Error("stamp documents anew", "err", err)
			}
		case v := <-d.queue:
			d.sending.Store(true)
			d.deliver(ctx, v)
			d.sending.Store(len(d.queue) > 0)
		}
	}
}

func (d *Documents) deliver(ctx context.Context, v delivery) {
	messages := d.messages(v.refs)
	if len(v.refs) == 0 {
		messages = [][]byte{append([]byte{messageDigest}, d.State()...)}
	}
	to := []boxed.NodeID{v.to}
	if v.to == "" {
		to = d.cfg.Peers()
	}
	slots := make(chan struct{}, sendAtOnce)
	var sending sync.WaitGroup
	for _, id := range to {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			break
		}
		sending.Go(func() {
			defer func() { <-slots }()
			for _, msg := range messages {
				if err := d.send(ctx, id, msg); err != nil {
					d.cfg.Log.Debug("send documents", "peer", id, "err", err)
					return // the next comparison finds what is missing
				}
			}
		})
	}
	sending.Wait()
}

// send waits a moment for a node that compared before it was known to be there.
func (d *Documents) send(ctx context.Context, id boxed.NodeID, msg []byte) error {
	for try := 1; ; try++ {
		err := d.cfg.Send(id, msg)
		if boxed.CodeOf(err) != boxed.CodeNotFound || try == 5 {
			return err
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// messages reads the documents and packs them.
func (d *Documents) messages(refs []documentRef) (messages [][]byte) {
	var batch []boxed.Document
	size := 0
	flush := func() {
		if raw, err := cbor.Marshal(batch); err == nil && len(batch) > 0 {
			messages = append(messages, append([]byte{messageDocuments}, raw...))
		}
		batch, size = nil, 0
	}
	for _, ref := range refs {
		doc, err := d.cfg.Store.Document(ref.kind, ref.key)
		if err != nil {
			continue // pruned meanwhile
		}
		if size += len(doc.Body); size > documentBatch {
			flush()
			size = len(doc.Body)
		}
		batch = append(batch, *doc)
	}
	flush()
	return messages
}

// Greet asks a node that has come for what this one lacks. What it lacks itself it
// asks for in the same way; what is put from now on it is sent.
func (d *Documents) Greet(id boxed.NodeID) { d.enqueue(delivery{to: id}) }

// Message takes what another node sent.
func (d *Documents) Message(from boxed.NodeID, raw []byte) {
	switch {
	case len(raw) > 1 && raw[0] == messageDocuments:
		d.takeAll(raw[1:])
	case len(raw) > 1 && raw[0] == messageDigest:
		d.compare(raw[1:], from)
	default: // of a later release
		d.cfg.Log.Debug("another node's message is not known")
	}
}

func (d *Documents) takeAll(raw []byte) {
	var docs []boxed.Document
	if err := documentDecoding().Unmarshal(raw, &docs); err != nil {
		d.cfg.Log.Warn("documents of another node cannot be read", "err", err)
		return
	}
	for _, doc := range docs {
		d.take(doc)
	}
}

// Take is for a document that came by another way than a message.
func (d *Documents) Take(doc boxed.Document) { d.take(doc) }

// take judges one document. What is wrong with it is its author's fault or a
// forger's, never a reason to stop.
func (d *Documents) take(doc boxed.Document) {
	if !doc.Verify() {
		d.cfg.Log.Warn("a forged document was refused", "kind", clip(doc.Kind, 64), "key", clip(doc.Key, 64))
		return
	}
	author := boxed.NodeIDOf(doc.Author)
	if !d.cfg.Trusted(doc.Kind, doc.Author) {
		d.cfg.Log.Warn("a document was refused: its author may not write such", "kind", clip(doc.Kind, 64), "key", clip(doc.Key, 64), "author", author)
		return
	}
	_, err := d.cfg.Store.PutDocument(doc)
	var e *boxed.Error
	switch {
	case err == nil:
		d.letGo(doc, author)
	case errors.As(err, &e) && e.Detail["reason"] == "clock_ahead":
		d.hold(doc, author)
	default:
		d.cfg.Log.Warn("a document was refused", "kind", clip(doc.Kind, 64), "author", author, "err", err)
	}
}

func (d *Documents) hold(doc boxed.Document, author boxed.NodeID) {
	name := doc.Kind + "\x00" + doc.Key + "\x00" + string(doc.Signature)
	d.mu.Lock()
	defer d.mu.Unlock()
	h, known := d.held[name]
	if !known && len(d.held) >= maxHeld {
		return
	}
	if h.seen = d.cfg.Now(); known {
		d.held[name] = h
		return
	}
	h.HeldDocument, h.doc = boxed.HeldDocument{Kind: doc.Kind, Key: doc.Key, Author: author, Stamp: time.UnixMilli(doc.Stamp.WallMS).UTC()}, doc
	d.held[name] = h
	d.cfg.Log.Warn("a document is held back: it is stamped ahead of this node's clock; set the clocks", "kind", doc.Kind, "key", clip(doc.Key, 64), "author", author)
}

// letGo drops what was held back of a document that its author has stamped anew.
func (d *Documents) letGo(doc boxed.Document, author boxed.NodeID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for name, h := range d.held {
		if h.Kind == doc.Kind && h.Key == doc.Key && h.Author == author {
			delete(d.held, name)
		}
	}
}

// retryHeld takes what is no longer ahead of the clock.
func (d *Documents) retryHeld() {
	d.mu.Lock()
	var due []boxed.Document
	now := d.cfg.Now()
	for name, h := range d.held {
		switch {
		case !h.Stamp.After(now.Add(boxed.MaxClockSkew)):
			due = append(due, h.doc)
			delete(d.held, name)
		case now.Sub(h.seen) > heldFor: // nobody has it any more
			delete(d.held, name)
		}
	}
	d.mu.Unlock()
	for _, doc := range due {
		d.take(doc)
	}
}

// SetRight stamps anew what this node wrote while its clock was ahead: nobody else
// took that, and nobody would take what is written after it.
func (d *Documents) SetRight() error {
	now := d.cfg.Now()
	var wrong []boxed.Document
	err := d.cfg.Store.AllDocuments(func(doc boxed.Document) error {
		if d.cfg.Store.Ahead(&doc) && boxed.NodeIDOf(doc.Author) == d.id {
			wrong = append(wrong, doc)
		}
		return nil
	})
	d.cfg.Clock.SetRight(now)
	for _, doc := range wrong {
		doc.Stamp = d.cfg.Clock.Next(now)
		doc.Sign(d.cfg.Identity)
		if replaceErr := d.cfg.Store.ReplaceDocument(doc); replaceErr != nil {
			err = errors.Join(err, replaceErr)
			continue
		}
		d.enqueue(delivery{refs: []documentRef{{doc.Kind, doc.Key}}})
	}
	return err
}

// Held is what is held back, for people to see.
func (d *Documents) Held() []boxed.HeldDocument {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := []boxed.HeldDocument{}
	for _, h := range d.held {
		list = append(list, h.HeldDocument)
	}
	slices.SortFunc(list, func(a, b boxed.HeldDocument) int { return strings.Compare(a.Kind+a.Key, b.Kind+b.Key) })
	return list
}

// digest is what a node says that it has.
type digest struct {
	From boxed.NodeID   `cbor:"1,keyasint"`
	Docs []digestedItem `cbor:"2,keyasint"`
}

type digestedItem struct {
	_       struct{} `cbor:",toarray"`
	Kind    string
	Key     string
	WallMS  int64
	Counter uint32
	Revoked bool
	Sum     uint32 // of author and signature, to tell equal stamps apart
}

func digested(doc *boxed.Document) digestedItem {
	h := fnv.New32a()
	h.Write(doc.Author)
	h.Write(doc.Signature)
	return digestedItem{Kind: doc.Kind, Key: doc.Key, WallMS: doc.Stamp.WallMS, Counter: doc.Stamp.Counter, Revoked: doc.Revoked, Sum: h.Sum32()}
}

// newer reports whether a may replace b; of two that only their authors tell
// apart each may.
func (a digestedItem) newer(b digestedItem) bool {
	if a.Revoked != b.Revoked {
		return a.Revoked
	}
	as, bs := boxed.Stamp{WallMS: a.WallMS, Counter: a.Counter}, boxed.Stamp{WallMS: b.WallMS, Counter: b.Counter}
	return bs.Before(as) || as == bs && a.Sum != b.Sum
}

// State is the digest of all documents.
func (d *Documents) State() []byte {
	all := digest{From: d.id}
	err := d.cfg.Store.AllDocuments(func(doc boxed.Document) error {
		// What lies ahead of the clock is not told of: a right one is to come.
		if len(all.Docs) < maxDigest && !d.cfg.Store.Ahead(&doc) {
			all.Docs = append(all.Docs, digested(&doc))
		}
		return nil
	})
	if err != nil {
		d.cfg.Log.Error("read the documents", "err", err)
		return nil
	}
	raw, err := cbor.Marshal(all)
	if err != nil {
		return nil
	}
	return raw
}

// Compare sends the other node what it has not, or older.
func (d *Documents) Compare(raw []byte) { d.compare(raw, "") }

// compare answers nobody but who asks: from, where that is known.
func (d *Documents) compare(raw []byte, from boxed.NodeID) {
	var theirs digest
	if err := documentDecoding().Unmarshal(raw, &theirs); err != nil || !theirs.From.Valid() {
		d.cfg.Log.Warn("another node's digest cannot be read", "err", err)
		return
	}
	if from != "" {
		theirs.From = from
	}
	have := make(map[documentRef]digestedItem, len(theirs.Docs))
	for _, item := range theirs.Docs {
		have[documentRef{item.Kind, item.Key}] = item
	}
	var missing []documentRef
	err := d.cfg.Store.AllDocuments(func(doc boxed.Document) error {
		ref, mine := documentRef{doc.Kind, doc.Key}, digested(&doc)
		if other, ok := have[ref]; !ok || mine.newer(other) {
			missing = append(missing, ref)
		}
		return nil
	})
	if err != nil {
		d.cfg.Log.Error("read the documents", "err", err)
	}
	if len(missing) > 0 {
		d.enqueue(delivery{to: theirs.From, refs: missing})
	}
}

// documentDecoding bounds what the bytes of another node may unfold to.
func documentDecoding() cbor.DecMode {
	mode, err := cbor.DecOptions{MaxArrayElements: maxDigest + 16, MaxMapPairs: 64, MaxNestedLevels: 8}.DecMode()
	if err != nil {
		panic(err) // the options are constants
	}
	return mode
}
