package sshd_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/crypto/ssh"
	"pgregory.net/rapid"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sshd"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// service stands for a node: sandboxes by owner and name, whose one program does
// what its command says.
type service struct {
	sshd.Service

	mu      sync.Mutex
	asked   []boxed.ExecRequest
	started boxed.ExecRequest
	labels  map[string]string
	expires time.Time
	did     []string
}

const theID boxed.ID = "aaaaaaaaaa-bbbbbbbbbbbbbbbb"

func (s *service) Resolve(ctx context.Context, ref string) (*boxed.Sandbox, error) {
	if who := boxed.PrincipalFrom(ctx); who.Owner != "ann" || ref != "box" {
		return nil, boxed.Errorf(boxed.CodeNotFound, "there is no sandbox %q", ref)
	}
	return &boxed.Sandbox{ID: theID, State: boxed.StateRunning}, nil
}

func (s *service) Exec(ctx context.Context, _ boxed.ID, req boxed.ExecRequest) (boxed.ExitStatus, error) {
	s.mu.Lock()
	s.asked = append(s.asked, req)
	s.mu.Unlock()
	switch command := req.Args[len(req.Args)-1]; command {
	case "killed":
		return boxed.ExitStatus{Reason: boxed.ReasonSignaled, Signal: "KILL", Code: 137}, nil
	case "wait":
		fmt.Fprintln(req.Stdout, "waiting")
		for {
			select {
			case <-ctx.Done():
				return boxed.ExitStatus{}, ctx.Err()
			case sig := <-req.Signals:
				fmt.Fprintln(req.Stdout, "signal", sig)
			case size := <-req.Resize:
				fmt.Fprintln(req.Stdout, "size", size.Cols, size.Rows)
			}
		}
	case "hostile":
		return boxed.ExitStatus{}, errors.New("a name\x1b]0;owned\x07 that is hostile")
	}
	io.Copy(req.Stdout, req.Stdin)
	return boxed.ExitStatus{Reason: boxed.ReasonExited}, nil
}

// A shell on a terminal is what Exec does with its arguments.
func (s *service) StartExec(_ context.Context, _ boxed.ID, req boxed.ExecRequest) (*boxed.Exec, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started = req
	return &boxed.Exec{ID: "exec", Running: true}, nil
}

func (s *service) Attach(ctx context.Context, id boxed.ID, _ boxed.ExecID, at boxed.AttachRequest) (boxed.ExitStatus, error) {
	s.mu.Lock()
	req := s.started
	s.mu.Unlock()
	req.Stdin, req.Stdout, req.Resize, req.Signals = at.Stdin, at.Stdout, at.Resize, at.Signals
	return s.Exec(ctx, id, req)
}

func (s *service) ListExecs(context.Context, boxed.ID) ([]boxed.Exec, error) { return nil, nil }

func (s *service) Get(_ context.Context, id boxed.ID) (*boxed.Sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &boxed.Sandbox{ID: id, State: boxed.StateRunning, Labels: s.labels, TTL: boxed.Duration(time.Hour), ExpiresAt: s.expires}, nil
}

func (s *service) Create(_ context.Context, spec boxed.Spec) (*boxed.Sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.labels, s.expires = spec.Labels, time.Now().Add(time.Minute)
	return &boxed.Sandbox{ID: theID, State: boxed.StateRunning, Labels: spec.Labels}, nil
}

func (s *service) Update(ctx context.Context, id boxed.ID, u boxed.Update) (*boxed.Sandbox, error) {
	s.mu.Lock()
	s.did = append(s.did, "renewed")
	s.expires = time.Now().Add(u.TTL.D())
	s.mu.Unlock()
	return s.Get(ctx, id)
}

func (s *service) KillExec(context.Context, boxed.ID, boxed.ExecID) error { return s.note("killed") }

func (s *service) Destroy(context.Context, boxed.ID) error { return s.note("destroyed") }

func (s *service) note(what string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.did = append(s.did, what)
	return nil
}

func (s *service) GetNode(context.Context, string) (*boxed.NodeInfo, error) {
	return &boxed.NodeInfo{Name: "host"}, nil
}

// door is a Server on the loopback that knows ann's key.
type door struct {
	t       *testing.T
	addr    string
	host    ssh.PublicKey
	ann     ssh.Signer
	service *service
	server  *sshd.Server
}

