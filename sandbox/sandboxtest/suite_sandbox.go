package sandboxtest

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// runSandbox tests, in one sandbox, what programs and files do there.
func runSandbox(t *testing.T, f Fixture) {
	s := newSite(t, f)
	box := s.create(func(spec *boxed.Spec) { spec.Env = map[string]string{"FROM_SPEC": "1", "OVER": "spec"} })
	for _, c := range []struct {
		name string
		test func(*site, boxed.ID)
	}{
		{"argv is byte-exact", argvIsExact},
		{"environment and directory", environmentAndDir},
		{"streams and exit codes", streamsAndExit},
		{"what cannot start says why", cannotStart},
		{"stdin", stdinArrives},
		{"a terminal", terminalWorks},
		{"signals", signalsArrive},
		{"a timeout ends the tree", timeoutEndsTree},
		{"a caller that leaves ends the tree", leavingEndsTree},
		{"10 MiB of output", outputArrives},
		{"an output limit", outputLimit},
		{"detached and resumed by offset", detached},
		{"readers come and go", readersComeAndGo},
		{"programs linger", programsLinger},
		{"what a leader leaves behind", leftBehind},
		{"execs are independent", independent},
		{"languages", runLanguages},
		{"files", filesWork},
		{"a full file system", fileSystemFull},
		{"tar", tarWorks},
		{"ports", portsWork},
		{"stats", statsWork},
	} {
		t.Run(c.name, func(t *testing.T) {
			sub := *s
			sub.t = t
			c.test(&sub, box.ID)
		})
	}
}

// Byte-exact argv, X18.
func argvIsExact(s *site, id boxed.ID) {
	args := []string{"", " ", "a b", "\"'`$(x)\\", "\xff\xfe", "ünï", "-n", "line\nline", "*"}
	want := strings.Join(args, "\x00") + "\x00"
	if r := s.sh(id, scriptArgs, args...); r.out != want {
		s.t.Errorf("got %q, want %q", r.out, want)
	}
}

func environmentAndDir(s *site, id boxed.ID) {
	r := s.exec(id, boxed.ExecRequest{Args: []string{"env"}, Env: map[string]string{"OVER": "exec", "NEW": "a=b c"}})
	for _, want := range []string{"FROM_SPEC=1", "OVER=exec", "NEW=a=b c", "HOME=" + sandbox.GuestHome, "USER=" + sandbox.GuestUser, "BOXED_SANDBOX=" + string(id)} {
		if !strings.Contains("\n"+r.out, "\n"+want+"\n") {
			s.t.Errorf("no %q in %q", want, r.out)
		}
	}
	for dir, want := range map[string]string{"": "/workspace\n", "/tmp": "/tmp\n", "sub": "/workspace/sub\n"} {
		if dir == "sub" {
			if err := s.Mkdir(context.Background(), id, "sub", false); err != nil {
				s.t.Fatal(err)
			}
		}
		if r := s.exec(id, boxed.ExecRequest{Args: []string{"pwd"}, Dir: dir}); r.out != want {
			s.t.Errorf("pwd in %q: %q", dir, r.out)
		}
	}
}

func streamsAndExit(s *site, id boxed.ID) {
	r := s.sh(id, scriptStreams)
	if r.out != "out" || r.err != "err" || r.status.Code != 7 || r.status.Reason != boxed.ReasonExited || r.status.StdoutBytes != 3 || r.status.StderrBytes != 3 {
		s.t.Errorf("%+v", r)
	}
	if r := s.sh(id, scriptSignal); r.status.Reason != boxed.ReasonSignaled || r.status.Signal != "KILL" || r.status.Code != 137 {
		s.t.Errorf("%+v", r.status) // X15
	}
	// User code runs as the sandbox's own uid.
	if r := s.sh(id, scriptUser); strings.HasPrefix(r.out, "0\n") || len(strings.Fields(r.out)) != 2 {
		s.t.Errorf("id: %q", r.out)
	}
}

// X19, X27.
func cannotStart(s *site, id boxed.ID) {
	_, err := s.Exec(context.Background(), id, boxed.ExecRequest{Args: []string{"no-such-program"}})
	wantCode(s.t, "a missing program", err, boxed.CodeStartFailed)
	if e := boxed.AsError(err); e.Detail["reason"] != "not_found" || !strings.Contains(e.Message, "no-such-program") {
		s.t.Errorf("%v, %v", err, e.Detail)
	}
	_, err = s.Exec(context.Background(), id, boxed.ExecRequest{Args: []string{"true"}, Dir: "/no/where"})
	wantCode(s.t, "a missing directory", err, boxed.CodeInvalid)
	if e := boxed.AsError(err); e.Field() != "dir" || !strings.Contains(e.Message, "/no/where") {
		s.t.Errorf("%v, %v", err, e.Detail)
	}
}

