package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// defaultMaxCopy bounds what a download writes here. What a sandbox says of
// sizes is not to be believed: a file of a few bytes can claim to be an exabyte
// of zeros.
const defaultMaxCopy = 16 << 30

func copyFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "max-size", Usage: "refuse to download more than `SIZE` (default " + table.Size(defaultMaxCopy) + ")"},
	}
}

func (a *app) cmdCp() *cli.Command {
	return &cli.Command{
		Name: "cp", Category: catFiles,
		Usage: "copy files and directories into or out of a sandbox",
		UsageText: "boxedctl cp [OPTIONS] LOCAL SANDBOX:PATH\n" +
			"boxedctl cp [OPTIONS] SANDBOX:PATH LOCAL",
		Description: "A directory is copied with all that is in it: under its name if the destination is a directory, else as the destination; " +
			"DIR/. is its content. Symbolic links are copied as links and never followed out of the tree. - is stdin or stdout: " +
			"a file's bytes, and for a directory a tar. Other kinds of files are left out, with a notice." +
			examples(
				"boxedctl cp ./src build:/workspace",
				"boxedctl cp build:/output/. ./results",
				"boxedctl cp build:report.pdf .",
				"echo hello | boxedctl cp - build:hello.txt",
				"boxedctl cp build:/workspace - | tar t",
			),
		Flags:  copyFlags(),
		Action: a.cp,
	}
}

func (a *app) cp(c *cli.Context) error {
	words, err := a.operands(c, 2, 2)
	if err != nil {
		return err
	}
	from, to := parsePlace(words[0]), parsePlace(words[1])
	switch {
	case from.ref == "" && to.ref == "":
		return usagef("neither %s nor %s is in a sandbox", words[0], words[1]).hint("write a path in one like SANDBOX:PATH")
	case from.ref != "" && to.ref != "":
		return usagef("from one sandbox to another goes in two steps").hint("boxedctl cp %s - | boxedctl cp - %s", words[0], words[1])
	}
	limit := int64(defaultMaxCopy)
	if s := c.String("max-size"); s != "" {
		if limit, err = parseSize(s); err != nil {
			return wrapf(err, "--max-size")
		}
	}
	svc, err := a.connect()
	if err != nil {
		return err
	}
	in := catchInterrupts()
	defer in.stop()
	ctx, release := in.cancelling(c.Context)
	defer release()
	id, err := sandboxID(ctx, svc, firstOf(from.ref, to.ref))
	if err == nil && to.ref != "" {
		err = a.send(ctx, svc, id, from.path, to.path)
	} else if err == nil {
		err = a.fetch(ctx, svc, id, from.path, to.path, limit)
	}
	if ctx.Err() != nil {
		return in.err()
	}
	return err
}

// send copies a local file, directory or stdin ("-") to a path in a sandbox.
func (a *app) send(ctx context.Context, svc service, id boxed.ID, local, remote string) error {
	remote = firstOf(remote, ".")
	into, err := svc.Stat(ctx, id, remote)
	if err != nil && boxed.CodeOf(err) != boxed.CodeNotFound {
		return err
	}
	isDir := err == nil && into.Type == "dir"
	if local == "-" {
		if isDir {
			return svc.WriteTar(ctx, id, remote, a.stdin)
		}
		_, err := svc.WriteFile(ctx, id, boxed.WriteRequest{Path: remote, Content: a.stdin, Parents: true})
		return err
	}
	info, err := os.Stat(local)
	if err != nil {
		return plainPath(err)
	}
	name := filepath.Base(filepath.Clean(local))
	switch {
	case info.IsDir():
		if err == nil && into != nil && !isDir {
			return boxed.Errorf(boxed.CodeConflict, "%s is there and is no directory", remote)
		}
		if isDir && !endsInDot(local) && name != "." && name != ".." && name != string(filepath.Separator) {
			remote = path.Join(remote, name)
		}
		return a.sendTree(ctx, svc, id, local, remote)
	case !info.Mode().IsRegular():
		return usagef("%s is neither a file nor a directory", local)
	}
	if isDir || strings.HasSuffix(remote, "/") {
		remote = path.Join(remote, name)
	}
	f, err := os.Open(local)
	if err != nil {
		return plainPath(err)
	}
	defer f.Close()
	mode := uint32(info.Mode().Perm())
	if filepath.Separator == '\\' {
		mode = 0 // Windows has no such bits
	}
	_, err = svc.WriteFile(ctx, id, boxed.WriteRequest{Path: remote, Content: f, Mode: mode, Parents: true})
	return err
}

// sendTree streams a directory as one tar.
func (a *app) sendTree(ctx context.Context, svc service, id boxed.ID, local, remote string) error {
	r, w := io.Pipe()
	packed := make(chan error, 1)
	go func() {
		err := packTree(w, local, func(name, kind string) { a.notice("%s is left out: %s", name, kind) })
		w.CloseWithError(err)
		packed <- err
	}()
	err := svc.WriteTar(ctx, id, remote, r)
	r.CloseWithError(errors.New("the sandbox takes no more"))
	if packErr := <-packed; packErr != nil && (err == nil || boxed.CodeOf(err) == boxed.CodeInternal) && ctx.Err() == nil {
		return packErr // the cause: the node only saw the stream break
	}
	return err
}

