package main

import (
	"encoding/base64"
	"net"
	"strings"

	"github.com/fxamacker/cbor/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/transport"
)

// joinToken is all that a node needs to join a cluster: the one secret.
type joinToken struct {
	Cluster string               `cbor:"1,keyasint"`
	Key     transport.ClusterKey `cbor:"2,keyasint"`
	Seeds   []string             `cbor:"3,keyasint"`
}

// tokenPrefix makes a leaked token recognisable.
const (
	tokenPrefix = "boxedjoin_"
	maxSeeds    = 5
)

func (t joinToken) String() string {
	raw, err := cbor.Marshal(t)
	if err != nil {
		return "" // strings and bytes can always be encoded
	}
	return tokenPrefix + base64.RawURLEncoding.EncodeToString(raw)
}

func parseToken(text string) (joinToken, error) {
	bad := boxed.Errorf(boxed.CodeInvalid, "that is not a join token: one starts with %s, and `boxedctl cluster token` prints it on a node of the cluster", tokenPrefix).WithField("token")
	encoded, ok := strings.CutPrefix(strings.TrimSpace(text), tokenPrefix)
	raw, err := base64.RawURLEncoding.DecodeString(encoded)
	if !ok || err != nil || len(raw) > 4096 {
		return joinToken{}, bad
	}
	var t joinToken
	if err := cbor.Unmarshal(raw, &t); err != nil || t.Cluster == "" || len(t.Cluster) > 64 || t.Key == (transport.ClusterKey{}) || len(t.Seeds) > 64 {
		return joinToken{}, bad
	}
	for _, seed := range t.Seeds {
		if _, _, err := net.SplitHostPort(seed); err != nil {
			return joinToken{}, bad
		}
	}
	return t, nil
}
