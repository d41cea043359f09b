package main

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/sshd"
)

// checker gathers problems.
type checker struct{ problems Problems }

// want notes a problem with a setting unless ok.
func (c *checker) want(ok bool, setting, format string, args ...any) {
	if !ok {
		c.problems = append(c.problems, Problem{Setting: setting, Message: fmt.Sprintf(format, args...)})
	}
}

// Validate finds every value that makes no sense, by itself or with the others.
// It looks at nothing but the configuration.
func (c *Config) Validate() Problems {
	v := &checker{}
	c.validateFront(v)
	c.validateMesh(v)
	c.validateSandboxes(v)
	c.validateNode(v)
	c.Egress.validate(v)
	return v.problems
}

// wantAddress notes a problem with an address to listen on; like is a good one.
func (c *checker) wantAddress(setting, address, like string) {
	host, port, err := net.SplitHostPort(address)
	n, portErr := strconv.Atoi(port)
	c.want(err == nil && portErr == nil && n >= 0 && n <= 65535, setting, "%q is not an address and a port, like %s", address, like)
	c.want(err != nil || host == "" || validHost(host), setting, "%q is not an address or a host name", host)
}

func (c *Config) validateFront(v *checker) {
	v.wantAddress("listen", c.Listen, "127.0.0.1:8080")
	v.want(filepath.IsAbs(c.DataDir), "data_dir", "%q is not an absolute path", c.DataDir)
	v.want(c.TLS.CertFile != "" || c.TLS.KeyFile == "", "tls.cert_file", "tls.key_file is set, so the certificate must be too")
	v.want(c.TLS.KeyFile != "" || c.TLS.CertFile == "", "tls.key_file", "tls.cert_file is set, so its key must be too")
	v.want(!c.TLS.Auto || c.TLS.CertFile == "", "tls.auto", "tls.cert_file is set already; choose one")
	for _, h := range c.Hosts {
		v.want(validHost(h), "hosts", "%q is not a host name or an address without a port", h)
	}
	v.want(c.Drain >= 0 && c.Drain <= boxed.Duration(10*time.Minute), "drain", "it is between 0s and 10m")
	if c.SSH.Listen != "" {
		v.wantAddress("ssh.listen", c.SSH.Listen, defaultSSHListen)
	}
	v.want(c.SSH.IdleTimeout == 0 || c.SSH.IdleTimeout >= boxed.Duration(time.Minute), "ssh.idle_timeout", "it is 0, or at least 1m")
	v.want(c.SSH.UserCAKeys == "" || filepath.IsAbs(c.SSH.UserCAKeys), "ssh.user_ca_keys", "%q is not an absolute path", c.SSH.UserCAKeys)
	for _, what := range c.SSH.Allow {
		v.want(slices.Contains(sshd.Allowances(), what), "ssh.allow", "%q is none of %v", what, sshd.Allowances())
	}
	for owner, path := range c.SSH.AuthorizedKeys {
		v.want(node.ValidOwner(owner) == nil, "ssh.authorized_keys", "%q is not an owner's name", owner)
		v.want(filepath.IsAbs(path), "ssh.authorized_keys", "%q is not an absolute path", path)
	}
	v.want(c.Log.Format == "text" || c.Log.Format == "json", "log.format", "%q is neither text nor json", c.Log.Format)
}

