package ctl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"
)

// sshAlias is what OpenSSH knows all nodes by: its name for their host keys.
const sshAlias = "boxed"

func (a *app) cmdSSH() *cli.Command {
	return &cli.Command{
		Name: "ssh", Category: catRun,
		Usage:     "connect to a sandbox with this machine's ssh, with nothing to set up",
		UsageText: "boxedctl ssh SANDBOX [SSH-OPTIONS…] [COMMAND…]",
		Description: "Runs ssh through boxed's API, as whom your API key is: no SSH key, no known host and no open port are needed. " +
			"SANDBOX is an ID, a name, or new for one that ends with the session (new+TEMPLATE, new+keep); what follows it is ssh's own. " +
			"scp, sftp, rsync, git and editors work after boxedctl ssh-config --install." +
			examples("boxedctl ssh build", "boxedctl ssh build 'make test'", "boxedctl ssh build -N -L 8000:localhost:8000", "boxedctl ssh new"),
		Action: a.ssh,
	}
}

func (a *app) ssh(c *cli.Context) error {
	words, err := a.operands(c, 1, -1)
	if err != nil {
		return err
	}
	if strings.HasPrefix(words[0], "-") || strings.ContainsAny(words[0], "@ \t") {
		return usagef("%q names no sandbox", words[0]).hint("boxedctl ssh SANDBOX, and ssh's own options after it")
	}
	if _, err := a.resolve(a.node); err != nil {
		return err
	}
	program, err := sshProgram()
	if err != nil {
		return err
	}
	lines, err := a.sshOptions()
	if err != nil {
		return err
	}
	args := []string{"-F", "none"}
	for _, line := range lines {
		args = append(args, "-o", line)
	}
	args = append(args, words[0]+"@"+sshAlias)
	args = append(args, words[1:]...)
	cmd := exec.CommandContext(c.Context, program, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.stdin, a.stdout, a.stderr
	cmd.Env = append(os.Environ(), a.sshEnviron()...)
	err = cmd.Run()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return exitStatus(exit.ExitCode())
	}
	return err
}

// sshOptions are those of a client that comes in through the API.
func (a *app) sshOptions() ([]string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	known, err := a.knownHosts()
	if err != nil {
		return nil, err
	}
	command := []string{quoteWord(self)}
	for _, f := range []struct{ name, value string }{
		{"context", a.node.context}, {"endpoint", a.node.endpoint}, {"api-key-file", a.node.keyFile}, {"pin", a.node.pin},
	} {
		if f.value != "" {
			command = append(command, "--"+f.name, quoteWord(f.value))
		}
	}
	return []string{
		"HostKeyAlias " + sshAlias,
		"ProxyCommand " + strings.Join(append(command, "ssh-proxy"), " "),
		"UserKnownHostsFile " + quoteWord(known),
		"StrictHostKeyChecking yes",
	}, nil
}

// sshEnviron is what ssh-proxy needs that must not be seen on a command line.
func (a *app) sshEnviron() []string {
	if a.node.key == "" {
		return nil
	}
	return []string{"BOXED_API_KEY=" + a.node.key}
}

// knownHosts is the file in which ssh finds what certifies the nodes of a target.
func (a *app) knownHosts() (string, error) {
	dir, err := a.configDir()
	if err != nil {
		return "", err
	}
	t, err := a.resolve(a.node)
	if err != nil {
		return "", err
	}
	name := firstOf(t.Context, strings.Map(func(r rune) rune {
		if strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789.-", r) {
			return r
		}
		return '_'
	}, strings.ToLower(t.Endpoint)))
	return filepath.Join(dir, "ssh_known_hosts."+name), nil
}

