package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/boxed-mesh/boxed"
)

var filesColumns = []string{"upload_mb_s", "download_mb_s"}

// dockerCP is `docker cp`, by the engine's API.
const dockerCP = "docker-cp"

// porter carries one file to a sandbox and back.
type porter struct {
	name     string
	path     string
	upload   func(ctx context.Context, content []byte) error
	download func(ctx context.Context, into []byte) error
	exec     func(ctx context.Context, w io.Writer, args ...string) error
}

// files measures how fast one large file goes in and comes out.
func files(ctx context.Context, r *rig, s *sheet) error {
	size := r.count(256, 256, 64) * boxed.MiB
	content := make([]byte, size)
	random := rand.NewChaCha8([32]byte{11})
	random.Read(content)

	n, err := r.startNode(ctx, settings{withoutBounds: true})
	if err != nil {
		return err
	}
	defer n.close()
	box, err := n.Create(ctx, boxed.Spec{TTL: boxed.DefaultMaxTTL, Limits: boxed.Limits{MemoryBytes: 1024 * boxed.MiB, WorkspaceBytes: 640 * boxed.MiB}})
	if err != nil {
		return err
	}
	c := r.stock()
	id, err := c.create(ctx)
	if err != nil {
		return err
	}
	defer func() { c.destroy(context.WithoutCancel(ctx), id) }()

	porters := []porter{c.porter(id), n.porter(box.ID)}
	buffer := make([]byte, size)
	turns := rand.New(random)
	rounds := r.trials(10, 5, 2)
	for round := -1; round < rounds; round++ {
		for _, at := range turns.Perm(len(porters)) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			up, down, err := porters[at].once(ctx, content, buffer)
			if round >= 0 {
				s.add(round, porters[at].name, err, up, down)
			}
			if err != nil {
				r.say("%s: %v", porters[at].name, err)
			}
		}
	}
	for _, system := range s.systems() {
		for _, name := range filesColumns {
			s.summarize(system, name, "MB/s", s.column(system, name, nil))
		}
	}
	s.failures()
	return nil
}

// once carries the file there and back, in MB/s, and checks it at both ends.
func (p porter) once(ctx context.Context, content, buffer []byte) (up, down float64, err error) {
	ctx, cancel := context.WithTimeout(ctx, trialLimit)
	defer cancel()
	up, down = math.NaN(), math.NaN()
	speed := func(from time.Time) float64 { return float64(len(content)) / 1e6 / time.Since(from).Seconds() }
	from := time.Now()
	if err := p.upload(ctx, content); err != nil {
		return up, down, fmt.Errorf("upload: %w", err)
	}
	up = speed(from)
	var sum strings.Builder
	if err := p.exec(ctx, &sum, "sha256sum", p.path); err != nil {
		return up, down, fmt.Errorf("hash the file: %w", err)
	}
	want := fmt.Sprintf("%x", sha256.Sum256(content))
	if got, _, _ := strings.Cut(sum.String(), " "); got != want {
		return up, down, fmt.Errorf("what arrived has the hash %s, not %s", got, want)
	}
	clear(buffer)
	from = time.Now()
	if err := p.download(ctx, buffer); err != nil {
		return up, down, fmt.Errorf("download: %w", err)
	}
	down = speed(from)
	if got := fmt.Sprintf("%x", sha256.Sum256(buffer)); got != want {
		return up, down, fmt.Errorf("what came back has the hash %s, not %s", got, want)
	}
	return up, down, p.exec(ctx, io.Discard, "rm", p.path)
}

// porter of a sandbox: its file system is memory.
func (n *node) porter(id boxed.ID) porter {
	const path = "/workspace/file"
	return porter{
		name: boxedPool, path: path, exec: streamed(boxedPool, id, n.Exec).exec,
		upload: func(ctx context.Context, content []byte) error {
			_, err := n.WriteFile(ctx, id, boxed.WriteRequest{Path: path, Content: bytes.NewReader(content)})
			return err
		},
		download: func(ctx context.Context, into []byte) error {
			file, err := n.ReadFile(ctx, id, boxed.ReadRequest{Path: path, Length: -1})
			if err != nil {
				return err
			}
			defer file.Close()
			return readExactly(file, into)
		},
	}
}

// porter of a stock container: to its own layer, as the engine cannot copy into
// a container's tmpfs.
func (c *raw) porter(id string) porter {
	const dir, name = "/var/tmp", "file"
	return porter{
		name: dockerCP, path: dir + "/" + name,
		exec: func(ctx context.Context, w io.Writer, args ...string) error { return c.exec(ctx, id, w, args...) },
		upload: func(ctx context.Context, content []byte) error {
			var head bytes.Buffer
			archive := tar.NewWriter(&head)
			if err := archive.WriteHeader(&tar.Header{Name: name, Size: int64(len(content)), Mode: 0o644}); err != nil {
				return err
			}
			// A size that is a multiple of 512 needs no padding: head, content and the two blocks of the end.
			stream := io.MultiReader(&head, bytes.NewReader(content), bytes.NewReader(make([]byte, 1024)))
			return c.r.engine.CopyToContainer(ctx, id, dir, stream, container.CopyToContainerOptions{})
		},
		download: func(ctx context.Context, into []byte) error {
			stream, _, err := c.r.engine.CopyFromContainer(ctx, id, dir+"/"+name)
			if err != nil {
				return err
			}
			defer stream.Close()
			archive := tar.NewReader(stream)
			if _, err := archive.Next(); err != nil {
				return err
			}
			return readExactly(archive, into)
		},
	}
}

// readExactly fills into, and nothing may follow.
func readExactly(r io.Reader, into []byte) error {
	if _, err := io.ReadFull(r, into); err != nil {
		return err
	}
	if n, err := r.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		return fmt.Errorf("more than %d bytes came", len(into))
	}
	return nil
}
