package ctl

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
	"github.com/boxed-mesh/boxed/internal/vt"
)

func (a *app) cmdReplay() *cli.Command {
	return &cli.Command{
		Name: "replay", Category: catWatch,
		Usage:     "show the recording of a terminal again",
		UsageText: "boxedctl replay [RECORDING | FILE] [--speed N] [--idle DURATION]",
		Description: "Without RECORDING it lists them: those of the node that answers, where their sessions came in (ssh.record turns recording on). " +
			"FILE is an asciicast of version 2, with a dot or a slash in its name, and - is stdin. What would have your terminal do more than show text is left out: titles, the clipboard, questions." +
			examples("boxedctl replay", "boxedctl replay k3v7q2mxw5ua6t4d", "boxedctl replay k3v7q2mxw5ua6t4d --speed 4 --idle 1s", "boxedctl replay ./demo.cast"),
		Flags: []cli.Flag{
			&cli.Float64Flag{Name: "speed", Value: 1, Usage: "`N` times as fast; 0: all at once"},
			&cli.StringFlag{Name: "idle", Value: "2s", Usage: "wait no longer than `DURATION` where nothing happens"},
		},
		Action: a.replay,
	}
}

func (a *app) replay(c *cli.Context) error {
	words, err := a.operands(c, 0, 1)
	if err != nil {
		return err
	}
	idle, err := parseDuration("idle", c.String("idle"))
	if err != nil {
		return err
	}
	speed := c.Float64("speed")
	if speed < 0 || speed > 1000 {
		return usagef("--speed is between 0 and 1000")
	}
	if len(words) == 0 {
		return a.listRecordings(c.Context)
	}
	in := catchInterrupts()
	defer in.stop()
	ctx, release := in.cancelling(c.Context)
	defer release()
	cast, err := a.openCast(ctx, words[0])
	if err != nil {
		return err
	}
	defer cast.Close()
	return replay(ctx, a.stdout, cast, speed, idle.D())
}

func (a *app) listRecordings(ctx context.Context) error {
	svc, err := a.connect()
	if err != nil {
		return err
	}
	list, err := svc.ListRecordings(ctx)
	if err != nil {
		return err
	}
	if list == nil {
		list = []boxed.Recording{}
	}
	t := table.New(table.Column{Name: "RECORDING", Keep: true}, table.Column{Name: "SANDBOX", Keep: true}, table.Column{Name: "OWNER"},
		table.Column{Name: "AGE", Right: true}, table.Column{Name: "SIZE", Right: true})
	var names []string
	now := time.Now()
	for _, r := range list {
		names = append(names, r.ID)
		t.Row(r.ID, r.Sandbox.Random(), r.Owner, table.Age(r.StartedAt, now), table.Size(r.Bytes))
	}
	return a.print(map[string]any{"recordings": list}, names, t)
}

func (a *app) openCast(ctx context.Context, name string) (io.ReadCloser, error) {
	switch {
	case name == "-":
		return io.NopCloser(a.stdin), nil
	case strings.ContainsAny(name, `./\`):
		file, err := os.Open(name)
		return file, plainPath(err)
	}
	svc, err := a.connect()
	if err != nil {
		return nil, err
	}
	return svc.ReadRecording(ctx, name)
}

// maxCastLine bounds one event of a recording, in bytes.
const maxCastLine = 8 << 20

// replay shows an asciicast in its own time.
func replay(ctx context.Context, out io.Writer, cast io.Reader, speed float64, idle time.Duration) error {
	lines := bufio.NewScanner(cast)
	lines.Buffer(make([]byte, 64<<10), maxCastLine)
	var header struct{ Version int }
	if !lines.Scan() || json.Unmarshal(lines.Bytes(), &header) != nil || header.Version != 2 {
		return usagef("that is no asciicast of version 2")
	}
	screen, last := vt.NewFilter(out), 0.0
	for n := 2; lines.Scan(); n++ {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		var at float64
		var kind, data string
		if err := json.Unmarshal(line, &[]any{&at, &kind, &data}); err != nil {
			return usagef("line %d is no event of an asciicast", n)
		}
		if wait := time.Duration((at - last) * float64(time.Second)); speed > 0 && wait > 0 {
			select {
			case <-time.After(min(time.Duration(float64(wait)/speed), idle)):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if last = at; kind == "o" {
			if _, err := io.WriteString(screen, data); err != nil {
				return err
			}
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read the recording: %w", err)
	}
	// As it was: colours, the cursor, the other screen.
	_, err := io.WriteString(out, "\x1b[0m\x1b[?25h\x1b[?1049l")
	return err
}
