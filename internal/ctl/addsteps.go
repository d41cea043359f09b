package ctl

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// hostFacts are what is known of a host.
type hostFacts struct {
	arch    string // as Go names it
	root    string // what a command is begun with to run as root: "" or "sudo -n"
	systemd bool
}

// Scripts run under any POSIX shell. $1 is always how to become root.
const (
	scriptLook = `uname -sm
id -u
if sudo -n true 2>/dev/null; then echo sudo; else echo none; fi
if [ -d /run/systemd/system ]; then echo systemd; else echo none; fi`

	scriptSum = `[ -x "$2" ] && sha256sum "$2" || true`

	// Nothing is left of a copy that breaks off: not even the file under its new name.
	scriptCopy = `set -eu
r=$1 sum=$2 to=$3 t=
gone() { [ -z "$t" ] || rm -f "$t"; $r rm -f "$to.new"; }
trap gone EXIT
trap "exit 1" HUP INT TERM
t=$(mktemp)
cat >"$t"
got=$(sha256sum "$t")
if [ "${got%% *}" != "$sum" ]; then echo "what arrived is not what was sent" >&2; exit 1; fi
$r mkdir -p "${to%/*}"
$r cp "$t" "$to.new"
$r chmod 755 "$to.new"
$r mv -f "$to.new" "$to"`

	scriptDoctor = `$1 "$2" doctor --host -o json`

	scriptUnit = `set -eu
r=$1 to=$2 data=$3 restart=$4
$r mkdir -p "${to%/*}" "$data"
$r chmod 711 "$data"
$r tee "$to" >/dev/null
$r chmod 644 "$to"
$r systemctl daemon-reload
$r systemctl enable boxed-node.service
$r systemctl "$restart" boxed-node.service`

	// The shell that writes its pid becomes the node.
	scriptBackground = `set -eu
r=$1 program=$2 data=$3 fresh=$4
$r mkdir -p "$data"
$r chmod 711 "$data"
pid=$($r cat "$data/boxed-node.pid" 2>/dev/null || true)
if [ -n "$pid" ] && $r grep -qs boxed-node "/proc/$pid/cmdline"; then
	if [ "$fresh" = no ]; then echo "it runs already, process $pid"; exit 0; fi
	$r kill "$pid"
	i=0
	while $r kill -0 "$pid" 2>/dev/null && [ $i -lt 300 ]; do sleep 0.1; i=$((i + 1)); done
fi
cd /
$r nohup sh -c "echo \$\$ >\"\$2/boxed-node.pid\"; exec \"\$1\" run --data-dir \"\$2\" >>\"\$2/boxed-node.log\" 2>&1" sh "$program" "$data" >/dev/null 2>&1 </dev/null &
echo "in the background: no systemd is used, so nothing starts it at the next boot; its process is in $data/boxed-node.pid"`

	scriptAwait = `r=$1 ctl=$2 key=$3 log=$4 i=0
until out=$($r "$ctl" --endpoint ` + defaultEndpoint + ` --api-key-file "$key" -q -o name node 2>&1); do
	i=$((i + 1))
	if [ $i -ge 120 ]; then
		echo "$out" >&2
		if [ -n "$log" ]; then $r tail -n 5 "$log" >&2; fi
		exit 1
	fi
	sleep 0.5
done
echo "$out"`

	scriptStatus = `$1 "$2" --endpoint ` + defaultEndpoint + ` --api-key-file "$3" -q -o name cluster status`

	// The token is on stdin.
	scriptJoin = `r=$1 ctl=$2 key=$3
shift 3
$r "$ctl" --endpoint ` + defaultEndpoint + ` --api-key-file "$key" -o name cluster join - "$@"`
)

func (j *addition) bin(name string) string { return j.prefix + "/bin/" + name }

func (j *addition) keyFile() string { return j.dataDir + "/admin.key" }

// look finds out what the host is.
func (j *addition) look(ctx context.Context) (string, error) {
	out, err := j.host.run(ctx, nil, scriptLook)
	if err != nil {
		return "", err
	}
	lines := strings.Split(out, "\n")
	if len(lines) != 4 {
		return "", boxed.Errorf(boxed.CodeUnavailable, "it does not say what it is: %q", out)
	}
	system, machine, _ := strings.Cut(lines[0], " ")
	arch := map[string]string{"x86_64": "amd64", "amd64": "amd64", "aarch64": "arm64", "arm64": "arm64"}[machine]
	if system != "Linux" || arch == "" {
		return "", (&problem{err: boxed.Errorf(boxed.CodeUnavailable, "it is %s", lines[0])}).hint("nodes run on Linux, amd64 or arm64")
	}
	j.facts = hostFacts{arch: arch, systemd: lines[3] == "systemd" && !j.background}
	who := "as root"
	if lines[1] != "0" {
		if lines[2] != "sudo" {
			return "", (&problem{err: boxed.Errorf(boxed.CodeForbidden, "its user is not root and may not use sudo without a password")}).
				hint("use root@HOST, or let the user: echo 'NAME ALL=(ALL) NOPASSWD: ALL' into a file of /etc/sudoers.d")
		}
		j.facts.root, who = "sudo -n", "root by sudo"
	}
	return fmt.Sprintf("Linux, %s, %s", arch, who), nil
}

