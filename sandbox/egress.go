package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// Egress lets sandboxes out. The Manager tells it of each that may leave, and hands it what
// their agents hand over.
type Egress interface {
	// Wanted reports whether an owner's sandbox that asks for this, nil for nothing, has
	// egress.
	Wanted(owner string, spec *boxed.EgressSpec) bool
	// Attach lets a sandbox out, or changes what it may reach.
	Attach(s *boxed.Sandbox, spec *boxed.EgressSpec) (*boxed.EgressGrant, error)
	// Restore lets a sandbox of an earlier life out again.
	Restore(s *boxed.Sandbox, g *boxed.EgressGrant) error
	// Allow lets it reach one host more for so long; 0 is for as long as it lives. An admin is
	// not held to what owners may have.
	Allow(id boxed.ID, host string, d time.Duration, admin bool) (*boxed.EgressGrant, error)
	// State says whether it reaches what it may. It is asked often.
	State(id boxed.ID) *boxed.EgressStatus
	// Resolve answers a DNS query: an RCODE, and the ports that a name may be reached at.
	Resolve(id boxed.ID, intent boxed.EgressIntent) (code int, ports []uint16)
	// Serve serves a connection until it has ended. opened is called for EntryName, once,
	// before any byte: an error is why there is nobody.
	Serve(ctx context.Context, id boxed.ID, intent boxed.EgressIntent, conn boxed.EgressConn, opened func(error) error)
	// Relabel tells of a sandbox's new labels.
	Relabel(id boxed.ID, labels map[string]string)
	// Detach shuts a sandbox. It is idempotent.
	Detach(id boxed.ID)
}

// Ports of the entries, on 127.0.0.1 of the sandbox.
var egressPorts = agent.EgressConfig{HTTP: 3128, SOCKS: 1080, DNS: 53}

// serveEgress is what an agent's host calls with each connection that is handed over.
func (b *box) serveEgress(ctx context.Context, in agent.Intent, conn agent.EgressConn) {
	defer conn.Close()
	e := b.m.cfg.Egress
	intent := boxed.EgressIntent{Entry: boxed.EgressEntry(in.Entry), Host: in.Host, Port: in.Port, Type: in.Type, Full: in.Full}
	if intent.Entry == boxed.EntryDNS {
		code, ports := e.Resolve(b.id, intent)
		conn.Answer(agent.Verdict{Code: code, Ports: ports}, nil)
		return
	}
	b.mu.Lock()
	b.busy++ // a download keeps it from being idle
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		b.busy--
		b.active = b.m.cfg.Now()
		b.mu.Unlock()
	}()
	e.Serve(ctx, b.id, intent, conn, func(err error) error {
		if err != nil {
			err = &agent.Error{Code: agent.ErrDenied, Message: err.Error()}
		}
		return conn.Answer(nil, err)
	})
}

// stepCanary looks from inside whether the sandbox is shut, before anybody can claim it.
func (b *box) stepCanary(ctx context.Context) error {
	host := b.link()
	if host == nil {
		return agent.ErrClosed
	}
	if !host.ServesEgress() {
		return nil
	}
	_, err := host.Canary(ctx, agent.Canary{})
	return err
}

// openEgress lets a sandbox out that is being handed over, and makes sure that it gets no
// further than it may.
func (b *box) openEgress(ctx context.Context, spec *boxed.EgressSpec) error {
	e := b.m.cfg.Egress
	if e == nil || !e.Wanted(b.record().Sandbox.Owner, spec) {
		return nil
	}
	host := b.link()
	if host == nil {
		return agent.ErrClosed
	}
	if !host.ServesEgress() {
		return boxed.Errorf(boxed.CodeUnavailable, "the sandbox's agent cannot serve egress").WithField("egress")
	}
	// The entries are opened while the policy is made: before there is one, nothing passes.
	opened := make(chan error, 1)
	config := b.record()
	config.Egress = &boxed.EgressGrant{}
	go func() { opened <- b.linkError(host.Configure(ctx, b.m.agentConfig(&config))) }()
	grant, err := e.Attach(b.view(), spec)
	if err == nil {
		b.mu.Lock()
		b.rec.Egress = grant // it becomes durable with the state
		b.mu.Unlock()
		err = b.writeEgress(ctx, host, grant)
	}
	if openErr := <-opened; err == nil {
		err = openErr
	}
	if err != nil {
		return err
	}
	return lookOut(ctx, host, grant)
}

// pushEgress gives the sandbox its files, has the agent open its entries, and looks from
// inside whether what is denied is.
func (b *box) pushEgress(ctx context.Context, host *agent.Host, grant *boxed.EgressGrant) error {
	if err := b.writeEgress(ctx, host, grant); err != nil {
		return err
	}
	r := b.record()
	if err := host.Configure(ctx, b.m.agentConfig(&r)); err != nil {
		return b.linkError(err)
	}
	return lookOut(ctx, host, grant)
}

// lookOut makes sure, from inside, that a name which is denied is.
func lookOut(ctx context.Context, host *agent.Host, grant *boxed.EgressGrant) error {
	if _, err := host.Canary(ctx, agent.Canary{Open: true, Name: grant.Canary}); err != nil {
		return boxed.Errorf(boxed.CodeInternal, "%w", err)
	}
	return nil
}

