package main

import (
	"cmp"
	"context"
	"crypto/ed25519"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/crypto/ssh"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/ctl"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/sshd"
)

// sshDoor is the SSH front door: its server, who it knows, and the listener that it
// has. It implements boxed.SSH.
type sshDoor struct {
	server *sshd.Server
	ln     net.Listener // nil: it serves tunnels, and the tailnet
	hosts  *sshHosts
	keys   *node.SSHKeys
	files  *authorizedKeys
	log    *slog.Logger

	recordings *recordings
}

var _ boxed.SSH = (*sshDoor)(nil)

// openSSH opens the front door.
func (d *daemon) openSSH(ctx context.Context, service boxed.API, keys *node.SSHKeys, m *mesh) error {
	own, err := sshHostKey(d.cfg.path("ssh_host_ed25519_key"))
	if err != nil {
		return err
	}
	door := &sshDoor{
		keys: keys, log: d.log,
		files: &authorizedKeys{files: d.cfg.SSH.AuthorizedKeys, log: d.log},
		hosts: &sshHosts{own: own, cluster: m.cluster.GateKeys, names: d.sshNames(m), shared: d.cfg.SSH.SharedHostKey, log: d.log},
	}
	door.recordings = &recordings{dir: d.cfg.path("recordings")}
	door.hosts.alone = ed25519.NewKeyFromSeed(derived(d.identity, "boxed ssh host authority"))
	if door.files.authorities, err = readAuthorities(d.cfg.SSH.UserCAKeys); err != nil {
		return err
	}
	var record func(boxed.Recording) (io.WriteCloser, error)
	if d.cfg.SSH.Record {
		record = door.recordings.create
	}
	door.server, err = sshd.New(sshd.Config{
		Record:  record,
		Service: service, HostKeys: door.hosts.signers, Env: d.cfg.SSH.AcceptEnv, Idle: d.cfg.SSH.IdleTimeout.D(), Log: d.log,
		Identify: door.identify, Node: d.id, Allow: d.cfg.SSH.Allow, Emit: func(e boxed.Event) { d.store.AppendEvent(e) }, Lobby: door.lobby(service),
	})
	if err != nil {
		return err
	}
	d.ssh = door
	if d.cfg.SSH.Listen == "" {
		return nil
	}
	ln, err := listen(ctx, d.cfg.SSH.Listen)
	if err != nil {
		if d.cfg.SSH.Listen == defaultSSHListen && len(d.cfg.SSH.AuthorizedKeys) == 0 {
			// Nobody asked for it: a second node on a host, or what had the port before.
			d.log.Warn("ssh is not open but through the API: its port is taken; set ssh.listen", "listen", d.cfg.SSH.Listen, "err", err)
			return nil
		}
		return fmt.Errorf("ssh.listen: %w", err)
	}
	d.close = append(d.close, func() error { ln.Close(); return nil })
	door.ln = ln
	d.log.Info("ssh is open", "listen", ln.Addr().String(), "host_key", ssh.FingerprintSHA256(own.PublicKey()))
	return nil
}

// lobbyService is the node, and its keys, for the lobby.
type lobbyService struct {
	boxed.API
	*sshDoor
}

func (s *sshDoor) lobby(api boxed.API) func(context.Context, []string, io.Writer, io.Writer, bool) int {
	return func(ctx context.Context, args []string, stdout, stderr io.Writer, color bool) int {
		return ctl.Lobby{Service: lobbyService{api, s}, Color: color}.Run(ctx, args, stdout, stderr)
	}
}

// sshNames are the names that a client may know this node by.
func (d *daemon) sshNames(m *mesh) func() []string {
	return func() []string {
		names := []string{sshHostName, m.node.Name(), "boxed-" + m.node.Name(), "localhost", "127.0.0.1", "::1"}
		if m.tailnet != nil {
			if t := m.tailnet.Standing(); t.Name != "" {
				short, _, _ := strings.Cut(t.Name, ".")
				names = append(names, t.Name, short, t.Address)
			}
		}
		return names
	}
}