// install copies one program, unless the same is there.
func (j *addition) install(ctx context.Context, name, given string) (string, error) {
	data, err := j.program(name, given)
	if err != nil {
		return "", err
	}
	sum, to := fmt.Sprintf("%x", sha256.Sum256(data)), j.bin(name)
	there, err := j.host.run(ctx, nil, scriptSum, j.facts.root, to)
	if err != nil {
		return "", err
	}
	if old, _, _ := strings.Cut(there, " "); old == sum {
		return to + " is there already", nil
	}
	if _, err := j.host.run(ctx, bytes.NewReader(data), scriptCopy, j.facts.root, sum, to); err != nil {
		return "", wrapf(err, "copy it").hint("nothing is left of it there; mend that (is a disk full, or %s read-only?), and repeat this", j.prefix)
	}
	if name == "boxed-node" {
		j.fresh = true
	}
	return fmt.Sprintf("copied to %s, %s", to, table.Size(int64(len(data)))), nil
}

// maxProgram bounds what is taken for a program, in bytes.
const maxProgram = 1 << 30

// program is the content of a program for the host's architecture.
func (j *addition) program(name, given string) ([]byte, error) {
	flag := map[string]string{"boxed-node": "--node-binary", "boxedctl": "--ctl-binary"}[name]
	file := given
	if file == "" {
		if runtime.GOOS != "linux" || runtime.GOARCH != j.facts.arch {
			return nil, usagef("this machine is %s, the host linux/%s: its programs are others", platform(), j.facts.arch).
				hint("give those of the same release for linux/%s: --node-binary FILE --ctl-binary FILE", j.facts.arch)
		}
		var err error
		if file, err = localProgram(name); err != nil {
			return nil, usagef("there is no %s beside boxedctl or on the PATH", name).hint("make build, or give it: %s FILE", flag)
		}
	}
	data, err := readSmall(file, maxProgram)
	if err != nil {
		return nil, wrapf(plainPath(err), "%s", flag)
	}
	if arch := elfArch(data); arch != "" && arch != j.facts.arch {
		return nil, usagef("%s is a program for %s, the host is %s", file, arch, j.facts.arch).hint("give the right one: %s FILE", flag)
	}
	return data, nil
}

// localProgram is a program of this machine: boxedctl itself, or what lies beside
// it or on the PATH.
func localProgram(name string) (string, error) {
	self, err := os.Executable()
	if err == nil {
		if name == "boxedctl" {
			return self, nil
		}
		beside := filepath.Join(filepath.Dir(self), name)
		if info, err := os.Stat(beside); err == nil && info.Mode().IsRegular() {
			return beside, nil
		}
	}
	return exec.LookPath(name)
}

// elfArch is the architecture of a Linux program as Go names it; "" for what is
// none, a script say, and the machine's own name for another.
func elfArch(data []byte) string {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return ""
	}
	switch f.Machine {
	case elf.EM_X86_64:
		return "amd64"
	case elf.EM_AARCH64:
		return "arm64"
	}
	return f.Machine.String()
}

// atStart are the checks of doctor that say nothing before the node runs.
var atStart = map[string]bool{"context": true, "key": true, "transport": true, "config_mode": true, "node": true, "ready": true, "version": true, "skew": true}

