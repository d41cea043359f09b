package ctl

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"

	"github.com/boxed-mesh/boxed"
)

//go:embed smoke_egress.py
var smokeEgressPython string

// smokeEgressChecks are those of the way out.
var smokeEgressChecks = []check{
	{Name: "egress_refuses", Title: "what is not allowed is refused", Remedy: "do not give sandboxes egress on this node: its proxy lets through what no rule names"},
	{Name: "egress_names", Title: "allowed names have an address of loopback", Remedy: "the sandbox's /etc/resolv.conf must be boxed-node's, and nothing else listen on its port 53"},
	{Name: "egress_addresses", Title: "this host and the metadata service stay out of reach", Remedy: "do not give sandboxes egress on this node: its proxy connects to addresses that nothing may allow"},
	{Name: "egress_credentials", Title: "a secret is a placeholder inside", Remedy: "do not attach secrets on this node: their value is in the sandbox"},
}

// smokeHost may be asked for, and is nowhere: nothing outside is disturbed.
const smokeHost = "boxed-smoke.invalid"

// smokeEgress lets the sandbox out, with a secret that is worth nothing, and looks from
// inside.
func smokeEgress(ctx context.Context, svc service, sb *boxed.Sandbox) []check {
	leaveOut := func(why string) []check {
		list := make([]check, len(smokeEgressChecks))
		for i, c := range smokeEgressChecks {
			list[i] = check{Name: c.Name, Title: c.Title, Result: resultSkipped, Detail: why}
		}
		return list
	}
	value := boxed.NewToken(40)
	// One secret for all times, rotated: each that is revoked is kept for ever.
	secret := boxed.Secret{Name: "boxed-smoke", Preset: "generic", Hosts: []string{"secret." + smokeHost}, Env: []string{"BOXED_SMOKE_SECRET"}}
	_, err := svc.SetSecret(ctx, boxed.SecretRequest{Secret: secret, Value: value})
	if errors.Is(err, boxed.CodeUnavailable) {
		return leaveOut("this node serves no egress")
	}
	if err != nil {
		return leaveOut("a secret could not be set: " + err.Error())
	}
	_, err = svc.SetEgress(ctx, sb.ID, boxed.EgressSpec{
		Profile: "none", Allow: []string{smokeHost, "169.254.169.254:80", "100.100.100.100", "127.0.0.1:8080", "[::1]:8080"},
		Secrets: []boxed.SecretUse{{Name: secret.Name}},
	})
	if err != nil {
		return leaveOut("the sandbox was not let out: " + err.Error())
	}
	var stdout, stderr bytes.Buffer
	st, err := svc.Exec(ctx, sb.ID, boxed.ExecRequest{
		Args: []string{"python3", "-c", smokeEgressPython}, Timeout: smokeTimeout, MaxOutput: boxed.CollectedOutput, Stdout: &stdout, Stderr: &stderr,
	})
	if err == nil && st.Code != 0 {
		err = fmt.Errorf("the checks broke off: %s", lastLine(stderr.String()))
	}
	if err != nil {
		return leaveOut(err.Error())
	}
	return judge(smokeEgressChecks, map[string]func(string, string) (string, string){
		"egress_credentials": func(placeholder, _ string) (string, string) {
			if placeholder == "" || placeholder == value {
				return resultFailed, "it is the value itself, or nothing"
			}
			return resultOK, "its value is not inside"
		},
	}, stdout.Bytes(), true)
}
