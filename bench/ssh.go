package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Milliseconds but where the name says otherwise.
var sshColumns = []string{"connect_true", "new_prompt", "scp_up_mb_s", "scp_down_mb_s", "scp_mb_s"}

// openssh is OpenSSH's own server on this machine: programs run on the host.
const openssh = "openssh"

// sshPath is one server, and where its client finds it.
type sshPath struct {
	name   string
	config string // of the client; the server is host
	file   string // where a large file goes: to memory
	prompt string // the user name of a shell
	after  func(ctx context.Context) error
}

// front measures the SSH front door against OpenSSH's server, with OpenSSH's own
// clients: a process from its start to its end.
func front(ctx context.Context, r *rig, s *sheet) error {
	dir, err := r.newDir()
	if err != nil {
		return err
	}
	key := filepath.Join(dir, "key")
	if err := run(ctx, io.Discard, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key); err != nil {
		return err
	}
	stop, theirs, err := startOpenSSH(ctx, dir, key)
	if err != nil {
		return err
	}
	defer stop()
	address, err := freeAddress()
	if err != nil {
		return err
	}
	n, err := r.startNode(ctx, settings{pool: defaultPool, withoutBounds: true, ssh: address, authorized: key + ".pub"})
	if err != nil {
		return err
	}
	defer n.close()
	size := r.count(1024, 256, 64) * boxed.MiB
	box, err := n.Create(ctx, boxed.Spec{
		Name: "box", TTL: boxed.DefaultMaxTTL, Limits: boxed.Limits{MemoryBytes: 3072 * boxed.MiB, WorkspaceBytes: 2048 * boxed.MiB},
	})
	if err != nil {
		return err
	}
	defer n.Destroy(context.WithoutCancel(ctx), box.ID)
	if err := n.settle(ctx, time.Minute); err != nil && ctx.Err() != nil {
		return err
	}
	ours := sshPath{name: boxedPool, file: "/workspace/file", prompt: "new"}
	if ours.config, err = clientConfig(dir, "boxed", address, key, "box"); err != nil {
		return err
	}
	full := n.pool + 1 // with box
	ours.after = func(ctx context.Context) error {
		return until(ctx, time.Minute, "the node to rest", func() (bool, error) {
			ids, err := n.containers(ctx)
			return len(ids) == full, err
		})
	}
	file := filepath.Join("/dev/shm", fmt.Sprintf("boxed-bench-%d", os.Getpid()))
	theirs.file = file + "-there"
	defer os.Remove(file)
	defer os.Remove(theirs.file)
	content := make([]byte, size)
	rand.NewChaCha8([32]byte{13}).Read(content)
	if err := os.WriteFile(file, content, 0o600); err != nil {
		return err
	}
	paths := []sshPath{theirs, ours}
	r.sshTurns(ctx, s, paths, r.trials(60, 30, 3), func(ctx context.Context, p sshPath) (map[string]float64, error) {
		ms, err := p.connectTrue(ctx)
		return map[string]float64{"connect_true": ms}, err
	})
	r.sshTurns(ctx, s, paths, r.trials(40, 20, 2), func(ctx context.Context, p sshPath) (map[string]float64, error) {
		ms, err := p.newPrompt(ctx)
		return map[string]float64{"new_prompt": ms}, err
	})
	r.sshTurns(ctx, s, paths, r.trials(5, 3, 1), func(ctx context.Context, p sshPath) (map[string]float64, error) {
		return p.copies(ctx, file, float64(size)/1e6)
	})
	for _, system := range s.systems() {
		for _, name := range sshColumns {
			unit := "ms"
			if name[:3] == "scp" {
				unit = "MB/s"
			}
			s.summarize(system, name, unit, s.column(system, name, nil))
		}
	}
	s.failures()
	return ctx.Err()
}

// sshTurns takes the servers in turn, after a first round that does not count.
func (r *rig) sshTurns(ctx context.Context, s *sheet, paths []sshPath, rounds int, once func(context.Context, sshPath) (map[string]float64, error)) {
	for round := -1; round < rounds && ctx.Err() == nil; round++ {
		for _, at := range rand.Perm(len(paths)) {
			p := paths[at]
			trial, cancel := context.WithTimeout(ctx, trialLimit)
			measured, err := once(trial, p)
			cancel()
			if err != nil {
				r.say("%s: %v", p.name, err)
			}
			if p.after != nil {
				if err := p.after(ctx); err != nil {
					r.say("%s: %v", p.name, err)
				}
			}
			if round < 0 {
				continue
			}
			s.addSome(round, p.name, err, measured)
		}
	}
}