// run serves the listener, if there is one, until the server is shut down.
func (s *sshDoor) run() error {
	if s.ln == nil {
		return nil
	}
	return s.server.Serve(s.ln)
}

// identify is whose key or certificate it is: by the files of the configuration, or by
// the keys of the cluster.
func (s *sshDoor) identify(_ context.Context, key ssh.PublicKey, from net.Addr) (sshd.Identity, error) {
	if cert, ok := key.(*ssh.Certificate); ok {
		return s.files.certified(cert, from)
	}
	byFile, fileErr := s.files.owner(key)
	added, keyErr := s.keys.Owner(key)
	switch {
	case fileErr == nil && keyErr == nil && byFile != added:
		return sshd.Identity{}, boxed.Errorf(boxed.CodeUnauthenticated, "the key %s is that of two owners; leave it to one", ssh.FingerprintSHA256(key))
	case fileErr == nil:
		added = byFile
	case boxed.CodeOf(fileErr) != boxed.CodeNotFound: // of two owners' files
		return sshd.Identity{}, fileErr
	case keyErr != nil:
		return sshd.Identity{}, keyErr
	}
	return sshd.Identity{Principal: boxed.Principal{Owner: added, Role: boxed.RoleUser}}, nil
}

// challenge is what a key signs to be an owner's on this cluster.
func (s *sshDoor) challenge(owner string) string {
	return "the SSH key of " + owner + " on " + publicLine(s.hosts.authority().PublicKey()) + "\n"
}

// AddSSHKey adds a public key.
func (s *sshDoor) AddSSHKey(ctx context.Context, req boxed.SSHKeyRequest) (*boxed.SSHKey, error) {
	owner := cmp.Or(req.Owner, boxed.PrincipalFrom(ctx).Owner)
	return s.keys.Add(ctx, req, s.challenge(owner))
}

// ListSSHKeys lists the caller's keys, or for admins all.
func (s *sshDoor) ListSSHKeys(ctx context.Context) ([]boxed.SSHKey, error) {
	switch who := boxed.PrincipalFrom(ctx); {
	case who.Admin():
		return s.keys.List(""), nil
	case who.Owner == "":
		return nil, boxed.Errorf(boxed.CodeForbidden, "only a known owner may list SSH keys")
	default:
		return s.keys.List(who.Owner), nil
	}
}

// RevokeSSHKey makes a key worthless.
func (s *sshDoor) RevokeSSHKey(ctx context.Context, id string) error { return s.keys.Revoke(ctx, id) }

// SSHInfo says how the front door is found and known.
func (s *sshDoor) SSHInfo(ctx context.Context) (*boxed.SSHInfo, error) {
	who := boxed.PrincipalFrom(ctx)
	info := &boxed.SSHInfo{
		Owner: who.Owner, Role: who.Role, Challenge: s.challenge(who.Owner), Authority: publicLine(s.hosts.authority().PublicKey()),
	}
	if s.ln != nil {
		info.Listen = s.ln.Addr().String()
	}
	for _, key := range s.hosts.signers() {
		if _, cert := key.PublicKey().(*ssh.Certificate); !cert {
			info.HostKeys = append(info.HostKeys, publicLine(key.PublicKey()))
		}
	}
	return info, nil
}

// ListRecordings are those that the caller may read.
func (s *sshDoor) ListRecordings(ctx context.Context) ([]boxed.Recording, error) {
	all, err := s.recordings.of(boxed.PrincipalFrom(ctx))
	list := make([]boxed.Recording, len(all))
	for i, f := range all {
		list[i] = f.Recording
	}
	return list, err
}

// ReadRecording reads one.
func (s *sshDoor) ReadRecording(ctx context.Context, id string) (io.ReadCloser, error) {
	return s.recordings.open(boxed.PrincipalFrom(ctx), id)
}

