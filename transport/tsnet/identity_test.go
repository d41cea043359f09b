package tsnet_test

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
	"github.com/boxed-mesh/boxed/transport/tsnet"
	"github.com/boxed-mesh/boxed/transport/tsnet/tailnettest"
)

func TestWhoIs(t *testing.T) {
	const capability = "boxed.dev/cap/boxed"
	tailnet, key := tailnettest.Start(t), transport.NewClusterKey()
	a := node(t, newConfig(t, tailnet, key))
	configs := map[string]tsnet.Config{}
	addrs := map[string]string{}
	for _, name := range []string{"tagged", "person", "shared", "router"} {
		configs[name] = newConfig(t, tailnet, key)
		addrs[name] = strings.Replace(node(t, configs[name]).Addr(), ":7946", ":54321", 1)
	}
	for _, err := range []error{
		tailnet.SetTags(configs["person"].Hostname), tailnet.Share(configs["shared"].Hostname),
		tailnet.SetRoutes(configs["router"].Hostname, netip.MustParsePrefix("10.77.0.0/24"), netip.MustParsePrefix("0.0.0.0/0")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	tailnet.SetCaps(map[string][]string{capability: {`{"role":"admin"}`, `{"role":"user"}`}})
	who := func(addr string) tsnet.Identity {
		t.Helper()
		id, err := network(a).WhoIs(within(t, patience), addr)
		if err != nil {
			t.Fatalf("%s: %v", addr, err)
		}
		return id
	}
	eventually(t, "all is seen", func() bool {
		p, s, r := who(addrs["person"]), who(addrs["shared"]), who(addrs["router"])
		if _, err := network(a).WhoIs(within(t, patience), "10.77.0.9"); err != nil {
			return false
		}
		return p.Login != "" && s.Shared && r.SubnetRouted && len(p.Caps[capability]) > 0
	})
	full := func(name string) string { return configs[name].Hostname + "." + tailnettest.Domain }
	granted := []json.RawMessage{json.RawMessage(`{"role":"admin"}`), json.RawMessage(`{"role":"user"}`)}

	if got := who(addrs["tagged"]); got.Login != "" || got.Node != full("tagged") || !cmp.Equal(got.Tags, []string{tsnet.DefaultTag}) || got.Shared || got.SubnetRouted {
		t.Errorf("a machine with a tag: %+v", got)
	}
	if got := who(addrs["person"]); !strings.Contains(got.Login, "@") || got.Name == "" || got.Node != full("person") || len(got.Tags) != 0 || !cmp.Equal(got.Caps[capability], granted) {
		t.Errorf("a person's machine: %+v", got)
	}
	if got := who(addrs["shared"]); !got.Shared {
		t.Errorf("a machine of another tailnet: %+v", got)
	}
	if got := who(addrs["router"]); !got.SubnetRouted || got.Node != full("router") {
		t.Errorf("a router: %+v", got)
	}
	if got := who("10.77.0.9:1234"); !cmp.Equal(got, tsnet.Identity{Node: full("router"), SubnetRouted: true}) {
		t.Errorf("a caller behind a router: %+v", got)
	}
	for _, addr := range []string{"127.0.0.1:80", "10.78.0.1:80", "100.64.99.1:80", "8.8.8.8", "[::1]:80", "", "localhost:80"} {
		if got, err := network(a).WhoIs(within(t, patience), addr); !errors.Is(err, boxed.CodeNotFound) {
			t.Errorf("%q: got %+v, %v", addr, got, err)
		}
	}
}
