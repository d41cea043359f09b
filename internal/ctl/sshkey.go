package ctl

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdSSHKey() *cli.Command {
	return &cli.Command{
		Name: "ssh-key", Category: catAccess,
		Usage:       "add, list and revoke the public keys that you come in with over SSH",
		UsageText:   "boxedctl ssh-key COMMAND",
		Description: "A key is known on every node of the cluster." + examples("boxedctl ssh-key add", "boxedctl ssh-key ls", "boxedctl ssh-key revoke KEY"),
		Subcommands: []*cli.Command{a.cmdSSHKeyAdd(), a.cmdSSHKeyLs(), a.cmdSSHKeyRevoke()},
	}
}

func (a *app) cmdSSHKeyAdd() *cli.Command {
	return &cli.Command{
		Name:      "add",
		Usage:     "add a public key",
		UsageText: "boxedctl ssh-key add [FILE] [--owner OWNER] [--ttl DURATION] [--comment TEXT]",
		Description: "FILE is a public key, like ~/.ssh/id_ed25519.pub, or - for stdin; without it, those of ~/.ssh are added. " +
			"That a key is yours is proved by a signature, which ssh-keygen makes with the private key beside FILE or with the agent. " +
			"Administrators need no proof, and may add keys of other owners." +
			examples("boxedctl ssh-key add", "boxedctl ssh-key add ~/.ssh/id_ed25519.pub --ttl 90d", "boxedctl ssh-key add ada.pub --owner ada"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "owner", Usage: "for `OWNER` instead of yourself; only for administrators"},
			&cli.StringFlag{Name: "comment", Usage: "a `TEXT` to know it by; without, the key's own"},
			&cli.StringFlag{Name: "ttl", Usage: "it expires after `DURATION`, like 90d; without, never"},
		},
		Action: a.addSSHKeys,
	}
}

