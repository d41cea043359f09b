package ctl

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// catEgress are the flags that let a sandbox out.
const catEgress = "Egress"

// catPlacement are the flags that choose among nodes.
const catPlacement = "Placement"

// isolations are the kinds of isolation, the weakest first.
var isolations = []string{"container", "gvisor", "vm"}

// specFlags describe a sandbox to be made. Defaults are printed from the
// domain's own numbers.
func specFlags() []cli.Flag {
	d := boxed.DefaultLimits()
	size := func(name, what string, def int64) cli.Flag {
		return &cli.StringFlag{Name: name, Category: "Limits", Usage: fmt.Sprintf("%s of `SIZE` (the default template has %s)", what, table.Size(def))}
	}
	return slices.Concat([]cli.Flag{
		&cli.StringFlag{Name: "image", Usage: "start from this `IMAGE`; it is pulled if the node does not have it"},
		&cli.StringFlag{Name: "template", Usage: "start from this `TEMPLATE` of the node (boxedctl node lists them); without either it is " + boxed.DefaultTemplate},
		&cli.StringFlag{Name: "name", Usage: "give it a `NAME`: up to 40 of a-z, 0-9 and -"},
		&cli.StringSliceFlag{Name: "label", Usage: "give it a label `K=V`; may be repeated"},
		&cli.StringSliceFlag{Name: "env", Aliases: []string{"e"}, Usage: "set `K=V` for every program; K alone takes it from your environment; may be repeated"},
		&cli.StringSliceFlag{Name: "env-file", Usage: "read such lines from `FILE`"},
		&cli.StringFlag{Name: "dir", Aliases: []string{"w"}, Usage: "run programs in `DIR` (default " + boxed.DefaultDir + ")"},
		&cli.StringSliceFlag{Name: "file", Usage: "copy `LOCAL:REMOTE`, a file or a directory, into it first; may be repeated"},
		&cli.StringFlag{Name: "runtime", Usage: "isolate with this OCI `RUNTIME` (boxedctl node lists them)"},
		&cli.StringFlag{Name: "ttl", Usage: "end it after `DURATION`, like 90s, 10m, 2d; admins may say never"},
		&cli.StringFlag{Name: "idle-timeout", Usage: "end it after it was idle for `DURATION`"},
	}, egressFlags(), []cli.Flag{
		&cli.StringFlag{Name: "node", Category: catPlacement, Usage: "make it on this `NODE`: an ID, its first characters, or a name"},
		&cli.StringSliceFlag{Name: "node-label", Category: catPlacement, Usage: "only on a node with the label `K=V`; repeated, with all of them"},
		&cli.StringFlag{Name: "isolation", Category: catPlacement, Usage: "only where it is isolated at least by a `KIND`: " + oneOf(isolations)},
		&cli.StringSliceFlag{Name: "near", Category: catPlacement, Usage: "only on the node of this `SANDBOX`; repeated, of one of them"},
		&cli.StringSliceFlag{Name: "apart", Category: catPlacement, Usage: "not on the node of this `SANDBOX`; repeated, of none of them"},
		size("memory", "memory, files included,", d.MemoryBytes),
		&cli.Float64Flag{Name: "cpus", Category: "Limits", Usage: fmt.Sprintf("`N` processor cores, in steps of 0.01 (the default template has %g)", d.CPUs)},
		&cli.Int64Flag{Name: "processes", Category: "Limits", Usage: fmt.Sprintf("`N` processes and threads (%d)", d.Processes)},
		&cli.Int64Flag{Name: "open-files", Category: "Limits", Usage: fmt.Sprintf("`N` open files of each process (%d)", d.OpenFiles)},
		size("workspace-size", boxed.DefaultDir, d.WorkspaceBytes),
		size("home-size", "a home directory", d.HomeBytes),
		size("tmp-size", "/tmp", d.TmpBytes),
		size("output-size", "/output", d.OutputBytes),
		size("shm-size", "/dev/shm", d.ShmBytes),
	})
}

// egressFlags say what a sandbox may reach.
func egressFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "egress", Category: catEgress, Usage: "let it reach what this `PROFILE` allows (boxedctl egress profile ls lists them); none: nothing, whatever the node's default"},
		&cli.StringSliceFlag{Name: "allow", Category: catEgress, Usage: "let it reach `HOST`, on port 443, or HOST:PORT; several between commas, or repeated"},
		&cli.StringSliceFlag{Name: "only", Category: catEgress, Usage: "narrow the profile to `HOST`; several between commas, or repeated"},
		&cli.StringSliceFlag{Name: "secret", Category: catEgress, Usage: "let programs use the secret `NAME`, which they never see (boxedctl secret ls); may be repeated"},
		&cli.StringSliceFlag{Name: "repo", Category: catEgress, Usage: "limit the secrets of code hosts, or the profile github, to the repository `OWNER/NAME`; may be repeated"},
		&cli.BoolFlag{Name: "read-only", Category: catEgress, Usage: "limit the secret to reading; of several, those of code hosts"},
		&cli.BoolFlag{Name: "ask", Category: catEgress, Usage: "ask you about each host that is not allowed (boxedctl egress ask), instead of refusing it"},
	}
}

