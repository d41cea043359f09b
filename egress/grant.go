package egress

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// Ports of the entries in every sandbox, on 127.0.0.1.
const (
	HTTPPort  = 3128
	SOCKSPort = 1080
	DNSPort   = 53
)

// Directory is where a sandbox finds the files of its egress.
const Directory = "/run/boxed"

// grantLocked is what the sandbox's record keeps, and what programs in it find.
func (k *Keeper) grantLocked(b *boxEgress) *boxed.EgressGrant {
	text, err := json.Marshal(b.state)
	if err != nil {
		panic("egress: " + err.Error()) // strings and bytes can always be encoded
	}
	g := &boxed.EgressGrant{
		Spec: b.spec, State: k.cfg.Sealer.Seal("egress "+string(b.sandbox.ID), text), Canary: b.state.Canary,
		Env: map[string]string{}, Files: map[string][]byte{},
	}
	proxy := fmt.Sprintf("http://127.0.0.1:%d", HTTPPort)
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"} {
		// Not the SOCKS entry for the last: clients with a SOCKS proxy in their environment
		// and no library for it (httpx) refuse to start.
		g.Env[name], g.Env[strings.ToLower(name)] = proxy, proxy
	}
	g.Env["NO_PROXY"], g.Env["no_proxy"] = "localhost,127.0.0.1,::1", "localhost,127.0.0.1,::1"
	g.Env["NODE_USE_ENV_PROXY"] = "1"
	k.trust(b, g)
	for name, text := range b.now.files {
		g.Files[name] = []byte(text)
		if v := fileVariables[name]; v != "" {
			g.Env[v] = Directory + "/" + name
		}
	}
	maps.Copy(g.Env, b.now.env)
	return g
}

// fileVariables say where programs look for a file.
var fileVariables = map[string]string{"gitconfig": "GIT_CONFIG_SYSTEM", "npmrc": "NPM_CONFIG_GLOBALCONFIG", "pip.conf": "PIP_CONFIG_FILE"}

// addVariables name certificates that a program trusts besides its own; replaceVariables
// those that it trusts instead.
var (
	addVariables     = []string{"NODE_EXTRA_CA_CERTS", "DENO_CERT", "BOXED_CA"}
	replaceVariables = []string{
		"SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE",
		"CARGO_HTTP_CAINFO", "NIX_SSL_CERT_FILE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
	}
)

// trust gives programs the certificates that they need.
func (k *Keeper) trust(b *boxEgress, g *boxed.EgressGrant) {
	extra := k.cfg.Proxy.cfg.ExtraRoots
	var own []byte
	if b.state.Authority != nil {
		own = b.state.Authority.PEM()
	}
	if len(own) == 0 && len(extra) == 0 {
		return
	}
	own = append(own, extra...)
	g.Files[boxed.EgressCAFile] = own // and the bundle, which the image's own are part of
	for _, name := range addVariables {
		g.Env[name] = Directory + "/" + boxed.EgressCAFile
	}
	for _, name := range replaceVariables {
		g.Env[name] = Directory + "/" + boxed.EgressBundleFile
	}
}
