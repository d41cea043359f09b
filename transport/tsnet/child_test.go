package tsnet_test

import (
	"bufio"
	"context"
	"crypto/ed25519"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/tsnet"
	"github.com/boxed-mesh/boxed/transport/tsnet/tailnettest"
)

// What a node in a process of its own is started with.
const (
	childControl = "BOXED_TSNET_CHILD_CONTROL"
	childDir     = "BOXED_TSNET_CHILD_DIR"
	childKey     = "BOXED_TSNET_CHILD_KEY"
	childSeed    = "BOXED_TSNET_CHILD_SEED"
)

// child is a node that echoes, until its standard input ends.
func child() {
	defer tailnettest.Setup()()
	key, err := transport.ParseClusterKey(os.Getenv(childKey))
	if err != nil {
		panic(err)
	}
	seed, _ := hex.DecodeString(os.Getenv(childSeed))
	gate, err := transport.NewGate(transport.GateConfig{
		Identity: ed25519.NewKeyFromSeed(seed), Keys: func() []transport.ClusterKey { return []transport.ClusterKey{key} },
	})
	if err != nil {
		panic(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, err := tsnet.New(ctx, tsnet.Config{
		Dir: os.Getenv(childDir), Hostname: "boxed-child", ControlURL: os.Getenv(childControl), Gate: gate,
	})
	if err != nil {
		panic(err)
	}
	defer n.Close()
	if err := n.Up(ctx); err != nil {
		panic(err)
	}
	l, err := n.Listen(transport.API)
	if err != nil {
		panic(err)
	}
	go func() {
		for {
			c, err := l.AcceptPeer()
			if err != nil {
				return
			}
			go io.Copy(c, c)
		}
	}()
	fmt.Println("up", n.Addr(), gate.ID())
	io.Copy(io.Discard, os.Stdin)
}

// process is a node in a process of its own.
type process struct {
	target transport.Target
	cmd    *exec.Cmd
}

func startProcess(t *testing.T, env []string) process {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(append(os.Environ(), tailnettest.Env()...), env...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Process.Kill(); cmd.Wait() })
	line := make(chan string, 1)
	go func() {
		text, _ := bufio.NewReader(out).ReadString('\n')
		line <- text
	}()
	select {
	case text := <-line:
		if f := strings.Fields(text); len(f) == 3 && f[0] == "up" {
			return process{transport.Target{ID: boxed.NodeID(f[2]), Addr: f[1]}, cmd}
		}
		t.Fatalf("the process said %q", text)
	case <-time.After(patience):
		t.Fatal("the process did not come up")
	}
	return process{}
}

// kill ends the process as a crash does: nothing is said to anybody.
func (p process) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// A machine that crashes says no goodbye. Who waits for its answer learns of it
// anyway: when it stays away, and when it is back at once and answers again.
func TestAConnectionEndsWhenTheOtherMachineCrashes(t *testing.T) {
	for name, back := range map[string]bool{"and stays away": false, "and is back": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tailnet, key := tailnettest.Start(t), transport.NewClusterKey()
			seed := make([]byte, ed25519.SeedSize)
			env := []string{
				childControl + "=" + tailnet.ControlURL, childDir + "=" + t.TempDir(),
				childKey + "=" + key.Secret(), childSeed + "=" + hex.EncodeToString(seed),
			}
			a := node(t, newConfig(t, tailnet, key))
			b := startProcess(t, env)
			eventually(t, "it is a peer", func() bool { return len(network(a).Peers()) == 1 })
			c, err := a.Dial(within(t, patience), b.target, transport.API)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			ping(t, c)
			// A connection that is younger could be one with the process after the crash.
			time.Sleep(11 * time.Second)
			ping(t, c)
			b.kill()
			if back {
				b = startProcess(t, env)
				var again transport.Conn
				eventually(t, "it takes connections again", func() bool { // the first try may have gone to the one that is no more
					var err error
					again, err = a.Dial(t.Context(), b.target, transport.API)
					return err == nil
				})
				defer again.Close()
				ping(t, again)
				defer ping(t, again) // it is not taken for one of before
			}
			ended := make(chan error, 1)
			go func() { _, err := c.Read(make([]byte, 1)); ended <- err }()
			select {
			case err := <-ended:
				if err == nil {
					t.Error("something was read")
				}
			case <-time.After(patience):
				t.Error("it is still open")
			}
		})
	}
}

// ping sees that c echoes.
func ping(t *testing.T, c net.Conn) {
	t.Helper()
	c.SetDeadline(time.Now().Add(patience))
	defer c.SetDeadline(time.Time{})
	if _, err := io.WriteString(c, "ping"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
}
