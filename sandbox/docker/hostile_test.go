package docker_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/volume"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// tree makes files (content), directories (name ends in a slash) and links
// (content begins with "->") and gives their root.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		path := filepath.Join(root, name)
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		target, isLink := strings.CutPrefix(content, "->")
		switch {
		case err != nil:
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(path, 0o755)
		case isLink:
			err = os.Symlink(target, path)
		default:
			err = os.WriteFile(path, []byte(content), 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// hostileConfig is everything that an image can say about its container.
func hostileConfig(g sandbox.Box, instance string) []string {
	return []string{
		"ENTRYPOINT /evil", "CMD evil", "USER 4242:4242", "WORKDIR /evil/dir", "EXPOSE 22 80/tcp",
		"HEALTHCHECK --interval=1s CMD /evil", "VOLUME /data /var/lib/db /workspace /dev/shm/x/.. /tmp/ /run /home",
		"LABEL sh.boxed.instance=" + instance, "LABEL sh.boxed.sandbox=" + string(g.ID), "LABEL sh.boxed.nonce=forged",
		"LABEL sh.boxed.probe=" + instance, "LABEL traefik.enable=true",
		"ENV LD_PRELOAD=/evil.so", "ENV LD_AUDIT=/evil.so", "ENV GODEBUG=gctrace=1", "ENV GOGC=off", "ENV GOMAXPROCS=1",
		"ENV BOXED_SECRET=x", "ENV HTTP_PROXY=http://evil", "ENV https_proxy=http://evil", "ENV HOSTNAME=evil", "ENV HOME=/evil",
		"ENV BASH_ENV=/evil", "ENV KEEP=yes", "ENV PATH=evil::/usr/bin:.:/opt/bin",
	}
}

// I5: an image has no effect beyond its files, and what runs in it costs the
// engine's disk nothing. facts.md: VOLUME wrote past every limit, HEALTHCHECK was
// run, labels merged, LD_PRELOAD reached PID 1.
func TestHostileImageConfiguresNothing(t *testing.T) {
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		d := r.driver(t)
		box, _ := newBox(t, sandbox.Image{})
		const name = "boxed-test/hostile:1"
		big := strings.Repeat("x", 4<<20)
		r.importImage(t, name, tree(t, map[string]string{
			"etc/passwd": "root:x:0:0::/evil:/evil\nsandbox:x:0:0:::\n", "etc/group": "root:x:0:root\n", "etc/ld.so.preload": "/evil.so\n",
			"etc/hosts": "6.6.6.6 localhost\n", "etc/resolv.conf": "nameserver 6.6.6.6\n", "data/big": big, "workspace/big": big,
			"tmp/big": big, "home/sandbox/big": big, "run/boxed/agent.sock": "x", "evil/dir/": "",
		}), hostileConfig(box, d.Instance())...)

		img, err := d.Image(t.Context(), name, nil)
		if err != nil {
			t.Fatal(err)
		}
		wantEnv := map[string]string{"KEEP": "yes", "PATH": "/usr/bin:/opt/bin"}
		if fmt.Sprint(img.Env) != fmt.Sprint(wantEnv) {
			t.Errorf("environment: %v, want %v", img.Env, wantEnv)
		}
		volumes := volumeNames(t, r)
		g := start(t, d, img)
		checkFirstProcess(t, g)
		checkAsTheEngineSees(t, r, g)
		for _, path := range []string{"/data", "/var/lib/db"} { // declared: the user's, small, in memory
			if got := g.stat(path); got.Bytes == 0 || got.Bytes > 16*boxed.MiB || got.UID != uint64(g.box.UID) || (r.shares && (!got.NoDev || !got.NoSuid)) {
				t.Errorf("%s: %+v", path, got)
			}
			if got := g.user("ls", path); got != "0" {
				t.Errorf("%s holds %s entries", path, got)
			}
		}
		for _, m := range sandbox.GuestTmpfs(g.box.Limits) {
			if got := g.stat(m.Path); got.Bytes != uint64(m.Bytes) || got.UID != uint64(g.box.UID) {
				t.Errorf("%s: %+v", m.Path, got)
			}
		}
		if got := g.user("cat", "/etc/hosts"); got != "127.0.0.1 localhost" {
			t.Errorf("/etc/hosts: %s", got)
		}
		// Whatever is written, by whomever, is not the disk's.
		for _, uid := range []int{g.box.UID, 0} {
			for _, dir := range []string{"/", "/data", "/var/lib/db", "/workspace", "/home/sandbox", "/tmp", "/output", "/dev/shm", "/etc", "/evil", "/run", "/home"} {
				g.run(uid, "self", "fill", dir)
			}
		}
		c, _, err := r.client.ContainerInspectWithRaw(t.Context(), g.id, true)
		// What the runtime itself puts there are mount points.
		if err != nil || c.SizeRw == nil || *c.SizeRw > 4096 {
			t.Errorf("the container's layer: %v bytes, %v", c.SizeRw, err)
		}
		if after := volumeNames(t, r); !slices.Equal(volumes, after) {
			t.Errorf("volumes %v, then %v", volumes, after)
		}
	})
}

