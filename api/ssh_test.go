package api_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api"
)

// fakeSSH is a front door whose tunnel says who came and then what it got.
type fakeSSH struct{ added []boxed.SSHKeyRequest }

func (f *fakeSSH) AddSSHKey(ctx context.Context, req boxed.SSHKeyRequest) (*boxed.SSHKey, error) {
	f.added = append(f.added, req)
	return &boxed.SSHKey{ID: "k1", Owner: boxed.PrincipalFrom(ctx).Owner, PublicKey: req.PublicKey}, nil
}

func (f *fakeSSH) ListSSHKeys(context.Context) ([]boxed.SSHKey, error) { return nil, nil }

func (f *fakeSSH) RevokeSSHKey(_ context.Context, id string) error {
	return boxed.Errorf(boxed.CodeNotFound, "there is no SSH key %q", id)
}

func (f *fakeSSH) SSHInfo(ctx context.Context) (*boxed.SSHInfo, error) {
	return &boxed.SSHInfo{Owner: boxed.PrincipalFrom(ctx).Owner, Role: boxed.RoleUser, Challenge: "c\n", Authority: "ssh-ed25519 AAAA"}, nil
}

func (f *fakeSSH) ListRecordings(context.Context) ([]boxed.Recording, error) { return nil, nil }

func (f *fakeSSH) ReadRecording(_ context.Context, id string) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader(`{"version":2}` + "\n")), nil
}

func (f *fakeSSH) DialSSH(ctx context.Context) (net.Conn, error) {
	client, server := net.Pipe()
	who := boxed.PrincipalFrom(ctx).Owner
	go func() {
		defer server.Close()
		io.WriteString(server, "hello "+who+"\n")
		io.Copy(server, server)
	}()
	return client, nil
}

// The calls about SSH reach the front door as the caller; where there is none they say
// so, and none is taken from another node.
func TestSSHOverTheAPI(t *testing.T) {
	door := &fakeSSH{}
	h := newHarness(t, func(c *api.Config) { c.SSH = door })
	ctx := t.Context()
	key, err := h.client.AddSSHKey(ctx, boxed.SSHKeyRequest{PublicKey: "ssh-ed25519 AAAA", Proof: "p"})
	if err != nil || key.Owner == "" || len(door.added) != 1 || door.added[0].Proof != "p" {
		t.Errorf("%+v, %v, %+v", key, err, door.added)
	}
	if list, err := h.client.ListSSHKeys(ctx); err != nil || list == nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
	if err := h.client.RevokeSSHKey(ctx, "nothing"); boxed.CodeOf(err) != boxed.CodeNotFound {
		t.Error(err)
	}
	info, err := h.client.SSHInfo(ctx)
	if err != nil || info.Owner != key.Owner || info.Challenge != "c\n" {
		t.Errorf("%+v, %v", info, err)
	}
	if list, err := h.client.ListRecordings(ctx); err != nil || len(list) != 0 {
		t.Errorf("%v, %v", list, err)
	}
	cast, err := h.client.ReadRecording(ctx, "r1")
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(cast); string(text) != "{\"version\":2}\n" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	cast.Close()

	conn, err := h.client.DialSSH(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want := "hello " + key.Owner + "\nping"
	io.WriteString(conn, "ping")
	got := make([]byte, len(want))
	if _, err := io.ReadFull(conn, got); err != nil || string(got) != want {
		t.Errorf("%q, %v", got, err)
	}
	conn.Close()
	if a := h.do(http.MethodGet, "/v1/ssh/tunnel", ""); a.status != http.StatusBadRequest {
		t.Errorf("no WebSocket: %d", a.status)
	}
	if a := h.do(http.MethodPost, "/v1/ssh/keys", `{"public_key": ""}`); a.status != http.StatusBadRequest {
		t.Errorf("no key: %d", a.status)
	}

	peer := serveOn(t, h.server.PeerHTTPServer("selfselfselfself", func(net.Conn) boxed.Peer { return boxed.Peer{Node: "peerpeerpeerpeer"} }))
	call := ask{"GET", "/v1/ssh/keys", "selfselfselfself", map[string]string{"Authorization": "Bearer " + userKey}, ""}
	if status, text := call.do(t, peer); status != http.StatusForbidden {
		t.Errorf("from another node: %d, %s", status, text)
	}
	without := newHarness(t)
	if _, err := without.client.SSHInfo(ctx); boxed.CodeOf(err) != boxed.CodeUnavailable {
		t.Error(err)
	}
}
