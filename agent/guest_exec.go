package agent

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// frames are buffers of one frame each. For short execs, one after the other, new
// ones would cost more than all else.
var frames = sync.Pool{New: func() any { return new([frameHead + ChunkSize]byte) }}

// ErrInterrupted is what an Output's Read returns after Interrupt.
var ErrInterrupted = errors.New("read interrupted")

// guestExec is one exec on the guest's side: its process, the kept end of its
// output, and whoever reads it.
type guestExec struct {
	start   ExecStart
	proc    Process
	started time.Time

	mu        sync.Mutex
	changed   *sync.Cond
	out       [2]ring  // stdout, stderr
	closed    [2]bool  // nothing more comes
	delivered [2]int64 // by the owner's stream: what back-pressure may not overwrite
	owners    int
	joined    bool // there was a reader
	adopted   bool // its first owner has attached
	readers   int
	stdin     int64   // bytes taken
	noRead    bool    // the program no longer reads stdin
	waiting   *sender // has sent all there is
	reason    string  // why it is being killed
	killed    bool
	exit      *Exit
	ended     time.Time

	stdinMu sync.Mutex // one writer of stdin at a time
	total   atomic.Int64
	exited  chan struct{} // the leader has ended
	exitAt  time.Time     // set before exited is closed
}

func newGuestExec(start ExecStart, proc Process, b *budget) *guestExec {
	e := &guestExec{start: start, proc: proc, started: time.Now(), exited: make(chan struct{})}
	e.out[0].budget, e.out[1].budget = b, b
	if !start.Detached {
		e.out[0].most, e.out[1].most = RingSize+ringHistory, RingSize+ringHistory
	}
	e.changed = sync.NewCond(&e.mu)
	return e
}

// run pumps the output, waits for the leader and closes the streams.
func (e *guestExec) run() {
	var timer *time.Timer
	if ms := e.start.TimeoutMS; ms > 0 {
		timer = time.AfterFunc(time.Duration(ms)*time.Millisecond, func() { e.kill(ExitTimeout) })
	}
	if e.start.LingerMS > 0 {
		go e.linger(time.Duration(e.start.LingerMS) * time.Millisecond)
	}
	var pumps sync.WaitGroup
	begin := func() {
		for i, out := range []Output{e.proc.Stdout(), e.proc.Stderr()} {
			if out == nil {
				e.closed[i] = true
				continue
			}
			pumps.Go(func() { e.pump(i, out) })
		}
	}
	status, quick := e.quick()
	if !quick {
		begin()
		status = e.proc.Wait()
	}
	if timer != nil {
		timer.Stop() // what the leader left behind may live on
	}
	e.exitAt = time.Now()
	close(e.exited)
	if quick && !e.drain() {
		begin() // a child has its output still, or there is much of it
	}
	for _, out := range []Output{e.proc.Stdout(), e.proc.Stderr()} {
		if out != nil {
			out.Interrupt(0)
		}
	}
	pumps.Wait()
	e.finish(status)
}

// linger ends the exec once nobody has been attached for so long. It counts steps and
// does not read a clock: a sandbox that is paused does not use its time up.
func (e *guestExec) linger(most time.Duration) {
	step := min(most/16+1, 10*time.Second)
	tick := time.NewTicker(step)
	defer tick.Stop()
	for alone := time.Duration(0); alone < most; {
		select {
		case <-e.exited:
			return
		case <-tick.C:
		}
		if e.inUse() {
			alone = 0
		} else {
			alone += step
		}
	}
	e.kill(ExitCanceled)
}

// quickFor is how long a program has to end before its output is looked at. Most
// that are so short write little, and what they wrote can wait in the pipes: two
// goroutines, and as many wake-ups, cost as much as the program.
const quickFor = time.Millisecond

// drainReads bounds what is taken at once, to more than a pipe holds: a child may
// be writing on.
const drainReads = 4

// quick waits a moment for the leader's end.
func (e *guestExec) quick() (WaitStatus, bool) {
	if e.start.TTY {
		return WaitStatus{}, false
	}
	return e.proc.WaitFor(quickFor)
}

// drain takes what a leader that has ended left in its pipes, and reports whether
// that was all: nobody else has them open.
func (e *guestExec) drain() bool {
	frame := frames.Get().(*[frameHead + ChunkSize]byte)
	defer frames.Put(frame)
	whole := true
	for i, out := range []Output{e.proc.Stdout(), e.proc.Stderr()} {
		if !e.drainOne(i, out, frame[:]) {
			whole = false
		}
	}
	return whole
}