// check lets the host look at itself.
func (j *addition) check(ctx context.Context) (string, error) {
	out, err := j.host.run(ctx, nil, scriptDoctor, j.facts.root, j.bin("boxedctl"))
	var failed *remoteError
	if err != nil && !errors.As(err, &failed) {
		return "", err
	}
	var report struct {
		Checks []check `json:"checks"`
	}
	if jsonErr := json.Unmarshal([]byte(out), &report); jsonErr != nil {
		return "", wrapf(firstError(err, jsonErr), "boxedctl doctor does not run there").hint("run it there to see why: %s doctor --host", j.bin("boxedctl"))
	}
	var wrong, mend, warnings []string
	for _, c := range report.Checks {
		switch {
		case atStart[c.Name]:
		case c.Result == resultFailed:
			wrong = append(wrong, c.Title+": "+c.Detail)
			mend = append(mend, c.Remedy)
		case c.Result == resultWarning:
			warnings = append(warnings, c.Title+": "+c.Detail)
		}
	}
	if len(wrong) > 0 {
		return "", (&problem{err: boxed.Errorf(boxed.CodeUnavailable, "%s", strings.Join(wrong, "; "))}).
			hint("%s; then repeat this", strings.Join(mend, "; "))
	}
	result := "all passed"
	if len(warnings) > 0 {
		result = fmt.Sprintf("passed, with %d warnings: %s", len(warnings), strings.Join(warnings, "; "))
	}
	return result, nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// start starts the node and sees to it that it starts again.
func (j *addition) start(ctx context.Context) (string, error) {
	fresh := map[bool]string{true: "yes", false: "no"}[j.fresh]
	if !j.facts.systemd {
		return j.host.run(ctx, nil, scriptBackground, j.facts.root, j.bin("boxed-node"), j.dataDir, fresh)
	}
	verb := map[bool]string{true: "restart", false: "start"}[j.fresh]
	unit := unitPath(j.prefix)
	if _, err := j.host.run(ctx, strings.NewReader(fillUnit(j.prefix, j.dataDir)), scriptUnit, j.facts.root, unit, j.dataDir, verb); err != nil {
		return "", wrapf(err, "%s", unit).hint("journalctl -u boxed-node, on the host, says why")
	}
	return "by systemd, now and at every boot", nil
}

// unitPath is where systemd finds a unit: `make install` puts it below its prefix,
// of which systemd knows two.
func unitPath(prefix string) string {
	if prefix == "/usr" || prefix == addPrefix {
		return prefix + "/lib/systemd/system/boxed-node.service"
	}
	return "/etc/systemd/system/boxed-node.service"
}

// fillUnit is the unit for a host. Outside of /var/lib systemd makes no state
// directory, it only allows it to be written.
func fillUnit(prefix, dataDir string) string {
	text := strings.ReplaceAll(unitText, "@bindir@", prefix+"/bin")
	if dataDir == addDataDir {
		return text
	}
	text = strings.Replace(text, "/boxed-node run\n", "/boxed-node run --data-dir "+dataDir+"\n", 1)
	text = strings.Replace(text, "StateDirectory=boxed\n", "ReadWritePaths="+dataDir+"\n", 1)
	return strings.Replace(text, "StateDirectoryMode=0711\n", "", 1)
}

// await waits until the node answers its own host.
func (j *addition) await(ctx context.Context) (string, error) {
	log := j.dataDir + "/boxed-node.log"
	if j.facts.systemd {
		log = ""
	}
	out, err := j.host.run(ctx, nil, scriptAwait, j.facts.root, j.bin("boxedctl"), j.keyFile(), log)
	if err != nil {
		where := "journalctl -u boxed-node"
		if log != "" {
			where = log
		}
		return "", wrapf(err, "not within a minute").hint("%s, on the host, says why. If it listens elsewhere than %s, join by hand there: boxedctl cluster join -", where, defaultEndpoint)
	}
	id := boxed.NodeID(lastLine(out))
	if !id.Valid() {
		return "", boxed.Errorf(boxed.CodeUnavailable, "what answers there is not a node: %q", out)
	}
	j.node = id
	return "it is " + string(id), nil
}

// join makes the node one of the cluster, unless it is.
func (j *addition) join(ctx context.Context) (string, error) {
	ctl, key := j.bin("boxedctl"), j.keyFile()
	in, err := j.host.run(ctx, nil, scriptStatus, j.facts.root, ctl, key)
	switch {
	case err != nil:
		return "", err
	case in == j.cluster:
		return "it is in " + in + " already", nil
	case in != "":
		return "", (&problem{err: boxed.Errorf(boxed.CodeConflict, "it is in the cluster %s", in)}).hint("take it out there, then repeat this: boxedctl cluster leave")
	}
	var args []string
	for _, f := range [][2]string{{"--listen", j.listen}, {"--advertise", j.advertise}} {
		if f[1] != "" {
			args = append(args, f[0]+"="+f[1])
		}
	}
	if _, err := j.host.run(ctx, strings.NewReader(j.token+"\n"), scriptJoin, append([]string{j.facts.root, ctl, key}, args...)...); err != nil {
		return "", wrapf(err, "join").hint("the host must reach the nodes that boxedctl cluster status lists, over TCP and UDP; then repeat this")
	}
	return "it has joined " + j.cluster, nil
}