// X6, X7, X8.
func stdinArrives(s *site, id boxed.ID) {
	if r := s.exec(id, boxed.ExecRequest{Args: []string{"cat"}}); r.out != "" || r.status.Code != 0 {
		s.t.Errorf("without stdin: %+v", r)
	}
	big := bytes.Repeat([]byte("0123456789abcde\n"), 1<<16)
	if r := s.exec(id, boxed.ExecRequest{Args: []string{"cat"}, Stdin: bytes.NewReader(big)}); r.out != string(big) {
		s.t.Errorf("%d bytes of %d, %+v", len(r.out), len(big), r.status)
	}
	// An early exit gives the writer a clear error, and is no error of the exec.
	in, w := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		_, err := w.Write(bytes.Repeat(big, 8))
		wrote <- err
	}()
	if r := s.exec(id, boxed.ExecRequest{Args: []string{"true"}, Stdin: in}); r.status.Code != 0 {
		s.t.Errorf("%+v", r.status)
	}
	if err := <-wrote; err == nil {
		s.t.Error("the writer of stdin heard nothing")
	}
}

// P1, P2, P3, P5.
func terminalWorks(s *site, id boxed.ID) {
	r := s.exec(id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptTTY}, TTY: true})
	if r.out != "tty\r\n24 80\r\n" {
		s.t.Errorf("default size: %q, %q", r.out, r.err)
	}
	r = s.exec(id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptTTY}, TTY: true, Size: boxed.Size{Cols: 132, Rows: 50}})
	if r.out != "tty\r\n50 132\r\n" {
		s.t.Errorf("asked size: %q", r.out)
	}
	if r := s.sh(id, scriptPlain); r.out != "plain\n" || r.err != "err" {
		s.t.Errorf("without a terminal: %+v", r)
	}
	resize := make(chan boxed.Size)
	b := s.begin(id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptResize}, TTY: true, Resize: resize})
	eventually(s.t, "it is ready", func() bool { return strings.Contains(b.out.String(), "ready") })
	resize <- boxed.Size{Cols: 99, Rows: 33}
	eventually(s.t, "it learns its size", func() bool { return strings.Contains(b.out.String(), "33 99") })
	b.cancel()
	b.wait(s.t)
	// What is typed is echoed, and ^D is the end.
	in, w := io.Pipe()
	b = s.begin(id, boxed.ExecRequest{Args: []string{"cat"}, TTY: true, Stdin: in})
	w.Write([]byte("hi\r"))
	eventually(s.t, "the echo and the copy", func() bool { return b.out.String() == "hi\r\nhi\r\n" })
	w.Write([]byte{4})
	if status := b.wait(s.t); status.Code != 0 {
		s.t.Errorf("%+v", status)
	}
	w.Close()
}

// X4.
func signalsArrive(s *site, id boxed.ID) {
	signals := make(chan string)
	b := s.begin(id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptTrap}, Signals: signals})
	eventually(s.t, "it is ready", func() bool { return strings.Contains(b.out.String(), "ready") })
	signals <- "TERM"
	if status := b.wait(s.t); status.Code != 3 || !strings.Contains(b.out.String(), "got it") {
		s.t.Errorf("%+v, %q", status, b.out.String())
	}
	b = s.begin(id, boxed.ExecRequest{Args: []string{"sleep", "1000"}})
	err := s.SignalExec(context.Background(), id, b.id, "NOSUCH", false)
	wantCode(s.t, "an unknown signal", err, boxed.CodeInvalid)
	if err := s.SignalExec(context.Background(), id, b.id, "TERM", true); err != nil {
		s.t.Error(err)
	}
	if status := b.wait(s.t); status.Reason != boxed.ReasonSignaled || status.Signal != "TERM" {
		s.t.Errorf("%+v", status)
	}
	wantCode(s.t, "an unknown exec", s.KillExec(context.Background(), id, boxed.NewExecID()), boxed.CodeNotFound)
}

