package docker

import (
	"context"
	"io"

	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"

	"github.com/boxed-mesh/boxed"
)

// Watch calls ended for each container of this node that stops. It returns nil
// when ctx ends and CodeNotReady when the engine goes away. ended is called
// from Watch's own goroutine and should not block.
func (d *Driver) Watch(ctx context.Context, ended func(containerID string)) error {
	messages, errs := d.client.Events(ctx, events.ListOptions{Filters: filters.NewArgs(
		filters.Arg("type", string(events.ContainerEventType)),
		filters.Arg("event", string(events.ActionDie)),
		filters.Arg("label", labelInstance+"="+d.instance),
	)})
	for {
		select {
		case m := <-messages:
			ended(m.Actor.ID)
		case err := <-errs:
			switch {
			case ctx.Err() != nil:
				return nil
			case err == nil || err == io.EOF:
				return boxed.Errorf(boxed.CodeNotReady, "the Docker engine ended its stream of events")
			}
			return d.engineError("watch events", err)
		}
	}
}
