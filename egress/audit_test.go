package egress_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unicode"
	"unicode/utf8"

	"go.uber.org/goleak"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/egress"
)

const (
	auditNode  = boxed.NodeID("aaaaaaaaaaaaaaaa")
	auditBox   = boxed.ID("bbbbbbbbbb-aaaaaaaaaaaaaaaa")
	auditOther = boxed.ID("cccccccccc-aaaaaaaaaaaaaaaa")
)

// auditLog opens a log; change may be nil.
func auditLog(t testing.TB, dir string, change func(*egress.AuditConfig)) *egress.Audit {
	t.Helper()
	cfg := egress.AuditConfig{Dir: dir, Node: auditNode}
	if change != nil {
		change(&cfg)
	}
	a, err := egress.OpenAudit(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// auditRun runs a log until the function that it returns is called.
func auditRun(t testing.TB, a *egress.Audit) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
}

func auditClose(t testing.TB, a *egress.Audit) {
	t.Helper()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
}

func auditAllow(t testing.TB, a *egress.Audit, recs ...boxed.EgressRecord) {
	t.Helper()
	for _, rec := range recs {
		if err := a.Allow(rec); err != nil {
			t.Fatal(err)
		}
	}
}

func auditAsk(sandbox boxed.ID, host string) boxed.EgressRecord {
	return boxed.EgressRecord{Sandbox: sandbox, Owner: "o-" + string(sandbox[:1]), Entry: boxed.EntryHTTP, Host: host, Port: 443}
}

func auditDenied(sandbox boxed.ID, host string) boxed.EgressRecord {
	rec := auditAsk(sandbox, host)
	rec.Reason = boxed.EgressNotListed
	return rec
}

func auditRead(t testing.TB, all iter.Seq2[boxed.EgressRecord, error]) (recs []boxed.EgressRecord) {
	t.Helper()
	for rec, err := range all {
		if err != nil {
			t.Fatal(err)
		}
		recs = append(recs, rec)
	}
	return recs
}

func auditHosts(recs []boxed.EgressRecord) (hosts []string) {
	for _, rec := range recs {
		hosts = append(hosts, rec.Host)
	}
	return hosts
}

// auditWhole fails if anything is wrong with a log.
func auditWhole(t testing.TB, dir string) egress.AuditReport {
	t.Helper()
	report, err := egress.VerifyAudit(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range report.Broken {
		t.Errorf("broken: %+v", b)
	}
	return report
}

// auditBroken fails if a log looks as it was written, or if none of what is wrong with
// it is where it should be.
func auditBroken(t testing.TB, dir, file string, line int) {
	t.Helper()
	report, err := egress.VerifyAudit(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(report.Broken, func(b egress.AuditBreak) bool { return b.File == file && b.Line == line && b.Why != "" }) {
		t.Errorf("want %s broken at line %d, got %+v", file, line, report.Broken)
	}
}

// auditWritten makes a closed log of n records in one file, or in more where one is
// smaller than they are.
func auditWritten(t testing.TB, n int, change func(*egress.AuditConfig)) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "audit")
	a := auditLog(t, dir, change)
	for i := range n {
		auditAllow(t, a, auditAsk(auditBox, fmt.Sprintf("h%d.example", i+1)))
	}
	auditClose(t, a)
	auditWhole(t, dir)
	return dir
}

func auditEdit(t testing.TB, path string, change func(lines []string) []string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := change(strings.SplitAfter(strings.TrimSuffix(string(text), "\n"), "\n"))
	if n := len(lines); n > 0 && !strings.HasSuffix(lines[n-1], "\n") {
		lines[n-1] += "\n"
	}
	for i := range lines[:max(0, len(lines)-1)] {
		lines[i] = strings.TrimSuffix(lines[i], "\n") + "\n"
	}
	if err := os.WriteFile(path, []byte(strings.Join(lines, "")), 0o600); err != nil {
		t.Fatal(err)
	}
}

func auditFiles(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func TestAuditGoesOnOverRestartsAndRotation(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	dir := filepath.Join(t.TempDir(), "audit")
	var want []string
	for run := range 3 {
		a := auditLog(t, dir, func(c *egress.AuditConfig) { c.MaxFile, c.MaxFiles = 2000, 100 })
		stop := auditRun(t, a)
		for i := range 20 {
			host := fmt.Sprintf("h%d-%d.example", run, i)
			auditAllow(t, a, auditAsk(auditBox, host))
			want = append(want, host)
		}
		stop()
		recs := auditRead(t, a.Records(egress.AuditFilter{}))
		if got := auditHosts(recs); !slices.Equal(got, want) {
			t.Fatalf("run %d: got %v, want %v", run, got, want)
		}
		for i, rec := range recs {
			if rec.Seq != uint64(i+1) || rec.Node != auditNode || rec.At.IsZero() || !rec.Allowed || rec.Reason != boxed.EgressAllowed {
				t.Fatalf("record %d is %+v", i, rec)
			}
		}
	}
	if report := auditWhole(t, dir); report.Records != 60 || report.First != 1 || report.Last != 60 || report.Files < 8 {
		t.Errorf("report %+v", report)
	}
	for _, name := range append(auditFiles(t, dir), ".") {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", name, info.Mode())
		}
	}
}

func TestAuditKeepsSoManyFilesAndDoesNotMissTheOthers(t *testing.T) {
	dir := auditWritten(t, 100, func(c *egress.AuditConfig) { c.MaxFile, c.MaxFiles = 1000, 3 })
	if report := auditWhole(t, dir); report.Files != 3 || report.First == 1 || report.Last != 100 || report.Records != int(101-report.First) {
		t.Errorf("report %+v", report)
	}
}

// Row I19: an edited log shows.
func TestAuditShowsWhatWasDoneToALine(t *testing.T) {
	const file = "egress.jsonl"
	for name, tc := range map[string]struct {
		line   int // that shows
		change func(lines []string) []string
	}{
		"edited": {4, func(l []string) []string {
			l[3] = strings.Replace(l[3], "h4.example", "h9.example", 1)
			return l
		}},
		"the last one edited": {9, func(l []string) []string {
			l[8] = strings.Replace(l[8], "h9.example", "h1.example", 1)
			return l
		}},
		"renumbered": {4, func(l []string) []string {
			l[3] = strings.Replace(l[3], `"seq":4`, `"seq":40`, 1)
			return l
		}},
		"removed": {4, func(l []string) []string { return slices.Delete(l, 3, 4) }},
		"removed and renumbered": {3, func(l []string) []string {
			for i := 4; i < len(l); i++ {
				l[i] = strings.Replace(l[i], fmt.Sprintf(`"seq":%d`, i+1), fmt.Sprintf(`"seq":%d`, i), 1)
			}
			return slices.Delete(l, 3, 4)
		}},
		"the first ones removed": {1, func(l []string) []string { return l[3:] }},
		"swapped":                {4, func(l []string) []string { l[3], l[4] = l[4], l[3]; return l }},
		"twice":                  {5, func(l []string) []string { return slices.Insert(l, 4, l[3]) }},
		"added at the end":       {9, func(l []string) []string { return append(l, strings.Replace(l[8], `"seq":9`, `"seq":10`, 1)) }},
		"no JSON":                {4, func(l []string) []string { l[3] = l[3][1:]; return l }},
		"empty":                  {4, func(l []string) []string { l[3] = "\n"; return l }},
		"too long":               {4, func(l []string) []string { l[3] = strings.Repeat("x", 1<<20); return l }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := auditWritten(t, 9, nil)
			auditEdit(t, filepath.Join(dir, file), tc.change)
			auditBroken(t, dir, file, tc.line)

			// A log that goes on does not heal it.
			a := auditLog(t, dir, nil)
			auditAllow(t, a, auditAsk(auditBox, "later.example"))
			auditClose(t, a)
			report, err := egress.VerifyAudit(dir)
			if err != nil || len(report.Broken) == 0 {
				t.Errorf("after a restart: %+v, %v", report, err)
			}
			if rec := auditLast(a); rec.Host != "later.example" {
				t.Errorf("the newest is %+v", rec)
			}
		})
	}
}

