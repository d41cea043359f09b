package main

import (
	"maps"
	"slices"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// setting is one value of the configuration, as people name and write it. This
// file is the only list of them: the file, the environment, flags, `config
// print` and docs/configuration.md are made from it.
type setting struct {
	path   string // as in the file, "docker.pull_timeout"
	value  any    // pointer into a Config; value.go says of which types
	help   string // one line
	secret bool   // never printed
}

// env is the variable that sets it.
func (s setting) env() string {
	return "BOXED_" + strings.ToUpper(strings.ReplaceAll(s.path, ".", "_"))
}

// flag is the flag that sets it, without dashes.
func (s setting) flag() string { return strings.NewReplacer(".", "-", "_", "-").Replace(s.path) }

// group is the heading under which it is listed.
func (s setting) group() string {
	group, _, nested := strings.Cut(s.path, ".")
	if !nested {
		return ""
	}
	return group
}

// settings lists every setting of c, those of its templates and owners too.
func (c *Config) settings() []setting {
	list := append(c.frontSettings(), c.sandboxSettings()...)
	list = append(list, limitSettings("limits.default", &c.Limits.Default, "unless the template or the request says otherwise")...)
	list = append(list, limitSettings("limits.highest", &c.Limits.Highest, "that a request may ask for; 0 is no bound but the node's capacity")...)
	list = append(list, c.nodeSettings()...)
	list = append(list, c.Egress.settings()...)
	for _, name := range slices.Sorted(maps.Keys(c.Templates)) {
		list = append(list, templateSettings(name, c.Templates[name])...)
	}
	for _, owner := range slices.Sorted(maps.Keys(c.Quotas.Owners)) {
		list = append(list, quotaSettings("quotas.owners."+owner, c.Quotas.Owners[owner], "of "+owner+"'s")...)
	}
	return list
}

func (c *Config) frontSettings() []setting {
	return []setting{
		{path: "listen", value: &c.Listen, help: "address and port of the API"},
		{path: "data_dir", value: &c.DataDir, help: "directory of everything durable; one process at a time"},
		{path: "api_key", value: &c.APIKey, secret: true, help: "an admin's API key; wins over api_key_file; on a command line other users of the host can see it"},
		{path: "api_key_file", value: &c.APIKeyFile, help: "file of an admin's API key; where there is none it is made, for a loopback listener; default <data_dir>/admin.key"},
		{path: "tls.cert_file", value: &c.TLS.CertFile, help: "certificate chain in PEM; read again when it changes, and on SIGHUP"},
		{path: "tls.key_file", value: &c.TLS.KeyFile, help: "its private key in PEM"},
		{path: "tls.auto", value: &c.TLS.Auto, help: "make a certificate, kept in <data_dir>/tls; clients pin its fingerprint (boxed-node fingerprint)"},
		{path: "insecure_listen", value: &c.InsecureListen, help: "serve an address that is not loopback without TLS: keys and data can be read on the way"},
		{path: "hosts", value: &c.Hosts, help: "further Host names under which the API is served, besides those of the address"},
		{path: "trusted_proxies", value: &c.TrustedProxies, help: "addresses or prefixes whose X-Forwarded-For and -Proto are believed"},
		{path: "drain", value: &c.Drain, help: "how long requests may go on after a stop"},
		{path: "name", value: &c.Name, help: "what people call the node; default the host's name"},
		{path: "place", value: &c.Place, help: "whose sandboxes it takes: any, own (what is asked of this node itself: for a laptop) or never"},
		{path: "place_by", value: &c.PlaceBy, help: "how this node chooses among nodes: spread (the least full) or pack (the fullest that has room)"},
		{path: "labels", value: &c.Labels, help: "of the node, that a sandbox may ask for"},
		{path: "mesh.network", value: &c.Mesh.Network, help: "what nodes reach each other over: tcp (the host's network, also where that is on a tailnet by itself) or tailnet (a machine of the node's own on a tailnet)"},
		{path: "mesh.listen", value: &c.Mesh.Listen, help: "address and port for other nodes, TCP and UDP; only once the node is in a cluster"},
		{path: "mesh.advertise", value: &c.Mesh.Advertise, help: "address and port that other nodes dial; default that of mesh.listen, or the one of the default route"},
		{path: "mesh.seeds", value: &c.Mesh.Seeds, help: "further addresses to find the other nodes by, besides those of the token and of nodes seen before"},
		{path: "mesh.token_file", value: &c.Mesh.TokenFile, help: "file with a join token: the node joins that cluster at its first start"},
		{path: "mesh.pace", value: &c.Mesh.Pace, help: "how fast a silent node is noticed: lan (3 s) or wan (links may stall for some)"},
		{path: "mesh.control", value: &c.Mesh.Control, help: "IDs of the nodes that may make and revoke keys and remove nodes; default all"},
		{path: "mesh.vouch", value: &c.Mesh.Vouch, help: "IDs of the nodes that may say who a caller is whom only they can know, by the tailnet or SSH; default all"},
		{path: "tailnet.hostname", value: &c.Tailnet.Hostname, help: "the node's machine on the tailnet; default boxed- and the node's name"},
		{path: "tailnet.auth_key", value: &c.Tailnet.AuthKey, secret: true, help: "auth key or OAuth client secret that logs the machine in; without one the log and boxedctl cluster status have a URL to open"},
		{path: "tailnet.auth_key_file", value: &c.Tailnet.AuthKeyFile, help: "file with it"},
		{path: "tailnet.control_url", value: &c.Tailnet.ControlURL, help: "control server, a headscale say; default Tailscale's"},
		{path: "tailnet.tag", value: &c.Tailnet.Tag, help: "tag that all nodes carry; a machine without it is no node, whatever it knows"},
		{path: "tailnet.api", value: &c.Tailnet.API, help: "serve the API on the tailnet: on 443 with the tailnet's certificate where HTTPS is on, else on 80"},
		{path: "tailnet.users", value: &c.Tailnet.Users, help: "every person of the tailnet is a user, without a key; false: only who has a key, a tag below, or a grant of boxed-mesh.dev/cap/sandbox"},
		{path: "tailnet.tags", value: &c.Tailnet.Tags, help: "roles of machines by their tag: user or admin"},
		{path: "ssh.listen", value: &c.SSH.Listen, help: "address and port of the SSH front door; \"\": only the API's tunnel, and the tailnet"},
		{path: "ssh.authorized_keys", value: &c.SSH.AuthorizedKeys, help: "files of public keys, as OpenSSH's authorized_keys, by the owner whose they are; read again when they change"},
		{path: "ssh.user_ca_keys", value: &c.SSH.UserCAKeys, help: "file of public keys that sign user certificates, whose one principal is the owner"},
		{path: "ssh.shared_host_key", value: &c.SSH.SharedHostKey, help: "shows one host key on all nodes of a cluster, for clients that know nothing of its authority; each node can then pose as any other"},
		{path: "ssh.record", value: &c.SSH.Record, help: "records what terminals show over SSH, in <data_dir>/recordings, for their owners and administrators; said on each"},
		{path: "ssh.idle_timeout", value: &c.SSH.IdleTimeout, help: "ends a sandbox that ssh new@… made, with its terminal, when nothing was typed or shown for so long; 0 never does"},
		{path: "ssh.allow", value: &c.SSH.Allow, help: "what leads from a sandbox into its client's machine: remote-forwarding (ssh -R), agent-forwarding (ssh -A); default neither"},
		{path: "ssh.accept_env", value: &c.SSH.AcceptEnv, help: "further variables that an SSH client may set, besides LANG, LC_*, TERM and COLORTERM; a name may end in *"},
		{path: "log.level", value: &c.Log.Level, help: "debug, info, warn or error; read again on SIGHUP"},
		{path: "log.format", value: &c.Log.Format, help: "text or json"},
	}
}

func (c *Config) sandboxSettings() []setting {
	return []setting{
		{path: "agent", value: &c.Agent, help: "agent program to use instead of the embedded one, for development"},
		{path: "docker.host", value: &c.Docker.Host, help: "address of the engine, like unix:///run/docker.sock; default DOCKER_HOST, or the engine's own"},
		{path: "docker.runtime", value: &c.Docker.Runtime, help: "OCI runtime of sandboxes that name none; default the engine's"},
		{path: "docker.runtimes", value: &c.Docker.Runtimes, help: "runtimes that may be asked for; default all that work"},
		{path: "docker.pull_timeout", value: &c.Docker.PullTimeout, help: "for one pull of an image"},
		{path: "docker.config_file", value: &c.Docker.ConfigFile, help: "file with the credentials of registries; default ~/.docker/config.json"},
		{path: "uid_range.first", value: &c.UIDs.First, help: "first user ID that sandboxes run as, one each"},
		{path: "uid_range.last", value: &c.UIDs.Last, help: "last of them; an ID rests for an hour before it is used again"},
		{path: "ttl.default", value: &c.TTL.Default, help: "life of a sandbox that asks for none, from its creation"},
		{path: "ttl.highest", value: &c.TTL.Highest, help: "longest that a user may ask for, and that a sandbox may be paused; an admin may ask for never"},
		{path: "idle_timeout", value: &c.Idle, help: "end of a sandbox that does nothing for so long and asks for no other; 0s is none"},
		{path: "pool.refill", value: &c.Pool.Refill, help: "warm sandboxes that are made at the same time"},
		{path: "pool.memory_share", value: &c.Pool.MemoryShare, help: "share of the free memory that all warm sandboxes together may hold"},
	}
}

func (c *Config) nodeSettings() []setting {
	list := []setting{
		{path: "capacity.memory_overcommit", value: &c.Capacity.MemoryOvercommit, help: "how many times the memory is promised"},
		{path: "capacity.cpu_overcommit", value: &c.Capacity.CPUOvercommit, help: "how many times the CPUs are promised"},
		{path: "capacity.reserve", value: &c.Capacity.Reserve, help: "share of memory and CPUs that is kept for the host"},
		{path: "capacity.sandboxes", value: &c.Capacity.Sandboxes, help: "most sandboxes on this node; 0 is as many as fit"},
		{path: "events.count", value: &c.Events.Count, help: "newest events that are kept whatever their age"},
		{path: "events.age", value: &c.Events.Age, help: "age up to which events are kept whatever their number"},
		{path: "events.most", value: &c.Events.Most, help: "bound on their number whatever their age; a million is about 300 MB"},
		{path: "ended.count", value: &c.Ended.Count, help: "end records of sandboxes that are kept at most"},
		{path: "ended.age", value: &c.Ended.Age, help: "age up to which they are kept"},
	}
	return append(list, quotaSettings("quotas", &c.Quotas.Quota, "of one owner's")...)
}

func limitSettings(path string, l *boxed.Limits, which string) []setting {
	at := func(name string, value any, help string) setting {
		return setting{path: path + "." + name, value: value, help: help + " " + which}
	}
	return []setting{
		at("memory", (*size)(&l.MemoryBytes), "memory, tmpfs included,"),
		at("cpus", &l.CPUs, "CPUs"),
		at("processes", &l.Processes, "processes and threads"),
		at("open_files", &l.OpenFiles, "open files of each process"),
		at("workspace", (*size)(&l.WorkspaceBytes), "size of /workspace"),
		at("home", (*size)(&l.HomeBytes), "size of the home directory"),
		at("tmp", (*size)(&l.TmpBytes), "size of /tmp"),
		at("output", (*size)(&l.OutputBytes), "size of /output"),
		at("shm", (*size)(&l.ShmBytes), "size of /dev/shm"),
	}
}

func quotaSettings(path string, q *Quota, whose string) []setting {
	return []setting{
		{path: path + ".sandboxes", value: &q.Sandboxes, help: "most living sandboxes " + whose + "; 0 is no bound"},
		{path: path + ".memory", value: (*size)(&q.MemoryBytes), help: "most memory of all living sandboxes " + whose + "; 0 is no bound"},
	}
}

func templateSettings(name string, t *boxed.Template) []setting {
	path := "templates." + name
	list := []setting{
		{path: path + ".image", value: &t.Image, help: "image of the template"},
		{path: path + ".pool", value: &t.Pool, help: "warm sandboxes to hold of the template"},
		{path: path + ".warm", value: &t.Warm, help: "language of which an interpreter waits in each warm sandbox, 7 MiB of its memory: python or none"},
		{path: path + ".runtime", value: &t.Runtime, help: "OCI runtime of the template; default docker.runtime"},
		{path: path + ".env", value: &t.Env, help: "environment of every exec in its sandboxes"},
	}
	return append(list, limitSettings(path+".limits", &t.Limits, "of the template; 0 is limits.default's")...)
}

// named makes the entry of a map that a path of the file goes through, and
// reports whether it did: templates and owners have names of their own.
func (c *Config) named(path string) bool {
	if name, ok := strings.CutPrefix(path, "templates."); ok && boxed.ValidName(name) && c.Templates[name] == nil {
		c.Templates[name] = &boxed.Template{}
		return true
	}
	if owner, ok := strings.CutPrefix(path, "quotas.owners."); ok && c.Quotas.Owners[owner] == nil {
		c.Quotas.Owners[owner] = &Quota{}
		return true
	}
	return false
}
