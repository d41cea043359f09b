package ctl

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// answers is a remote that answers each script with a line of text.
type answers map[string]string

func (a answers) name() string { return "root@there" }

func (a answers) run(_ context.Context, stdin io.Reader, script string, _ ...string) (string, error) {
	if stdin != nil {
		_, _ = io.Copy(io.Discard, stdin)
	}
	out, ok := a[script]
	if !ok || strings.HasPrefix(out, "!") {
		return "", &remoteError{1, strings.TrimPrefix(out, "!")}
	}
	return out, nil
}

func TestOnlyAFitHostIsMadeANode(t *testing.T) {
	for name, tt := range map[string]struct{ look, want, hint string }{
		"a Mac":                 {"Darwin arm64\n501\nnone\nnone", "it is Darwin arm64", "nodes run on Linux, amd64 or arm64"},
		"a small board":         {"Linux armv7l\n0\nnone\nnone", "it is Linux armv7l", "nodes run on Linux, amd64 or arm64"},
		"Windows":               {"MINGW64_NT-10.0 x86_64\n0\nnone\nnone", "it is MINGW64_NT-10.0 x86_64", "nodes run on Linux"},
		"nobody who may":        {"Linux x86_64\n1000\nnone\nsystemd", "is not root and may not use sudo", "root@HOST"},
		"a shell that chatters": {"welcome\nLinux x86_64\n0\nnone\nnone", "does not say what it is", ""},
	} {
		t.Run(name, func(t *testing.T) {
			j := &addition{host: answers{scriptLook: tt.look}}
			if result, err := j.look(t.Context()); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(nextStep(err), tt.hint) {
				t.Errorf("%q, %v (%s)", result, err, nextStep(err))
			}
		})
	}
	j := &addition{host: answers{scriptLook: "Linux aarch64\n1000\nsudo\nsystemd"}}
	if _, err := j.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(hostFacts{arch: "arm64", root: "sudo -n", systemd: true}, j.facts, cmp.AllowUnexported(hostFacts{})); diff != "" {
		t.Error(diff)
	}
}

func TestAProgramOfAnotherMachineIsRefused(t *testing.T) {
	header := make([]byte, 64) // an ELF header alone, of arm64
	copy(header, "\x7fELF\x02\x01\x01")
	binary.LittleEndian.PutUint16(header[16:], 2)
	binary.LittleEndian.PutUint16(header[18:], 183)
	binary.LittleEndian.PutUint32(header[20:], 1)
	file := filepath.Join(t.TempDir(), "boxed-node")
	if err := os.WriteFile(file, header, 0o644); err != nil {
		t.Fatal(err)
	}
	j := &addition{host: answers{}, facts: hostFacts{arch: "amd64"}}
	if _, err := j.program("boxed-node", file); err == nil || !strings.Contains(err.Error(), "is a program for arm64, the host is amd64") {
		t.Errorf("got %v", err)
	}
	j.facts.arch = "arm64"
	if got, err := j.program("boxed-node", file); err != nil || !bytes.Equal(got, header) {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
	j.facts.arch = "another"
	if _, err := j.program("boxed-node", ""); err == nil || !strings.Contains(nextStep(err), "--node-binary FILE --ctl-binary FILE") {
		t.Errorf("got %v (%s)", err, nextStep(err))
	}
	if _, err := j.program("boxed-node", file+"-none"); err == nil || !strings.Contains(err.Error(), "--node-binary: ") {
		t.Errorf("got %v", err)
	}
}

// The unit of a host that is added is that of `make install`.
func TestTheUnitIsTheOneThatIsInstalled(t *testing.T) {
	want, err := os.ReadFile(filepath.Join("..", "..", "deploy", "boxed-node.service.in"))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), unitText); diff != "" {
		t.Errorf("go generate ./cmd/boxedctl copies it:\n%s", diff)
	}
	usual, other := fillUnit(addPrefix, addDataDir), fillUnit("/opt/boxed", "/srv/boxed")
	for text, lines := range map[string][]string{
		usual: {"ExecStart=/usr/local/bin/boxed-node run\n", "StateDirectory=boxed\n"},
		other: {"ExecStart=/opt/boxed/bin/boxed-node run --data-dir /srv/boxed\n", "ReadWritePaths=/srv/boxed\n"},
	} {
		for _, line := range lines {
			if !strings.Contains(text, line) {
				t.Errorf("no %q in\n%s", line, text)
			}
		}
	}
	if strings.Contains(other, "StateDirectory") || strings.Contains(usual+other, "@bindir@") {
		t.Errorf("it is not all filled in:\n%s", other)
	}
}

func TestThePolicyIsJSONWithComments(t *testing.T) {
	var p struct {
		TagOwners map[string][]string `json:"tagOwners"`
		Grants    []struct {
			Src, Dst, IP []string
			App          map[string][]struct{ Role string }
		} `json:"grants"`
	}
	d := json.NewDecoder(strings.NewReader(withoutComments(policyText)))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		t.Fatal(err)
	}
	if len(p.TagOwners["tag:boxed"]) != 1 || len(p.Grants) != 3 || p.Grants[2].App["boxed-mesh.dev/cap/sandbox"][0].Role != "user" {
		t.Errorf("it says %+v", p)
	}
	for i, want := range []string{"tag:boxed tag:boxed tcp:7946 udp:7946", "autogroup:member tag:boxed tcp:443 tcp:80", "autogroup:member tag:boxed"} {
		g := p.Grants[i]
		if got := strings.Join(append(append(g.Src, g.Dst...), g.IP...), " "); got != want {
			t.Errorf("grant %d is %s, want %s", i, got, want)
		}
	}
}

func TestClientsOptionsCannotBeAHost(t *testing.T) {
	for _, where := range []string{"", "@", "@host", "root@", "-oProxyCommand=x", "a b@c", "root@h\nx"} {
		if _, err := newSSH(where, "", 0, nil); err == nil {
			t.Errorf("%q was taken", where)
		}
	}
}