func auditLast(a *egress.Audit) (last boxed.EgressRecord) {
	for rec, err := range a.Records(egress.AuditFilter{}) {
		if err == nil {
			last = rec
		}
	}
	return last
}

func TestAuditShowsACutTail(t *testing.T) {
	rotated := func(c *egress.AuditConfig) { c.MaxFile = 1000 }
	for name, cut := range map[string]func(t *testing.T, dir string){
		"lines": func(t *testing.T, dir string) {
			auditEdit(t, filepath.Join(dir, "egress.jsonl"), func(l []string) []string { return l[:len(l)-1] })
		},
		"half a line": func(t *testing.T, dir string) {
			path := filepath.Join(dir, "egress.jsonl")
			info, err := os.Stat(path)
			if err := errors.Join(err, os.Truncate(path, info.Size()-10)); err != nil {
				t.Fatal(err)
			}
		},
		"the file": func(t *testing.T, dir string) { auditRemove(t, dir, "egress.jsonl") },
		"all files": func(t *testing.T, dir string) {
			auditRemove(t, dir, slices.DeleteFunc(auditFiles(t, dir), func(n string) bool { return n == "egress.head" })...)
		},
		"the head": func(t *testing.T, dir string) { auditRemove(t, dir, "egress.head") },
		"the head's text": func(t *testing.T, dir string) {
			auditEdit(t, filepath.Join(dir, "egress.head"), func(l []string) []string { return []string{"x" + l[0][1:]} })
		},
		"a file in the middle": func(t *testing.T, dir string) { auditRemove(t, dir, auditFiles(t, dir)[2]) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := auditWritten(t, 16, rotated)
			cut(t, dir)
			report, err := egress.VerifyAudit(dir)
			if err != nil || len(report.Broken) == 0 {
				t.Fatalf("report %+v, %v", report, err)
			}
			if name == "a file in the middle" {
				return
			}
			a := auditLog(t, dir, rotated)
			auditClose(t, a)
			recs := auditRead(t, a.Records(egress.AuditFilter{}))
			if last := recs[len(recs)-1]; last.Reason != boxed.EgressTruncated || last.Detail == "" {
				t.Errorf("the next run begins with %+v", last)
			}
			if report, err = egress.VerifyAudit(dir); err != nil || (len(report.Broken) == 0 && !strings.Contains(name, "head") && name != "all files") {
				t.Errorf("after a restart: %+v, %v", report, err)
			}
		})
	}
}

