package main_test

import (
	"testing"

	"github.com/boxed-mesh/boxed/agent"
)

// What one exec costs over the link, without a container around the agent.
func BenchmarkExecTrue(b *testing.B) {
	s := start(b)
	for b.Loop() {
		if exit, err := s.Exec(b.Context(), command("true"), agent.Streams{}); err != nil || exit.Code != 0 {
			b.Fatal(exit, err)
		}
	}
}

// Bytes of output per second through the link.
func BenchmarkStdout(b *testing.B) {
	s := start(b)
	const size = 256 << 20
	b.SetBytes(size)
	for b.Loop() {
		exit, err := s.Exec(b.Context(), command("head", "-c", "268435456", "/dev/zero"), agent.Streams{})
		if err != nil || exit.StdoutBytes != size {
			b.Fatal(exit, err)
		}
	}
}

// One question and its answer.
func BenchmarkPing(b *testing.B) {
	s := start(b)
	for b.Loop() {
		if err := s.Ping(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