func volumeNames(t *testing.T, r *oci) (names []string) {
	t.Helper()
	list, err := r.client.VolumeList(t.Context(), volume.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range list.Volumes {
		names = append(names, v.Name)
	}
	slices.Sort(names)
	return names
}

// checkFirstProcess looks at what PID 1 got, from within.
func checkFirstProcess(t *testing.T, g *guest) {
	t.Helper()
	read := func(name string) string { return g.run(0, "self", "cat", "/proc/1/"+name).Out }
	environ := strings.Split(strings.TrimSuffix(read("environ"), "\x00"), "\x00")
	environ = slices.DeleteFunc(environ, func(e string) bool { return e == "PATH="+sandbox.DefaultPath }) // gVisor's own
	slices.Sort(environ)
	want := sandbox.AgentEnv()
	slices.Sort(want)
	if !slices.Equal(environ, want) {
		t.Errorf("PID 1's environment: %q", environ)
	}
	if got := read("cmdline"); got != sandbox.GuestAgent+"\x00" {
		t.Errorf("PID 1: %q", got)
	}
}

func checkAsTheEngineSees(t *testing.T, r *oci, g *guest) {
	t.Helper()
	c, err := r.client.ContainerInspect(t.Context(), g.id)
	if err != nil {
		t.Fatal(err)
	}
	if l := c.Config.Labels; l["sh.boxed.nonce"] != g.box.Nonce || l["sh.boxed.sandbox"] != string(g.box.ID) || l["traefik.enable"] != "" || l["sh.boxed.probe"] != "" {
		t.Errorf("labels: %v", l)
	}
	if c.State.Health != nil || c.Config.StopSignal != "SIGKILL" {
		t.Errorf("health %+v, stop signal %s", c.State.Health, c.Config.StopSignal)
	}
	for _, m := range c.Mounts {
		if m.Type == mount.TypeVolume {
			t.Errorf("the engine made a volume for %s", m.Destination)
		}
	}
}

// Case I5: what an image's files can bend is found out after the start, before
// anything of the user's runs.
func TestHostileFilesEndTheStart(t *testing.T) {
	d := newDriver(t)
	for name, c := range map[string]struct {
		files map[string]string
		say   string
	}{
		"the socket in a user's":      {map[string]string{"run": "->/tmp/run"}, "/run/boxed"},
		"the socket elsewhere":        {map[string]string{"run/boxed": "->/var/x", "var/x/": ""}, "/run/boxed"},
		"two places are one":          {map[string]string{"workspace": "->tmp", "tmp/": ""}, "link"},
		"home over the system":        {map[string]string{"home/sandbox": "->/etc", "etc/": ""}, "/etc"},
		"shared memory elsewhere":     {map[string]string{"output": "->/dev/shm"}, "/"},
		"the agent is a directory":    {map[string]string{".boxed-agent/": ""}, ""},
		"the agent is a link":         {map[string]string{".boxed-agent": "->/tmp/x"}, ""},
		"passwd is a directory":       {map[string]string{"etc/passwd/": ""}, ""},
		"a place is a file":           {map[string]string{"workspace": "x"}, ""},
		"a place is a link in a loop": {map[string]string{"workspace": "->workspace"}, ""},
		"a link out of the image":     {map[string]string{"workspace": "->../../../../../../../../root"}, "/root"},
	} {
		t.Run(name, func(t *testing.T) {
			image := "boxed-test/bent:" + strings.ReplaceAll(strings.ReplaceAll(name, " ", "-"), "'", "")
			importImage(t, image, tree(t, c.files))
			img, err := d.Image(t.Context(), image, nil)
			if err != nil {
				t.Fatal(err)
			}
			box, _ := newBox(t, img)
			id, err := d.Create(t.Context(), box)
			if err != nil {
				t.Logf("create: %v", err)
				return
			}
			err = d.Start(t.Context(), id)
			if boxed.CodeOf(err) != boxed.CodeStartFailed || !strings.Contains(fmt.Sprint(err), c.say) {
				t.Errorf("start: %v", err)
			}
			t.Log(err)
			eventually(t, "it does not run", func() bool {
				s, err := d.Status(t.Context(), id)
				return err == nil && !s.Running
			})
			if err := d.Remove(t.Context(), id); err != nil {
				t.Error(err)
			}
		})
	}
}

// Case I5: engines look the user "0" up by name before, or instead of, taking
// it for a number.
func TestRootIsRootWhateverThePasswdFileSays(t *testing.T) {
	d := newDriver(t)
	const image = "boxed-test/passwd:1"
	importImage(t, image, tree(t, map[string]string{
		"etc/passwd": "0:x:4242:4242::/:/x\nroot:x:0:0::/:/x\n", "etc/group": "0:x:4242:root\nmore:x:4343:root,0\n",
	}))
	img, err := d.Image(t.Context(), image, nil)
	if err != nil {
		t.Fatal(err)
	}
	box, _ := newBox(t, img)
	id, err := d.Create(t.Context(), box)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context(), id); err != nil {
		if boxed.CodeOf(err) != boxed.CodeStartFailed || !strings.Contains(err.Error(), "/etc/") {
			t.Errorf("start: %v", err)
		}
		return // an engine that believes the image
	}
	s, err := d.Status(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.PID))
	if f := statusFields(string(raw)); err != nil || f["Uid"] != "0 0 0 0" || f["Gid"] != "0 0 0 0" || (f["Groups"] != "" && f["Groups"] != "0") {
		t.Errorf("PID 1 is %s %s %s, %v", f["Uid"], f["Gid"], f["Groups"], err)
	}
}

