package table

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/boxed-mesh/boxed"
)

// Age says how long ago t was, in one unit: "3s", "12m", "5h", "2d". What lies
// ahead of now by a clock's error is "0s"; the zero time is "-".
func Age(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return Span(max(0, now.Sub(t)))
}

// Until says how far ahead t is, in the form of Age; what has passed is "now"
// and the zero time, which stands for no deadline, "never".
func Until(t, now time.Time) string {
	switch {
	case t.IsZero():
		return "never"
	case !t.After(now):
		return "now"
	}
	return Span(t.Sub(now))
}

// Span is a duration in one unit, rounded down from 2 minutes, 2 hours and 2
// days on, as people say it: 90 s is "90s", 150 s is "2m".
func Span(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return strconv.FormatInt(int64(d/time.Second), 10) + "s"
	case d < 2*time.Hour:
		return strconv.FormatInt(int64(d/time.Minute), 10) + "m"
	case d < 48*time.Hour:
		return strconv.FormatInt(int64(d/time.Hour), 10) + "h"
	}
	return strconv.FormatInt(int64(d/(24*time.Hour)), 10) + "d"
}

// Size is a number of bytes with a binary unit: "0 B", "512 MiB", "1.5 GiB".
func Size(n int64) string {
	if n > -1024 && n < 1024 {
		return strconv.FormatInt(n, 10) + " B"
	}
	v, unit := float64(n), 0
	for math.Abs(v) >= 1023.95 && unit < 6 {
		v /= 1024
		unit++
	}
	text := strconv.FormatFloat(v, 'f', 1, 64)
	if len(text) > 2 && text[len(text)-2:] == ".0" {
		text = text[:len(text)-2]
	}
	return fmt.Sprintf("%s %ciB", text, "BKMGTPE"[unit])
}

// State is a sandbox's state as a cell: coloured, and with the reason once it
// has ended.
func State(sb *boxed.Sandbox) Cell {
	text := string(sb.State)
	if sb.State.Ended() && sb.Reason != "" {
		text += ": " + string(sb.Reason)
	}
	switch sb.State {
	case boxed.StateRunning:
		return Cell{text, Good}
	case boxed.StateFailed:
		return Cell{text, Bad}
	case boxed.StateStopped, boxed.StateStopping:
		return Cell{text, Dim}
	}
	return Cell{text, Warn}
}
