package main_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"strings"
	"testing"

	main "github.com/boxed-mesh/boxed/bench"
)

// rawServer listens on the loopback until the test ends.
func rawServer(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go main.ServeRaw(l)
	return l.Addr().String()
}

func TestTheClientMeasuresWhatTheServerSends(t *testing.T) {
	at := rawServer(t)
	for what, args := range map[string][]string{
		"down":  {"-bytes", "3000001"},
		"up":    {"-bytes", "3000001"},
		"short": {"-count", "50"},
	} {
		var out bytes.Buffer
		if err := main.ClientCommand(append([]string{what, "-to", at, "-at", at}, args...), nil, &out); err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		var values []float64
		if err := json.Unmarshal(out.Bytes(), &values); err != nil || len(values) != 1 || values[0] <= 0 {
			t.Errorf("%s measured %q: %v", what, out.String(), err)
		}
	}
}

func TestTheClientHoldsConnectionsToTheEndOfItsInput(t *testing.T) {
	at := rawServer(t)
	var out bytes.Buffer
	if err := main.ClientCommand([]string{"hold", "-to", at}, strings.NewReader("3\n2\n"), &out); err != nil || out.String() != "3\n5\n" {
		t.Errorf("it said %q: %v", out.String(), err)
	}
}

// A server that sends less than was asked for is no fast one.
func TestTheClientNoticesABrokenAnswer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			io.ReadFull(conn, make([]byte, 1))
			conn.Close()
		}
	}()
	for _, what := range []string{"down", "up", "short", "hold"} {
		args := []string{what, "-to", l.Addr().String(), "-bytes", "3000000", "-count", "2"}
		if err := main.ClientCommand(args, strings.NewReader("2\n"), io.Discard); err == nil {
			t.Errorf("%s took it for an answer", what)
		}
	}
}