func (c *Config) validateMesh(v *checker) {
	v.want(len(c.Name) <= boxed.MaxNodeName && (c.Name == "" || validHost(c.Name)), "name", "%q is not a host name of at most %d characters", c.Name, boxed.MaxNodeName)
	v.want(slices.Contains([]string{"any", "own", "never"}, c.Place), "place", "%q is none of any, own and never", c.Place)
	v.want(slices.Contains([]string{"spread", "pack"}, c.PlaceBy), "place_by", "%q is neither spread nor pack", c.PlaceBy)
	v.want(c.Mesh.Network == networkTCP || c.Mesh.Network == networkTailnet, "mesh.network", "%q is neither tcp nor tailnet", c.Mesh.Network)
	v.want(c.Tailnet.AuthKey == "" || c.Tailnet.AuthKeyFile == "", "tailnet.auth_key", "tailnet.auth_key_file is set already; choose one")
	v.want(strings.HasPrefix(c.Tailnet.Tag, "tag:") && len(c.Tailnet.Tag) > 4, "tailnet.tag", "%q is not a tag, like tag:boxed", c.Tailnet.Tag)
	v.want(c.Tailnet.ControlURL == "" || strings.HasPrefix(c.Tailnet.ControlURL, "http://") || strings.HasPrefix(c.Tailnet.ControlURL, "https://"),
		"tailnet.control_url", "%q is not a URL", c.Tailnet.ControlURL)
	v.want(c.Tailnet.Hostname == "" || validHost(c.Tailnet.Hostname) && len(c.Tailnet.Hostname) <= 63, "tailnet.hostname", "%q is not a host name", c.Tailnet.Hostname)
	for tag, role := range c.Tailnet.Tags {
		v.want(strings.HasPrefix(tag, "tag:"), "tailnet.tags", "%q is not a tag, like tag:ci", tag)
		v.want(role == "user" || role == "admin", "tailnet.tags", "%q is neither user nor admin", role)
	}
	v.want(slices.Contains([]string{"lan", "wan"}, c.Mesh.Pace), "mesh.pace", "%q is neither lan nor wan", c.Mesh.Pace)
	bytes := 0
	for key, value := range c.Labels {
		bytes += len(key) + len(value)
		v.want(key != "" && !strings.ContainsAny(key+value, "=,\x00\n"), "labels", "%q=%q is not a label: neither has a comma, = or line break in it", key, value)
	}
	v.want(len(c.Labels) <= boxed.MaxNodeLabels && bytes <= boxed.MaxNodeLabelBytes, "labels",
		"%d labels of %d bytes in all; at most %d and %d are allowed", len(c.Labels), bytes, boxed.MaxNodeLabels, boxed.MaxNodeLabelBytes)
	address := func(setting, value string, host bool) {
		h, port, err := net.SplitHostPort(value)
		n, portErr := strconv.Atoi(port)
		v.want(err == nil && portErr == nil && n >= 0 && n <= 65535 && (h == "" && !host || validHost(h)), setting, "%q is not an address and a port, like 192.168.1.10:7946", value)
	}
	address("mesh.listen", c.Mesh.Listen, false)
	if c.Mesh.Advertise != "" {
		address("mesh.advertise", c.Mesh.Advertise, true)
	}
	for _, seed := range c.Mesh.Seeds {
		address("mesh.seeds", seed, true)
	}
	for _, id := range c.Mesh.Vouch {
		v.want(boxed.NodeID(id).Valid(), "mesh.vouch", "%q is not a node's ID", id)
	}
	for _, id := range c.Mesh.Control {
		v.want(boxed.NodeID(id).Valid(), "mesh.control", "%q is not a node's ID: 16 of a-z and 2-7, as `boxedctl node ls` shows them", id)
	}
}

