package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/boxed-mesh/boxed"
)

// egressUnits are the columns, in order, and what they are measured in.
var egressUnits = []struct{ column, unit string }{
	{"tunnel_mb_s", "MB/s"},
	{"tunnel_up_mb_s", "MB/s"},
	{"first_byte", "ms"},
	{"first_byte_intercept", "ms"},
	{"create_plain", "ms"},
	{"create_egress", "ms"},
	{"tunnel_kib_1000", "KiB"}, // per tunnel, with half of all
	{"tunnel_kib", "KiB"},
	{"tunnel_sandbox_kib", "KiB"},
	{"short_fds", "descriptors"},
	{"short_rss_kib", "KiB"},
}

var egressColumns = func() (list []string) {
	for _, u := range egressUnits {
		list = append(list, u.column)
	}
	return list
}()

// What a program's way out of a sandbox is compared with.
const (
	direct = "direct" // no proxy, on the host itself
	socat  = "socat"  // socat between the client and the server, on the host
)

const egressProfile = "bench"

// leaving measures the way out of a sandbox: what it costs a connection, a create and the
// node's memory. The node's host and the world outside are made up, see outside.
func leaving(ctx context.Context, r *rig, s *sheet) error {
	if _, err := exec.LookPath("socat"); err != nil {
		return errors.New("socat is not installed (apt install socat)")
	}
	program, err := r.buildClient(ctx)
	if err != nil {
		return err
	}
	dir, err := r.newDir()
	if err != nil {
		return err
	}
	o, err := newOutside(dir)
	if err != nil {
		return err
	}
	defer o.close()
	e := &egressRun{rig: r, sheet: s, out: o, program: program}
	for _, part := range []func(context.Context) error{e.waysOut, e.tunnels, e.shorts} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	for _, system := range s.systems() {
		for _, u := range egressUnits {
			s.summarize(system, u.column, u.unit, s.column(system, u.column, nil))
		}
	}
	extra := func(metric, of, beyond, system string) {
		if values, others := s.column(boxedPool, of, nil), s.column(system, beyond, nil); len(values) > 0 && len(others) > 0 {
			s.number(boxedPool, metric, "ms", len(values), median(values)-median(others))
		}
	}
	extra("create_extra", "create_egress", "create_plain", boxedPool)
	extra("first_byte_extra", "first_byte", "first_byte", direct)
	extra("first_byte_intercept_extra", "first_byte_intercept", "first_byte", direct)
	s.failures()
	return ctx.Err()
}

// buildClient returns this program, without cgo: it is its own client, in any image.
func (r *rig) buildClient(ctx context.Context) (string, error) {
	path := filepath.Join(r.bin, "bench")
	if _, err := os.Stat(path); err == nil { // scripts/bench has made it
		return path, nil
	}
	path = filepath.Join(r.dir, "bench")
	return path, r.buildOne(ctx, path, "./bench")
}

// egressRun is one run of the experiment.
type egressRun struct {
	*rig
	sheet   *sheet
	out     *outside
	program string
}

// node starts a node on the host of the world outside, with the profile.
func (e *egressRun) node(ctx context.Context, s settings) (*node, error) {
	const without = 1_000_000 // what a sandbox may do in a second is no question here
	s.withoutBounds, s.host = true, e.out.host
	s.egress = map[string]any{
		"resolvers": []string{resolverAddress + ":53"}, "roots": e.out.roots,
		"limits": map[string]any{"dials": without, "requests": without},
	}
	n, err := e.startNode(ctx, s)
	if err != nil {
		return nil, err
	}
	profile, _ := json.Marshal(boxed.EgressProfile{Version: 1, Name: egressProfile, Rules: []boxed.EgressRule{ // plain data always encodes
		{Host: rawName, Ports: []uint16{rawPort}, Raw: true},
		{Host: tunnelName},
		{Host: interceptName, Mode: boxed.EgressIntercept},
	}})
	if _, err := n.ApplyProfile(ctx, profile, false); err != nil {
		n.close()
		return nil, fmt.Errorf("apply the profile: %w", err)
	}
	return n, nil
}

