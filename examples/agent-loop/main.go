// Command agent-loop is the loop of a coding agent, with the model's part played
// by a list of attempts: code is run in a sandbox, its failure is read, and the
// next attempt is made in the same sandbox, where the files still are.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strings"
	"time"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// attempts are what a model might answer: the first one has a mistake.
var attempts = []string{
	"rows = [line.split(',') for line in open('sales.csv')]\nprint(sum(r[1] for r in rows))\n",
	"rows = [line.split(',') for line in open('sales.csv')]\nprint('total', sum(int(r[1]) for r in rows))\n",
}

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	c, err := client.New(client.Config{Endpoint: os.Getenv("BOXED_ENDPOINT"), APIKey: os.Getenv("BOXED_API_KEY")})
	if err != nil {
		return err
	}
	box, err := c.Create(ctx, boxed.Spec{
		TTL:   boxed.Duration(10 * time.Minute),
		Files: []boxed.File{{Path: "sales.csv", Content: []byte("apples,3\npears,4\nplums,5\n")}},
	})
	if err != nil {
		return err
	}
	defer c.Destroy(ctx, box.ID)
	for i, code := range attempts {
		result, err := c.Run(ctx, box.ID, boxed.ExecRequest{Language: "python", Code: code, Timeout: boxed.Duration(30 * time.Second)})
		if err != nil {
			return err // ours: not the program's
		}
		if result.Reason == boxed.ReasonExited && result.Code == 0 {
			fmt.Printf("attempt %d: %s", i+1, result.Stdout)
			return nil
		}
		lines := strings.Split(strings.TrimSpace(string(result.Stderr)), "\n")
		fmt.Printf("attempt %d failed (%s, exit code %d): %s\n", i+1, result.Reason, result.Code, lines[len(lines)-1])
	}
	return fmt.Errorf("no attempt worked")
}
