package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sort"
	"syscall"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
	"github.com/dgraph-io/badger/v4/table"
	"github.com/dgraph-io/ristretto/v2/z"

	"github.com/boxed-mesh/boxed"
)

// damaged is the error of a store that cannot be read.
func damaged(dir string, err error) error {
	return boxed.Errorf(boxed.CodeInternal,
		"the store in %s is damaged: %w. Nothing was changed. Put back a copy of the directory; or run `boxed-node store salvage`, which keeps a copy and gives up what cannot be read; or move the directory away to start empty (API keys made by `boxedctl key` are lost, and running sandboxes are removed)",
		dir, err)
}

// checkDamage looks for damage in Badger's files without changing them. It is
// here because Badger repairs silently: it cuts a log at the first entry that
// it cannot read, however much follows, goes on without a table that has a bad
// checksum, and deletes all tables where the manifest is missing. A log whose
// end is torn is no damage: that is how a killed daemon leaves it.
func checkDamage(dir string) error {
	logs, err := filepath.Glob(filepath.Join(dir, "*.mem"))
	if err != nil {
		return err
	}
	tables, err := filepath.Glob(filepath.Join(dir, "*.sst"))
	if err != nil {
		return err
	}
	manifest, err := readManifest(dir)
	switch {
	case errors.Is(err, os.ErrNotExist) && len(logs)+len(tables) == 0:
		return nil // a new store
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("its %s is missing", badger.ManifestFilename)
	case err != nil:
		return err
	}
	for id, t := range manifest.Tables {
		if err := checkTable(table.NewFilename(id, dir), t.Compression); err != nil {
			return err
		}
	}
	sort.Strings(logs)
	for _, path := range logs {
		if err := checkLog(path); err != nil {
			return err
		}
	}
	return nil
}

// removeUnmade removes logs of no length. Badger makes a file and then gives it its
// size; killed in between, it leaves one that nothing was ever written to, and
// that it would not open again.
func removeUnmade(dir string) error {
	for _, pattern := range []string{"*.mem", "*.vlog"} {
		paths, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			return err
		}
		for _, path := range paths {
			if fi, err := os.Stat(path); err != nil {
				return err
			} else if fi.Size() > 0 {
				continue
			}
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
	return nil
}

func readManifest(dir string) (badger.Manifest, error) {
	f, err := os.Open(filepath.Join(dir, badger.ManifestFilename))
	if err != nil {
		return badger.Manifest{}, err
	}
	defer f.Close()
	m, _, err := badger.ReplayManifestFile(f, 0, badger.DefaultOptions(dir).WithLogger(nil))
	if err != nil {
		return badger.Manifest{}, fmt.Errorf("%s cannot be read: %w", f.Name(), err)
	}
	return m, nil
}

// checkTable verifies every checksum of one table.
func checkTable(path string, compression options.CompressionType) (err error) {
	defer func() { // Badger panics on a footer that makes no sense
		if r := recover(); r != nil {
			err = fmt.Errorf("table %s cannot be read", path)
		}
	}()
	f, err := z.OpenMmapFile(path, os.O_RDONLY, 0)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("table %s is missing", path)
	} else if err != nil {
		return fmt.Errorf("table %s: %w", path, err)
	}
	t, err := table.OpenTable(f, table.Options{
		ReadOnly: true, Compression: compression, BlockSize: 4 << 10, ChkMode: options.OnTableAndBlockRead,
	})
	if err != nil {
		f.Close(-1)
		return fmt.Errorf("table %s has a bad checksum: %w", path, err)
	}
	return t.Close(-1)
}

// A log is a header of 20 bytes and then entries: meta, user meta, key length,
// value length and expiry as varints, key, value, CRC-32C. Entries of one
// transaction end with a marker. Unwritten space is zero. (Badger v4,
// structs.go and memtable.go.)
const (
	logHeader   = 20
	bitTxn      = 1 << 6
	bitFinTxn   = 1 << 7
	maxKeyLen   = 1 << 16
	maxValueLen = 4 << 20
)

// castagnoli is the polynomial of a log's checksums.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// damagedLog is a log with a hole in it.
type damagedLog struct {
	path     string
	at, next int // offsets of what cannot be read, and of what can again
}

func (d damagedLog) Error() string {
	return fmt.Sprintf("log %s cannot be read at byte %d, and there are records after it, at byte %d", d.path, d.at, d.next)
}

// checkLog fails if entries can be read after one that cannot.
func checkLog(path string) error {
	data, err := readLog(path)
	if err != nil {
		return err
	}
	if len(data) <= logHeader {
		return nil
	}
	end := readableEnd(data)
	for i := end + 1; i < len(data); i++ {
		// An entry's first byte has the mark of a transaction: all of ours do.
		if data[i]&(bitTxn|bitFinTxn) == 0 {
			continue
		}
		if _, n := readEntry(data[i:]); n > 0 {
			return damagedLog{path: path, at: end, next: i}
		}
	}
	return nil
}

// readLog reads a log up to its last byte that is not zero. Logs are made twice
// the memtable's size and are mostly a hole, which is not read.
func readLog(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	const seekData, seekHole = 3, 4 // of lseek(2)
	end, size := int64(0), fi.Size()
	for end < size {
		start, err := f.Seek(end, seekData)
		if errors.Is(err, syscall.ENXIO) {
			break // only a hole is left
		} else if err == nil {
			end, err = f.Seek(start, seekHole)
		}
		if err != nil {
			end = size // a filesystem that does not tell
		}
	}
	data := make([]byte, end)
	if _, err := f.ReadAt(data, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return bytes.TrimRight(data, "\x00"), nil
}

// readableEnd is where Badger would stop replaying: the first offset at which
// there is no entry that belongs there.
func readableEnd(data []byte) int {
	var version []byte // of the transaction that is open
	at := logHeader
	for at < len(data) {
		e, n := readEntry(data[at:])
		switch {
		case n == 0:
			return at
		case e.meta&bitTxn != 0:
			if len(e.key) < 8 || (version != nil && !bytes.Equal(version, e.key[len(e.key)-8:])) {
				return at
			}
			version = e.key[len(e.key)-8:]
		case e.meta&bitFinTxn != 0:
			version = nil
		}
		at += n
	}
	return at
}

type logEntry struct {
	meta byte
	key  []byte
}

// readEntry decodes the entry at the start of b and returns its length, or 0
// if there is none. A trailing zero of the checksum may have been trimmed.
func readEntry(b []byte) (logEntry, int) {
	if len(b) < 2 {
		return logEntry{}, 0
	}
	at := 2
	var lens [3]uint64 // key, value, expiry
	for i := range lens {
		v, n := binary.Uvarint(b[at:])
		if n <= 0 {
			return logEntry{}, 0
		}
		lens[i], at = v, at+n
	}
	klen, vlen := lens[0], lens[1]
	if klen == 0 || klen > maxKeyLen || vlen > maxValueLen || uint64(len(b)-at) < klen+vlen {
		return logEntry{}, 0
	}
	body := at + int(klen+vlen)
	var sum [4]byte
	copy(sum[:], b[body:])
	if crc32.Checksum(b[:body], castagnoli) != binary.BigEndian.Uint32(sum[:]) {
		return logEntry{}, 0
	}
	return logEntry{meta: b[0], key: b[at : at+int(klen)]}, body + 4
}

func allZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}