func (a *app) cmdSSHProxy() *cli.Command {
	return &cli.Command{
		Name: "ssh-proxy", Category: catOther, Hidden: true,
		Usage:       "be the connection of an ssh client",
		UsageText:   "boxedctl ssh-proxy",
		Description: "For OpenSSH's ProxyCommand." + examples("boxedctl ssh-proxy"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			// Before ssh hears of the server, and reads it.
			if err := a.knowHosts(c.Context, svc); err != nil {
				return err
			}
			conn, err := svc.DialSSH(c.Context)
			if err != nil {
				return err
			}
			defer conn.Close()
			go func() {
				io.Copy(conn, a.stdin)
				conn.Close() // ssh has gone
			}()
			_, err = io.Copy(a.stdout, conn)
			if errors.Is(err, io.ErrClosedPipe) || errors.Is(err, fs.ErrClosed) {
				err = nil
			}
			return err
		},
	}
}

// knowHosts keeps what certifies the nodes now: it changes when the cluster's key does.
func (a *app) knowHosts(ctx context.Context, svc service) error {
	info, err := svc.SSHInfo(ctx)
	if err != nil {
		return err
	}
	if strings.ContainsAny(info.Authority, "\n\r") {
		return usagef("the node's answer is malformed")
	}
	path, err := a.knownHosts()
	if err != nil {
		return err
	}
	want := fmt.Appendf(nil, "# written by boxedctl\n@cert-authority %s %s\n", sshAlias, info.Authority)
	if have, err := readSmall(path, maxSettings); err == nil && bytes.Equal(have, want) {
		return nil
	}
	return replaceFile(path, want)
}

// replaceFile writes a file that others may read at any time.
func replaceFile(path string, text []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return plainPath(err)
	}
	file, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return plainPath(err)
	}
	defer os.Remove(file.Name())
	_, err = file.Write(text)
	if err := errors.Join(err, file.Close()); err != nil {
		return plainPath(err)
	}
	return os.Rename(file.Name(), path)
}

func (a *app) cmdSSHConfig() *cli.Command {
	return &cli.Command{
		Name: "ssh-config", Category: catAccess,
		Usage:     "have ssh, scp, rsync, git and editors find sandboxes as SANDBOX@boxed",
		UsageText: "boxedctl ssh-config [--install]",
		Description: "Prints what belongs into ~/.ssh/config: connections go through the API of the node or cluster that boxedctl speaks to, " +
			"whichever of its nodes answers, as whom your API key is. --install writes it to ~/.ssh/boxed.conf and includes that." +
			examples("boxedctl ssh-config", "boxedctl ssh-config --install", "ssh build@boxed"),
		Flags:  []cli.Flag{&cli.BoolFlag{Name: "install", Usage: "write it where ssh reads it"}},
		Action: a.sshConfig,
	}
}

func (a *app) sshConfig(c *cli.Context) error {
	if _, err := a.operands(c, 0, 0); err != nil {
		return err
	}
	if a.node.key != "" {
		return usagef("--api-key cannot be written to a file").hint("boxedctl context add keeps it, or use --api-key-file")
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	if err := a.knowHosts(c.Context, svc); err != nil {
		return err
	}
	lines, err := a.sshOptions()
	if err != nil {
		return err
	}
	text := "# written by boxedctl ssh-config\nHost boxed *.boxed\n  " + strings.Join(lines, "\n  ") + "\n"
	if !c.Bool("install") {
		_, err := io.WriteString(a.stdout, text)
		return err
	}
	home := a.getenv("HOME")
	if home == "" {
		if home, err = os.UserHomeDir(); err != nil {
			return err
		}
	}
	dir := filepath.Join(home, ".ssh")
	if err := replaceFile(filepath.Join(dir, "boxed.conf"), []byte(text)); err != nil {
		return err
	}
	config := filepath.Join(dir, "config")
	have, err := readSmall(config, maxSettings)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	const include = "Include boxed.conf\n"
	if bytes.Contains(have, []byte(include)) {
		a.notice("%s is as it should be", config)
		return nil
	}
	// At the top: further down it would belong to the Host above it.
	if err := replaceFile(config, append([]byte(include), have...)); err != nil {
		return err
	}
	a.notice("%s includes boxed.conf; try: ssh new@boxed", config)
	return nil
}
