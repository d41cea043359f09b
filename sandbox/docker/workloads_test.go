package docker_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Images that make test builds.
const (
	workloadsImage = "boxed/workloads:bookworm"
	smallImage     = "boxed/small:bookworm"
)

// workload is what a person or a coding agent really does.
type workload struct {
	script string
	says   string // its last line
	small  bool   // the small image has all that it needs
}

// workloads are the programs of I6. Each runs in an empty /workspace of its own.
var workloads = map[string]workload{
	"python threads": {script: `python3 -c '
import threading as t
l, n = t.Lock(), [0]
def add():
    for _ in range(100):
        with l: n[0] += 1
ts = [t.Thread(target=add) for _ in range(50)]
[x.start() for x in ts]; [x.join() for x in ts]; print(n[0])'`, says: "5000", small: true},
	"python multiprocessing": {script: `cat >m.py <<'P'
import multiprocessing as m
if __name__ == "__main__":
    with m.Pool(4) as p: total = sum(p.map(abs, range(-50, 50)))
    for how in ("fork", "spawn", "forkserver"):
        c = m.get_context(how); q = c.Queue(); p = c.Process(target=q.put, args=(7,)); p.start(); total += q.get(); p.join()
    s = m.shared_memory.SharedMemory(create=True, size=4096) if hasattr(m, "shared_memory") else None
    print(total)
P
python3 m.py`, says: "2521", small: true},
	"python sockets": {script: `python3 -c '
import socket, asyncio
async def main():
    async def serve(r, w): w.write(await r.read(3)); await w.drain(); w.close()
    s = await asyncio.start_server(serve, "127.0.0.1", 0)
    r, w = await asyncio.open_connection(*s.sockets[0].getsockname()); w.write(b"hey"); print((await r.read()).decode())
assert socket.getaddrinfo("localhost", 80); asyncio.run(main())'`, says: "hey", small: true},
	"sqlite": {script: `python3 -c '
import sqlite3
c = sqlite3.connect("x.db"); c.execute("pragma journal_mode=wal"); c.execute("create table t(a)")
c.executemany("insert into t values(?)", [(i,) for i in range(1000)]); c.commit()' && sqlite3 x.db 'select count(*), sum(a) from t'`, says: "1000|499500"},
	"node workers": {script: `node -e '
const {Worker} = require("worker_threads"); let left = 4, sum = 0
for (let i = 0; i < 4; i++) new Worker("const {parentPort, workerData} = require(\"worker_threads\"); parentPort.postMessage(workerData * 2)", {eval: true, workerData: i})
  .on("message", n => { sum += n; if (--left == 0) console.log(sum) })'`, says: "12"},
	"node children and a watch": {script: `node -e '
const fs = require("fs"); console.log(require("child_process").execSync("echo hi").toString().trim())
const w = fs.watch(".", () => { w.close(); console.log("seen") }); setTimeout(() => fs.writeFileSync("x", "1"), 50)'`, says: "seen"},
	"git": {script: `git init -q r && cd r && git config user.name x && git config user.email x@x && echo 1 >f && git add f && git commit -qm one &&
git clone -q . ../s && cd ../s && git config user.name x && git config user.email x@x && git switch -qc b && echo 2 >f && git commit -qam two && git push -q origin b && git gc -q && git log --oneline --all | wc -l`, says: "2"},
	"gcc":  {script: `printf '#include <pthread.h>\n#include <stdio.h>\nvoid *f(void *x) { return x; }\nint main() { pthread_t t; pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts("built"); }\n' >a.c && gcc -O2 -pthread a.c -o a && ./a`, says: "built"},
	"make": {script: `printf 'all: a b c\na b c:\n\tsleep 0.01\n' >Makefile && make -j4 >/dev/null && echo made`, says: "made"},
	"npm ci": {script: `mkdir -p dep app && cd dep && echo '{"name":"dep","version":"1.0.0","main":"i.js"}' >package.json && echo 'module.exports = 42' >i.js && npm pack --silent --pack-destination ../app >/dev/null &&
cd ../app && echo '{"name":"app","version":"1.0.0","dependencies":{"dep":"file:dep-1.0.0.tgz"}}' >package.json && npm install --package-lock-only --offline --silent && npm ci --offline --silent >/dev/null && node -p 'require("dep")'`, says: "42"},
	"pip and a C extension": {script: `mkdir p && cd p && cat >setup.py <<'P'
from setuptools import setup, Extension
setup(name="ext", version="1", ext_modules=[Extension("ext", ["ext.c"])])
P
cat >ext.c <<'C'
#include <Python.h>
static PyObject *f(PyObject *s, PyObject *a) { return PyLong_FromLong(42); }
static PyMethodDef ms[] = {{"f", f, METH_NOARGS, ""}, {0}};
static struct PyModuleDef m = {PyModuleDef_HEAD_INIT, "ext", 0, -1, ms};
PyMODINIT_FUNC PyInit_ext(void) { return PyModule_Create(&m); }
C
echo include setup.py >MANIFEST.in && python3 setup.py -q sdist && cd .. && python3 -m venv --system-site-packages v &&
v/bin/pip install -q --no-build-isolation --no-index --disable-pip-version-check p/dist/ext-1.tar.gz && v/bin/python -c 'import ext; print(ext.f())'`, says: "42"},
	"gdb":                {script: `printf 'int main() {\n volatile int x = 41;\n x++;\n return x;\n}\n' >d.c && gcc -g d.c -o d && gdb -q -batch -ex 'break 4' -ex run -ex 'print x' ./d 2>&1 | tail -n 1`, says: "$1 = 42"},
	"strace":             {script: `strace -f -o log sh -c '/bin/true; exit 0' && grep -q 'execve("/bin/true"' log && echo traced`, says: "traced"},
	"files of all kinds": {script: `mkdir -p t/a && echo x >t/a/b && ln t/a/b t/c && ln -s a t/d && mkfifo f && rsync -aH t/ u/ && tar c t | tar t >/dev/null && zip -q z.zip t/a/b && unzip -l z.zip >/dev/null && (echo hit >f &) && rg hit <f`, says: "hit"},
	"a shell's jobs":     {script: `for i in 1 2 3; do sleep 0.01 & done; wait; nice -n 5 true; ps aux | head -3 >/dev/null; timeout 1 true; sync; curl --version >/dev/null; script -qec 'tty >/dev/null && echo tty' /dev/null 2>/dev/null || echo tty`, says: "tty"},
}