// DialSSH connects the caller to the front door, which asks for no key.
func (s *sshDoor) DialSSH(ctx context.Context) (net.Conn, error) {
	who := boxed.PrincipalFrom(ctx)
	if who.Owner == "" {
		return nil, boxed.Errorf(boxed.CodeForbidden, "only a known owner may come in by SSH")
	}
	client, server := net.Pipe()
	go s.server.ServeConn(server, func(context.Context) (boxed.Principal, error) {
		// The API ends the tunnel when the caller's key is revoked.
		return who, ctx.Err()
	})
	return client, nil
}

// onTailnet serves SSH on the tailnet, to whom that knows without a key.
func (s *sshDoor) onTailnet(ln net.Listener, identify func(context.Context, string) (boxed.Principal, error)) error {
	return s.server.ServeKnown(ln, func(ctx context.Context, conn net.Conn) (boxed.Principal, error) {
		return identify(ctx, conn.RemoteAddr().String())
	})
}

// certified is who a user certificate lets in. Its principal is the owner; what
// else it says is honoured, or the certificate is refused.
func (a *authorizedKeys) certified(cert *ssh.Certificate, from net.Addr) (sshd.Identity, error) {
	refuse := func(format string, args ...any) (sshd.Identity, error) {
		return sshd.Identity{}, boxed.Errorf(boxed.CodeUnauthenticated, "the certificate %q: "+format, append([]any{cert.KeyId}, args...)...)
	}
	if len(cert.ValidPrincipals) != 1 {
		return refuse("it has %d principals; the one that it needs is the owner of sandboxes", len(cert.ValidPrincipals))
	}
	owner := cert.ValidPrincipals[0]
	if node.ValidOwner(owner) != nil {
		return refuse("%q is no owner's name", owner)
	}
	checker := ssh.CertChecker{
		SupportedCriticalOptions: []string{sourceAddress},
		IsUserAuthority:          func(key ssh.PublicKey) bool { return a.authorities[string(key.Marshal())] },
	}
	if cert.CertType != ssh.UserCert || !checker.IsUserAuthority(cert.SignatureKey) {
		return refuse("it is not signed as a user's by a key of ssh.user_ca_keys")
	}
	if err := checker.CheckCert(owner, cert); err != nil {
		return refuse("%w", err)
	}
	if list, ok := cert.CriticalOptions[sourceAddress]; ok && !addressIn(list, from) {
		return refuse("it is not for use from %s", from)
	}
	_, terminal := cert.Extensions["permit-pty"]
	_, forwarding := cert.Extensions["permit-port-forwarding"]
	return sshd.Identity{
		Principal: boxed.Principal{Owner: owner, Role: boxed.RoleUser}, NoTerminal: !terminal, NoForwarding: !forwarding,
	}, nil
}

// sourceAddress is the critical option that names the addresses of a certificate's
// user.
const sourceAddress = "source-address"

// addressIn reports whether an address is in a list of them and of networks.
func addressIn(list string, from net.Addr) bool {
	at, err := netip.ParseAddrPort(from.String())
	if err != nil {
		return false
	}
	addr := at.Addr().Unmap()
	for part := range strings.SplitSeq(list, ",") {
		part = strings.TrimSpace(part)
		if one, err := netip.ParseAddr(part); err == nil && one.Unmap() == addr {
			return true
		}
		if network, err := netip.ParsePrefix(part); err == nil && network.Contains(addr) {
			return true
		}
	}
	return false
}

// readAuthorities reads the keys that sign user certificates.
func readAuthorities(path string) (map[string]bool, error) {
	if path == "" {
		return nil, nil
	}
	text, err := readSmall(path)
	if err != nil {
		return nil, fmt.Errorf("ssh.user_ca_keys: %w", err)
	}
	keys := map[string]bool{}
	for len(text) > 0 {
		key, _, _, rest, err := ssh.ParseAuthorizedKey(text)
		if err != nil {
			break
		}
		keys[string(key.Marshal())], text = true, rest
	}
	if len(keys) == 0 {
		return nil, fmt.Errorf("ssh.user_ca_keys: %w", errors.New(path+" has no public key"))
	}
	return keys, nil
}