func (e *guestExec) drainOne(i int, out Output, frame []byte) bool {
	for range drainReads {
		n, err := out.TryRead(frame[frameHead:])
		if n > 0 && !e.keep(i, frame[:frameHead+n]) {
			err = io.EOF
		}
		if errors.Is(err, io.EOF) {
			out.Close()
			e.mu.Lock()
			e.closed[i] = true
			e.mu.Unlock()
			return true
		}
		if err != nil {
			return false
		}
	}
	return false
}

func (e *guestExec) finish(status WaitStatus) {
	e.closeStdin()
	e.proc.Release() // before anybody hears of the end
	e.mu.Lock()
	exit := &Exit{
		Reason: ExitExited, Code: status.Code, Signal: status.Signal,
		StdoutBytes: e.out[0].end, StderrBytes: e.out[1].end,
		DurationMS: e.exitAt.Sub(e.started).Milliseconds(),
	}
	switch {
	case e.reason != "":
		exit.Reason = e.reason
	case status.OOM:
		exit.Reason = ExitOOM
	case status.Signal != "":
		exit.Reason = ExitSignaled
	}
	e.exit, e.ended = exit, time.Now()
	if s := e.waiting; s != nil && s.offset == [2]int64{e.out[0].end, e.out[1].end} {
		s.done = e.lend(s, exit.frame())
	}
	e.changed.Broadcast()
	e.mu.Unlock()
}

// pump moves one output into its ring until its end. After the leader's exit
// all that was written before it is still taken, however slow the reader is,
// and what children write for DrainWindow more.
func (e *guestExec) pump(i int, out Output) {
	defer func() {
		if !e.start.TTY { // a terminal is closed when its leader has ended: closing it hangs up
			out.Close()
		}
		e.mu.Lock()
		e.closed[i] = true
		e.changed.Broadcast()
		e.mu.Unlock()
	}()
	frame := frames.Get().(*[frameHead + ChunkSize]byte)
	defer frames.Put(frame)
	must, draining := 0, false
	for {
		n, err := out.Read(frame[frameHead:])
		if n > 0 && !e.keep(i, frame[:frameHead+n]) {
			return
		}
		must -= n
		if err != nil && !errors.Is(err, ErrInterrupted) {
			if !e.start.TTY {
				return
			}
			// Nobody has the terminal open: the leader is about to end, or opens it again.
			<-e.exited
		}
		select {
		case <-e.exited:
		default:
			continue
		}
		if err != nil && !errors.Is(err, ErrInterrupted) {
			return
		}
		if !draining {
			draining = true
			must = out.Pending() + e.unseen()
		}
		switch left := DrainWindow - int(time.Since(e.exitAt).Milliseconds()); {
		case left > 0:
			if err != nil {
				out.Interrupt(left)
			}
		case must <= 0:
			return
		case err != nil: // late, but bytes from before the exit may be there
			if out.Pending() == 0 {
				return
			}
			out.Interrupt(1)
		}
	}
}

// unseen is how much a terminal may hold that Pending does not count: what is on
// its way through the line discipline.
func (e *guestExec) unseen() int {
	if e.start.TTY {
		return 64 << 10
	}
	return 0
}