// connectTrue is a connection, its key's proof, a program and its status.
func (p sshPath) connectTrue(ctx context.Context) (float64, error) {
	from := time.Now()
	err := run(ctx, io.Discard, "ssh", "-F", p.config, "host", "true")
	return millis(time.Since(from)), err
}

// newPrompt is until a shell on a terminal has said that it is ready.
func (p sshPath) newPrompt(ctx context.Context) (float64, error) {
	cmd := exec.CommandContext(ctx, "ssh", "-F", p.config, "-tt", "-l", p.prompt, "host")
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	from := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	defer cmd.Wait()
	defer in.Close()
	var got []byte
	buf := make([]byte, 4096)
	for !bytes.ContainsAny(got, "$#") {
		n, err := out.Read(buf)
		got = append(got, buf[:n]...)
		if err != nil {
			return 0, fmt.Errorf("no prompt in %q: %w", got, err)
		}
	}
	took := millis(time.Since(from))
	if _, err := io.WriteString(in, "exit\n"); err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, out)
	return took, err
}

// copies carries a file there and back.
func (p sshPath) copies(ctx context.Context, file string, megabytes float64) (map[string]float64, error) {
	from := time.Now()
	if err := run(ctx, io.Discard, "scp", "-q", "-F", p.config, file, "host:"+p.file); err != nil {
		return nil, err
	}
	up := time.Since(from).Seconds()
	back := file + "-back"
	defer os.Remove(back)
	from = time.Now()
	if err := run(ctx, io.Discard, "scp", "-q", "-F", p.config, "host:"+p.file, back); err != nil {
		return nil, err
	}
	down := time.Since(from).Seconds()
	if err := run(ctx, io.Discard, "cmp", file, back); err != nil {
		return nil, err
	}
	return map[string]float64{"scp_up_mb_s": megabytes / up, "scp_down_mb_s": megabytes / down, "scp_mb_s": 2 * megabytes / (up + down)}, nil
}

// run runs a program that must work.
func run(ctx context.Context, out io.Writer, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout = out
	return runCommand(cmd)
}

func runCommand(cmd *exec.Cmd) error {
	var errs bytes.Buffer
	cmd.Stderr = &errs
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", cmd.Args[0], err, bytes.TrimSpace(errs.Bytes()))
	}
	return nil
}

// clientConfig is one of OpenSSH's client, for a server that is called host.
func clientConfig(dir, name, address, key, user string) (string, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, name+".config")
	text := fmt.Sprintf("Host host\n  HostName %s\n  Port %s\n  User %s\n  IdentityFile %s\n  IdentitiesOnly yes\n  BatchMode yes\n"+
		"  StrictHostKeyChecking accept-new\n  UserKnownHostsFile %s/known_hosts\n  LogLevel ERROR\n", host, port, user, key, dir)
	return path, os.WriteFile(path, []byte(text), 0o600)
}

// startOpenSSH starts OpenSSH's server for root, without what its users pay for
// beyond SSH itself (PAM, a look-up of the client's name).
func startOpenSSH(ctx context.Context, dir, key string) (stop func(), p sshPath, err error) {
	const sshd = "/usr/sbin/sshd"
	if _, err := os.Stat(sshd); err != nil {
		return nil, p, errors.New("OpenSSH's server is not installed (apt install openssh-server)")
	}
	address, err := freeAddress()
	if err != nil {
		return nil, p, err
	}
	hostKey := filepath.Join(dir, "host_key")
	if err := run(ctx, io.Discard, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", hostKey); err != nil {
		return nil, p, err
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, p, err
	}
	config := filepath.Join(dir, "sshd_config")
	text := fmt.Sprintf("Port %s\nListenAddress 127.0.0.1\nHostKey %s\nAuthorizedKeysFile %s.pub\nPidFile none\nUsePAM no\nUseDNS no\nStrictModes no\n"+
		"PermitRootLogin yes\nPrintMotd no\nPrintLastLog no\nSubsystem sftp internal-sftp\n", port, hostKey, key)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, p, err
	}
	os.Mkdir("/run/sshd", 0o755) // its services make it
	cmd := exec.Command(sshd, "-D", "-f", config)
	if err := cmd.Start(); err != nil {
		return nil, p, err
	}
	stop = func() {
		cmd.Process.Kill()
		cmd.Wait()
	}
	p = sshPath{name: openssh, prompt: "root"}
	if p.config, err = clientConfig(dir, "openssh", address, key, "root"); err == nil {
		err = until(ctx, 10*time.Second, "sshd", func() (bool, error) {
			conn, err := net.Dial("tcp", address)
			if err == nil {
				conn.Close()
			}
			return err == nil, nil
		})
	}
	if err != nil {
		stop()
		return nil, p, err
	}
	return stop, p, nil
}