func auditRemove(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
}

// auditCrash copies a log as a kill of its process would leave it: not closed.
func auditCrash(t *testing.T, n int) (dir string) {
	t.Helper()
	from, to := filepath.Join(t.TempDir(), "audit"), filepath.Join(t.TempDir(), "audit")
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, from, nil)
		defer auditRun(t, a)()
		for i := range n {
			auditAllow(t, a, auditAsk(auditBox, fmt.Sprintf("h%d.example", i+1)))
		}
		time.Sleep(2 * time.Second) // of the bubble: all is written
		if err := os.CopyFS(to, os.DirFS(from)); err != nil {
			t.Fatal(err)
		}
	})
	auditWhole(t, to)
	return to
}

func auditAppend(t testing.TB, path string, text []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err == nil {
		_, err = f.Write(text)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestAuditCutsOffWhatACrashLeftOfALine(t *testing.T) {
	dir := auditCrash(t, 3)
	path := filepath.Join(dir, "egress.jsonl")
	auditAppend(t, path, []byte(`{"seq":4,"at":"2026-`))
	if report := auditWhole(t, dir); report.Last != 3 { // it is no harm
		t.Errorf("report %+v", report)
	}

	a := auditLog(t, dir, nil)
	auditAllow(t, a, auditAsk(auditBox, "h4.example"))
	auditClose(t, a)
	if report := auditWhole(t, dir); report.Records != 5 || report.Last != 5 {
		t.Errorf("report %+v", report)
	}
	recs := auditRead(t, a.Records(egress.AuditFilter{After: 3}))
	if len(recs) != 2 || recs[0].Reason != boxed.EgressTruncated || !strings.Contains(recs[0].Detail, "20 bytes") || recs[1].Host != "h4.example" {
		t.Errorf("after the crash: %+v", recs)
	}
}

// A kill between a batch and the head leaves records that the head does not know.
func TestAuditGoesOnWhereTheHeadIsBehind(t *testing.T) {
	dir := auditCrash(t, 3)
	head, err := os.ReadFile(filepath.Join(dir, "egress.head"))
	if err != nil {
		t.Fatal(err)
	}
	a := auditLog(t, dir, nil)
	auditAllow(t, a, auditAsk(auditBox, "h4.example"), auditAsk(auditBox, "h5.example"))
	auditClose(t, a)
	if err := os.WriteFile(filepath.Join(dir, "egress.head"), head, 0o600); err != nil {
		t.Fatal(err)
	}
	auditWhole(t, dir)
	a = auditLog(t, dir, nil)
	auditAllow(t, a, auditAsk(auditBox, "h6.example"))
	auditClose(t, a)
	if report := auditWhole(t, dir); report.Last != 6 || report.Records != 6 {
		t.Errorf("report %+v", report)
	}
}

// auditCount sums what records of a sandbox stand for.
func auditCount(recs []boxed.EgressRecord, sandbox boxed.ID) (lines, sum int) {
	for _, rec := range recs {
		if rec.Sandbox == sandbox {
			lines++
			sum += max(1, rec.Count)
		}
	}
	return lines, sum
}

// Row I19: one sandbox's flood of denials hides nobody else's. A sandbox asks for
// hundreds of thousands of names so that those of its accomplice never reach the disk,
// or are rotated away.
func TestAuditFloodOfOneSandboxHidesNobodyElses(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	const flood = 100_000
	dir := filepath.Join(t.TempDir(), "audit")
	a := auditLog(t, dir, nil)
	for i := range flood {
		a.Deny(auditDenied(auditBox, fmt.Sprintf("x%d.example", i)))
	}
	for i := range 3 {
		a.Deny(auditDenied(auditOther, fmt.Sprintf("secret%d.example", i)))
	}
	auditAllow(t, a, auditAsk("dddddddddd-aaaaaaaaaaaaaaaa", "fine.example"))
	auditClose(t, a)

	recs := auditRead(t, a.Records(egress.AuditFilter{}))
	auditWhole(t, dir)
	if lines, sum := auditCount(recs, auditOther); lines != 3 || sum != 3 {
		t.Errorf("%d records of %d denials of the other, want 3", lines, sum)
	}
	if lines, sum := auditCount(recs, auditBox); lines > 300 || sum != flood {
		t.Errorf("%d records of %d denials of the flood, want %d in at most 300", lines, sum, flood)
	}
	var lost []boxed.EgressRecord
	for i, rec := range recs {
		if rec.Sandbox != auditBox && i > 10 {
			t.Errorf("record %d of another sandbox waited behind the flood", rec.Seq)
		}
		if rec.Detail == "more denials than are kept one by one" {
			lost = append(lost, rec)
		}
	}
	if len(lost) != 1 || lost[0].Host != "" || lost[0].Reason != boxed.EgressNotListed || lost[0].Owner != "o-b" {
		t.Errorf("what was only counted: %+v", lost)
	}
}

func TestAuditFloodThatGoesOnLeavesNoFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, filepath.Join(t.TempDir(), "audit"), nil)
		stop := auditRun(t, a)
		n := 0
		for range 120 { // two minutes
			for range 100 {
				a.Deny(auditDenied(auditBox, fmt.Sprintf("x%d.example", n)))
				n++
			}
			time.Sleep(time.Second)
		}
		stop()
		lines, sum := auditCount(auditRead(t, a.Records(egress.AuditFilter{})), auditBox)
		if lines > 256+2*120+20 || sum != n {
			t.Errorf("%d records of %d denials, want %d in far fewer", lines, sum, n)
		}
	})
}

