package tsnet_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/tsnet"
	"github.com/boxed-mesh/boxed/transport/tsnet/tailnettest"
)

func becomes(t *testing.T, n *tsnet.Network, state tsnet.State) tsnet.Status {
	t.Helper()
	eventually(t, "the state is "+string(state)+", and not "+string(n.Status().State), func() bool { return n.Status().State == state })
	return n.Status()
}

// Case M5: "needs login" is a state that is seen, with the next step.
func TestALoginThatIsNeededIsShown(t *testing.T) {
	tailnet := tailnettest.Start(t, tailnettest.Config{RequireAuth: true})
	n := start(t, newConfig(t, tailnet, transport.NewClusterKey()))
	s := becomes(t, n, tsnet.NeedsLogin)
	if !strings.HasPrefix(s.LoginURL, tailnet.ControlURL) || !strings.Contains(s.Next, s.LoginURL) || !strings.Contains(s.Next, "auth key") {
		t.Errorf("it says %+v", s)
	}
	if n.Addr() != "" {
		t.Errorf("it has the address %s", n.Addr())
	}
	err := n.Up(within(t, 100*time.Millisecond))
	if err == nil || !strings.Contains(err.Error(), s.LoginURL) {
		t.Errorf("waiting for it says %v", err)
	}
	if !tailnet.CompleteLogin(s.LoginURL) {
		t.Fatal("that is no login URL")
	}
	up(t, n)
	if s := n.Status(); s.State != tsnet.Running || s.Problem != "" || s.LoginURL != "" || s.Addr != n.Addr() || s.Addr == "" {
		t.Errorf("it says %+v", s)
	}
}

func TestARefusedAuthKeyIsShown(t *testing.T) {
	tailnet := tailnettest.Start(t, tailnettest.Config{AuthKey: "tskey-good"})
	cfg := newConfig(t, tailnet, transport.NewClusterKey())
	cfg.AuthKey = "tskey-bad"
	n := start(t, cfg)
	eventually(t, "there is a problem", func() bool { return n.Status().Problem != "" })
	if s := n.Status(); s.State != tsnet.NeedsLogin || !strings.Contains(s.Problem, "invalid authkey") || !strings.Contains(s.Next, tsnet.DefaultTag) {
		t.Errorf("it says %+v", s)
	}
	n.Close()
	cfg.AuthKey = "tskey-good"
	up(t, start(t, cfg))
}

func TestAnApprovalThatIsNeededIsShown(t *testing.T) {
	tailnet := tailnettest.Start(t, tailnettest.Config{RequireApproval: true})
	cfg := newConfig(t, tailnet, transport.NewClusterKey())
	n := start(t, cfg)
	if s := becomes(t, n, tsnet.NeedsApproval); !strings.Contains(s.Next, "approve") {
		t.Errorf("it says %+v", s)
	}
	if err := tailnet.Approve(cfg.Hostname); err != nil {
		t.Fatal(err)
	}
	up(t, n)
}

// A control server that does not answer keeps nobody waiting.
func TestAControlServerThatDoesNotAnswerIsShown(t *testing.T) {
	tailnet := tailnettest.Start(t)
	cfg := newConfig(t, tailnet, transport.NewClusterKey())
	cfg.ControlURL = "http://127.0.0.1:1"
	began := time.Now()
	n := start(t, cfg)
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("New took %v", took)
	}
	eventually(t, "there is a problem", func() bool { return n.Status().Problem != "" })
	if s := n.Status(); s.State != tsnet.Starting || !strings.Contains(s.Next, cfg.ControlURL) {
		t.Errorf("it says %+v", s)
	}
	began = time.Now()
	n.Close()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("Close took %v", took)
	}
	if s := n.Status(); s.State != tsnet.Stopped {
		t.Errorf("it says %+v", s)
	}
}