// X1, X2.
func timeoutEndsTree(s *site, id boxed.ID) {
	began := time.Now()
	b := s.begin(id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptTree}, Timeout: boxed.Duration(500 * time.Millisecond)})
	if status := b.wait(s.t); status.Reason != boxed.ReasonTimeout || time.Since(began) > 5*time.Second {
		s.t.Errorf("%+v after %v", status, time.Since(began))
	}
	if n := s.processes(id, b.id); n != 0 {
		s.t.Errorf("%d processes are left", n)
	}
}

// X2: disconnect.
func leavingEndsTree(s *site, id boxed.ID) {
	b := s.begin(id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptTree}})
	eventually(s.t, "it runs", func() bool { return strings.Contains(b.out.String(), "started") })
	b.cancel()
	if status := b.wait(s.t); status.Reason != boxed.ReasonCanceled || !errors.Is(b.err, context.Canceled) {
		s.t.Errorf("%+v, %v", status, b.err)
	}
	eventually(s.t, "nothing is left", func() bool { return s.processes(id, b.id) == 0 })
}

// X10, X18.
func outputArrives(s *site, id boxed.ID) {
	r := s.sh(id, scriptSpew)
	if sha256.Sum256([]byte(r.out)) != sha256.Sum256(spewed()) || r.status.StdoutBytes != int64(len(r.out)) {
		s.t.Errorf("%d bytes, %+v", len(r.out), r.status)
	}
}

// X28.
func outputLimit(s *site, id boxed.ID) {
	r := s.exec(id, boxed.ExecRequest{Args: []string{"yes"}, MaxOutput: 100_000})
	if r.status.Reason != boxed.ReasonOutputLimit || len(r.out) != 100_000 {
		s.t.Errorf("%d bytes, %+v", len(r.out), r.status)
	}
}

// X11, X12, X13.
func detached(s *site, id boxed.ID) {
	ctx := context.Background()
	e, err := s.StartExec(ctx, id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptCount}})
	if err != nil {
		s.t.Fatal(err)
	}
	var whole bytes.Buffer
	for range 4 {
		var part buffer
		reading, leave := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.Attach(reading, id, e.ID, boxed.AttachRequest{StdoutOffset: int64(whole.Len()), Stdout: &part})
		}()
		eventually(s.t, "output comes", func() bool { return len(part.String()) > 20 })
		leave()
		<-done
		whole.WriteString(part.String())
	}
	var want bytes.Buffer
	for i := 0; want.Len() < whole.Len(); i++ {
		fmt.Fprintln(&want, i)
	}
	if whole.String() != want.String()[:whole.Len()] {
		s.t.Errorf("got %q", whole.String())
	}
	if got, err := s.GetExec(ctx, id, e.ID); err != nil || !got.Running || !got.Detached {
		s.t.Errorf("%+v, %v", got, err)
	}
	if err := s.KillExec(ctx, id, e.ID); err != nil {
		s.t.Fatal(err)
	}
	status, err := s.Attach(ctx, id, e.ID, boxed.AttachRequest{})
	if err != nil || status.Reason != boxed.ReasonCanceled {
		s.t.Errorf("%+v, %v", status, err)
	}
}

// X3.
func leftBehind(s *site, id boxed.ID) {
	began := time.Now()
	b := s.begin(id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptLeave}})
	if status := b.wait(s.t); status.Code != 0 || b.out.String() != "left\n" || time.Since(began) > 3*time.Second {
		s.t.Errorf("%+v, %q after %v", status, b.out.String(), time.Since(began))
	}
	if n := s.processes(id, b.id); n != 1 {
		s.t.Errorf("%d processes live on", n)
	}
	if err := s.KillExec(context.Background(), id, b.id); err != nil {
		s.t.Error(err)
	}
	if n := s.processes(id, b.id); n != 0 {
		s.t.Errorf("%d processes are left", n)
	}
}

// X21, X24.
func independent(s *site, id boxed.ID) {
	stuck := s.begin(id, boxed.ExecRequest{Args: []string{"sleep", "1000"}})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 10 {
				var out bytes.Buffer
				status, err := s.Exec(context.Background(), id, boxed.ExecRequest{Args: []string{"echo", "x"}, Stdout: &out})
				if err != nil || status.Code != 0 || out.String() != "x\n" {
					s.t.Errorf("%q, %+v, %v", out.String(), status, err)
				}
			}
		})
	}
	wg.Wait()
	stuck.cancel()
	stuck.wait(s.t)
}