// keep appends to the ring what follows the room for a head in frame, waiting for
// the owner unless the exec is detached. It reports whether the pump should go on.
func (e *guestExec) keep(i int, frame []byte) bool {
	if limit := e.start.MaxOutput; limit > 0 {
		size := int64(len(frame) - frameHead)
		if over := e.total.Add(size) - limit; over > 0 {
			if over <= size { // this chunk crossed the limit
				e.cut()
			}
			frame = frame[:frameHead+max(0, size-over)]
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(frame) > frameHead {
		n := len(frame) - frameHead
		if e.waitsForReaders() {
			n = e.out[i].room(e.delivered[i], n)
			if n == 0 {
				if e.killed && e.owners == 0 {
					return true // it is dead and nobody waits for the rest
				}
				e.changed.Wait()
				continue
			}
		}
		e.out[i].write(frame[frameHead : frameHead+n])
		e.hand(i, frame[:frameHead+n])
		frame = frame[n:]
	}
	return true
}

// waitsForReaders reports whether output waits for somebody to take it, where else
// the oldest is lost: also for the first reader of a program that lingers, who is on the
// way. The caller holds e.mu.
func (e *guestExec) waitsForReaders() bool {
	return !e.start.Detached || e.start.LingerMS > 0 && (e.readers > 0 || !e.joined)
}

// sender is one reader's side of an exec. Its fields are guarded by the exec's mu.
type sender struct {
	conn   io.Writer
	offset [2]int64 // what it has sent
	lent   bool     // somebody else writes to conn, and mu is not held
	missed bool     // something changed meanwhile
	done   bool     // nothing more is to be sent
	err    error
}

var frameTypes = [2]byte{frameStdout, frameStderr}

// hand passes on what was just kept. A sender that waits for it, has sent all
// before it and is the only one, is not woken: whoever has the bytes writes them.
func (e *guestExec) hand(i int, frame []byte) {
	s := e.waiting
	n := int64(len(frame) - frameHead)
	if s == nil || e.readers > 1 || s.offset[i] != e.out[i].end-n {
		e.changed.Broadcast()
		return
	}
	putFrameHead(frame, frameTypes[i], int(n))
	if e.lend(s, frame) {
		s.offset[i] += n
		e.delivered[i] = max(e.delivered[i], s.offset[i])
	}
}

// lend writes a frame in a waiting sender's stead, while e.mu is not held, and
// reports whether that worked.
func (e *guestExec) lend(s *sender, frame []byte) bool {
	e.waiting, s.lent, s.missed = nil, true, false
	e.mu.Unlock()
	_, err := s.conn.Write(frame)
	e.mu.Lock()
	s.lent, s.err = false, err
	if err == nil && !s.missed {
		e.waiting = s // it has not noticed
	} else {
		e.changed.Broadcast()
	}
	return err == nil
}

// wait waits for a change, and until nobody writes in the sender's stead.
func (e *guestExec) wait(s *sender, own bool) {
	if own && !e.start.Detached && e.waiting == nil {
		e.waiting = s
	}
	e.changed.Wait()
	if e.waiting == s {
		e.waiting = nil
	}
	for s.lent {
		s.missed = true
		e.changed.Wait()
	}
}

// cut ends an exec that wrote too much, and says so even if its leader has ended
// meanwhile: what it wrote is not all there.
func (e *guestExec) cut() {
	e.mu.Lock()
	if e.reason == "" {
		e.reason = ExitOutputLimit
	}
	e.mu.Unlock()
	go e.kill(ExitOutputLimit)
}

// kill ends the whole tree. The first reason stays.
func (e *guestExec) kill(reason string) error {
	e.mu.Lock()
	if e.exit == nil && e.reason == "" {
		select {
		case <-e.exited:
		default:
			e.reason = reason
		}
	}
	e.killed = true
	e.changed.Broadcast()
	e.mu.Unlock()
	return e.proc.KillTree()
}

func (e *guestExec) hasEnded() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.exit != nil
}

func (e *guestExec) info(count bool) ExecInfo {
	e.mu.Lock()
	info := ExecInfo{
		ID: e.start.ID, Language: e.start.Language, TTY: e.start.TTY, Detached: e.start.Detached,
		Attached: e.readers, LingerMS: e.start.LingerMS, PID: e.proc.PID(), Started: e.started, Ended: e.ended, Exit: e.exit,
	}
	e.mu.Unlock()
	size := 0
	for _, arg := range e.start.Argv {
		if size += len(arg); size > 4<<10 {
			info.Args = append(info.Args, "…")
			break
		}
		info.Args = append(info.Args, strings.ToValidUTF8(string(arg), "\uFFFD"))
	}
	if count {
		info.Processes = e.proc.Count()
	}
	return info
}

// attach serves one reader (and writer of stdin) until the exec has ended, the
// reader goes, or, without following, all that is there has been sent.
func (e *guestExec) attach(a Attach, conn io.ReadWriter) error {
	e.mu.Lock()
	answer := Attached{Stdin: e.stdin}
	e.readers++
	e.joined = true
	if a.Own {
		if !e.adopted { // spawn counted the first owner already
			e.adopted = true
		} else {
			e.owners++
		}
		e.delivered = [2]int64{min(a.Stdout, e.out[0].end), min(a.Stderr, e.out[1].end)}
		e.changed.Broadcast()
	}
	if e.start.LingerMS > 0 { // what was lost while nobody was here is not waited for
		e.delivered = [2]int64{max(e.delivered[0], e.out[0].start()), max(e.delivered[1], e.out[1].start())}
	}
	e.mu.Unlock()
	answer.Info = e.info(false)
	gone := false
	defer func() {
		e.mu.Lock()
		e.readers--
		if a.Own {
			e.owners--
		}
		e.changed.Broadcast()
		e.mu.Unlock()
	}()
	if err := respond(conn, answer, nil); err != nil {
		return err
	}
	leave := func() {
		e.mu.Lock()
		gone = true
		e.changed.Broadcast()
		e.mu.Unlock()
	}
	if d, ok := conn.(directCall); ok && e.proc.Stdin() == nil {
		defer context.AfterFunc(d.left, leave)()
	} else {
		go func() {
			e.takeStdin(conn)
			leave()
		}()
	}
	return e.send(a, conn, &gone)
}

// send writes output frames, then the exit. gone is guarded by e.mu.
func (e *guestExec) send(a Attach, conn io.Writer, gone *bool) error {
	s := &sender{conn: conn, offset: [2]int64{a.Stdout, a.Stderr}}
	first := 0 // the stream that is looked at first: the one that was not sent last
	frame := frames.Get().(*[frameHead + ChunkSize]byte)
	defer frames.Put(frame)
	toldNoRead := false
	for {
		e.mu.Lock()
		i, skipped, n := e.next(&s.offset, first, frame[frameHead:])
		for n == 0 && skipped == 0 && e.exit == nil && !a.NoFollow && !*gone && (toldNoRead || !e.noRead) && s.err == nil {
			e.wait(s, a.Own)
			i, skipped, n = e.next(&s.offset, first, frame[frameHead:])
		}
		exit, left, noRead, offset, done, err := e.exit, *gone, e.noRead, s.offset[i], s.done, s.err
		e.mu.Unlock()
		first = 1 - i

		switch {
		case err != nil || done:
			return err
		case left: // also while there is always something more to send
			return io.ErrClosedPipe
		case skipped > 0:
			gap := binary.BigEndian.AppendUint64([]byte{frameTypes[i]}, uint64(skipped))
			err = writeFrame(conn, frameGap, gap)
			e.advance(a, i, offset)
		case n > 0:
			putFrameHead(frame[:], frameTypes[i], n)
			_, err = conn.Write(frame[:frameHead+n])
			if err == nil {
				e.advance(a, i, offset)
			}
		case noRead && !toldNoRead:
			toldNoRead = true
			err = writeFrame(conn, frameNoRead, nil)
		case exit != nil:
			_, err = conn.Write(exit.frame())
			return err
		case a.NoFollow:
			return writeFrame(conn, frameAlive, nil)
		}
		if err != nil {
			return err
		}
	}
}

// next finds the next bytes to send, of the first stream or the other: a gap, or
// n bytes copied to buf. The caller holds e.mu. Offsets are advanced.
func (e *guestExec) next(offset *[2]int64, first int, buf []byte) (i int, skipped int64, n int) {
	for _, i := range [2]int{first, 1 - first} {
		r := &e.out[i]
		if start := r.start(); offset[i] < start {
			skipped = start - offset[i]
			offset[i] = start
			return i, skipped, 0
		}
		if n = r.read(buf, offset[i]); n > 0 {
			offset[i] += int64(n)
			return i, 0, n
		}
	}
	return 0, 0, 0
}

// advance lets the program write on once its owner has got what it wrote; of one that
// anybody may watch, once the fastest has.
func (e *guestExec) advance(a Attach, i int, offset int64) {
	if (!a.Own || e.start.Detached) && e.start.LingerMS == 0 {
		return
	}
	e.mu.Lock()
	e.delivered[i] = max(e.delivered[i], offset)
	e.changed.Broadcast()
	e.mu.Unlock()
}

// inUse reports whether somebody reads it, or is about to.
func (e *guestExec) inUse() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.readers+e.owners > 0
}