// I6: real programs work under all of this.
func TestRealProgramsWork(t *testing.T) {
	t.Parallel()
	needDocker(t)
	for _, name := range []string{workloadsImage, smallImage} {
		if _, err := engineClient.ImageInspect(t.Context(), name); err != nil {
			t.Skip("no image " + name + " on this host; make test builds it: " + err.Error())
		}
	}
	onEveryRuntime(t, func(t *testing.T, r *oci) {
		name, all := workloadsImage, r.host == "" || os.Getenv("BOXED_TEST_ALL") != ""
		if !all {
			name = smallImage
		}
		w := newWorld(t, r, func(c *sandbox.Config) {
			template := c.Templates[boxed.DefaultTemplate]
			template.Image = name
			template.Limits = boxed.DefaultLimits()
			template.Limits.MemoryBytes, template.Limits.WorkspaceBytes, template.Limits.TmpBytes, template.Limits.CPUs = 1024*boxed.MiB, 256*boxed.MiB, 256*boxed.MiB, 2
			c.Templates = map[string]boxed.Template{boxed.DefaultTemplate: template}
		})
		w.image = name
		r.image(t, w.d, name)
		b := w.create()
		for name, load := range workloads {
			if !all && !load.small {
				continue
			}
			began := time.Now()
			out, status := b.exec("/bin/bash", "-ec", `d=$(mktemp -d /workspace/XXXXXX); cd "$d"; `+load.script)
			lines := strings.Split(out, "\n")
			if status.Code != 0 || lines[len(lines)-1] != load.says {
				t.Errorf("%s: %+v\n%s", name, status, out)
			}
			t.Logf("%s: %v", name, time.Since(began).Round(time.Millisecond))
		}
		if r.shares && all {
			b.goBuild(t)
		}
		if !all {
			t.Skip("in part: BOXED_TEST_ALL=1 runs all of them here; half a minute to bring their image to this engine")
		}
	})
}

// goBuild brings the part of this host's Go that the smallest program needs (a
// cold build of package fmt would take a quarter of a minute), and builds one.
func (b *inside) goBuild(t *testing.T) {
	t.Helper()
	began := time.Now()
	said, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	root := strings.TrimSpace(string(said))
	list := exec.Command("go", "list", "-deps", "-f", "{{.Dir}}", "runtime")
	list.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod")
	dirs, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	out := tar.NewWriter(&archive)
	add := func(path string) {
		if err == nil {
			err = addFile(out, root, path)
		}
	}
	for _, name := range []string{"bin/go", "go.env", "VERSION", "src/go.mod"} {
		add(filepath.Join(root, name))
	}
	for _, tool := range []string{"compile", "link", "asm", "buildid"} {
		add(filepath.Join(root, "pkg", "tool", runtime.GOOS+"_"+runtime.GOARCH, tool))
	}
	for _, dir := range append(strings.Fields(string(dirs)), filepath.Join(root, "pkg", "include"), filepath.Join(root, "src", "runtime", "cgo")) {
		files, globErr := filepath.Glob(filepath.Join(dir, "*"))
		err = errors.Join(err, globErr)
		for _, file := range files {
			if !strings.HasSuffix(file, "_test.go") {
				add(file)
			}
		}
	}
	if err = errors.Join(err, out.Close()); err != nil {
		t.Fatal(err)
	}
	size := archive.Len()
	if err := b.w.WriteTar(t.Context(), b.id, "/workspace/go", &archive); err != nil {
		t.Fatal(err)
	}
	brought := time.Since(began)
	built, status := b.exec("/bin/bash", "-ec", `mkdir -p /workspace/g && cd /workspace/g
export GOROOT=/workspace/go PATH=/workspace/go/bin:$PATH GOTOOLCHAIN=local GOPROXY=off GOCACHE=/tmp/cache GOPATH=/tmp/path CGO_ENABLED=0
go mod init g 2>/dev/null
printf 'package main\nfunc main() { c := make(chan int); go func() { c <- 42 }(); println(<-c) }\n' >main.go
go build -o g . && ./g`)
	if status.Code != 0 || built != "42" {
		t.Errorf("go build: %+v\n%s", status, built)
	}
	t.Logf("go build: %v, %v of it to bring %d MiB of Go", time.Since(began).Round(time.Millisecond), brought.Round(time.Millisecond), size>>20)
}

// addFile adds a regular file below root to a tar; others are left out.
func addFile(out *tar.Writer, root, path string) error {
	info, err := os.Stat(path) // through links: a distribution's Go has some
	if errors.Is(err, fs.ErrNotExist) || (err == nil && !info.Mode().IsRegular()) {
		return nil
	}
	if err != nil {
		return err
	}
	name, err := filepath.Rel(root, path)
	if err != nil {
		return err
	}
	header := &tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: int64(info.Mode().Perm()), Size: info.Size()}
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(out, f)
	return err
}