func (a *app) addSSHKeys(c *cli.Context) error {
	words, err := a.operands(c, 0, 1)
	if err != nil {
		return err
	}
	ttl, err := parseDuration("ttl", c.String("ttl"))
	if err != nil {
		return err
	}
	files := words
	if len(words) == 0 {
		if files, err = a.publicKeys(); err != nil {
			return err
		}
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	var added []boxed.SSHKey
	for _, file := range files {
		req := boxed.SSHKeyRequest{Owner: c.String("owner"), Comment: c.String("comment"), TTL: ttl}
		if req.TTL == boxed.Never {
			req.TTL = 0
		}
		key, err := a.addSSHKey(c.Context, svc, file, req)
		if err != nil {
			return err
		}
		added = append(added, *key)
	}
	return a.printSSHKeys(map[string]any{"keys": added}, added)
}

// publicKeys are those of the person's own directory.
func (a *app) publicKeys() ([]string, error) {
	home := a.getenv("HOME")
	if home == "" {
		home, _ = os.UserHomeDir()
	}
	files, err := filepath.Glob(filepath.Join(home, ".ssh", "id_*.pub"))
	if err == nil && len(files) == 0 {
		return nil, usagef("there is no public key in %s", filepath.Join(home, ".ssh")).hint("make one: ssh-keygen -t ed25519; or name its file: boxedctl ssh-key add FILE")
	}
	return files, err
}

func (a *app) addSSHKey(ctx context.Context, svc service, file string, req boxed.SSHKeyRequest) (*boxed.SSHKey, error) {
	text, err := a.readPublicKey(file)
	if err != nil {
		return nil, err
	}
	req.PublicKey = text
	key, err := svc.AddSSHKey(ctx, req)
	// Who needs no proof is not asked for a passphrase.
	if boxed.CodeOf(err) != boxed.CodeForbidden || req.Owner != "" || file == "-" {
		return key, err
	}
	info, infoErr := svc.SSHInfo(ctx)
	if infoErr != nil {
		return nil, infoErr
	}
	if req.Proof, err = a.signSSH(ctx, file, info.Challenge); err != nil {
		return nil, err
	}
	return svc.AddSSHKey(ctx, req)
}

// maxPublicKey bounds the file of a public key, in bytes.
const maxPublicKey = 16 << 10

func (a *app) readPublicKey(file string) (string, error) {
	var text []byte
	var err error
	if file == "-" {
		text, err = io.ReadAll(io.LimitReader(a.stdin, maxPublicKey))
	} else {
		text, err = readSmall(file, maxPublicKey)
	}
	if err != nil {
		return "", err
	}
	if bytes.Contains(text, []byte("PRIVATE KEY")) {
		return "", usagef("%s is a private key; it never leaves this machine", file).hint("boxedctl ssh-key add %s.pub", file)
	}
	return strings.TrimSpace(string(text)), nil
}

// signSSH signs as the holder of a public key's private key.
func (a *app) signSSH(ctx context.Context, file, challenge string) (string, error) {
	cmd := exec.CommandContext(ctx, "ssh-keygen", "-Y", "sign", "-n", boxed.SSHNamespace, "-f", file)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(challenge), &out, &errs
	if err := cmd.Run(); err != nil {
		return "", usagef("the key of %s did not sign that it is yours: %s", file, firstOf(strings.TrimSpace(errs.String()), err.Error())).
			hint("it needs the private key beside it, or in the agent (ssh-add)")
	}
	return out.String(), nil
}

func (a *app) cmdSSHKeyLs() *cli.Command {
	return &cli.Command{
		Name: "ls", Aliases: []string{"list"},
		Usage:       "list public keys",
		UsageText:   "boxedctl ssh-key ls",
		Description: "Your own; everybody's for administrators." + examples("boxedctl ssh-key ls", "boxedctl ssh-key ls -o json"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			keys, err := svc.ListSSHKeys(c.Context)
			if err != nil {
				return err
			}
			if keys == nil {
				keys = []boxed.SSHKey{}
			}
			return a.printSSHKeys(map[string]any{"keys": keys}, keys)
		},
	}
}

func (a *app) printSSHKeys(v any, keys []boxed.SSHKey) error {
	t := table.New(table.Column{Name: "KEY", Keep: true}, table.Column{Name: "OWNER"}, table.Column{Name: "FINGERPRINT"},
		table.Column{Name: "AGE", Right: true}, table.Column{Name: "STATE"}, table.Column{Name: "COMMENT"})
	now := time.Now()
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.ID
		t.Add(table.Cell{Text: k.ID}, table.Cell{Text: k.Owner}, table.Cell{Text: k.Fingerprint},
			table.Cell{Text: table.Age(k.CreatedAt, now)}, validity(k.RevokedAt, k.ExpiresAt, now), table.Cell{Text: k.Comment})
	}
	return a.print(v, names, t)
}

// validity says whether a key is good.
func validity(revoked, expires, now time.Time) table.Cell {
	switch {
	case !revoked.IsZero():
		return table.Cell{Text: "revoked", Style: table.Bad}
	case !expires.IsZero() && !expires.After(now):
		return table.Cell{Text: "expired", Style: table.Bad}
	case !expires.IsZero():
		return table.Cell{Text: "valid for " + table.Until(expires, now), Style: table.Good}
	}
	return table.Cell{Text: "valid", Style: table.Good}
}

func (a *app) cmdSSHKeyRevoke() *cli.Command {
	return &cli.Command{
		Name: "revoke", Aliases: []string{"rm"},
		Usage:       "revoke public keys",
		UsageText:   "boxedctl ssh-key revoke KEY…",
		Description: "KEY is the ID that ssh-key ls shows. Its sessions end within 30 seconds. The same public key can be added again." + examples("boxedctl ssh-key revoke k7m2xq"),
		Action:      a.revokeEach(service.RevokeSSHKey),
	}
}

// sshProgram is OpenSSH's client.
func sshProgram() (string, error) {
	program, err := exec.LookPath("ssh")
	if err != nil {
		return "", usagef("there is no ssh on this machine").hint("install OpenSSH's client; without it: boxedctl exec -it SANDBOX bash")
	}
	return program, nil
}

// quoteWord quotes a word for OpenSSH's ProxyCommand, which a shell reads.
func quoteWord(word string) string {
	if strings.Trim(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:=") == "" && word != "" {
		return word
	}
	return fmt.Sprintf(`"%s"`, strings.NewReplacer(`\`, `\\`, `"`, `\"`, `$`, `\$`, "`", "\\`", `%`, `%%`).Replace(word))
}
