package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// outside is all that there is for a node but its own host: a name server and two servers at
// an address that the node takes for public. It and the host are network namespaces, and
// what one sends this process hands to the other.
type outside struct {
	host  *netHost
	far   *netHost
	roots string // file of the authority that signed the servers' certificate
	work  sync.WaitGroup
	ends  []func()
}

// netHost is a network namespace with one interface.
type netHost struct {
	ns  string // of `ip netns`
	tun *os.File
}

// Where things are outside. Names end in .example, which nobody has (RFC 2606).
const (
	hostAddress     = "10.77.0.1"
	resolverAddress = "10.77.0.2"
	farAddress      = "93.184.215.2"

	rawName       = "raw.bench.example"
	tunnelName    = "tunnel.bench.example"
	interceptName = "intercept.bench.example"

	rawPort = 5001 // neither 80 nor 443, where raw rules are not allowed
)

// rawAt is the raw server at a name or an address.
func rawAt(host string) string { return net.JoinHostPort(host, strconv.Itoa(rawPort)) }

// newOutside makes it, with files in dir. Its close ends it.
func newOutside(dir string) (_ *outside, err error) {
	o := &outside{}
	defer func() {
		if err != nil {
			o.close()
		}
	}()
	if o.host, err = o.newHost("host", hostAddress); err != nil {
		return nil, err
	}
	if o.far, err = o.newHost("far", resolverAddress, farAddress); err != nil {
		return nil, err
	}
	o.work.Go(func() { carry(o.host.tun, o.far.tun) })
	o.work.Go(func() { carry(o.far.tun, o.host.tun) })
	certificate, err := o.certify(dir)
	if err != nil {
		return nil, err
	}
	if err := o.serveNames(); err != nil {
		return nil, err
	}
	raw, err := o.listen(rawAt(farAddress))
	if err != nil {
		return nil, err
	}
	o.work.Go(func() { serveRaw(raw) })
	events, err := o.listen(farAddress + ":443")
	if err != nil {
		return nil, err
	}
	o.work.Go(func() { serveEvents(events, certificate) })
	return o, nil
}

func (o *outside) close() {
	for i := len(o.ends) - 1; i >= 0; i-- {
		o.ends[i]()
	}
	o.work.Wait()
}

// newHost makes a host with addresses, of which the first is on the network of both.
func (o *outside) newHost(name string, addresses ...string) (*netHost, error) {
	h := &netHost{ns: fmt.Sprintf("bench-%d-%s", os.Getpid(), name)}
	ip := func(args ...string) error {
		if text, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, text)
		}
		return nil
	}
	if err := ip("netns", "add", h.ns); err != nil {
		return nil, err
	}
	o.ends = append(o.ends, func() { ip("netns", "del", h.ns) })
	if err := h.inside(h.openTUN); err != nil {
		return nil, fmt.Errorf("make a network for %s: %w", h.ns, err)
	}
	o.ends = append(o.ends, func() { h.tun.Close() })
	steps := [][]string{
		{"addr", "add", addresses[0] + "/24", "dev", "lan0"},
		// As large as packets between namespaces may be, so that carrying them costs little beside what is
		// measured, and a queue that loses none of them.
		{"link", "set", "lan0", "mtu", "60000", "txqueuelen", "5000", "up"},
		{"link", "set", "lo", "up"},
		{"route", "add", "default", "dev", "lan0"},
	}
	for _, a := range addresses[1:] {
		steps = append(steps, []string{"addr", "add", a + "/32", "dev", "lan0"})
	}
	for _, args := range steps {
		if err := ip(append([]string{"-n", h.ns}, args...)...); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// inside runs f on a thread that is in the host's network meanwhile.
func (h *netHost) inside(f func() error) error {
	home, err := os.Open("/proc/self/ns/net")
	if err != nil {
		return err
	}
	defer home.Close()
	ns, err := os.Open("/var/run/netns/" + h.ns)
	if err != nil {
		return err
	}
	defer ns.Close()
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		// A thread that cannot go back ends with this goroutine. No other may: it could be one that has started a
		// program, which would end too (Pdeathsig).
		if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back == nil {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}

func (h *netHost) openTUN() error {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	var req struct {
		name  [unix.IFNAMSIZ]byte
		flags uint16
		_     [22]byte
	}
	copy(req.name[:], "lan0")
	req.flags = unix.IFF_TUN | unix.IFF_NO_PI
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TUNSETIFF, uintptr(unsafe.Pointer(&req))); errno != 0 {
		unix.Close(fd)
		return errno
	}
	h.tun = os.NewFile(uintptr(fd), "tun")
	return nil
}

// carry hands to one host what another sends, until the other's end.
func carry(from, to *os.File) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		if n >= 20 && buf[0]>>4 == 4 {
			to.Write(buf[:n])
		}
	}
}

// dial connects from within the host's network.
func (h *netHost) dial(ctx context.Context, network, addr string) (conn net.Conn, err error) {
	err = h.inside(func() (err error) {
		conn, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, network, addr)
		return err
	})
	return conn, err
}

// argv is a command line within the host's network. Unlike `ip netns exec` it leaves mounts
// as they are: a node needs its control groups.
func (h *netHost) argv(program string, args ...string) []string {
	return append([]string{"nsenter", "--net=/var/run/netns/" + h.ns, program}, args...)
}