func runLanguages(s *site, id boxed.ID) {
	for _, language := range boxed.Languages() {
		code, has := s.f.Languages[language]
		if has {
			if r := s.exec(id, boxed.ExecRequest{Language: language, Code: code}); r.out != "hello\n" || r.status.Code != 0 {
				s.t.Errorf("%s: %+v", language, r)
			}
			continue
		}
		_, err := s.Exec(context.Background(), id, boxed.ExecRequest{Language: language, Code: "x"})
		wantCode(s.t, language, err, boxed.CodeStartFailed)
	}
	_, err := s.Exec(context.Background(), id, boxed.ExecRequest{Language: "cobol", Code: "x"})
	if wantCode(s.t, "cobol", err, boxed.CodeInvalid); boxed.AsError(err).Field() != "language" {
		s.t.Errorf("%v", boxed.AsError(err).Detail)
	}
}

// F1 and the codes of errors.
func filesWork(s *site, id boxed.ID) {
	ctx := context.Background()
	content := bytes.Repeat([]byte("content\n"), 40_000)
	info, err := s.WriteFile(ctx, id, boxed.WriteRequest{Path: "d/e/file", Content: bytes.NewReader(content), Mode: 0o640, Parents: true})
	if err != nil || info.Path != "/workspace/d/e/file" || info.Size != int64(len(content)) || info.Mode != 0o640 || info.Type != "file" {
		s.t.Fatalf("%+v, %v", info, err)
	}
	if r := s.exec(id, boxed.ExecRequest{Args: []string{"cat"}, Stdin: s.read(id, "d/e/file", 0, -1)}); r.out != string(content) {
		s.t.Errorf("read %d bytes", len(r.out))
	}
	for _, c := range []struct{ offset, length, from, to int64 }{{5, 10, 5, 15}, {0, 0, 0, 0}, {int64(len(content)) - 3, 100, int64(len(content)) - 3, int64(len(content))}} {
		got, err := io.ReadAll(s.read(id, "/workspace/d/e/file", c.offset, c.length))
		if err != nil || string(got) != string(content[c.from:c.to]) {
			s.t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
	_, err = s.ReadFile(ctx, id, boxed.ReadRequest{Path: "d/e/file", Offset: 1 << 40, Length: 1})
	wantCode(s.t, "beyond the end", err, boxed.CodeRange)
	if err := s.Move(ctx, id, "d/e/file", "d/moved"); err != nil {
		s.t.Error(err)
	}
	list, err := s.ListFiles(ctx, id, "d")
	if err != nil || len(list) != 2 || list[0].Name != "e" || list[0].Type != "dir" || list[1].Name != "moved" {
		s.t.Errorf("%+v, %v", list, err)
	}
	wantCode(s.t, "mkdir of what exists", s.Mkdir(ctx, id, "d", false), boxed.CodeConflict)
	if err := s.Mkdir(ctx, id, "d", true); err != nil {
		s.t.Errorf("mkdir with parents: %v", err)
	}
	wantCode(s.t, "remove of a full directory", s.Remove(ctx, id, "d", false), boxed.CodeConflict)
	if err := s.Remove(ctx, id, "d", true); err != nil {
		s.t.Error(err)
	}
	_, err = s.Stat(ctx, id, "d")
	wantCode(s.t, "stat of what is gone", err, boxed.CodeNotFound)
	_, err = s.WriteFile(ctx, id, boxed.WriteRequest{Path: "/etc/passwd", Content: strings.NewReader("x")})
	wantCode(s.t, "a read-only place", err, boxed.CodeForbidden, boxed.CodeConflict)
	_, err = s.ReadFile(ctx, id, boxed.ReadRequest{Path: "/workspace", Length: -1})
	wantCode(s.t, "reading a directory", err, boxed.CodeConflict)
	// A reader that fails leaves nothing behind.
	_, err = s.WriteFile(ctx, id, boxed.WriteRequest{Path: "half", Content: io.MultiReader(bytes.NewReader(content), failing{})})
	if err == nil {
		s.t.Error("half a file was taken")
	}
	_, err = s.Stat(ctx, id, "half")
	wantCode(s.t, "half a file", err, boxed.CodeNotFound)
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("the reader failed") }

func (s *site) read(id boxed.ID, path string, offset, length int64) io.ReadCloser {
	s.t.Helper()
	f, err := s.ReadFile(context.Background(), id, boxed.ReadRequest{Path: path, Offset: offset, Length: length})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { f.Close() })
	return f
}

// F8.
func fileSystemFull(s *site, id boxed.ID) {
	_, err := s.WriteFile(context.Background(), id, boxed.WriteRequest{Path: "big", Content: io.LimitReader(zeros{}, limits().WorkspaceBytes+boxed.MiB)})
	wantCode(s.t, "too much", err, boxed.CodeNoSpace)
	_, err = s.Stat(context.Background(), id, "big")
	wantCode(s.t, "what did not fit", err, boxed.CodeNotFound)
	s.works(id)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// F4, F5, F7.
func tarWorks(s *site, id boxed.ID) {
	ctx := context.Background()
	var in bytes.Buffer
	w := tar.NewWriter(&in)
	add := func(w *tar.Writer, h tar.Header, content string) {
		h.Size = int64(len(content))
		if err := w.WriteHeader(&h); err != nil {
			s.t.Fatal(err)
		}
		io.WriteString(w, content)
	}
	add(w, tar.Header{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o755}, "")
	for i := range 100 {
		add(w, tar.Header{Name: fmt.Sprintf("dir/f%d", i), Typeflag: tar.TypeReg, Mode: 0o644}, strings.Repeat("x", i))
	}
	add(w, tar.Header{Name: "dir/link", Typeflag: tar.TypeSymlink, Linkname: "f1"}, "")
	w.Close()
	if err := s.WriteTar(ctx, id, "unpacked", &in); err != nil {
		s.t.Fatal(err)
	}
	out, err := s.ReadTar(ctx, id, "unpacked")
	if err != nil {
		s.t.Fatal(err)
	}
	defer out.Close()
	sizes, links := map[string]int64{}, 0
	for r := tar.NewReader(out); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			s.t.Fatal(err)
		}
		if sizes[h.Name] = h.Size; h.Typeflag == tar.TypeSymlink && h.Linkname == "f1" {
			links++
		}
	}
	if len(sizes) != 102 || sizes["dir/f99"] != 99 || links != 1 {
		s.t.Errorf("%d entries, %d links", len(sizes), links)
	}
	for _, name := range []string{"../evil", "/evil", "a/../../evil"} {
		var evil bytes.Buffer
		w := tar.NewWriter(&evil)
		add(w, tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, "x")
		w.Close()
		wantCode(s.t, name, s.WriteTar(ctx, id, "unpacked", &evil), boxed.CodeInvalid)
	}
	_, err = s.ReadTar(ctx, id, "no-such")
	wantCode(s.t, "no such directory", err, boxed.CodeNotFound)
	wantCode(s.t, "not a tar", s.WriteTar(ctx, id, "unpacked", strings.NewReader(strings.Repeat("junk", 1000))), boxed.CodeInvalid)
}

