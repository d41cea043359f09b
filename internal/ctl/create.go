package ctl

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

func (a *app) cmdCreate() *cli.Command {
	return &cli.Command{
		Name: "create", Category: catLife,
		Usage:     "make a sandbox and print its ID",
		UsageText: "boxedctl create [OPTIONS]",
		Description: "Returns when the sandbox is running. It ends by rm, or when its ttl or idle-timeout has passed." +
			examples("boxedctl create", "boxedctl create --name build --memory 2g --cpus 2 --ttl 8h", "id=$(boxedctl create --image python:3.12-slim --file ./src:/workspace/src)",
				"boxedctl create --node-label disk=fast --isolation gvisor --apart build"),
		Flags: specFlags(),
		Action: func(c *cli.Context) error {
			if _, err := a.operands(c, 0, 0); err != nil {
				return err
			}
			spec, uploads, err := a.parseSpec(c)
			if err != nil {
				return err
			}
			svc, err := a.connect()
			if err != nil {
				return err
			}
			if err := a.place(c.Context, svc, c, &spec); err != nil {
				return err
			}
			in := catchInterrupts()
			defer in.stop()
			sb, err := a.makeSandbox(in, svc, spec, uploads, "")
			if err != nil {
				return err
			}
			if a.output == outputJSON {
				return a.printJSON(sb)
			}
			_, err = fmt.Fprintln(a.stdout, sb.ID)
			return err
		},
	}
}

// destroyWithin bounds how long boxedctl waits for a sandbox to be gone.
const destroyWithin = 20 * time.Second

// callLabel marks a throwaway sandbox with the call of boxedctl that made it, so
// that the call finds it when its Create was interrupted at the very moment the
// node had done it. People do not see the label in tables.
const callLabel = "boxedctl.call"

// makeSandbox creates a sandbox and copies the uploads into it. If that fails
// or is interrupted nothing is left behind; for that a throwaway sandbox has a
// call, any unique word.
func (a *app) makeSandbox(in *interrupts, svc service, spec boxed.Spec, uploads []upload, call string) (*boxed.Sandbox, error) {
	ctx, release := in.cancelling(context.Background())
	defer release()
	if call != "" {
		spec.Labels = maps.Clone(spec.Labels)
		if spec.Labels == nil {
			spec.Labels = map[string]string{}
		}
		spec.Labels[callLabel] = call
	}
	stopTelling := a.tellWait(ctx, svc)
	sb, err := svc.Create(ctx, spec)
	stopTelling()
	if err != nil {
		if ctx.Err() != nil {
			if call != "" {
				a.destroyCall(svc, call)
			}
			return nil, in.err()
		}
		return nil, err
	}
	if err := a.sendUploads(ctx, svc, sb, uploads); err != nil {
		a.destroy(svc, sb.ID)
		if ctx.Err() != nil {
			return nil, in.err()
		}
		return nil, err
	}
	return sb, nil
}

// destroy ends a sandbox that the user did not ask to keep.
func (a *app) destroy(svc service, id boxed.ID) {
	ctx, cancel := deadlineAfter(destroyWithin)
	defer cancel()
	if err := svc.Destroy(ctx, id); err != nil && boxed.CodeOf(err) != boxed.CodeNotFound {
		a.notice("%s may still be there: %s", id, message(err))
	}
}

// destroyCall ends what an interrupted Create may have made.
func (a *app) destroyCall(svc service, call string) {
	ctx, cancel := deadlineAfter(destroyWithin)
	defer cancel()
	list, err := svc.List(ctx, boxed.Filter{Labels: map[string]string{callLabel: call}})
	if err != nil {
		a.notice("a sandbox with the label %s=%s may be there: %s", callLabel, call, message(err))
		return
	}
	for _, sb := range list.Sandboxes {
		a.destroy(svc, sb.ID)
	}
}

// tellWait shows a person what a create waits for, an image's pull or its turn,
// once it takes long enough to wonder.
func (a *app) tellWait(ctx context.Context, svc service) (stop func()) {
	if a.quiet || !isTerminal(a.stderr) {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-ctx.Done():
			return
		case <-time.After(2 * time.Second):
		}
		tell := func(text string) {
			fmt.Fprintf(a.stderr, "\r%s\x1b[K", table.Clip(table.Inert(text), terminalWidth(a.stderr)-1))
		}
		tell(cmp.Or(a.queued(ctx, svc), "waiting for the sandbox …"))
		for event, err := range svc.Events(ctx, "") {
			if err != nil {
				break
			}
			switch event.Type {
			case boxed.EventImage:
				tell(event.Message)
			case boxed.EventStarted, boxed.EventFailed, boxed.EventQueued: // the queue has moved
				if text := a.queued(ctx, svc); text != "" {
					tell(text)
				}
			}
		}
		<-ctx.Done()
		fmt.Fprint(a.stderr, "\r\x1b[K")
	}()
	return func() { cancel(); <-done }
}

// queued says where the caller's sandboxes stand that wait to be made, or "".
func (a *app) queued(ctx context.Context, svc service) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	list, err := svc.List(ctx, boxed.Filter{States: []boxed.State{boxed.StatePending}})
	if err != nil {
		return ""
	}
	var places []int
	for _, sb := range list.Sandboxes {
		if sb.QueuePlace > 0 {
			places = append(places, sb.QueuePlace)
		}
	}
	slices.Sort(places)
	switch len(places) {
	case 0:
		return ""
	case 1:
		return fmt.Sprintf("waiting for its turn to be made: place %d", places[0])
	}
	return fmt.Sprintf("waiting for a turn: %d of your sandboxes are to be made, at places %d to %d", len(places), places[0], places[len(places)-1])
}
