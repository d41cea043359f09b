package main_test

import (
	"encoding/json"
	"testing"

	"github.com/boxed-mesh/boxed"
	main "github.com/boxed-mesh/boxed/cmd/boxed-node"
)

// Point of decision 2: on a tailnet who asks is known without a key. What the
// policy grants goes first, then tags, then the login; whoever is of another
// tailnet, or behind a router, needs a grant.
func TestWhoACallerOfTheTailnetIs(t *testing.T) {
	user, admin := json.RawMessage(`{"role":"user"}`), json.RawMessage(`{"role":"admin","owner":"ops"}`)
	tags := map[string]string{"tag:ci": "user", "tag:ops": "admin"}
	for name, tc := range map[string]struct {
		who   main.Caller
		users bool
		want  boxed.Principal
		code  boxed.Code
	}{
		"a person":                           {main.Caller{Login: "ann@x", Node: "laptop"}, true, boxed.Principal{Owner: "ann@x", Role: boxed.RoleUser}, ""},
		"a person, where that is not enough": {main.Caller{Login: "ann@x", Node: "laptop"}, false, boxed.Principal{}, boxed.CodeUnauthenticated},
		"a person with a grant":              {main.Caller{Login: "ann@x", Grants: []json.RawMessage{user}}, false, boxed.Principal{Owner: "ann@x", Role: boxed.RoleUser}, ""},
		"a grant of more":                    {main.Caller{Login: "ann@x", Grants: []json.RawMessage{user, admin}}, true, boxed.Principal{Owner: "ops", Role: boxed.RoleAdmin}, ""},
		"a grant with bounds":                {main.Caller{Login: "ann@x", Grants: []json.RawMessage{json.RawMessage(`{"role":"user","sandboxes":3,"memory":"4GiB"}`)}}, false, boxed.Principal{Owner: "ann@x", Role: boxed.RoleUser, Sandboxes: 3, MemoryBytes: 4 << 30}, ""},
		"a grant that makes no sense":        {main.Caller{Login: "ann@x", Grants: []json.RawMessage{json.RawMessage(`{"role":"root"}`), json.RawMessage(`7`)}}, true, boxed.Principal{Owner: "ann@x", Role: boxed.RoleUser}, ""},
		"a machine with a tag":               {main.Caller{Tags: []string{"tag:ci"}, Node: "runner"}, true, boxed.Principal{Owner: "runner", Role: boxed.RoleUser}, ""},
		"a machine with two":                 {main.Caller{Tags: []string{"tag:ci", "tag:ops"}, Node: "bastion"}, true, boxed.Principal{Owner: "bastion", Role: boxed.RoleAdmin}, ""},
		"a machine with none of them":        {main.Caller{Tags: []string{"tag:printer"}, Node: "printer"}, true, boxed.Principal{}, boxed.CodeUnauthenticated},
		"shared in":                          {main.Caller{Login: "eve@y", Node: "hers", Shared: true}, true, boxed.Principal{}, boxed.CodeForbidden},
		"shared in, with a tag of ours":      {main.Caller{Tags: []string{"tag:ops"}, Node: "hers", Shared: true}, true, boxed.Principal{}, boxed.CodeForbidden},
		"shared in, with a grant":            {main.Caller{Login: "eve@y", Shared: true, Grants: []json.RawMessage{user}}, true, boxed.Principal{Owner: "eve@y", Role: boxed.RoleUser}, ""},
		"behind a subnet router":             {main.Caller{Login: "ann@x", Node: "router", SubnetRouted: true}, true, boxed.Principal{}, boxed.CodeForbidden},
		"nobody":                             {main.Caller{}, true, boxed.Principal{}, boxed.CodeUnauthenticated},
	} {
		got, err := main.PrincipalOf(tags, tc.users, tc.who)
		if got != tc.want || boxed.CodeOf(err) != tc.code {
			t.Errorf("%s: got %+v, %v", name, got, err)
		}
	}
}

func TestAJoinTokenIsWholeOrNone(t *testing.T) {
	token := main.NewToken("abc", []string{"10.0.0.1:7946"})
	if err := main.ParseToken(token); err != nil {
		t.Fatal(err)
	}
	if err := main.ParseToken(" " + token + "\n"); err != nil {
		t.Errorf("with spaces around it: %v", err)
	}
	for _, bad := range []string{"", "boxedjoin_", token[:len(token)-3], token[1:], "boxedjoin_AAAA", token + "!", main.NewToken("", nil), main.NewToken("abc", []string{"no port"})} {
		if err := main.ParseToken(bad); boxed.CodeOf(err) != boxed.CodeInvalid {
			t.Errorf("%q: got %v", bad, err)
		}
	}
}
