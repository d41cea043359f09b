package egress

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"

	"github.com/boxed-mesh/boxed"
)

// AuditReport is what [VerifyAudit] found, and AuditBreak one place of it.
type (
	AuditReport = boxed.AuditReport
	AuditBreak  = boxed.AuditBreak
)

// VerifyAudit walks the log in dir, which may be in use, and checks that every line
// is the one that was written: numbers without gaps, each line's hash in the next, the
// newest one's in the head. Old files that rotation removed are not missed. Somebody
// who can write all the files, the head too, can forge it all: for that, keep a copy
// of the head elsewhere. A power failure may cost the last second, which shows as a
// cut tail.
func VerifyAudit(dir string) (AuditReport, error) { return verifyAudit(dir, 0) }

// verifyAudit is VerifyAudit of a log of which rotation keeps so many files; 0 is not known.
func verifyAudit(dir string, keeps int) (AuditReport, error) {
	mark, markErr := readAuditMark(dir)
	names, files, err := openAuditAll(dir, 0)
	if err != nil {
		return AuditReport{}, err
	}
	defer closeAudit(files)
	c := auditCheck{mark: mark, marked: markErr == nil}
	c.Files = len(files)
	for i, name := range names {
		want := name.first
		if want == 0 && c.marked && mark.current(names) {
			want = mark.first
		}
		if err := c.walk(name, want, files[i]); err != nil {
			return c.AuditReport, err
		}
	}
	if c.First > 1 && len(files) < keeps {
		c.broken(names[0].name, 1, fmt.Sprintf("records 1 to %d are missing before it, and rotation has removed none", c.First-1))
	}
	switch {
	case errors.Is(markErr, fs.ErrNotExist):
		_, again := readAuditMark(dir) // the log may have been begun at this moment
		if c.any && errors.Is(again, fs.ErrNotExist) {
			c.broken(auditHead, 0, "it is missing, so nobody can say whether records are missing at the end")
		}
	case markErr != nil:
		c.broken(auditHead, 0, "it cannot be read, so nobody can say whether records are missing at the end")
	case mark.seq > c.Last:
		c.broken(c.file, c.line, fmt.Sprintf("records %d to %d are missing after it", c.Last+1, mark.seq))
	case mark.closed && mark.seq < c.Last:
		c.broken(c.file, c.line, fmt.Sprintf("record %d was the last when the log was closed", mark.seq))
	}
	return c.AuditReport, nil
}

// auditCheck is a walk over a log.
type auditCheck struct {
	AuditReport
	mark   auditState
	marked bool

	file string // the line before: where it is,
	line int
	seq  uint64 // its number,
	hash auditHash
	any  bool // whether there was one,
	bad  bool // and whether it was no record
}

func (c *auditCheck) broken(file string, line int, why string) {
	if len(c.Broken) < auditWrongs {
		c.Broken = append(c.Broken, AuditBreak{File: file, Line: line, Why: why})
	}
}

func (c *auditCheck) walk(name auditFile, want uint64, r io.Reader) error {
	lines := newAuditLines(r)
	for {
		line, err := lines.next()
		if err != nil && !errors.Is(err, errAuditLong) {
			// What a crash, or a write at this moment, leaves in the current file is no harm.
			if lines.torn > 0 && (name.first > 0 || c.mark.closed) {
				c.broken(name.name, lines.n+1, "the line is not whole")
			}
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("verify audit log: %w", err)
		}
		var rec boxed.EgressRecord
		if err == nil {
			rec, err = parseAuditLine(line)
		}
		sum := auditHash(sha256.Sum256(line))
		if err != nil {
			c.broken(name.name, lines.n, "it is no record")
			c.seq++
		} else {
			if lines.n != 1 {
				want = 0
			}
			c.record(name.name, lines.n, want, rec, sum)
			c.seq = rec.Seq
		}
		c.file, c.line, c.hash, c.any, c.bad = name.name, lines.n, sum, true, err != nil
	}
}

func (c *auditCheck) record(file string, line int, want uint64, rec boxed.EgressRecord, sum auditHash) {
	switch {
	case want > 0 && rec.Seq != want:
		c.broken(file, line, fmt.Sprintf("the file begins with record %d, and was begun with %d", rec.Seq, want))
	case !c.any:
		if rec.Seq == 1 && rec.Prev != hex.EncodeToString(make([]byte, len(auditHash{}))) {
			c.broken(file, line, "it is the first record and names one before it")
		}
	case rec.Seq != c.seq+1:
		c.broken(file, line, fmt.Sprintf("record %d comes after record %d", rec.Seq, c.seq))
	case rec.Prev != hex.EncodeToString(c.hash[:]) && !c.bad:
		c.broken(c.file, c.line, fmt.Sprintf("it is not the line that record %d was written after; one of the two was changed", rec.Seq))
	}
	if c.marked && rec.Seq == c.mark.seq && sum != c.mark.hash {
		c.broken(file, line, "it is not the line that "+auditHead+" knows")
	}
	if c.Records++; c.First == 0 {
		c.First = rec.Seq
	}
	c.Last = rec.Seq
}