// Case I5: configurations that cannot be made harmless are refused as images.
func TestImagesThatCannotBeUsed(t *testing.T) {
	d := newDriver(t)
	big := strings.Repeat("y", 40<<10)
	for name, changes := range map[string]string{
		"volume on the root":    "VOLUME /",
		"volume on etc":         "VOLUME /etc",
		"volume in proc":        "VOLUME /proc/sys",
		"volume on the socket":  "VOLUME /run/boxed",
		"volume on the agent":   "VOLUME /.boxed-agent",
		"volume by another way": "VOLUME /x/../etc/",
		"volume in dev":         "VOLUME /dev/shm/x",
		"relative volume":       "VOLUME data",
		"too many volumes":      "VOLUME /a /b /c /d /e /f /g /h /i /j /k /l /m /n /o /p /q",
		"large labels":          "LABEL a=" + big + "|LABEL b=" + big + "|LABEL c=" + big + "|LABEL d=" + big + "|LABEL e=" + big + "|LABEL f=" + big + "|LABEL g=" + big,
	} {
		t.Run(name, func(t *testing.T) {
			image := "boxed-test/refused:" + strings.ReplaceAll(name, " ", "-")
			importImage(t, image, tree(t, nil), strings.Split(changes, "|")...)
			_, err := d.Image(t.Context(), image, nil)
			if e := boxed.AsError(err); err == nil || e.Code != boxed.CodeImage || e.Detail["reason"] != string(boxed.ImageUnusable) || strings.Contains(e.Message, "\n") {
				t.Errorf("%v %v", err, boxed.AsError(err).Detail)
			}
		})
	}
}