// free forgets the output of an exec that has ended and that nobody reads.
func (e *guestExec) free() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.exit != nil && e.readers+e.owners == 0 {
		e.out[0].free()
		e.out[1].free()
	}
}

// takeStdin feeds the program until end of file or the reader's leaving.
func (e *guestExec) takeStdin(conn io.Reader) {
	r := bufio.NewReaderSize(conn, 4<<10)
	var buf []byte
	for {
		typ, payload, grown, err := readFrame(r, buf)
		if err != nil {
			return
		}
		buf = grown
		if typ != frameStdin {
			continue
		}
		if len(payload) == 0 {
			e.closeStdin()
			continue
		}
		stdin := e.proc.Stdin()
		if stdin == nil {
			continue
		}
		e.stdinMu.Lock()
		_, werr := stdin.Write(payload)
		e.stdinMu.Unlock()
		e.mu.Lock()
		if werr == nil {
			e.stdin += int64(len(payload))
		} else if !e.noRead {
			e.noRead = true
			e.changed.Broadcast()
		}
		e.mu.Unlock()
	}
}

// closeStdin is end of file for the program. A terminal stays open: there, end
// of file is a character.
func (e *guestExec) closeStdin() {
	if stdin := e.proc.Stdin(); stdin != nil && !e.start.TTY {
		stdin.Close()
	}
}
