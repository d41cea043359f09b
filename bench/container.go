package main

import (
	"bytes"
	"context"
	"fmt"
	"io"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"
)

// raw is a kind of container as it is made without boxed, through the engine's
// API on a connection that is kept: the docker command would add its own start
// to each step.
type raw struct {
	r      *rig
	config container.Config
	host   container.HostConfig
	user   string // of execs
}

// create makes and starts a container.
func (c *raw) create(ctx context.Context) (string, error) {
	config, host := c.config, c.host
	config.Labels = map[string]string{benchLabel: c.r.owner}
	made, err := c.r.engine.ContainerCreate(ctx, &config, &host, nil, nil, "")
	if err != nil {
		return "", err
	}
	return made.ID, c.r.engine.ContainerStart(ctx, made.ID, container.StartOptions{})
}

// exec runs a program and gives its standard output to w, as `docker exec`
// does: create, attach, read to the end, ask for the status.
func (c *raw) exec(ctx context.Context, id string, w io.Writer, args ...string) error {
	made, err := c.r.engine.ContainerExecCreate(ctx, id, container.ExecOptions{Cmd: args, User: c.user, AttachStdout: true, AttachStderr: true})
	if err != nil {
		return err
	}
	stream, err := c.r.engine.ContainerExecAttach(ctx, made.ID, container.ExecAttachOptions{})
	if err != nil {
		return err
	}
	defer stream.Close()
	stop := context.AfterFunc(ctx, stream.Close)
	defer stop()
	var stderr bytes.Buffer
	if _, err := stdcopy.StdCopy(w, &stderr, stream.Reader); err != nil {
		return err
	}
	for {
		end, err := c.r.engine.ContainerExecInspect(ctx, made.ID)
		switch {
		case err != nil:
			return err
		case end.Running: // its output ends a moment before it does
			continue
		case end.ExitCode != 0:
			return fmt.Errorf("exit status %d: %.200s", end.ExitCode, stderr.String())
		}
		return nil
	}
}

func (c *raw) destroy(ctx context.Context, id string) error {
	return c.r.engine.ContainerRemove(ctx, id, container.RemoveOptions{Force: true})
}