// listen listens at the far host, and stops with it.
func (o *outside) listen(addr string) (l net.Listener, err error) {
	err = o.far.inside(func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	})
	if err == nil {
		o.ends = append(o.ends, func() { l.Close() })
	}
	return l, err
}

// certify makes an authority, of which the certificate is in a file of dir, and a
// certificate of its for the names that are served with TLS.
func (o *outside) certify(dir string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the authority of a benchmark"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(48 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	root, err := x509.CreateCertificate(rand.Reader, ca, ca, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: tunnelName}, DNSNames: []string{tunnelName, interceptName},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(24 * time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	signed, err := x509.CreateCertificate(rand.Reader, leaf, ca, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	o.roots = filepath.Join(dir, "roots.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root})
	return &tls.Certificate{Certificate: [][]byte{signed}, PrivateKey: key}, os.WriteFile(o.roots, text, 0o644)
}

// serveNames answers for the names.
func (o *outside) serveNames() error {
	var conn net.PacketConn
	err := o.far.inside(func() (err error) {
		conn, err = net.ListenPacket("udp", resolverAddress+":53")
		return err
	})
	if err != nil {
		return err
	}
	o.ends = append(o.ends, func() { conn.Close() })
	o.work.Go(func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if reply, err := answer(buf[:n]); err == nil {
				conn.WriteTo(reply, from)
			}
		}
	})
	return nil
}

func answer(query []byte) ([]byte, error) {
	var p dnsmessage.Parser
	head, err := p.Start(query)
	if err != nil {
		return nil, err
	}
	q, err := p.Question()
	if err != nil {
		return nil, err
	}
	reply := dnsmessage.Header{ID: head.ID, Response: true, RecursionAvailable: true}
	known := strings.HasSuffix(strings.ToLower(q.Name.String()), ".bench.example.")
	if !known {
		reply.RCode = dnsmessage.RCodeNameError
	}
	b := dnsmessage.NewBuilder(nil, reply)
	err = errors.Join(b.StartQuestions(), b.Question(q), b.StartAnswers())
	if known && q.Type == dnsmessage.TypeA {
		h := dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 60}
		err = errors.Join(err, b.AResource(h, dnsmessage.AResource{A: netip.MustParseAddr(farAddress).As4()}))
	}
	if err != nil {
		return nil, err
	}
	return b.Finish()
}

// What a client of the raw server asks for, by its first byte.
const (
	askDown  = 'd' // and a length of 8 bytes: so many come, and the end
	askUp    = 'u' // and a length: so many are read, and answered by one byte and the end
	askHold  = 'h' // a byte comes, and then nothing until the client ends
	askShort = 's' // a byte comes, and the end
)

// rawChunk is how much the raw server and its client read or write at once.
const rawChunk = 256 << 10

// serveRaw serves until the listener is closed.
func serveRaw(l net.Listener) {
	content := make([]byte, rawChunk)
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer conn.Close()
			rawAnswer(conn, content)
		}()
	}
}

func rawAnswer(conn net.Conn, content []byte) error {
	var head [9]byte
	if _, err := io.ReadFull(conn, head[:1]); err != nil {
		return err
	}
	switch head[0] {
	case askShort:
		_, err := conn.Write(head[:1])
		return err
	case askHold:
		if _, err := conn.Write(head[:1]); err != nil {
			return err
		}
		_, err := conn.Read(head[:1])
		return err
	}
	if _, err := io.ReadFull(conn, head[1:]); err != nil {
		return err
	}
	left := int64(binary.BigEndian.Uint64(head[1:]))
	if head[0] == askUp {
		if err := readRaw(conn, left); err != nil {
			return err
		}
		_, err := conn.Write(head[:1])
		return err
	}
	return writeRaw(conn, left, content)
}

// readRaw reads so many bytes.
func readRaw(r io.Reader, bytes int64) error {
	buf := make([]byte, min(rawChunk, bytes))
	for bytes > 0 {
		n, err := r.Read(buf[:min(bytes, int64(len(buf)))])
		if bytes -= int64(n); err != nil && bytes > 0 {
			return fmt.Errorf("%d bytes did not come: %w", bytes, err)
		}
	}
	return nil
}

// writeRaw writes so many bytes.
func writeRaw(w io.Writer, bytes int64, content []byte) error {
	for bytes > 0 {
		n, err := w.Write(content[:min(bytes, int64(len(content)))])
		if bytes -= int64(n); err != nil {
			return err
		}
	}
	return nil
}

// serveEvents answers every request with the head of a stream of events and its first, both
// at once, and goes on for as long as the client stays: whoever waits for the end of an
// answer hands nothing on.
func serveEvents(l net.Listener, certificate *tls.Certificate) {
	s := &http.Server{
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{*certificate}},
		ErrorLog:  log.New(io.Discard, "", 0), // clients go away in the middle
		Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			io.WriteString(w, "data: 1\n\n")
			http.NewResponseController(w).Flush()
			<-req.Context().Done()
		}),
	}
	defer s.Close()
	s.ServeTLS(l, "", "")
}