// Row I19: what is allowed floods no more than what is denied: a sandbox that may reach
// something does not rotate everybody's records away by reaching it.
func TestAuditFloodOfWhatIsAllowedLeavesNoFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, filepath.Join(t.TempDir(), "audit"), nil)
		stop := auditRun(t, a)
		n := 0
		for range 120 { // two minutes
			for range 200 {
				rec := auditAsk(auditBox, fmt.Sprintf("x%d.example", n))
				auditAllow(t, a, rec)
				rec.Allowed, rec.Reason, rec.Down = true, boxed.EgressAllowed, 1
				a.End(rec)
				n++
			}
			time.Sleep(time.Second)
		}
		stop()
		recs := auditRead(t, a.Records(egress.AuditFilter{}))
		if len(recs) > 8192+20*120+60 {
			t.Errorf("%d records of %d connections, want far fewer", len(recs), n)
		}
		opened, ended, down := 0, 0, int64(0)
		for _, rec := range recs {
			if count := max(1, rec.Count); rec.End {
				ended, down = ended+count, down+rec.Down
			} else {
				opened += count
			}
		}
		if opened != n || ended != n || down != int64(n) {
			t.Errorf("on the record are %d opened, %d ended, %d bytes; want %d of each", opened, ended, down, n)
		}
	})
}

func TestAuditCountsEqualDenials(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, filepath.Join(t.TempDir(), "audit"), nil)
		defer auditRun(t, a)()
		other := auditDenied(auditBox, "a.example")
		other.Reason = boxed.EgressPort
		for range 5 {
			a.Deny(auditDenied(auditBox, "a.example"))
			a.Deny(other)
			a.Deny(auditDenied(auditOther, "a.example"))
		}
		a.Deny(auditDenied(auditBox, "b.example"))
		synctest.Wait()
		at := time.Now()
		first := auditRead(t, a.Records(egress.AuditFilter{}))
		if len(first) != 4 || slices.ContainsFunc(first, func(r boxed.EgressRecord) bool { return r.Count != 0 }) {
			t.Fatalf("at once: %+v", first)
		}

		time.Sleep(9 * time.Second)
		a.Deny(auditDenied(auditBox, "a.example")) // still of the same window
		synctest.Wait()
		if recs := auditRead(t, a.Records(egress.AuditFilter{After: 4})); len(recs) != 0 {
			t.Fatalf("within the window: %+v", recs)
		}
		time.Sleep(time.Second + time.Millisecond)
		synctest.Wait()
		counts := map[string]int{}
		for _, rec := range auditRead(t, a.Records(egress.AuditFilter{After: 4})) {
			counts[fmt.Sprint(rec.Sandbox[:1], " ", rec.Reason, " ", rec.Host)] = rec.Count
			if rec.Reason == boxed.EgressPort && !rec.At.Equal(at) {
				t.Errorf("the record is of %v, its newest denial of %v", rec.At, at)
			}
		}
		want := map[string]int{"b not_listed a.example": 5, "b port a.example": 4, "c not_listed a.example": 4}
		if fmt.Sprint(counts) != fmt.Sprint(want) {
			t.Errorf("counted %v, want %v", counts, want)
		}
		a.Deny(auditDenied(auditBox, "a.example")) // the next window
		synctest.Wait()
		if recs := auditRead(t, a.Records(egress.AuditFilter{After: 7})); len(recs) != 1 || recs[0].Count != 0 {
			t.Errorf("after the window: %+v", recs)
		}
	})
}

func TestAuditForgetsASandboxOnceItIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, filepath.Join(t.TempDir(), "audit"), nil)
		defer auditRun(t, a)()
		for range 7 {
			a.Deny(auditDenied(auditBox, "a.example"))
		}
		a.Forget(auditBox)
		a.Forget(auditOther)
		synctest.Wait()
		if lines, sum := auditCount(auditRead(t, a.Records(egress.AuditFilter{})), auditBox); lines != 2 || sum != 7 {
			t.Errorf("%d records of %d denials, want 2 of 7", lines, sum)
		}
		a.End(auditAsk(auditBox, "late.example"))
		synctest.Wait()
		if lines, _ := auditCount(auditRead(t, a.Records(egress.AuditFilter{})), auditBox); lines != 3 {
			t.Errorf("%d records after a late end, want 3", lines)
		}
	})
}

func TestAuditRefusesWhatItCannotQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, filepath.Join(t.TempDir(), "audit"), nil) // and nobody writes
		n := 0
		begin := time.Now()
		for ; n < 10_000; n++ {
			err := a.Allow(auditAsk(auditBox, "a.example"))
			if err == nil {
				continue
			}
			if boxed.AsError(err).Detail["reason"] != string(boxed.EgressAuditFull) {
				t.Errorf("error %#v", err)
			}
			break
		}
		if took := time.Since(begin); n != 256 || took < 100*time.Millisecond || took > 2*time.Second {
			t.Errorf("refused after %d records and %v", n, took)
		}
		auditAllow(t, a, auditAsk(auditOther, "a.example")) // another's queue is not full
		for i := range 10 {
			a.End(boxed.EgressRecord{Sandbox: auditBox, Allowed: true, Reason: boxed.EgressAllowed, Host: "a.example", Up: 1, Down: int64(i)})
			a.Deny(auditDenied(auditBox, "b.example"))
		}
		auditClose(t, a)
		if err := a.Allow(auditAsk(auditOther, "a.example")); boxed.AsError(err).Detail["reason"] != string(boxed.EgressAuditFull) {
			t.Errorf("after the end: %v", err)
		}
		a.Deny(auditDenied(auditBox, "b.example"))
		auditClose(t, a)

		var counted []string
		for _, rec := range auditRead(t, a.Records(egress.AuditFilter{Sandbox: auditBox})) {
			if rec.Count > 0 {
				counted = append(counted, fmt.Sprintln(rec.Reason, rec.End, rec.Allowed, rec.Count, rec.Up, rec.Down, rec.Host))
			}
		}
		if want := []string{"allowed true true 10 10 45 \n", "not_listed false false 10 0 0 \n"}; !slices.Equal(counted, want) {
			t.Errorf("counted %q, want %q", counted, want)
		}
	})
}

func TestAuditRoomLetsAWaitingConnectionGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, filepath.Join(t.TempDir(), "audit"), nil)
		var all sync.WaitGroup
		for range 300 { // more than its queue holds
			all.Go(func() {
				if err := a.Allow(auditAsk(auditBox, "a.example")); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		stop := auditRun(t, a)
		all.Wait()
		stop()
		if recs := auditRead(t, a.Records(egress.AuditFilter{})); len(recs) != 300 {
			t.Errorf("%d records, want 300", len(recs))
		}
	})
}

// auditTmpfs mounts a file system of 512 KiB; root is not stopped by permissions.
func auditTmpfs(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", dir).CombinedOutput(); err != nil {
		t.Skipf("a file system that can be filled needs mount: %s", out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount: %s", out)
		}
	})
	return dir
}

func TestAuditAllowsNothingWhileTheDiskIsFull(t *testing.T) {
	mount := auditTmpfs(t)
	dir, filler := filepath.Join(mount, "audit"), filepath.Join(mount, "filler")
	if err := os.WriteFile(filler, make([]byte, 480<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, dir, func(c *egress.AuditConfig) { c.MaxFile, c.MaxFiles = 10_000, 100 })
		stop := auditRun(t, a)
		var want []string
		for i := range 10_000 {
			host := fmt.Sprintf("h%d.example", i)
			err := a.Allow(auditAsk(auditBox, host))
			if err != nil {
				if boxed.AsError(err).Detail["reason"] != string(boxed.EgressAuditFull) {
					t.Errorf("error %#v", err)
				}
				break
			}
			want = append(want, host)
		}
		synctest.Wait()
		for i := range 3 {
			if err := a.Allow(auditAsk(auditOther, "a.example")); err == nil {
				t.Fatal("it was allowed on a full disk")
			}
			a.Deny(auditDenied(auditOther, fmt.Sprintf("d%d.example", i)))
			time.Sleep(7 * time.Second)
		}
		auditWhole(t, dir) // half a batch is no record

		if err := os.Remove(filler); err != nil {
			t.Fatal(err)
		}
		time.Sleep(7 * time.Second)
		auditAllow(t, a, auditAsk(auditOther, "a.example"))
		stop()
		if got := auditHosts(auditRead(t, a.Records(egress.AuditFilter{Sandbox: auditBox}))); !slices.Equal(got, want) {
			t.Errorf("%d records of %d that were allowed", len(got), len(want))
		}
		if got := auditHosts(auditRead(t, a.Records(egress.AuditFilter{Sandbox: auditOther}))); !slices.Equal(got, []string{"d0.example", "d1.example", "d2.example", "a.example"}) {
			t.Errorf("of the other: %v", got)
		}
		auditWhole(t, dir)
	})
}

