package ctl

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

var roles = []string{string(boxed.RoleUser), string(boxed.RoleAdmin)}

func (a *app) cmdKey() *cli.Command {
	return &cli.Command{
		Name: "key", Category: catAccess,
		Usage:       "make, list and revoke API keys",
		UsageText:   "boxedctl key COMMAND",
		Description: "Only for administrators." + examples("boxedctl key create --owner ada", "boxedctl key ls", "boxedctl key revoke KEY"),
		Subcommands: []*cli.Command{a.cmdKeyCreate(), a.cmdKeyLs(), a.cmdKeyRevoke()},
	}
}

func (a *app) cmdKeyCreate() *cli.Command {
	return &cli.Command{
		Name:      "create",
		Usage:     "make an API key",
		UsageText: "boxedctl key create --owner OWNER [--role ROLE] [--ttl DURATION] [--comment TEXT] [--write FILE]",
		Description: "The secret is shown this once: on stdout, or with --write it goes to a new file that only you can read. " +
			"An owner is whose sandboxes the key works with; several keys may have one owner." +
			examples("boxedctl key create --owner ada --comment laptop --ttl 90d", "boxedctl key create --owner ci --write ci.key"),
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "owner", Usage: "for the sandboxes of `OWNER`"},
			&cli.StringFlag{Name: "role", Value: string(boxed.RoleUser), Usage: "`ROLE`: user (its owner's sandboxes) or admin (everybody's, and keys)"},
			&cli.StringFlag{Name: "comment", Usage: "a `TEXT` to know it by"},
			&cli.StringFlag{Name: "ttl", Usage: "it expires after `DURATION`, like 90d; without, never"},
			&cli.StringFlag{Name: "write", Usage: "write the secret to the new `FILE`"},
		},
		Action: a.createKey,
	}
}

func (a *app) createKey(c *cli.Context) error {
	if _, err := a.operands(c, 0, 0); err != nil {
		return err
	}
	req := boxed.KeyRequest{Owner: c.String("owner"), Role: boxed.Role(c.String("role")), Comment: c.String("comment")}
	if req.Owner == "" {
		return usagef("--owner is missing").hint("boxedctl key create --owner NAME")
	}
	if !containsFold(roles, string(req.Role)) {
		return usagef("--role is %s, not %q", oneOf(roles), req.Role)
	}
	req.Role = boxed.Role(strings.ToLower(string(req.Role)))
	var err error
	if req.TTL, err = parseDuration("ttl", c.String("ttl")); err != nil {
		return err
	}
	if req.TTL == boxed.Never {
		req.TTL = 0
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	var file *os.File
	if name := c.String("write"); name != "" {
		// Before the key is made: one whose secret cannot be kept is of no use.
		if file, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
			return wrapf(plainPath(err), "--write")
		}
		defer file.Close()
	}
	key, err := svc.CreateKey(c.Context, req)
	if err != nil {
		if file != nil {
			_ = os.Remove(file.Name()) // empty, and ours
		}
		return err
	}
	if file != nil {
		if _, err := fmt.Fprintln(file, key.Secret); err != nil {
			return wrapf(plainPath(err), "--write (the key %s is lost: revoke it)", key.ID)
		}
		return a.printKeys(key.Key, []boxed.Key{key.Key})
	}
	switch a.output {
	case outputJSON:
		return a.printJSON(key)
	case outputName:
		_, err = fmt.Fprintln(a.stdout, key.ID)
		return err
	}
	a.notice("key %s of %s; its secret is shown this once:", key.ID, key.Owner)
	_, err = fmt.Fprintln(a.stdout, key.Secret)
	return err
}

func (a *app) cmdKeyLs() *cli.Command {
	return &cli.Command{
		Name: "ls", Aliases: []string{"list"},
		Usage:       "list the API keys",
		UsageText:   "boxedctl key ls",
		Description: "Never their secrets." + examples("boxedctl key ls", "boxedctl key ls -o json"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			keys, err := svc.ListKeys(c.Context)
			if err != nil {
				return err
			}
			if keys == nil {
				keys = []boxed.Key{}
			}
			return a.printKeys(map[string]any{"keys": keys}, keys)
		},
	}
}

func (a *app) printKeys(v any, keys []boxed.Key) error {
	t := table.New(table.Column{Name: "KEY", Keep: true}, table.Column{Name: "OWNER"}, table.Column{Name: "ROLE"},
		table.Column{Name: "AGE", Right: true}, table.Column{Name: "STATE"}, table.Column{Name: "COMMENT"})
	now := time.Now()
	names := make([]string, len(keys))
	for i, k := range keys {
		names[i] = k.ID
		t.Add(table.Cell{Text: k.ID}, table.Cell{Text: k.Owner}, table.Cell{Text: string(k.Role)},
			table.Cell{Text: table.Age(k.CreatedAt, now)}, validity(k.RevokedAt, k.ExpiresAt, now), table.Cell{Text: k.Comment})
	}
	return a.print(v, names, t)
}

func (a *app) cmdKeyRevoke() *cli.Command {
	return &cli.Command{
		Name: "revoke", Aliases: []string{"rm"},
		Usage:       "revoke API keys, for good",
		UsageText:   "boxedctl key revoke KEY…",
		Description: "KEY is the ID that key ls shows. Live connections of a revoked key end within seconds; its sandboxes stay." + examples("boxedctl key revoke k7m2xq"),
		Action:      a.revokeEach(service.RevokeKey),
	}
}

// revokeEach revokes what its operands name.
func (a *app) revokeEach(revoke func(svc service, ctx context.Context, id string) error) cli.ActionFunc {
	return func(c *cli.Context) error {
		words, err := a.operands(c, 1, -1)
		if err != nil {
			return err
		}
		svc, err := a.connect()
		if err != nil {
			return err
		}
		for _, id := range words {
			if err := revoke(svc, c.Context, id); err != nil {
				return err
			}
		}
		return nil
	}
}