// writeEgress writes the files that programs in the sandbox find.
func (b *box) writeEgress(ctx context.Context, host *agent.Host, grant *boxed.EgressGrant) error {
	if own := grant.Files[boxed.EgressCAFile]; own != nil {
		bundle := append(slices.Clone(b.roots(ctx, host)), '\n')
		grant.Files[boxed.EgressBundleFile] = append(bundle, own...)
	}
	for name, text := range grant.Files {
		if err := replaceFile(filepath.Join(b.dir(), name), text); err != nil {
			return fmt.Errorf("write the egress files: %w", err)
		}
	}
	return nil
}

// replaceFile writes a file that programs may be reading.
func replaceFile(path string, text []byte) error {
	temp := path + ".new"
	if err := os.WriteFile(temp, text, 0o644); err != nil {
		return err
	}
	return os.Rename(temp, path)
}

// SetEgress changes what a running sandbox may reach.
func (m *Manager) SetEgress(ctx context.Context, id boxed.ID, spec *boxed.EgressSpec) error {
	return m.changeEgress(ctx, id, func(b *box) (*boxed.EgressGrant, error) {
		if !m.cfg.Egress.Wanted(b.record().Sandbox.Owner, spec) {
			m.cfg.Egress.Detach(id)
			return nil, nil
		}
		return m.cfg.Egress.Attach(b.view(), spec)
	})
}

// AllowEgress lets a running sandbox reach one host more.
func (m *Manager) AllowEgress(ctx context.Context, id boxed.ID, hostName string, d time.Duration, admin bool) error {
	return m.changeEgress(ctx, id, func(*box) (*boxed.EgressGrant, error) {
		return m.cfg.Egress.Allow(id, hostName, d, admin)
	})
}

func (m *Manager) changeEgress(ctx context.Context, id boxed.ID, change func(*box) (*boxed.EgressGrant, error)) error {
	if m.cfg.Egress == nil {
		return boxed.Errorf(boxed.CodeUnavailable, "this node serves no egress")
	}
	return m.with(id, func(b *box, host *agent.Host) error {
		if !host.ServesEgress() {
			return boxed.Errorf(boxed.CodeUnavailable, "the sandbox was made by an earlier release, whose agent serves no egress; make a new one")
		}
		grant, err := change(b)
		if err != nil {
			return err
		}
		return b.keepEgress(ctx, host, grant)
	})
}

// keepEgress makes a changed grant durable and gives it to the sandbox; nil shuts it.
func (b *box) keepEgress(ctx context.Context, host *agent.Host, grant *boxed.EgressGrant) error {
	err := b.update(func(r *Record) error {
		r.Egress = grant
		return b.alive()
	})
	if err != nil {
		return err
	}
	if grant == nil {
		r := b.record()
		return b.linkError(host.Configure(ctx, b.m.agentConfig(&r)))
	}
	return b.pushEgress(ctx, host, grant)
}

// RenewEgress gives a sandbox a grant that has changed by itself. It returns at once.
func (m *Manager) RenewEgress(id boxed.ID, grant *boxed.EgressGrant) {
	m.later(func(ctx context.Context) {
		ctx, cancel := m.untilStop(ctx, stepLimit)
		defer cancel()
		err := m.with(id, func(b *box, host *agent.Host) error { return b.keepEgress(ctx, host, grant) })
		if err != nil && !errors.Is(err, boxed.CodeGone) {
			m.log.Warn("renew a sandbox's egress", "sandbox", id, "err", err)
		}
	})
}

// restoreEgress lets an adopted sandbox out again. One whose egress cannot be read stays
// shut.
func (b *box) restoreEgress() {
	r := b.record()
	if r.Egress == nil || b.m.cfg.Egress == nil {
		return
	}
	if err := b.m.cfg.Egress.Restore(&r.Sandbox, r.Egress); err != nil {
		b.m.log.Error("a sandbox's egress stays shut", "sandbox", b.id, "err", err)
	}
}

// shutEgress ends it.
func (b *box) shutEgress() {
	if b.m.cfg.Egress != nil {
		b.m.cfg.Egress.Detach(b.id)
	}
}

// Where images keep the certificates that they trust.
var rootFiles = []string{"/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/ca-bundle.pem", "/etc/ssl/cert.pem"}

const (
	maxRoots  = 1 << 20 // bytes that are taken of an image
	keptRoots = 64      // images whose certificates are kept
)

// roots are the certificates that the sandbox's image trusts. They are read once per image,
// when the first sandbox of it is let out: where its root is read-only, user code has no part
// in them.
func (b *box) roots(ctx context.Context, host *agent.Host) []byte {
	digest := b.record().Sandbox.ImageDigest
	m := b.m
	m.mu.Lock()
	have, ok := m.roots[digest]
	m.mu.Unlock()
	if ok {
		return have
	}
	for _, path := range rootFiles {
		var text []byte
		content, _, err := host.Read(ctx, agent.Read{Path: path, Length: maxRoots})
		if err == nil {
			text, err = io.ReadAll(io.LimitReader(content, maxRoots))
			content.Close()
		}
		if err == nil && len(text) > 0 {
			have = text
			break
		}
	}
	if ctx.Err() != nil {
		return have
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.roots) >= keptRoots {
		clear(m.roots)
	}
	m.roots[digest] = have
	return have
}