// parseSpec reads specFlags.
func (a *app) parseSpec(c *cli.Context) (boxed.Spec, []upload, error) {
	spec := boxed.Spec{
		Name: c.String("name"), Template: c.String("template"), Image: c.String("image"),
		Dir: c.String("dir"), Runtime: c.String("runtime"),
	}
	if s := c.String("isolation"); s != "" && !containsFold(isolations, s) {
		return spec, nil, usagef("--isolation is %s, not %q", oneOf(isolations), s)
	}
	if spec.Image != "" && spec.Template != "" {
		return spec, nil, usagef("--image and --template exclude each other")
	}
	if spec.Name != "" && !boxed.ValidName(spec.Name) {
		return spec, nil, usagef("--name %q is not a name", spec.Name).hint("up to 40 of a-z, 0-9 and -, not at the ends")
	}
	var err error
	if spec.Env, err = a.parseEnv(c.StringSlice("env"), c.StringSlice("env-file")); err != nil {
		return spec, nil, err
	}
	if spec.Labels, err = parseLabels(c.StringSlice("label")); err != nil {
		return spec, nil, err
	}
	if spec.TTL, err = parseDuration("ttl", c.String("ttl")); err != nil {
		return spec, nil, err
	}
	if spec.IdleTimeout, err = parseDuration("idle-timeout", c.String("idle-timeout")); err != nil {
		return spec, nil, err
	}
	if spec.Limits, err = parseLimits(c); err != nil {
		return spec, nil, err
	}
	if spec.Egress, err = parseEgress(c); err != nil {
		return spec, nil, err
	}
	var uploads []upload
	for _, s := range c.StringSlice("file") {
		u, err := parseUpload(s)
		if err != nil {
			return spec, nil, err
		}
		uploads = append(uploads, u)
	}
	return spec, uploads, nil
}

// place reads the flags that choose among nodes, and looks up what they and those of
// egress name.
func (a *app) place(ctx context.Context, svc service, c *cli.Context, spec *boxed.Spec) error {
	var err error
	if c.IsSet("node") {
		if spec.Node, err = nodeID(ctx, svc, c.String("node")); err != nil {
			return wrapf(err, "--node")
		}
	}
	p := boxed.Placement{Isolation: strings.ToLower(c.String("isolation"))}
	for _, entry := range c.StringSlice("node-label") {
		k, v, _ := strings.Cut(entry, "=")
		if k == "" {
			return usagef("--node-label %q has no name", entry).hint("write it like --node-label disk=fast; boxedctl node ls shows those of nodes")
		}
		if p.NodeLabels == nil {
			p.NodeLabels = map[string]string{}
		}
		p.NodeLabels[k] = v
	}
	for flag, to := range map[string]*[]boxed.ID{"near": &p.Near, "apart": &p.Apart} {
		for _, ref := range c.StringSlice(flag) {
			id, err := sandboxID(ctx, svc, ref)
			if err != nil {
				return wrapf(err, "--%s %s", flag, ref)
			}
			*to = append(*to, id)
		}
	}
	if p.Isolation != "" || p.NodeLabels != nil || p.Near != nil || p.Apart != nil {
		spec.Placement = &p
	}
	return a.limitSecrets(ctx, svc, spec.Egress)
}

// parseEgress reads egressFlags; nil: none was given.
func parseEgress(c *cli.Context) (*boxed.EgressSpec, error) {
	e := &boxed.EgressSpec{Profile: c.String("egress")}
	if e.Profile != "" && !boxed.ValidName(e.Profile) {
		return nil, usagef("--egress %q names no profile", e.Profile).hint("boxedctl egress profile ls lists them")
	}
	for _, entry := range c.StringSlice("allow") {
		for host := range strings.SplitSeq(entry, ",") {
			if host = strings.TrimSpace(host); host == "" {
				return nil, usagef("--allow %q names no host", entry).hint("write it like --allow pypi.org,files.pythonhosted.org")
			}
			e.Allow = append(e.Allow, host)
		}
	}
	for _, entry := range c.StringSlice("only") {
		for host := range strings.SplitSeq(entry, ",") {
			if host = strings.TrimSpace(host); host == "" {
				return nil, usagef("--only %q names no host", entry)
			}
			e.Only = append(e.Only, host)
		}
	}
	repos := c.StringSlice("repo")
	for _, repo := range repos {
		if owner, name, _ := strings.Cut(repo, "/"); owner == "" || name == "" {
			return nil, usagef("--repo %q is no repository", repo).hint("write it like --repo acme/app")
		}
	}
	for _, name := range c.StringSlice("secret") {
		if !isOwned(name) {
			return nil, usagef("--secret %q names no secret", name).hint("boxedctl secret ls lists them; the value itself is never on a command line")
		}
		e.Secrets = append(e.Secrets, boxed.SecretUse{Name: name, Repos: repos, ReadOnly: c.Bool("read-only")})
	}
	switch {
	case e.Profile == gitHubProfile:
		e.Repos = repos
	case e.Secrets == nil && len(repos) > 0:
		return nil, usagef("--repo limits a secret, or --egress github").hint("boxedctl run --secret github --repo acme/app …")
	}
	if e.Secrets == nil && c.Bool("read-only") {
		return nil, usagef("--read-only limits a secret, and no --secret is given")
	}
	if c.Bool("ask") {
		e.OnDeny = boxed.DenyAsk
	}
	if e.Profile == "" && e.Allow == nil && e.Only == nil && e.Secrets == nil && e.OnDeny == "" {
		return nil, nil
	}
	return e, nil
}

