package main

import (
	"io"
	"log/slog"
)

// newLogger logs to w. With level, which may be nil, the level can be changed
// while it is in use.
func newLogger(c *Config, w io.Writer, level *slog.LevelVar) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.Log.Level}
	if level != nil {
		level.Set(c.Log.Level)
		o.Level = level
	}
	if c.Log.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
