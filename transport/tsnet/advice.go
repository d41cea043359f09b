package tsnet

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"tailscale.com/ipn/ipnstate"
)

// aloneWarning is how long the control server may be away before that is a
// problem: it hangs up now and then.
const aloneWarning = 30 * time.Second

// advise says what is wrong and what to do, one sentence of each.
func (n *Network) advise(st *ipnstate.Status, v view, last login) (problem, next string) {
	s := v.status
	tag := n.cfg.Tag
	switch s.State {
	case Starting:
		if last.err != "" {
			return "this machine cannot log in to the tailnet: " + last.err,
				"check this host's network, and that " + n.cfg.ControlURL + " is the right control server"
		}
		return "", ""
	case NeedsLogin:
		if s.LoginURL != "" {
			return "this machine is not logged in to the tailnet",
				fmt.Sprintf("open %s in a browser, or start boxed-node with an auth key that has %s", s.LoginURL, tag)
		}
		return "the tailnet refused to log this machine in: " + last.err,
			fmt.Sprintf("make an auth key with %s on the Keys page of the tailnet's admin console, and start boxed-node with it", tag)
	case NeedsApproval:
		return "this machine waits to be let into the tailnet",
			"approve it on the Machines page of the tailnet's admin console, or use a pre-approved auth key"
	case Expired:
		next = "extend the key on the Machines page of the tailnet's admin console, or start boxed-node again with an auth key"
		if s.LoginURL != "" {
			next = "log in again at " + s.LoginURL
		}
		return "this machine's key for the tailnet expired on " + s.KeyExpiry.UTC().Format(time.DateOnly), next + "; then disable key expiry for it"
	case Stopped:
		return "the tailnet node is stopped", "start boxed-node again"
	}
	return n.adviseRunning(st, v)
}

func (n *Network) adviseRunning(st *ipnstate.Status, v view) (problem, next string) {
	s := v.status
	left := time.Until(s.KeyExpiry)
	switch {
	case meshAddr(st.TailscaleIPs) != s.Addr:
		return fmt.Sprintf("this machine's tailnet address has changed from %s to %s", s.Addr, meshAddr(st.TailscaleIPs)),
			"start boxed-node again"
	case !hasTag(st.Self, n.cfg.Tag):
		return fmt.Sprintf("this machine does not have %s, so other nodes refuse it", n.cfg.Tag), giveTag(n.cfg.Tag)
	case !s.KeyExpiry.IsZero() && left < expiryWarning:
		return "this machine's key for the tailnet expires in " + days(left),
			"disable key expiry for it on the Machines page of the tailnet's admin console, or log in again before"
	case !v.alone.IsZero() && time.Since(v.alone) > aloneWarning:
		return "this machine does not reach the tailnet's control server; what is connected stays so",
			"check this host's network"
	case st.Self.Relay == "":
		return "this machine has no relay of the tailnet yet", "if it stays so, let this host reach the internet on TCP 443 and UDP 3478"
	}
	return "", ""
}

// giveTag is how a machine comes by a tag.
func giveTag(tag string) string {
	return fmt.Sprintf("name %s under tagOwners in the tailnet's policy, and give it to the machine: on the Machines page (Edit ACL tags), or by an auth key that has it", tag)
}

func days(d time.Duration) string {
	switch n := int(d.Hours() / 24); {
	case n < 1:
		return "less than a day"
	case n == 1:
		return "1 day"
	default:
		return fmt.Sprintf("%d days", n)
	}
}

// logStatus tells of a new state.
func logStatus(log *slog.Logger, s Status) {
	level := slog.LevelInfo
	if s.Problem != "" {
		level = slog.LevelWarn
	}
	attrs := []any{"state", s.State, "addr", s.Addr}
	if s.Problem != "" {
		attrs = append(attrs, "problem", s.Problem, "next", s.Next)
	}
	log.Log(context.Background(), level, "tailnet", attrs...)
}
