package ctl

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"
)

// policyText is JSON with comments, without trailing commas.
//
//go:embed policy.hujson
var policyText string

func (a *app) cmdClusterPolicy() *cli.Command {
	return &cli.Command{
		Name:      "policy",
		Usage:     "print what a tailnet's policy must allow",
		UsageText: "boxedctl cluster policy",
		Description: "For nodes that reach each other over a tailnet: tags and grants to paste into its policy file. It asks no node. " +
			"With -o json it is without comments." +
			examples("boxedctl cluster policy", "boxedctl cluster policy -o json"),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			if a.output == outputJSON {
				return a.printJSON(json.RawMessage(withoutComments(policyText)))
			}
			_, err := fmt.Fprint(a.stdout, policyText)
			return err
		},
	}
}

// withoutComments drops the lines that are comments, the only form that
// policyText has.
func withoutComments(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(strings.TrimSpace(line), "//") {
			b.WriteString(line)
		}
	}
	return b.String()
}