func (c *Config) validateSandboxes(v *checker) {
	v.want(c.Docker.PullTimeout >= boxed.Duration(time.Second), "docker.pull_timeout", "it is at least 1s")
	v.want(c.Docker.Runtime == "" || len(c.Docker.Runtimes) == 0 || slices.Contains(c.Docker.Runtimes, c.Docker.Runtime),
		"docker.runtime", "%q is not among docker.runtimes", c.Docker.Runtime)
	v.want(c.UIDs.First >= 1000, "uid_range.first", "user IDs below 1000 are the system's")
	v.want(c.UIDs.Last >= c.UIDs.First+255, "uid_range.last", "there must be at least 256 user IDs: one for each sandbox, and each rests for an hour")
	v.want(c.UIDs.Last <= 1<<31-2, "uid_range.last", "it is at most %d", 1<<31-2)
	v.want(c.TTL.Default > 0, "ttl.default", "it is positive, or never")
	v.want(c.TTL.Highest > 0, "ttl.highest", "it is positive, or never")
	v.want(c.TTL.Default <= c.TTL.Highest, "ttl.default", "%s is more than ttl.highest, %s", c.TTL.Default, c.TTL.Highest)
	v.want(c.Pool.Refill >= 1 && c.Pool.Refill <= 64, "pool.refill", "it is between 1 and 64")
	v.want(c.Pool.MemoryShare >= 0 && c.Pool.MemoryShare <= 1, "pool.memory_share", "it is between 0 and 1")
	before := len(v.problems)
	c.validateLimits(v, "limits.default", c.Limits.Default, true)
	c.validateLimits(v, "limits.highest", c.Limits.Highest, false)
	sound := len(v.problems) == before // else each template would repeat it
	v.want(c.Templates[boxed.DefaultTemplate] != nil, "templates", "the template %q is missing", boxed.DefaultTemplate)
	for name, t := range c.Templates {
		path := "templates." + name
		v.want(t.Image != "", path+".image", "a template needs an image")
		v.want(t.Warm == "" || t.Warm == boxed.WarmPython || t.Warm == boxed.WarmNone, path+".warm", "it is python or none")
		v.want(t.Pool >= 0 && t.Pool <= 1000, path+".pool", "it is between 0 and 1000")
		v.want(t.Runtime == "" || len(c.Docker.Runtimes) == 0 || slices.Contains(c.Docker.Runtimes, t.Runtime),
			path+".runtime", "%q is not among docker.runtimes", t.Runtime)
		for name := range t.Env {
			v.want(name != "" && !strings.ContainsAny(name, "=\x00"), path+".env", "%q is not the name of a variable", name)
		}
		encoded, err := json.Marshal(t.Env)
		v.want(err == nil && len(encoded) <= boxed.MaxEnvJSON/2, path+".env", "it has %d bytes as JSON; at most %d are allowed", len(encoded), boxed.MaxEnvJSON/2)
		if sound {
			c.validateLimits(v, path+".limits", c.TemplateList()[name].Limits, true)
		}
	}
}

// validateLimits checks limits; whole ones have no field that is open.
func (c *Config) validateLimits(v *checker, path string, l boxed.Limits, whole bool) {
	least := func(value, least int64, name, text string) {
		v.want(value >= least || !whole && value == 0, path+"."+name, "it is at least %s", text)
	}
	least(l.MemoryBytes, 2*boxed.MemoryHeadroom, "memory", "128MiB")
	least(l.Processes, 4, "processes", "4")
	least(l.OpenFiles, 32, "open_files", "32")
	for name, bytes := range map[string]int64{"workspace": l.WorkspaceBytes, "home": l.HomeBytes, "tmp": l.TmpBytes, "output": l.OutputBytes, "shm": l.ShmBytes} {
		least(bytes, boxed.MiB, name, "1MiB")
	}
	v.want(l.CPUs >= 0.05 || !whole && l.CPUs == 0, path+".cpus", "it is at least 0.05")
	if whole {
		v.want(l.TmpfsBytes() <= l.MemoryBytes-boxed.MemoryHeadroom, path+".memory",
			"the sizes of tmpfs add up to %s, which must be at most the memory of %s less %s: a full tmpfs is memory, and would kill the sandbox",
			size(l.TmpfsBytes()), size(l.MemoryBytes), size(boxed.MemoryHeadroom))
		over := func(value, highest int64, name string) {
			v.want(highest == 0 || value <= highest, path+"."+name, "it is more than limits.highest.%s", name)
		}
		over(l.MemoryBytes, c.Limits.Highest.MemoryBytes, "memory")
		over(l.Processes, c.Limits.Highest.Processes, "processes")
		over(l.OpenFiles, c.Limits.Highest.OpenFiles, "open_files")
		v.want(c.Limits.Highest.CPUs == 0 || l.CPUs <= c.Limits.Highest.CPUs, path+".cpus", "it is more than limits.highest.cpus")
	}
}