// gitHubProfile is the ready profile that reads named repositories.
const gitHubProfile = "github"

// isOwned reports whether a text is NAME or OWNER/NAME, of a secret or a profile.
func isOwned(text string) bool {
	cut := strings.LastIndexByte(text, '/')
	if cut < 0 {
		return boxed.ValidName(text)
	}
	return cut > 0 && !strings.ContainsAny(text[:1], "./") && boxed.ValidName(text[cut+1:])
}

// codeHosts are the presets whose secrets can be limited to repositories.
var codeHosts = []string{"github", "gitlab"}

// limitSecrets leaves --repo and --read-only to the secrets of code hosts, where others
// are given beside them. A secret that is alone is the node's to judge.
func (a *app) limitSecrets(ctx context.Context, svc service, e *boxed.EgressSpec) error {
	if e == nil || len(e.Secrets) == 0 || e.Secrets[0].Repos == nil && !e.Secrets[0].ReadOnly {
		return nil
	}
	alone, forProfile, readOnly := len(e.Secrets) == 1, e.Repos != nil, e.Secrets[0].ReadOnly
	if alone && !forProfile {
		return nil
	}
	list, err := svc.ListSecrets(ctx)
	if err != nil {
		return err
	}
	var code, others, found []string
	for i := range e.Secrets {
		use := &e.Secrets[i]
		preset := presetOf(list, use.Name)
		found = append(found, use.Name+" ("+firstOf(preset, "there is none of this name")+")")
		if slices.Contains(codeHosts, preset) {
			code = append(code, use.Name)
			continue
		}
		others = append(others, use.Name)
		use.Repos, use.ReadOnly = nil, readOnly && alone
	}
	switch {
	case len(code) > 0 && len(others) > 0 && readOnly:
		a.notice("--read-only limits %s, and not %s", strings.Join(code, ", "), strings.Join(others, ", "))
	case len(code) == 0 && !forProfile, len(code) == 0 && readOnly && !alone:
		return usagef("--repo and --read-only limit secrets of code hosts, of the preset %s, and of these none is: %s", oneOf(codeHosts), strings.Join(found, ", ")).
			hint("boxedctl secret ls shows their presets")
	}
	return nil
}

// presetOf is that of a secret by name, "" if there is none. Where owners have several of
// one name, a code host's counts: it can be limited more.
func presetOf(list []boxed.Secret, name string) (preset string) {
	cut := strings.LastIndexByte(name, '/')
	of, bare := name[:max(cut, 0)], name[cut+1:]
	for _, s := range list {
		if s.Name == bare && (of == "" || s.Owner == of) && s.RevokedAt.IsZero() && (preset == "" || slices.Contains(codeHosts, s.Preset)) {
			preset = s.Preset
		}
	}
	return preset
}

func parseLimits(c *cli.Context) (boxed.Limits, error) {
	l := boxed.Limits{CPUs: c.Float64("cpus"), Processes: c.Int64("processes"), OpenFiles: c.Int64("open-files")}
	for name, n := range map[string]float64{"cpus": l.CPUs, "processes": float64(l.Processes), "open-files": float64(l.OpenFiles)} {
		if c.IsSet(name) && n <= 0 {
			return l, usagef("--%s must be more than 0", name)
		}
	}
	for name, to := range map[string]*int64{
		"memory": &l.MemoryBytes, "workspace-size": &l.WorkspaceBytes, "home-size": &l.HomeBytes,
		"tmp-size": &l.TmpBytes, "output-size": &l.OutputBytes, "shm-size": &l.ShmBytes,
	} {
		if !c.IsSet(name) {
			continue
		}
		n, err := parseSize(c.String(name))
		if err != nil {
			return l, wrapf(err, "--%s", name)
		}
		if n == 0 {
			return l, usagef("--%s must be more than 0", name)
		}
		*to = n
	}
	return l, nil
}

// sendUploads copies what --file names into a new sandbox.
func (a *app) sendUploads(ctx context.Context, svc service, sb *boxed.Sandbox, uploads []upload) error {
	for _, u := range uploads {
		if err := a.send(ctx, svc, sb.ID, u.local, u.remote); err != nil {
			return wrapf(err, "--file %s", u.local)
		}
	}
	return nil
}
