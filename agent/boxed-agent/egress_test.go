package main_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed/agent"
)

// world is a host's side of egress: names that end in .example are allowed, and who
// connects is told what it asked for.
type world struct {
	mu   sync.Mutex
	seen []agent.Intent
}

func (w *world) serve(_ context.Context, in agent.Intent, conn agent.EgressConn) {
	defer conn.Close()
	w.mu.Lock()
	w.seen = append(w.seen, in)
	w.mu.Unlock()
	allowed := strings.HasSuffix(in.Host, ".example")
	switch in.Entry {
	case agent.EntryDNS:
		v := agent.Verdict{Code: 3}
		if allowed {
			v = agent.Verdict{Ports: []uint16{80, 443}}
		}
		conn.Answer(v, nil)
	case agent.EntryName:
		if in.Port == 80 {
			conn.Answer(nil, &agent.Error{Code: agent.ErrDenied, Message: "no"})
			return
		}
		conn.Answer(nil, nil)
		fmt.Fprintf(conn, "%s:%d\n", in.Host, in.Port)
		io.Copy(conn, conn)
	case agent.EntryHTTP:
		line, _ := bufio.NewReader(conn).ReadString('\n')
		if strings.HasPrefix(line, "CONNECT canary") {
			io.WriteString(conn, "HTTP/1.1 403 Forbidden\r\n\r\n")
			return
		}
		io.WriteString(conn, line)
	}
}

func (w *world) count(f func(agent.Intent) bool) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, in := range w.seen {
		if f(in) {
			n++
		}
	}
	return n
}

var entryPorts = agent.EgressConfig{HTTP: 3128, SOCKS: 1080, DNS: 53}

// The sandbox of these tests has bash and perl, and ports below 1024 that anybody may bind
// as a container's engine has them.
func startEgress(t *testing.T) (*sandbox, *world) {
	t.Helper()
	w := &world{}
	s := startWith(t, agent.Config{}, w.serve)
	return s, w
}

func (s *sandbox) open(t *testing.T) {
	t.Helper()
	c := s.config
	c.Egress = &entryPorts
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.Configure(ctx, c); err != nil {
		t.Fatal(err)
	}
}

// lookup is a query by hand: what it prints is the RCODE and the addresses.
const lookup = `perl -MIO::Socket::INET -e '
my ($name, $type, $proto) = @ARGV;
my $q = pack("nnnnnn", 7, 0x0100, 1, 0, 0, 0) . join("", map { chr(length) . $_ } split /\./, $name) . "\0" . pack("nn", $type, 1);
my $s = IO::Socket::INET->new(PeerAddr => "127.0.0.1:53", Proto => $proto, Timeout => 3) or die "none: $!\n";
my $r;
if ($proto eq "tcp") { print $s pack("n", length $q) . $q; read $s, my $n, 2; read $s, $r, unpack("n", $n); }
else { $s->send($q); $s->recv($r, 512); }
my ($id, $flags, $qd, $an) = unpack("nnnn", $r);
print "code ", $flags & 15, " answers $an";
print " ", join(".", unpack("C4", substr($r, -4))) if $an;
print "\n";' `

func (s *sandbox) lookup(t *testing.T, name string, typ int, proto string) string {
	t.Helper()
	out, errs, _ := s.run(t, script(fmt.Sprintf("%s %s %d %s", lookup, name, typ, proto)), "")
	return strings.TrimSpace(out + errs)
}