// Case M5: the machine is the same one after the daemon has started again, also
// where a new one would have to log in.
func TestTheMachineIsTheSameAfterARestart(t *testing.T) {
	tailnet := tailnettest.Start(t, tailnettest.Config{RequireAuth: true})
	cfg := newConfig(t, tailnet, transport.NewClusterKey())
	cfg.Dir = filepath.Join(cfg.Dir, "new", "dir")
	n := start(t, cfg)
	tailnet.CompleteLogin(becomes(t, n, tsnet.NeedsLogin).LoginURL)
	up(t, n)
	addr, key := n.Addr(), tailnet.Machine(cfg.Hostname).Key
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	n = up(t, start(t, cfg))
	if n.Addr() != addr || tailnet.Machine(cfg.Hostname).Key != key || tailnet.Control.NumNodes() != 1 {
		t.Errorf("it was %s and is %s", addr, n.Addr())
	}
	if info, err := os.Stat(cfg.Dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("its directory is %v, %v", info, err)
	}
}

func TestAnExpiryOfTheKeyIsShown(t *testing.T) {
	tailnet := tailnettest.Start(t)
	cfg := newConfig(t, tailnet, transport.NewClusterKey())
	n := up(t, start(t, cfg))
	if s := n.Status(); !s.KeyExpiry.IsZero() || s.Problem != "" {
		t.Errorf("it says %+v", s)
	}
	soon := time.Now().Add(5*24*time.Hour + time.Hour).Truncate(time.Second)
	if err := tailnet.SetKeyExpiry(cfg.Hostname, soon); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is seen", func() bool { return n.Status().Problem != "" })
	if s := n.Status(); s.State != tsnet.Running || !s.KeyExpiry.Equal(soon) || !strings.Contains(s.Problem, "5 days") || !strings.Contains(s.Next, "disable key expiry") {
		t.Errorf("it says %+v", s)
	}
	if err := tailnet.SetKeyExpiry(cfg.Hostname, time.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	if s := becomes(t, n, tsnet.Expired); !strings.Contains(s.Problem, "expired on") || s.Next == "" {
		t.Errorf("it says %+v", s)
	}
	// An administrator may extend it, and nothing need be started again.
	if err := tailnet.SetKeyExpiry(cfg.Hostname, time.Time{}); err != nil {
		t.Fatal(err)
	}
	becomes(t, n, tsnet.Running)
	up(t, n)
}

// After the key has expired, the same machine logs in again.
func TestAnExpiredMachineLogsInAgain(t *testing.T) {
	tailnet := tailnettest.Start(t, tailnettest.Config{RequireAuth: true})
	cfg := newConfig(t, tailnet, transport.NewClusterKey())
	n := start(t, cfg)
	tailnet.CompleteLogin(becomes(t, n, tsnet.NeedsLogin).LoginURL)
	addr := up(t, n).Addr()
	if err := tailnet.SetKeyExpiry(cfg.Hostname, time.Now().Add(-time.Minute)); err != nil {
		t.Fatal(err)
	}
	becomes(t, n, tsnet.Expired)
	n.Close()
	n = start(t, cfg)
	eventually(t, "there is a login URL", func() bool { return n.Status().LoginURL != "" })
	if s := n.Status(); s.State != tsnet.NeedsLogin && s.State != tsnet.Expired || !strings.Contains(s.Next, s.LoginURL) {
		t.Errorf("it says %+v", s)
	}
	tailnet.CompleteLogin(n.Status().LoginURL)
	eventually(t, "the key of before is gone", func() bool { return tailnet.Control.NumNodes() == 1 })
	if err := tailnet.SetKeyExpiry(cfg.Hostname, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if up(t, n); n.Addr() != addr {
		t.Errorf("it was %s and is %s", addr, n.Addr())
	}
}

func TestPeersAreTheMachinesWithTheTag(t *testing.T) {
	tailnet, key := tailnettest.Start(t), transport.NewClusterKey()
	a, b := node(t, newConfig(t, tailnet, key)), node(t, newConfig(t, tailnet, key))
	otherConfig := newConfig(t, tailnet, key)
	otherConfig.Tag = "tag:other"
	other := node(t, otherConfig)
	acquainted(t, a, b)
	eventually(t, "all are seen", func() bool {
		_, err := network(a).WhoIs(within(t, patience), other.Addr())
		return err == nil
	})
	want := tsnet.Peer{Name: network(b).Status().DNSName, Addr: b.Addr(), Online: true}
	if got := network(a).Peers(); len(got) != 1 || got[0] != want || !strings.HasSuffix(want.Name, "."+tailnettest.Domain) {
		t.Errorf("got %v, not %v", got, want)
	}
}