func portsWork(s *site, id boxed.ID) {
	ctx := context.Background()
	_, err := s.Dial(ctx, id, 8123)
	if err == nil {
		s.t.Fatal("something listens already")
	}
	b := s.begin(id, boxed.ExecRequest{Args: []string{"sh", "-c", scriptListen}})
	eventually(s.t, "it listens", func() bool { return strings.Contains(b.out.String(), "listening") })
	ports, err := s.ListPorts(ctx, id)
	if err != nil || len(ports) != 1 || ports[0].Port != 8123 || ports[0].Address != "127.0.0.1" {
		s.t.Errorf("%+v, %v", ports, err)
	}
	conn, err := s.Dial(ctx, id, 8123)
	if err != nil {
		s.t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	big := bytes.Repeat([]byte("0123456789"), 20_000)
	go func() {
		conn.Write(big)
		conn.(interface{ CloseWrite() error }).CloseWrite() // one direction ends before the other
	}()
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, big) {
		s.t.Errorf("%d bytes, %v", len(got), err)
	}
	b.cancel()
	b.wait(s.t)
	eventually(s.t, "nothing listens", func() bool { ports, err := s.ListPorts(ctx, id); return err == nil && len(ports) == 0 })
}

func statsWork(s *site, id boxed.ID) {
	b := s.begin(id, boxed.ExecRequest{Args: []string{"sleep", "1000"}})
	stats, err := s.Stats(context.Background(), id)
	if err != nil || stats.Execs != 1 || stats.MemoryLimit != limits().MemoryBytes || stats.AgentRSSBytes <= 0 || stats.At.IsZero() {
		s.t.Errorf("%+v, %v", stats, err)
	}
	b.cancel()
	b.wait(s.t)
}