func TestEntriesAreShutUntilTheHostOpensThem(t *testing.T) {
	s, w := startEgress(t)
	for _, port := range []string{"3128", "1080", "53"} {
		if out, _, _ := s.run(t, script("bash -c 'exec 3<>/dev/tcp/127.0.0.1/"+port+"' 2>&1"), ""); !strings.Contains(out, "refused") {
			t.Errorf("port %s: %q", port, out)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if r, err := s.Canary(ctx, agent.Canary{}); err != nil {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := s.Canary(ctx, agent.Canary{Open: true, Name: "canary.invalid"}); err == nil {
		t.Error("the canary of an open sandbox was content with a shut one")
	}
	s.open(t)
	if r, err := s.Canary(ctx, agent.Canary{Open: true, Name: "canary.invalid"}); err != nil {
		t.Errorf("%+v, %v", r, err)
	} else {
		t.Logf("the canary took %d µs", r.Micros)
	}
	out, _, _ := s.run(t, script(`bash -c 'exec 3<>/dev/tcp/127.0.0.1/3128; echo hello >&3; cat <&3'`), "")
	if out != "hello\n" {
		t.Errorf("the proxy passed on %q", out)
	}
	if err := s.Configure(ctx, s.config); err != nil { // shut again
		t.Fatal(err)
	}
	if out, _, _ := s.run(t, script("bash -c 'exec 3<>/dev/tcp/127.0.0.1/3128' 2>&1"), ""); !strings.Contains(out, "refused") {
		t.Errorf("after it was shut: %q", out)
	}
	if w.count(func(in agent.Intent) bool { return in.Entry == agent.EntryHTTP }) == 0 {
		t.Error("nothing reached the host")
	}
}

// EN3: httpjail#53; nothing is looked up outside, and what is no name of the profile's has
// no address. EN6: a type that is not there is answered at once.
func TestNamesGetSyntheticAddresses(t *testing.T) {
	s, w := startEgress(t)
	s.open(t)
	for _, c := range []struct {
		name  string
		typ   int
		proto string
		want  string
	}{
		{"a.example", 1, "udp", "code 0 answers 1 127.64.0.1"},
		{"b.example", 1, "udp", "code 0 answers 1 127.64.0.2"},
		{"A.Example", 1, "udp", "code 0 answers 1 127.64.0.1"},
		{"a.example", 1, "tcp", "code 0 answers 1 127.64.0.1"},
		{"a.example", 28, "udp", "code 0 answers 0"}, // AAAA
		{"a.example", 65, "udp", "code 0 answers 0"}, // HTTPS
		{"a.test", 1, "udp", "code 3 answers 0"},
		{"localhost", 1, "udp", "code 0 answers 1 127.0.0.1"},
	} {
		if got := s.lookup(t, c.name, c.typ, c.proto); got != c.want {
			t.Errorf("%s %d %s: %q, want %q", c.name, c.typ, c.proto, got, c.want)
		}
	}
	out, _, _ := s.run(t, script(`bash -c 'exec 3<>/dev/tcp/127.64.0.2/443; echo ping >&3; head -2 <&3'`), "")
	if out != "b.example:443\nping\n" {
		t.Errorf("a connection to the address: %q", out)
	}
	if out, _, _ := s.run(t, script(`bash -c 'exec 3<>/dev/tcp/127.64.0.2/80 && cat <&3' 2>&1`), ""); !strings.Contains(out, "reset") {
		t.Errorf("one that the host refuses: %q", out)
	}
	// EA11: microsandbox#1361; an address that no name has refuses at once.
	if out, _, _ := s.run(t, script(`bash -c 'exec 3<>/dev/tcp/127.64.9.9/443' 2>&1`), ""); !strings.Contains(out, "refused") {
		t.Errorf("an address without a name: %q", out)
	}
	if w.count(func(in agent.Intent) bool { return in.Host == "localhost" }) != 0 {
		t.Error("localhost was asked of the host")
	}
}

// I17.
func TestASyntheticAddressNeverChangesItsName(t *testing.T) {
	s, _ := startEgress(t)
	s.open(t)
	for i := range 20 {
		s.lookup(t, fmt.Sprintf("n%d.example", i), 1, "udp")
	}
	first := s.lookup(t, "n7.example", 1, "udp")
	s.BreakLink()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.Ping(ctx); err != nil {
		t.Fatal(err)
	}
	if got := s.lookup(t, "n7.example", 1, "udp"); got != first {
		t.Errorf("after a break of the link %q, before it %q", got, first)
	}
	c := s.config
	if err := s.Configure(ctx, c); err != nil {
		t.Fatal(err)
	}
	s.open(t)
	if got := s.lookup(t, "n7.example", 1, "udp"); got != first {
		t.Errorf("after it was shut and opened again %q, before it %q", got, first)
	}
	if got := s.lookup(t, "fresh.example", 1, "udp"); got != "code 0 answers 1 127.64.0.21" {
		t.Errorf("a new name: %q", got)
	}
}

// The entries are no ports of the sandbox's: whoever forwards one would speak as it.
func TestTheEntriesCannotBeForwarded(t *testing.T) {
	s, _ := startEgress(t)
	s.open(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for _, port := range []uint16{3128, 1080, 53} {
		if conn, err := s.Dial(ctx, port); err == nil {
			conn.Close()
			t.Errorf("port %d was dialled", port)
		}
	}
	ports, err := s.Ports(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range ports {
		t.Errorf("port %+v is listed", p)
	}
}

// Nothing of a flood stays: neither in the agent nor at its host.
func TestAFloodOfConnectionsLeavesNothing(t *testing.T) {
	s, w := startEgress(t)
	s.open(t)
	out, errs, _ := s.run(t, script(`perl -MIO::Socket::INET -e '
for (1..20) { my @s = map { IO::Socket::INET->new("127.0.0.1:3128") } 1..100; print {$_} "x\n" for grep { $_ } @s; for my $c (grep { $_ } @s) { my $l = <$c> } }
print "done\n";'`), "")
	if !strings.Contains(out, "done") {
		t.Fatalf("%q %q", out, errs)
	}
	if n := w.count(func(in agent.Intent) bool { return in.Entry == agent.EntryHTTP }); n != 2000 {
		t.Errorf("%d of 2000 connections reached the host", n)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	stats, err := s.Stats(ctx)
	if err != nil || stats.RSSBytes > 24<<20 {
		t.Errorf("the agent has %d KiB, %v", stats.RSSBytes>>10, err)
	}
}