// box makes a sandbox that may leave, with the client in it: past the node, which would grow
// by carrying so large a file before its memory is looked at.
func (e *egressRun) box(ctx context.Context, n *node, limits boxed.Limits) (boxed.ID, error) {
	box, err := n.Create(ctx, boxed.Spec{TTL: boxed.DefaultMaxTTL, Limits: limits, Egress: &boxed.EgressSpec{Profile: egressProfile}})
	if err != nil {
		return "", err
	}
	c, err := e.engine.ContainerInspect(ctx, "boxed-"+string(box.ID))
	if err != nil {
		return "", err
	}
	program, err := os.ReadFile(e.program)
	if err != nil {
		return "", err
	}
	path := fmt.Sprintf("/proc/%d/root%s", c.State.Pid, guestClient)
	if err := os.WriteFile(path, program, 0o755); err != nil {
		return "", fmt.Errorf("put the client into a sandbox: %w", err)
	}
	return box.ID, os.Chmod(path, 0o755) // whatever the umask
}

const guestClient = "/workspace/client"

// stand is a place where the client runs.
type stand func(ctx context.Context, args ...string) ([]float64, error)

// beside is the host of the sandboxes.
func (e *egressRun) beside(ctx context.Context, args ...string) ([]float64, error) {
	var out bytes.Buffer
	argv := e.out.host.argv(e.program, append([]string{clientProgram}, args...)...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env, cmd.Stdout = []string{"PATH=" + os.Getenv("PATH"), "SSL_CERT_FILE=" + e.out.roots}, &out
	if err := runCommand(cmd); err != nil {
		return nil, err
	}
	return clientAnswer(out.Bytes())
}

// within is a sandbox.
func within(n *node, id boxed.ID) stand {
	return func(ctx context.Context, args ...string) ([]float64, error) {
		var out, errs bytes.Buffer
		status, err := n.Exec(ctx, id, boxed.ExecRequest{Args: append([]string{guestClient, clientProgram}, args...), Stdout: &out, Stderr: &errs})
		if err == nil {
			err = exited(status)
		}
		if err != nil {
			return nil, fmt.Errorf("client %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(errs.Bytes()))
		}
		return clientAnswer(out.Bytes())
	}
}

func clientAnswer(text []byte) (values []float64, err error) {
	if err = json.Unmarshal(text, &values); err == nil && len(values) == 0 {
		err = errors.New("the client measured nothing")
	}
	return values, err
}

// way is one system: what its client does, and from where.
type way struct {
	system string
	once   func(ctx context.Context) ([]map[string]float64, error)
}

// turns takes the ways in turn, after a first round that does not count.
func (e *egressRun) turns(ctx context.Context, rounds int, ways []way) {
	for round := -1; round < rounds && ctx.Err() == nil; round++ {
		for _, at := range rand.Perm(len(ways)) {
			w := ways[at]
			trial, cancel := context.WithTimeout(ctx, trialLimit)
			list, err := w.once(trial)
			cancel()
			if err != nil {
				e.say("%s: %v", w.system, err)
				list = []map[string]float64{nil}
			}
			for i, measured := range list {
				if round >= 0 {
					e.sheet.addSome(round*len(list)+i, w.system, err, measured)
				}
			}
		}
	}
}

// waysOut measures creates, bytes and first bytes with one node.
func (e *egressRun) waysOut(ctx context.Context) error {
	n, err := e.node(ctx, settings{pool: defaultPool})
	if err != nil {
		return err
	}
	defer n.close()
	if err := e.creates(ctx, n); err != nil {
		return err
	}
	id, err := e.box(ctx, n, boxed.Limits{CPUs: 2})
	if err != nil {
		return err
	}
	stop, between, err := e.startSocat(ctx)
	if err != nil {
		return err
	}
	defer stop()
	box := within(n, id)
	pause(ctx, rest)
	size := int64(e.count(1024, 256, 64)) * boxed.MiB
	raw := rawAt(rawName)
	e.turns(ctx, e.trials(7, 5, 1), []way{
		e.tunnel(direct, e.beside, size, raw, rawAt(farAddress)),
		e.tunnel(socat, e.beside, size, raw, between),
		e.tunnel(boxedPool, box, size, raw, ""),
	})
	e.say("the tunnels are measured")
	e.turns(ctx, e.trials(40, 20, 2), []way{
		firsts(direct, "first_byte", e.beside, tunnelName, farAddress),
		firsts(boxedPool, "first_byte", box, tunnelName, ""),
		firsts(boxedPool, "first_byte_intercept", box, interceptName, ""),
	})
	e.say("the first bytes are measured")
	return ctx.Err()
}

// tunnel moves bytes down and up.
func (e *egressRun) tunnel(system string, from stand, size int64, to, at string) way {
	return way{system, func(ctx context.Context) ([]map[string]float64, error) {
		measured := map[string]float64{}
		for column, direction := range map[string]string{"tunnel_mb_s": "down", "tunnel_up_mb_s": "up"} {
			values, err := from(ctx, direction, "-to", to, "-at", at, "-bytes", strconv.FormatInt(size, 10))
			if err != nil {
				return nil, err
			}
			measured[column] = values[0]
		}
		return []map[string]float64{measured}, nil
	}}
}

// firsts waits for first bytes of answers, a few times by one client.
func firsts(system, column string, from stand, name, at string) way {
	if at != "" {
		at += ":443"
	}
	return way{system, func(ctx context.Context) (list []map[string]float64, err error) {
		values, err := from(ctx, "first", "-to", name+":443", "-at", at, "-count", "5")
		for _, v := range values {
			list = append(list, map[string]float64{column: v})
		}
		return list, err
	}}
}

// startSocat starts socat on the host, as its manual has it, between whoever connects to
// where it says and the raw server.
func (e *egressRun) startSocat(ctx context.Context) (stop func(), at string, err error) {
	if at, err = freeAddress(); err != nil {
		return nil, "", err
	}
	_, port, err := net.SplitHostPort(at)
	if err != nil {
		return nil, "", err
	}
	argv := e.out.host.argv("socat", "TCP-LISTEN:"+port+",fork,reuseaddr", "TCP:"+rawAt(farAddress))
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	stop = func() {
		syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // with those that it has forked
		cmd.Wait()
	}
	err = until(ctx, 10*time.Second, "socat", func() (bool, error) {
		conn, err := e.out.host.dial(ctx, "tcp", at)
		if err == nil {
			conn.Close()
		}
		return err == nil, nil
	})
	if err != nil {
		stop()
	}
	return stop, at, err
}

// creates measures creates out of the pool, with egress and without, in turn.
func (e *egressRun) creates(ctx context.Context, n *node) error {
	specs := []struct {
		column string
		spec   boxed.Spec
	}{
		{"create_plain", boxed.Spec{}},
		{"create_egress", boxed.Spec{Egress: &boxed.EgressSpec{Profile: egressProfile}}},
	}
	for round := -2; round < e.trials(60, 30, 3); round++ {
		for _, at := range rand.Perm(len(specs)) {
			if err := n.settle(ctx, trialLimit); err != nil {
				return err
			}
			pause(ctx, rest)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			from := time.Now()
			box, err := n.Create(ctx, specs[at].spec)
			took := ms(from)
			if err == nil {
				err = errors.Join(wantWarm(box.Warm), n.Destroy(context.WithoutCancel(ctx), box.ID))
			}
			if err != nil {
				e.say("%s: %v", specs[at].column, err)
			}
			if round >= 0 {
				e.sheet.addSome(round, boxedPool, err, map[string]float64{specs[at].column: took})
			}
		}
	}
	e.say("the creates are measured")
	return n.settle(ctx, trialLimit)
}

// tunnels measures what idle tunnels cost, each time with a new node: one that has had many
// has their memory still.
func (e *egressRun) tunnels(ctx context.Context) error {
	for i := range e.count(3, 3, 1) {
		measured, err := e.manyTunnels(ctx)
		if err != nil {
			e.say("tunnels: %v", err)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		e.sheet.addSome(i, boxedPool, err, measured)
	}
	return nil
}

func (e *egressRun) manyTunnels(ctx context.Context) (map[string]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	n, err := e.node(ctx, settings{limits: map[string]any{"memory": "256MiB"}})
	if err != nil {
		return nil, err
	}
	defer n.close()
	holders, tunnels := make([]*holder, e.count(20, 20, 4)), e.count(100, 100, 50) // of each
	errs := make([]error, len(holders))
	each(len(holders), 2, func(i int) { holders[i], errs[i] = e.newHolder(ctx, n) })
	defer func() {
		for _, h := range holders {
			if h != nil {
				h.stop()
			}
		}
	}()
	// One each to begin with: what the first of a sandbox costs is not what one more does.
	var before, half, all holding
	for _, step := range []struct {
		more int
		at   *holding
	}{{1, &before}, {tunnels / 2, &half}, {tunnels / 2, &all}} {
		each(len(holders), 2, func(i int) {
			if errs[i] == nil {
				errs[i] = holders[i].more(ctx, step.more)
			}
		})
		if err := errors.Join(errs...); err != nil {
			return nil, err
		}
		if *step.at, err = e.held(ctx, n, holders); err != nil {
			return nil, err
		}
	}
	many := float64(tunnels * len(holders))
	return map[string]float64{
		"tunnel_kib_1000":    (half.node - before.node) / (many / 2),
		"tunnel_kib":         (all.node - before.node) / many,
		"tunnel_sandbox_kib": (all.agents - before.agents) / many,
	}, nil
}

// holding is resident memory, in KiB.
type holding struct{ node, agents float64 }

// held weighs the node and the agents when they have been idle for a while.
func (e *egressRun) held(ctx context.Context, n *node, holders []*holder) (now holding, err error) {
	pause(ctx, time.Duration(e.count(15, 15, 1))*time.Second)
	for _, h := range holders {
		stats, err := n.Stats(ctx, h.id)
		if err != nil {
			return now, err
		}
		now.agents += float64(stats.AgentRSSBytes) / 1024
	}
	now.node, err = rss(n.pid())
	return now, err
}

// holder is a client in a sandbox that keeps tunnels.
type holder struct {
	id    boxed.ID
	in    *io.PipeWriter
	lines chan string
	ended chan error
	count int
}

// newHolder makes one with its sandbox.
func (e *egressRun) newHolder(ctx context.Context, n *node) (*holder, error) {
	id, err := e.box(ctx, n, boxed.Limits{})
	if err != nil {
		return nil, err
	}
	in, feed := io.Pipe()
	out, fill := io.Pipe()
	h := &holder{id: id, in: feed, lines: make(chan string), ended: make(chan error, 1)}
	go func() {
		var errs bytes.Buffer
		status, err := n.Exec(ctx, id, boxed.ExecRequest{
			Args: []string{guestClient, clientProgram, "hold", "-to", rawAt(rawName)}, Stdin: in, Stdout: fill, Stderr: &errs,
		})
		if err == nil {
			err = exited(status)
		}
		if err != nil {
			err = fmt.Errorf("hold tunnels: %w: %s", err, bytes.TrimSpace(errs.Bytes()))
		}
		fill.Close()
		h.ended <- err
	}()
	go func() {
		defer close(h.lines)
		for scan := bufio.NewScanner(out); scan.Scan(); {
			h.lines <- scan.Text()
		}
	}()
	return h, nil
}

// more opens more tunnels.
func (h *holder) more(ctx context.Context, count int) error {
	if _, err := fmt.Fprintln(h.in, count); err != nil {
		return err
	}
	h.count += count
	select {
	case line, ok := <-h.lines:
		switch {
		case !ok:
			err := <-h.ended
			h.ended <- err
			return errors.Join(errors.New("the client ended"), err)
		case line != strconv.Itoa(h.count):
			return fmt.Errorf("the client holds %s tunnels, not %d", line, h.count)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (h *holder) stop() {
	h.in.Close()
	for range h.lines { // until the client has ended
	}
	<-h.ended
}

// shorts measures what very many connections leave behind that came and went.
func (e *egressRun) shorts(ctx context.Context) error {
	n, err := e.node(ctx, settings{})
	if err != nil {
		return err
	}
	defer n.close()
	id, err := e.box(ctx, n, boxed.Limits{CPUs: 2})
	if err != nil {
		return err
	}
	box := within(n, id)
	connect := func(many int) error {
		took, err := box(ctx, "short", "-to", rawAt(rawName), "-count", strconv.Itoa(many))
		if err == nil {
			e.say("%d short connections took %.1f s", many, took[0])
			pause(ctx, time.Duration(e.count(10, 10, 2))*time.Second)
		}
		return err
	}
	if err := connect(e.count(2000, 2000, 500)); err != nil {
		return err
	}
	fds, err := descriptors(n.pid())
	if err != nil {
		return err
	}
	memory, err := rss(n.pid())
	if err != nil {
		return err
	}
	err = connect(e.count(100_000, 20_000, 2000))
	measured := map[string]float64{}
	if err == nil {
		var fdsAfter, after float64
		fdsAfter, err = descriptors(n.pid())
		if err == nil {
			after, err = rss(n.pid())
		}
		measured["short_fds"], measured["short_rss_kib"] = max(0, fdsAfter-fds), max(0, after-memory)
	}
	if err != nil {
		e.say("short connections: %v", err)
	}
	e.sheet.addSome(0, boxedPool, err, measured)
	return nil
}