func TestAuditEndsInTimeThoughTheDiskIsFull(t *testing.T) {
	mount := auditTmpfs(t)
	if err := os.WriteFile(filepath.Join(mount, "filler"), make([]byte, 512<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, filepath.Join(mount, "audit"), nil)
		auditAllow(t, a, auditAsk(auditBox, "a.example"))
		begin := time.Now()
		if err := a.Close(); boxed.CodeOf(err) != boxed.CodeNoSpace || time.Since(begin) > 4*time.Second {
			t.Errorf("after %v: %v", time.Since(begin), err)
		}
	})
}

func TestAuditFollowerThatIsSlowMissesNothing(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	const n = 4000 // more than is kept in memory
	dir := filepath.Join(t.TempDir(), "audit")
	a := auditLog(t, dir, func(c *egress.AuditConfig) { c.MaxFile, c.MaxFiles = 50_000, 1000 })
	stop := auditRun(t, a)
	defer stop()
	auditAllow(t, a, auditAsk(auditBox, "h0.example"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	slow, end := iter.Pull2(a.Follow(ctx, egress.AuditFilter{Sandbox: auditBox}))
	defer end()
	next := func(i int) {
		rec, err, ok := slow()
		if want := fmt.Sprintf("h%d.example", i); err != nil || !ok || rec.Host != want {
			t.Fatalf("got %q, %v, %v, want %s", rec.Host, err, ok, want)
		}
	}
	next(0)
	for i := range n {
		auditAllow(t, a, auditAsk(auditBox, fmt.Sprintf("h%d.example", i+1)), auditAsk(auditOther, "x.example"))
		if i%1500 == 0 {
			next(i/1500 + 1) // from memory, and already too slow the next time
		}
	}
	for i := 4; i <= n; i++ {
		next(i)
	}
	cancel()
	if _, err, ok := slow(); !ok || !errors.Is(err, context.Canceled) {
		t.Errorf("after the end of its context: %v, %v", err, ok)
	}
	if _, _, ok := slow(); ok {
		t.Error("it went on after its last error")
	}
}

func TestAuditFollowerGetsTheLastRecordsOfALogThatEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := auditWritten(t, 5, nil)
		a := auditLog(t, dir, nil)
		stop := auditRun(t, a)
		var all, fresh, denied []boxed.EgressRecord
		var following sync.WaitGroup
		for to, filter := range map[*[]boxed.EgressRecord]egress.AuditFilter{&all: {Limit: 2}, &fresh: {Limit: -1}, &denied: {Denied: true}} {
			following.Go(func() { *to = auditRead(t, a.Follow(context.Background(), filter)) })
		}
		synctest.Wait()
		for range 3 {
			a.Deny(auditDenied(auditBox, "d.example"))
		}
		auditAllow(t, a, auditAsk(auditBox, "h6.example"))
		stop()
		following.Wait()
		for _, tc := range []struct {
			got  []boxed.EgressRecord
			want string
		}{
			{all, "[h4.example h5.example d.example h6.example d.example]"},
			{fresh, "[d.example h6.example d.example]"},
			{denied, "[d.example d.example]"},
		} {
			if got := fmt.Sprint(auditHosts(tc.got)); got != tc.want {
				t.Errorf("got %v, want %v", got, tc.want)
			}
		}
	})
}

func TestAuditReadsWhatIsAskedFor(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	a := auditLog(t, dir, func(c *egress.AuditConfig) { c.MaxFile = 1000 })
	for i := range 10 {
		auditAllow(t, a, auditAsk(auditBox, fmt.Sprintf("a%d", i)), auditAsk(auditOther, fmt.Sprintf("b%d", i)))
	}
	a.Deny(auditDenied(auditBox, "d0"))
	a.Deny(auditDenied(auditOther, "d1"))
	auditClose(t, a) // all of it at once: the queues are served in turn, and so it has one order
	for _, tc := range []struct {
		filter egress.AuditFilter
		want   string
	}{
		{egress.AuditFilter{Denied: true}, "[d0 d1]"},
		{egress.AuditFilter{Denied: true, Sandbox: auditOther}, "[d1]"},
		{egress.AuditFilter{Sandbox: auditBox, Limit: 3}, "[a8 a9 d0]"},
		{egress.AuditFilter{Owner: "o-c", Limit: 4}, "[b7 b8 b9 d1]"},
		{egress.AuditFilter{Owner: "o-c", Sandbox: auditBox}, "[]"},
		{egress.AuditFilter{Owner: "o"}, "[]"},
		{egress.AuditFilter{After: 20}, "[d0 d1]"},
		{egress.AuditFilter{After: 22}, "[]"},
		{egress.AuditFilter{After: 1 << 63}, "[]"},
		{egress.AuditFilter{Sandbox: auditBox, After: 4, Limit: 100}, "[a2 a3 a4 a5 a6 a7 a8 a9 d0]"},
		{egress.AuditFilter{Limit: -1}, "[]"},
	} {
		if got := fmt.Sprint(auditHosts(auditRead(t, a.Records(tc.filter)))); got != tc.want {
			t.Errorf("%+v: got %s, want %s", tc.filter, got, tc.want)
		}
	}
	for rec, err := range a.Records(egress.AuditFilter{}) { // a reader that has enough
		if err != nil || rec.Host != "a0" {
			t.Errorf("the first is %+v, %v", rec, err)
		}
		break
	}
}

