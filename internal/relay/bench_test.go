package relay_test

import (
	"io"
	"net"
	"path/filepath"
	"testing"

	"github.com/boxed-mesh/boxed/internal/relay"
)

// BenchmarkTwoHops is what a tunnel goes through: a socket of loopback, the agent, a unix
// socket, the node, another socket of loopback.
func BenchmarkTwoHops(b *testing.B) {
	unixL, err := net.Listen("unix", filepath.Join(b.TempDir(), "s"))
	if err != nil {
		b.Fatal(err)
	}
	defer unixL.Close()
	a, ra := ends(b)
	z, rz := ends(b)
	ua, err := net.Dial("unix", unixL.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	uz, err := unixL.Accept()
	if err != nil {
		b.Fatal(err)
	}
	go relay.Both(ra, ua, relay.Options{})
	go relay.Both(uz, rz, relay.Options{})
	const chunk = 256 << 10
	b.SetBytes(chunk)
	go func() {
		buf := make([]byte, chunk)
		for {
			if _, err := a.Write(buf); err != nil {
				return
			}
		}
	}()
	buf := make([]byte, chunk)
	for b.Loop() {
		if _, err := io.ReadFull(z, buf); err != nil {
			b.Fatal(err)
		}
	}
}
