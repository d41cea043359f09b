package ctl

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
)

func (a *app) cmdDoctor() *cli.Command {
	return &cli.Command{
		Name: "doctor", Category: catWatch,
		Usage:     "find out what is wrong, and what mends it",
		UsageText: "boxedctl doctor [--host]",
		Description: "Looks at the context and the key, asks the node, and if the node is on this machine looks at the host as well: " +
			"kernel, cgroups, the engine and its runtimes, disk, memory, limits, clock. It changes nothing. " +
			fmt.Sprintf("The status is %d if something fails; warnings do not count.", exitFailed) +
			examples("boxedctl doctor", "sudo boxedctl doctor --host", "boxedctl doctor -o json"),
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "host", Usage: "look at this host although the node is elsewhere, or not there yet"},
		},
		Action: a.doctor,
	}
}

// doctorWithin bounds each question that doctor asks over a connection.
const doctorWithin = 10 * time.Second

func (a *app) doctor(c *cli.Context) error {
	if _, err := a.operands(c, 0, 0); err != nil {
		return err
	}
	var checks []check
	t, found := a.checkContext()
	checks = append(checks, found...)
	if t.Endpoint != "" {
		checks = append(checks, a.checkNode(c.Context)...)
	}
	if c.Bool("host") || slices.ContainsFunc(t.urls(), isLoopback) {
		checks = append(checks, hostChecks(c.Context, newHost(a.getenv))...)
	} else {
		checks = append(checks, check{
			Name: "host", Title: "the host", Result: resultSkipped, Detail: "the node is on another machine: run boxedctl doctor there",
		})
	}
	failed := countResults(checks)[resultFailed]
	if err := a.printChecks(map[string]any{"ok": failed == 0, "endpoint": t.Endpoint, "checks": checks}, firstOf(t.Endpoint, "no endpoint"), checks); err != nil {
		return err
	}
	if failed > 0 {
		return exitStatus(exitFailed)
	}
	return nil
}

// checkContext looks at what chooses the node.
func (a *app) checkContext() (target, []check) {
	c := check{Name: "context", Title: "which node is meant"}
	t, err := a.resolve(a.node)
	if err != nil {
		c.Result, c.Detail, c.Remedy = resultFailed, message(err), firstOf(nextStep(err), "boxedctl context show says what is chosen")
		return target{}, []check{c}
	}
	c.Result, c.Detail = resultOK, t.describe()+", by "+t.Origin
	checks := []check{c}
	key := check{Name: "key", Title: "an API key", Result: resultOK, Detail: "there is one"}
	if t.Key == "" {
		key.Result, key.Detail, key.Remedy = resultWarning, "none is given for this address", nextStep(boxed.CodeUnauthenticated)
	} else if !strings.HasPrefix(t.Key, "boxed_") {
		key.Result, key.Detail, key.Remedy = resultWarning, "it does not begin with boxed_", "was the right file given?"
	}
	checks = append(checks, key)
	for _, e := range t.urls() {
		if u, err := url.Parse(e); err == nil && u.Scheme == "http" && t.Key != "" && !isLoopback(e) {
			checks = append(checks, check{
				Name: "transport", Title: "the key is sent over TLS", Result: resultWarning, Detail: e + " is not https",
				Remedy: "on a network that is not private use https with --pin, or a tailnet",
			})
		}
	}
	if dir, err := a.configDir(); err == nil {
		if path := filepath.Join(dir, "config.yaml"); keyIsPublic(path) {
			checks = append(checks, check{Name: "config_mode", Title: "the contexts are private", Result: resultWarning, Detail: path + " can be read by others", Remedy: "chmod 600 " + path})
		}
	}
	return t, checks
}

// checkNode asks the node how it fares.
func (a *app) checkNode(ctx context.Context) []check {
	c := check{Name: "node", Title: "the node answers"}
	ctx, cancel := context.WithTimeout(ctx, doctorWithin)
	defer cancel()
	svc, err := a.connect()
	var n *boxed.NodeInfo
	if err == nil {
		n, err = svc.NodeInfo(ctx)
	}
	if err != nil {
		c.Result, c.Detail, c.Remedy = resultFailed, message(err), "start it on its host: make up, or systemctl start boxed-node; make logs shows why it ended"
		if boxed.CodeOf(err) == boxed.CodeUnauthenticated {
			c.Remedy = nextStep(err)
		}
		return []check{c}
	}
	c.Result, c.Detail = resultOK, fmt.Sprintf("%s, version %s, up since %s", firstOf(n.Name, string(n.ID)), n.Version, when(n.StartedAt))
	checks := []check{c}
	ready := check{Name: "ready", Title: "the node takes work", Result: resultOK, Detail: fmt.Sprintf("%d sandboxes", n.Sandboxes)}
	switch {
	case !n.Ready:
		ready.Result, ready.Detail = resultFailed, firstOf(strings.Join(n.Problems, "; "), "it is not ready")
		ready.Remedy = "the checks of the engine below say more; make logs has the node's own words"
	case len(n.Problems) > 0:
		ready.Result, ready.Detail, ready.Remedy = resultWarning, strings.Join(n.Problems, "; "), "it works all the same; mend this when you can"
	case n.Draining:
		ready.Result, ready.Detail, ready.Remedy = resultWarning, "it is draining", "it takes no new sandboxes until it is started again"
	}
	checks = append(checks, ready)
	if ours, theirs := versionText(), n.Version; theirs != "" && ours != "dev" && ours != theirs {
		checks = append(checks, check{
			Name: "version", Title: "boxedctl and the node are of one version", Result: resultWarning,
			Detail: ours + " here, " + theirs + " there", Remedy: "make build && make up, or install the same release on both",
		})
	}
	if ahead := time.Until(n.StartedAt); ahead > time.Minute {
		checks = append(checks, check{
			Name: "skew", Title: "the clocks agree", Result: resultFailed, Detail: "the node started " + ahead.Round(time.Second).String() + " in the future",
			Remedy: "set this machine's clock: timedatectl set-ntp true",
		})
	}
	return checks
}

// isLoopback reports whether an endpoint is on this machine.
func isLoopback(endpoint string) bool {
	u, err := url.Parse(endpoint)
	if err != nil || endpoint == "" {
		return false
	}
	if u.Hostname() == "localhost" {
		return true
	}
	ip := net.ParseIP(u.Hostname())
	return ip != nil && ip.IsLoopback()
}

// platform names this machine's system for people.
func platform() string { return runtime.GOOS + "/" + runtime.GOARCH }