func TestAuditReaderGoesOnAfterALineThatIsNone(t *testing.T) {
	dir := auditWritten(t, 5, nil)
	auditEdit(t, filepath.Join(dir, "egress.jsonl"), func(l []string) []string { l[2] = "{\n"; return l })
	a := auditLog(t, dir, nil)
	defer auditClose(t, a)
	for _, limit := range []int{0, 5} {
		var got []string
		for rec, err := range a.Records(egress.AuditFilter{Limit: limit}) {
			if err != nil {
				rec.Host = "error"
			}
			got = append(got, rec.Host)
		}
		if want := "[h1.example h2.example error h4.example h5.example]"; fmt.Sprint(got) != want {
			t.Errorf("got %v, want %v", got, want)
		}
	}
}

func TestAuditIsWholeWhileItIsWritten(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	dir := filepath.Join(t.TempDir(), "audit")
	a := auditLog(t, dir, func(c *egress.AuditConfig) { c.MaxFile, c.MaxFiles = 100_000, 3 })
	stop := auditRun(t, a)
	defer stop()
	var writing sync.WaitGroup
	done := make(chan struct{})
	for _, sandbox := range []boxed.ID{auditBox, auditOther} {
		writing.Go(func() {
			for range 2000 {
				auditAllow(t, a, auditAsk(sandbox, "a.example"))
			}
		})
	}
	go func() { writing.Wait(); close(done) }()
	for looks := 0; ; looks++ {
		select {
		case <-done:
			t.Logf("looked %d times", looks)
			return
		default:
			auditWhole(t, dir)
		}
	}
}

func TestAuditGoesOnInANewFileWhenItsOwnWasMovedAway(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	synctest.Test(t, func(t *testing.T) {
		a := auditLog(t, dir, nil)
		stop := auditRun(t, a)
		auditAllow(t, a, auditAsk(auditBox, "h1.example"))
		time.Sleep(2 * time.Second)
		if err := os.Rename(filepath.Join(dir, "egress.jsonl"), filepath.Join(dir, "old")); err != nil {
			t.Fatal(err)
		}
		auditRemove(t, dir, "egress.head")
		auditAllow(t, a, auditAsk(auditBox, "h2.example")) // into the old one; it shows at the next sync
		time.Sleep(2 * time.Second)
		auditAllow(t, a, auditAsk(auditBox, "h3.example"))
		stop()
		if got := auditHosts(auditRead(t, a.Records(egress.AuditFilter{}))); !slices.Equal(got, []string{"h3.example"}) {
			t.Errorf("got %v", got)
		}
	})
	if report := auditWhole(t, dir); report.First != 3 || report.Last != 3 {
		t.Errorf("report %+v", report)
	}
}

func TestAuditNeedsADirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if a, err := egress.OpenAudit(egress.AuditConfig{Dir: file}); err == nil {
		auditClose(t, a)
		t.Error("a log was opened in a file")
	}
	if _, err := egress.VerifyAudit(filepath.Join(file, "x")); err == nil {
		t.Error("what is not there was verified")
	}
	if _, err := egress.VerifyAudit(filepath.Join(t.TempDir(), "x")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what is not there: %v", err)
	}
	if report := auditWhole(t, t.TempDir()); report.Records != 0 || report.Files != 0 {
		t.Errorf("an empty log: %+v", report)
	}
}

// auditInert fails if text could do more than be read.
func auditInert(t *testing.T, what, text string, limit int) {
	t.Helper()
	if len(text) > limit || !utf8.ValidString(text) || strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsGraphic(r) }) {
		t.Errorf("%s is %q of %d bytes", what, text, len(text))
	}
}