func (c *Config) validateNode(v *checker) {
	within := func(value, low, high float64, setting string) {
		v.want(value >= low && value <= high, setting, "it is between %v and %v", low, high)
	}
	within(c.Capacity.MemoryOvercommit, 0.1, 100, "capacity.memory_overcommit")
	within(c.Capacity.CPUOvercommit, 0.1, 1000, "capacity.cpu_overcommit")
	within(c.Capacity.Reserve, 0, 0.9, "capacity.reserve")
	v.want(c.Capacity.Sandboxes >= 0, "capacity.sandboxes", "it is not negative")
	v.want(c.Quotas.Sandboxes >= 0, "quotas.sandboxes", "it is not negative")
	for owner, q := range c.Quotas.Owners {
		v.want(q.Sandboxes >= 0, "quotas.owners."+owner+".sandboxes", "it is not negative")
	}
	v.want(c.Events.Count >= 100, "events.count", "it is at least 100")
	v.want(c.Events.Most >= c.Events.Count, "events.most", "it is at least events.count, %d", c.Events.Count)
	v.want(c.Events.Age > 0, "events.age", "it is positive")
	v.want(c.Ended.Count >= 1, "ended.count", "it is at least 1")
	v.want(c.Ended.Age > 0 && c.Ended.Age != boxed.Never, "ended.age", "it is positive and not never")
}

// checkFiles finds what only the disk can tell, and what decision 13 forbids:
// a node must not be open by accident.
func (c *Config) checkFiles() Problems {
	v := &checker{}
	if c.TLS.CertFile != "" && c.TLS.KeyFile != "" {
		_, err := tls.LoadX509KeyPair(c.TLS.CertFile, c.TLS.KeyFile)
		v.want(err == nil, "tls.cert_file", "the certificate and its key cannot be used: %v", err)
	}
	if c.Agent != "" {
		fi, err := os.Stat(c.Agent)
		v.want(err == nil && fi.Mode().IsRegular(), "agent", "there is no program at %s", c.Agent)
	}
	keyExists := c.APIKey != ""
	if !keyExists {
		switch fi, err := os.Stat(c.KeyPath()); {
		case err == nil && fi.Mode().IsRegular():
			keyExists = true
		case err == nil:
			v.want(false, "api_key_file", "%s is not a file", c.KeyPath())
		case !errors.Is(err, fs.ErrNotExist):
			v.want(false, "api_key_file", "%v", err)
		}
	}
	return append(v.problems, c.checkExposure(keyExists)...)
}

// checkExposure is decision 13: an address that others can reach needs a key
// that somebody chose or knows, and TLS, unless the operator says insecure.
func (c *Config) checkExposure(keyExists bool) Problems {
	if c.InsecureListen || isLoopback(c.Listen) {
		return nil
	}
	v := &checker{}
	v.want(keyExists, "listen",
		"%s can be reached from other machines, and there is no API key: make one (boxed-node key generate, into a file of mode 0600 that api_key_file names), or listen on 127.0.0.1", c.Listen)
	v.want(c.TLS.Enabled(), "listen",
		"%s can be reached from other machines, and there is no TLS: set tls.cert_file and tls.key_file, or tls.auto, or listen on 127.0.0.1; insecure_listen serves it in the open", c.Listen)
	return v.problems
}

// isLoopback reports whether only this machine can reach a listener. A name
// that is not localhost might resolve to anything.
func isLoopback(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	addr, err := netip.ParseAddr(host)
	return err == nil && addr.Unmap().IsLoopback()
}

func validHost(h string) bool {
	if _, err := netip.ParseAddr(strings.Trim(h, "[]")); err == nil {
		return true
	}
	if h == "" || len(h) > 253 {
		return false
	}
	for i := range len(h) {
		c := h[i]
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '.' || c == '_') {
			return false
		}
	}
	return true
}
