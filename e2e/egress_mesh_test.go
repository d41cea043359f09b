package e2e_test

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
)

// pair is a cluster of two nodes, each on a host of its own.
func (in *internet) pair(args ...string) (a, b *node) {
	in.t.Helper()
	second := in.another("10.77.0.3")
	a = in.nodeOn(in.host, "--name", "near", "--mesh-listen", in.host.addr+":7946")
	b = in.nodeOn(second, append([]string{
		"--name", "far", "--mesh-listen", second.addr + ":7946", "--uid-range-first", "210000", "--uid-range-last", "210999",
	}, args...)...)
	within(in.t, 30*time.Second, "a cluster", func() bool {
		_, err := a.StartCluster(in.t.Context(), boxed.ClusterRequest{})
		return err == nil
	})
	token, err := a.ClusterToken(in.t.Context())
	if err != nil {
		in.t.Fatal(err)
	}
	within(in.t, 60*time.Second, "the second node to join", func() bool {
		_, err := b.StartCluster(in.t.Context(), boxed.ClusterRequest{Token: token})
		return err == nil
	})
	within(in.t, 30*time.Second, "the nodes to know each other", func() bool {
		_, errA := a.GetNode(in.t.Context(), "far")
		_, errB := b.GetNode(in.t.Context(), "near")
		return errA == nil && errB == nil
	})
	return a, b
}

func (n *node) id() boxed.NodeID {
	n.t.Helper()
	info, err := n.NodeInfo(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	return info.ID
}

// memoryHolds looks for a text in a process's memory.
func memoryHolds(t *testing.T, pid int, text string) bool {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	const piece = 1 << 20
	buf := make([]byte, piece+len(text))
	for line := range strings.Lines(string(maps)) {
		var from, to int64
		var rights string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &rights); err != nil || rights[0] != 'r' || strings.Contains(line, "[v") {
			continue
		}
		for at := from; at < to; at += piece {
			n, _ := mem.ReadAt(buf[:min(int64(len(buf)), to-at)], at)
			if strings.Contains(string(buf[:n]), text) {
				return true
			}
		}
	}
	return false
}

func TestASandboxLeavesByAnotherNode(t *testing.T) {
	in := newInternet(t)
	in.name("api.acme.example")
	in.name("inner.acme.example", farPrivate)
	near, far := in.pair("--egress-exits", "* abroad", "--egress-open", farPrivate.String()+"/32 443 inner.acme.example")
	profile := "version: 1\nname: abroad\nexit: " + string(far.id()) + "\nrules:\n- host: api.acme.example\n- host: inner.acme.example\n"
	if _, err := near.ApplyProfile(t.Context(), []byte(profile), false); err != nil {
		t.Fatal(err)
	}
	other := strings.Replace(profile, "abroad", "unlisted", 1)
	if _, err := near.ApplyProfile(t.Context(), []byte(other), false); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, "the profile to be on the other node", func() bool {
		_, err := far.GetProfile(t.Context(), "abroad")
		return err == nil
	})
	s := near.create(boxed.Spec{Node: near.id(), Egress: &boxed.EgressSpec{Profile: "abroad"}})
	out, status := near.sh(s.ID, `curl -sS https://api.acme.example/hello`)
	if status.Code != 0 || !strings.Contains(out, `"path":"/hello"`) {
		t.Fatalf("%+v: %s\n%s", status, out, far.log.tail(2000))
	}
	// I16: what the exit's operator opened for its own is not for others.
	if out, _ := near.sh(s.ID, `curl -sS https://inner.acme.example/`); strings.Contains(out, `"path"`) || !strings.Contains(out, "403") {
		t.Errorf("the exit's private address: %s", out)
	}
	// An exit serves the profiles that it names.
	u := near.create(boxed.Spec{Node: near.id(), Egress: &boxed.EgressSpec{Profile: "unlisted"}})
	if out, _ := near.sh(u.ID, `curl -sS https://api.acme.example/`); strings.Contains(out, `"path"`) {
		t.Errorf("a profile that the exit does not serve: %s", out)
	}
	// One that is away is no reason to leave otherwise.
	far.stop(syscall.SIGKILL)
	in.requests()
	out, _ = near.sh(s.ID, `curl -sS -o /dev/null -w '%{http_connect}' https://api.acme.example/hello; true`)
	if !strings.Contains(out, "503") || len(in.requests()) != 0 {
		t.Errorf("without the exit: %s", out)
	}
}

func TestANodeUsesASecretForOthersThatNeverHaveIt(t *testing.T) {
	in := newInternet(t)
	for _, name := range []string{"github.com", "api.github.com", "raw.githubusercontent.com", "uploads.github.com"} {
		in.name(name)
	}
	near, far := in.pair()
	if _, err := far.SetSecret(t.Context(), boxed.SecretRequest{Secret: boxed.Secret{Name: "github", Preset: "github", HeldBy: far.id()}, Value: real}); err != nil {
		t.Fatal(err)
	}
	within(t, 10*time.Second, "the secret to be known on the other node", func() bool {
		list, err := near.ListSecrets(t.Context())
		return err == nil && len(list) == 1 && !list[0].Here
	})
	s := near.create(boxed.Spec{Node: near.id(), Egress: &boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "github", Repos: []string{"acme/app"}}}}})
	out, status := near.sh(s.ID, `curl -sS -H "Authorization: token $GH_TOKEN" https://api.github.com/repos/acme/app; curl -sS --http1.1 -d '{"title":"x"}' -H "Authorization: token $GH_TOKEN" https://api.github.com/repos/acme/app/issues`)
	got := in.requests()
	if status.Code != 0 || len(got) != 2 || got[0].Header.Get("Authorization") != "token "+real || got[1].Body != `{"title":"x"}` {
		t.Fatalf("%+v: %s\nupstream saw %+v\nfar: %s", status, out, got, far.log.tail(2000))
	}
	if out, _ := near.sh(s.ID, `curl -sS -H "Authorization: token $GH_TOKEN" https://api.github.com/repos/acme/other`); !strings.Contains(out, `"reason":"path"`) {
		t.Errorf("beyond its repository: %s", out)
	}
	if leaks(out) || leaks(near.log.String()) || leaks(far.log.String()) {
		t.Error("the credential is somewhere")
	}
	if held := memoryHolds(t, far.cmd.Process.Pid, "R3alT0kenThatMustN0tLeak"); !held {
		t.Error("the holder does not have it: what looks for it finds nothing")
	}
	if memoryHolds(t, near.cmd.Process.Pid, "R3alT0kenThatMustN0tLeak") {
		t.Error("the credential is in the memory of the node that never had it")
	}
	far.stop(syscall.SIGKILL)
	in.requests()
	out, _ = near.sh(s.ID, `curl -sS -o /dev/null -w '%{http_connect}' -H "Authorization: token $GH_TOKEN" https://api.github.com/repos/acme/app; true`)
	if !strings.Contains(out, "503") || len(in.requests()) != 0 {
		t.Errorf("without the holder: %s", out)
	}
}