func signer(t *testing.T) ssh.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func open(t *testing.T) *door {
	t.Helper()
	host := signer(t)
	d := &door{t: t, host: host.PublicKey(), ann: signer(t), service: &service{}}
	var err error
	d.server, err = sshd.New(sshd.Config{
		Idle: 500 * time.Millisecond, Service: d.service, HostKeys: func() []ssh.Signer { return []ssh.Signer{host} }, Env: []string{"APP_*"},
		Identify: func(_ context.Context, key ssh.PublicKey, _ net.Addr) (sshd.Identity, error) {
			if bytes.Equal(key.Marshal(), d.ann.PublicKey().Marshal()) {
				return sshd.Identity{Principal: boxed.Principal{Owner: "ann", Role: boxed.RoleUser}}, nil
			}
			return sshd.Identity{}, boxed.Errorf(boxed.CodeUnauthenticated, "not known")
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d.addr = ln.Addr().String()
	served := make(chan error, 1)
	go func() { served <- d.server.Serve(ln) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		d.server.Shutdown(ctx)
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return d
}

func (d *door) dial(user string, auth ...ssh.AuthMethod) (*ssh.Client, error) {
	return ssh.Dial("tcp", d.addr, &ssh.ClientConfig{User: user, Auth: auth, HostKeyCallback: ssh.FixedHostKey(d.host), Timeout: 20 * time.Second})
}

func (d *door) connect(user string) *ssh.Client {
	d.t.Helper()
	c, err := d.dial(user, ssh.PublicKeys(d.ann))
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { c.Close() })
	return c
}

func (d *door) session(c *ssh.Client) *ssh.Session {
	d.t.Helper()
	s, err := c.NewSession()
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { s.Close() })
	return s
}

// claimed offers a key that it cannot sign with.
type claimed struct{ ssh.Signer }

func (claimed) Sign(io.Reader, []byte) (*ssh.Signature, error) {
	return nil, errors.New("it has only the public half")
}

// S7, CVE-2024-45337: who offers ann's public key and proves another is not ann, and
// is let in by neither.
func TestAKeyThatIsOnlyOfferedIsNobodys(t *testing.T) {
	d := open(t)
	other := signer(t)
	for name, keys := range map[string][]ssh.Signer{
		"offered, then another proved": {claimed{d.ann}, other},
		"another":                      {other},
		"offered only":                 {claimed{d.ann}},
	} {
		if c, err := d.dial("box", ssh.PublicKeys(keys...)); err == nil {
			c.Close()
			t.Errorf("%s: it got in", name)
		}
	}
	if c, err := d.dial("box", ssh.Password("")); err == nil {
		c.Close()
		t.Error("a password got in")
	}
	if c, err := d.dial("box"); err == nil {
		c.Close()
		t.Error("nothing got in")
	}
	// And who has two known keys is whose the proved one is.
	c, err := d.dial("box", ssh.PublicKeys(other, d.ann))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// S1: death by a signal is said as such.
func TestAProgramThatIsKilledSaysSo(t *testing.T) {
	d := open(t)
	err := d.session(d.connect("box")).Run("killed")
	var exit *ssh.ExitError
	if !errors.As(err, &exit) || exit.Signal() != "KILL" {
		t.Errorf("got %v", err)
	}
}

// A program that ends at once ends after the answer to its request: a client that
// has the end first takes the connection for broken.
func TestTheAnswerComesBeforeTheEnd(t *testing.T) {
	d := open(t)
	c := d.connect("box")
	for range 300 {
		s := d.session(c)
		if err := s.Run("hostile"); err == nil || errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		s.Close()
	}
}

// I20: what a terminal would act on is inert in our words.
func TestOurWordsAreInert(t *testing.T) {
	d := open(t)
	for user, command := range map[string]string{"box": "hostile", "\x1b]0;owned\x07": "true"} {
		s := d.session(d.connect(user))
		var errs bytes.Buffer
		s.Stderr = &errs
		err := s.Run(command)
		var exit *ssh.ExitError
		if !errors.As(err, &exit) || exit.ExitStatus() != 255 || strings.ContainsAny(errs.String(), "\x1b\x07") || !strings.HasPrefix(errs.String(), "boxed: ") {
			t.Errorf("%v: %q", err, errs.String())
		}
	}
}

// S10: resizes and signals of a program that takes its time with them block
// nothing, and the last size arrives.
func TestResizesAndSignalsAreDrained(t *testing.T) {
	d := open(t)
	s := d.session(d.connect("box"))
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RequestPty("xterm", 24, 80, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Start("wait"); err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		if err := s.WindowChange(50, i); err != nil {
			t.Fatal(err)
		}
		s.Signal(ssh.SIGUSR1)
	}
	s.WindowChange(7, 77)
	var got strings.Builder
	buf := make([]byte, 4096)
	for !strings.Contains(got.String(), "size 77 7\n") {
		n, err := out.Read(buf)
		got.Write(buf[:n])
		if err != nil {
			t.Fatalf("%v after %.200q", err, got.String())
		}
	}
	if !strings.Contains(got.String(), "signal USR1") {
		t.Error("no signal came")
	}
}

// S8: a client sets what says how it shows text, and what the operator allows.
func TestTheEnvironmentIsAnAllowList(t *testing.T) {
	d := open(t)
	s := d.session(d.connect("box"))
	for name, may := range map[string]bool{
		"LANG": true, "LC_ALL": true, "TERM": true, "COLORTERM": true, "APP_MODE": true,
		"LD_PRELOAD": false, "PATH": false, "BASH_ENV": false, "lang": false, "": false, "LCX": false, "LANGUAGE": false,
	} {
		if err := s.Setenv(name, "v"); (err == nil) != may {
			t.Errorf("%q: %v", name, err)
		}
	}
	for i := range 100 { // and not without end
		s.Setenv(fmt.Sprintf("APP_%d", i), strings.Repeat("v", 1000))
	}
	if err := s.Run("echo"); err != nil {
		t.Fatal(err)
	}
	env := d.service.asked[0].Env
	if len(env) > 65 || env["LD_PRELOAD"] != "" || env["APP_MODE"] != "v" {
		t.Errorf("%d variables: %.300v", len(env), env)
	}
}

// What is not there is refused, and the connection goes on.
func TestWhatIsNotThereIsRefused(t *testing.T) {
	d := open(t)
	c := d.connect("box")
	for _, kind := range []string{"x11", "direct-streamlocal@openssh.com", "tun@openssh.com", "nonsense"} {
		if ch, _, err := c.OpenChannel(kind, nil); err == nil {
			ch.Close()
			t.Errorf("%s was opened", kind)
		}
	}
	for _, request := range []string{"tcpip-forward", "streamlocal-forward@openssh.com", "nonsense"} {
		if ok, _, err := c.SendRequest(request, true, nil); ok || err != nil {
			t.Errorf("%s: %v, %v", request, ok, err)
		}
	}
	s := d.session(c)
	for _, request := range []string{"x11-req", "auth-agent-req@openssh.com", "nonsense", "subsystem", "exec", "env", "pty-req", "window-change"} {
		if ok, err := s.SendRequest(request, true, []byte{1, 2}); ok || err != nil {
			t.Errorf("%s: %v, %v", request, ok, err)
		}
	}
	for _, to := range []string{"10.0.0.1:80", "boxed.example:80", "0.0.0.0:80", "127.0.0.1.example:80", "[::ffff:10.0.0.1]:80"} {
		if conn, err := c.Dial("tcp", to); err == nil {
			conn.Close()
			t.Errorf("%s was dialled", to)
		}
	}
	if err := s.Run("echo"); err != nil {
		t.Errorf("after all that: %v", err)
	}
}

// Who proves nothing is closed and makes room; who has proved a key and opens
// nothing, as `ssh -N` does, stays.
func TestWhoProvesNothingIsClosed(t *testing.T) {
	t.Cleanup(sshd.SetHandshakeLimit(300 * time.Millisecond))
	d := open(t)
	idle := d.connect("box")
	var silent []net.Conn
	for range 100 {
		c, err := net.Dial("tcp", d.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		silent = append(silent, c)
	}
	for _, c := range silent {
		c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("one that says nothing is still there")
		}
	}
	if err := d.session(d.connect("box")).Run("echo"); err != nil {
		t.Errorf("after them: %v", err)
	}
	if err := d.session(idle).Run("echo"); err != nil {
		t.Errorf("one that was idle: %v", err)
	}
}

// A connection has so many channels and no more.
func TestChannelsAreBounded(t *testing.T) {
	d := open(t)
	c := d.connect("box")
	refused := 0
	for range 200 {
		s, err := c.NewSession()
		if err != nil {
			refused++
			continue
		}
		defer s.Close()
		s.Start("wait")
	}
	if refused != 200-64 {
		t.Errorf("%d were refused", refused)
	}
}

// Requests in any order, any number of times: at most one program starts, and the
// door goes on.
func TestRequestsInAnyOrder(t *testing.T) {
	d := open(t)
	c := d.connect("box")
	payloads := map[string][]byte{
		"pty-req": ssh.Marshal(struct {
			Term       string
			C, R, W, H uint32
			M          string
		}{"xterm", 0, 0, 1 << 31, 0, ""}),
		"window-change": ssh.Marshal(struct{ C, R, W, H uint32 }{1 << 31, 0, 0, 0}),
		"env":           ssh.Marshal(struct{ N, V string }{"LANG", "C"}),
		"shell":         nil, "exec": ssh.Marshal(struct{ C string }{"wait"}), "signal": ssh.Marshal(struct{ N string }{"TERM"}),
		"subsystem": ssh.Marshal(struct{ N string }{"sftp"}), "break": ssh.Marshal(struct{ N uint32 }{1}),
	}
	rapid.Check(t, func(t *rapid.T) {
		ch, requests, err := c.OpenChannel("session", nil)
		if err != nil {
			t.Fatal(err)
		}
		go ssh.DiscardRequests(requests)
		defer ch.Close()
		started := 0
		kinds := []string{"pty-req", "window-change", "env", "shell", "exec", "signal", "subsystem", "break"}
		for _, kind := range rapid.SliceOfN(rapid.SampledFrom(kinds), 1, 12).Draw(t, "requests") {
			payload := payloads[kind]
			if rapid.IntRange(0, 4).Draw(t, "garbage") == 0 {
				payload = rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "payload")
			}
			ok, err := ch.SendRequest(kind, true, payload)
			if err != nil {
				if started > 0 && errors.Is(err, io.EOF) {
					return // the program has ended, and the channel with it
				}
				t.Fatal(err)
			}
			if ok && (kind == "shell" || kind == "exec") {
				started++
			}
		}
		if started > 1 {
			t.Errorf("%d programs started", started)
		}
	})
}

// What runs when the node goes away is not ended by that, and the client hears of
// it.
func TestTheNodeGoesAway(t *testing.T) {
	d := open(t)
	s := d.session(d.connect("box"))
	var errs bytes.Buffer
	s.Stderr = &errs
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Start("wait"); err != nil {
		t.Fatal(err)
	}
	io.ReadFull(out, make([]byte, 8))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	d.server.Shutdown(ctx)
	err = s.Wait()
	var exit *ssh.ExitError
	if !errors.As(err, &exit) || exit.ExitStatus() != 255 || !strings.Contains(errs.String(), "lives on") {
		t.Errorf("%v: %q", err, errs.String())
	}
}

// A terminal in a sandbox that was made for it has no fixed lifetime, is told before it
// ends because nothing happens, and then leaves nothing.
func TestATerminalInWhichNothingHappensEnds(t *testing.T) {
	defer sshd.SetWatch(20*time.Millisecond, 400*time.Millisecond, 150*time.Millisecond)()
	d := open(t)
	s := d.session(d.connect("new"))
	var errs bytes.Buffer
	s.Stderr = &errs
	in, err := s.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.RequestPty("xterm", 24, 80, nil); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if err := s.Shell(); err != nil {
		t.Fatal(err)
	}
	for range 10 { // it does not end while somebody types
		time.Sleep(100 * time.Millisecond)
		io.WriteString(in, "x")
	}
	var exit *ssh.ExitError
	if err := s.Wait(); !errors.As(err, &exit) || exit.ExitStatus() != 255 {
		t.Errorf("got %v", err)
	}
	if took := time.Since(began); took < 1500*time.Millisecond {
		t.Errorf("it ended after %v", took)
	}
	if text := errs.String(); !strings.Contains(text, "it ends with this shell, or when nothing happens for 500ms") ||
		!strings.Contains(text, "type something to stay") || !strings.Contains(text, "nothing was typed or shown for too long") || strings.ContainsAny(text, "\x1b") {
		t.Errorf("it was told %q", text)
	}
	d.service.mu.Lock()
	defer d.service.mu.Unlock()
	if got := strings.Join(d.service.did, " "); got != "renewed killed destroyed" {
		t.Errorf("got %q", got)
	}
}

// The status is there when the output ends: a client that has nothing more to say closes then.
func TestTheStatusComesBeforeTheEndOfTheOutput(t *testing.T) {
	d := open(t)
	c := d.connect("box")
	for _, command := range []string{"killed", "hello"} {
		ch, requests, err := c.OpenChannel("session", nil)
		if err != nil {
			t.Fatal(err)
		}
		go io.Copy(io.Discard, ch.Stderr())
		if ok, err := ch.SendRequest("exec", true, ssh.Marshal(struct{ Command string }{command})); !ok || err != nil {
			t.Fatal(ok, err)
		}
		ch.CloseWrite()
		io.Copy(io.Discard, ch)
		select {
		case r := <-requests:
			if r == nil || !strings.HasPrefix(r.Type, "exit-") {
				t.Errorf("%s: the request is %+v", command, r)
			}
		default:
			t.Errorf("%s: the output has ended, and there is no status", command)
		}
		ch.Close()
	}
}
