// Command reach is a static Go program that asks for things from within a sandbox: what it trusts and which proxy it
// takes is what Go's own net/http does.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/coder/websocket"
)

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	ask := map[string]func(context.Context, string) error{"get": get, "say": say, "socket": socket}[os.Args[1]]
	if err := ask(ctx, os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// get prints an answer, or of a long one its checksum.
func get(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	sum, head := sha256.New(), &bytes.Buffer{}
	n, err := io.Copy(sum, io.TeeReader(resp.Body, &limited{head, 4096}))
	if err != nil {
		return err
	}
	if n > 4096 {
		fmt.Printf("%d %x\n", n, sum.Sum(nil))
		return nil
	}
	fmt.Printf("%s", head)
	return nil
}

type limited struct {
	w    io.Writer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), l.left)
	l.left -= n
	l.w.Write(p[:n])
	return len(p), nil
}

// say makes a call of gRPC by hand: a message has five bytes of head, the status is in the trailers.
func say(ctx context.Context, url string) error {
	const text = "gopher"
	body := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(text))), text...)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/hello.Greeter/Say", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/grpc")
	req.Header.Set("Te", "trailers")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	reply, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	fmt.Printf("%s %d %q status=%s message=%s\n", resp.Proto, resp.StatusCode, reply, resp.Trailer.Get("Grpc-Status"), resp.Trailer.Get("Grpc-Message"))
	return nil
}

// socket says something over a WebSocket, and prints what comes back.
func socket(ctx context.Context, url string) error {
	c, _, err := websocket.Dial(ctx, url, nil)
	if err != nil {
		return err
	}
	defer c.CloseNow()
	for _, text := range []string{"one", "two"} {
		if err := c.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
			return err
		}
		_, got, err := c.Read(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("%s\n", got)
	}
	return c.Close(websocket.StatusNormalClosure, "")
}