func endsInDot(p string) bool {
	return p == "." || strings.HasSuffix(filepath.ToSlash(p), "/.")
}

// fetch copies a file or directory of a sandbox to a local path or stdout.
func (a *app) fetch(ctx context.Context, svc service, id boxed.ID, remote, local string, limit int64) error {
	remote = firstOf(remote, ".")
	info, err := svc.Stat(ctx, id, remote)
	if err != nil {
		return err
	}
	switch info.Type {
	case "file":
		if local == "-" {
			return a.fetchFile(ctx, svc, id, remote, a.stdout, limit)
		}
		return a.fetchTo(ctx, svc, id, remote, local, limit)
	case "dir":
	case "symlink":
		return boxed.Errorf(boxed.CodeInvalid, "%s is a link to %s; copy that", remote, info.Target)
	default:
		return boxed.Errorf(boxed.CodeInvalid, "%s is a %s, neither a file nor a directory", remote, info.Type)
	}
	tree, err := svc.ReadTar(ctx, id, remote)
	if err != nil {
		return err
	}
	defer tree.Close()
	if local == "-" {
		_, err := io.Copy(a.stdout, &limited{r: tree, left: limit, limit: limit})
		return err
	}
	if st, err := os.Stat(local); err == nil && st.IsDir() {
		if base := baseName(remote); base != "" {
			if local, err = localName(local, base); err != nil {
				return err
			}
		}
	}
	if err := os.MkdirAll(local, 0o777); err != nil {
		return plainPath(err)
	}
	root, err := os.OpenRoot(local)
	if err != nil {
		return plainPath(err)
	}
	defer root.Close()
	return unpackTree(root, tree, limit, func(name, kind string) { a.notice("%s is left out: %s", name, kind) })
}

// localName puts a name that comes from a sandbox's path behind a local
// directory. On Windows such a name may be no plain name.
func localName(dir, base string) (string, error) {
	if !filepath.IsLocal(base) || strings.ContainsAny(base, string(filepath.Separator)) {
		return "", usagef("%q cannot be a file's name here", base).hint("say under which name to write it")
	}
	return filepath.Join(dir, base), nil
}

// fetchTo writes one file, whole or not at all.
func (a *app) fetchTo(ctx context.Context, svc service, id boxed.ID, remote, local string, limit int64) error {
	st, err := os.Stat(local)
	switch {
	case err == nil && st.IsDir():
		base := baseName(remote)
		if base == "" {
			return usagef("say under which name to write %s", remote)
		}
		if local, err = localName(local, base); err != nil {
			return err
		}
	case err == nil && !st.Mode().IsRegular():
		// A device or a pipe is written to; renaming over it would remove it.
		f, err := os.OpenFile(local, os.O_WRONLY, 0)
		if err != nil {
			return plainPath(err)
		}
		return errors.Join(a.fetchFile(ctx, svc, id, remote, f, limit), f.Close())
	case os.IsPathSeparator(local[len(local)-1]):
		return plainPath(&fs.PathError{Op: "open", Path: local, Err: fs.ErrNotExist})
	}
	if st, err := os.Stat(local); err == nil && st.IsDir() {
		return usagef("%s is a directory", local)
	}
	file, err := svc.ReadFile(ctx, id, boxed.ReadRequest{Path: remote, Length: -1})
	if err != nil {
		return err
	}
	defer file.Close()
	content, err := bounded(file, limit)
	if err != nil {
		return err
	}
	return plainPath(writeByRename(local, content, fs.FileMode(file.Info.Mode).Perm()))
}

// fetchFile writes one file's bytes to w.
func (a *app) fetchFile(ctx context.Context, svc service, id boxed.ID, remote string, w io.Writer, limit int64) error {
	file, err := svc.ReadFile(ctx, id, boxed.ReadRequest{Path: remote, Length: -1})
	if err != nil {
		return err
	}
	defer file.Close()
	content, err := bounded(file, limit)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, content)
	return err
}

// bounded is a file's content that fails when it is shorter than announced, or
// longer than limit.
func bounded(file *boxed.FileReader, limit int64) (io.Reader, error) {
	if file.Length > limit {
		return nil, tooMuch(limit)
	}
	return &exact{r: io.LimitReader(file, file.Length), left: file.Length}, nil
}

func tooMuch(limit int64) error {
	return (&problem{err: boxed.Errorf(boxed.CodeTooLarge, "it has more than %s", table.Size(limit))}).hint("--max-size allows more")
}

// exact reads left bytes and calls any other end an error.
type exact struct {
	r    io.Reader
	left int64
}

func (e *exact) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	e.left -= int64(n)
	if err == io.EOF && e.left > 0 {
		return n, fmt.Errorf("%d bytes are missing: %w", e.left, io.ErrUnexpectedEOF)
	}
	return n, err
}

// limited fails when more than limit bytes come.
type limited struct {
	r           io.Reader
	left, limit int64
}

func (l *limited) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if l.left -= int64(n); l.left < 0 {
		return 0, tooMuch(l.limit)
	}
	return n, err
}

// writeByRename writes a file that appears under its name when all of it is
// there.
func writeByRename(name string, content io.Reader, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".boxedctl-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails once it is renamed
	_, err = io.Copy(f, content)
	if err == nil && filepath.Separator != '\\' {
		err = f.Chmod(mode)
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	return err
}
