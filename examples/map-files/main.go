// Command map-files counts words in several texts at once, each in a sandbox of
// its own: a file goes in, a result comes out, and the sandbox is gone.
package main

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"sync"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

var texts = []string{"one", "one two", "one two three", "one two three four"}

func main() {
	c, err := client.New(client.Config{Endpoint: os.Getenv("BOXED_ENDPOINT"), APIKey: os.Getenv("BOXED_API_KEY")})
	if err != nil {
		log.Fatal(err)
	}
	results := make([]string, len(texts))
	var wg sync.WaitGroup
	for i, text := range texts {
		wg.Go(func() {
			count, err := countWords(context.Background(), c, text)
			if err != nil {
				log.Fatalf("%q: %v", text, err)
			}
			results[i] = count
		})
	}
	wg.Wait()
	fmt.Println(strings.Join(results, " "))
}

func countWords(ctx context.Context, c *client.Client, text string) (string, error) {
	box, err := c.Create(ctx, boxed.Spec{})
	if err != nil {
		return "", err
	}
	defer c.Destroy(ctx, box.ID)
	if _, err := c.WriteFile(ctx, box.ID, boxed.WriteRequest{Path: "text", Content: strings.NewReader(text)}); err != nil {
		return "", err
	}
	var out bytes.Buffer
	status, err := c.Exec(ctx, box.ID, boxed.ExecRequest{Args: []string{"wc", "-w"}, Stdin: strings.NewReader(text), Stdout: &out})
	if err != nil {
		return "", err
	}
	if status.Code != 0 {
		return "", fmt.Errorf("wc ended with %d", status.Code)
	}
	return strings.TrimSpace(out.String()), nil
}