// A sandbox names a host so that whoever reads the log has a terminal that obeys it,
// or so that there is one line more.
func FuzzAuditText(f *testing.F) {
	f.Add("a.example", "/path?")
	f.Add("\x1b]0;owned\a\x1b[2J", "/\n{\"seq\":9}\n")
	f.Add("\u202eelpmaxe.a\u009b31m\u2028", "\xff\xfe\x00")
	f.Add(strings.Repeat("é", 300), "/"+strings.Repeat("\x00", 600))
	f.Fuzz(func(t *testing.T, host, path string) {
		dir := filepath.Join(t.TempDir(), "audit")
		a := auditLog(t, dir, nil)
		rec := boxed.EgressRecord{
			Sandbox: auditBox, Owner: host, Entry: boxed.EgressEntry(path), Host: host, SNI: host, Method: path, Path: path, Detail: path,
			Address: host, Rule: path, Credential: host, Labels: map[string]string{host: path, path: host}, Reason: boxed.EgressNotListed,
		}
		a.Deny(rec)
		auditClose(t, a)
		recs := auditRead(t, a.Records(egress.AuditFilter{}))
		if len(recs) != 1 {
			t.Fatalf("%d records", len(recs))
		}
		got := recs[0]
		for what, field := range map[string]struct {
			text  string
			limit int
		}{
			"host": {got.Host, 253}, "sni": {got.SNI, 253}, "method": {got.Method, 32}, "path": {got.Path, 512}, "detail": {got.Detail, 512},
			"owner": {got.Owner, 256}, "entry": {string(got.Entry), 32}, "address": {got.Address, 64}, "rule": {got.Rule, 512}, "credential": {got.Credential, 256},
		} {
			auditInert(t, what, field.text, field.limit)
		}
		for k, v := range got.Labels {
			auditInert(t, "label", k, 512)
			auditInert(t, "label "+k, v, 512)
		}
		auditWhole(t, dir)
	})
}

// Whatever somebody writes into a log that was closed, it shows, nothing of the log
// is lost for it, and nothing that reads it falls over.
func FuzzAuditLine(f *testing.F) {
	dir := auditWritten(f, 2, nil)
	read := func(name string) []byte {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			f.Fatal(err)
		}
		return text
	}
	head, lines := read("egress.head"), read("egress.jsonl")
	_, last, _ := bytes.Cut(bytes.TrimSuffix(lines, []byte("\n")), []byte("\n"))
	f.Add(last)
	f.Add(bytes.Replace(last, []byte(`"seq":2`), []byte(`"seq":3`), 1))
	f.Add(bytes.Replace(last, []byte(`"seq":2`), []byte(`"seq":18446744073709551615`), 1))
	f.Add([]byte(`{"SEQ":3,"host":"\u001b[2J","at":"x"}`))
	f.Add([]byte(""))
	f.Add([]byte("\x00\n\n{}"))
	f.Add(bytes.Repeat([]byte("["), 100_000))
	f.Fuzz(func(t *testing.T, line []byte) {
		dir := t.TempDir()
		text := slices.Concat(lines, line, []byte("\n"))
		if err := errors.Join(os.WriteFile(filepath.Join(dir, "egress.head"), head, 0o600), os.WriteFile(filepath.Join(dir, "egress.jsonl"), text, 0o600)); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if report, err := egress.VerifyAudit(dir); err != nil || len(report.Broken) == 0 || report.Records < 2 {
				t.Fatalf("report %+v, %v", report, err)
			}
			a := auditLog(t, dir, nil)
			auditAllow(t, a, auditAsk(auditBox, "later.example"))
			auditClose(t, a)
			var hosts []string
			for rec, err := range a.Records(egress.AuditFilter{}) {
				if err == nil {
					auditInert(t, "host", rec.Host, 253)
					hosts = append(hosts, rec.Host)
				}
			}
			if n := len(hosts); n < 3 || hosts[0] != "h1.example" || hosts[1] != "h2.example" || hosts[n-1] != "later.example" {
				t.Fatalf("read back %q", hosts)
			}
		}
	})
}

// Row I19: files that rotation has not removed yet are missed. Of those that it may have
// removed nobody can say.
func TestAuditMissesItsOldestFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "audit")
	small := func(c *egress.AuditConfig) { c.MaxFile, c.MaxFiles = 1000, 8 }
	a := auditLog(t, dir, small)
	for i := range 12 {
		auditAllow(t, a, auditAsk(auditBox, fmt.Sprintf("h%d.example", i)))
	}
	auditClose(t, a)
	files, err := filepath.Glob(filepath.Join(dir, "egress-*"))
	if err != nil || len(files) < 2 {
		t.Fatal(files, err)
	}
	slices.Sort(files)
	verify := func() egress.AuditReport {
		a := auditLog(t, dir, small)
		defer auditClose(t, a)
		report, err := a.Verify()
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	if r := verify(); len(r.Broken) > 0 {
		t.Fatalf("as it was written: %+v", r)
	}
	if err := os.Remove(files[0]); err != nil {
		t.Fatal(err)
	}
	if r := verify(); len(r.Broken) != 1 || !strings.Contains(r.Broken[0].Why, "missing before it") {
		t.Errorf("without the oldest: %+v", r)
	}
}
