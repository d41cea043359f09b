package ctl

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// maxTyped is how long a value may be that is typed, in bytes: some terminals hand over no
// more of a line, and drop the rest in silence.
const maxTyped = 1000

// secretValue reads the value of a secret: from a file, stdin, or a person.
func (a *app) secretValue(name, file string) (string, error) {
	const most = boxed.MaxSecret + len("\r\n")
	var text []byte
	var err error
	switch {
	case file != "" && file != "-":
		if keyIsPublic(file) {
			a.notice("%s can be read by others: chmod 600 it", file)
		}
		text, err = readSmall(file, int64(most))
	case isTerminal(a.stdin):
		text, err = a.askValue(name)
	default:
		text, err = io.ReadAll(io.LimitReader(a.stdin, int64(most)+1))
	}
	if err != nil {
		return "", plainPath(err)
	}
	value := strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r")
	switch {
	case strings.TrimSpace(value) == "":
		return "", usagef("there is no value: %s is empty", inputName(firstOf(file, "-"))).hint("boxedctl secret set %s < FILE reads it from a file", name)
	case len(value) > boxed.MaxSecret:
		return "", boxed.Errorf(boxed.CodeTooLarge, "the value has more than %d bytes", boxed.MaxSecret)
	}
	return value, nil
}

// askValue asks a person, and does not show what is typed.
func (a *app) askValue(name string) ([]byte, error) {
	in := catchInterrupts()
	defer in.stop()
	ctx, release := in.cancelling(context.Background())
	defer release()
	fmt.Fprintf(a.stderr, "The value of %s (it is not shown): ", name)
	text, err := readHidden(ctx, a.stdin)
	fmt.Fprintln(a.stderr)
	switch {
	case ctx.Err() != nil:
		return nil, in.err()
	case err != nil && len(text) == 0:
		return nil, boxed.Errorf(boxed.CodeCanceled, "nothing was done")
	case len(text) > maxTyped:
		return nil, usagef("it has more than %d bytes: a terminal may have cut it off", maxTyped).hint("boxedctl secret set %s < FILE reads it from a file", name)
	}
	return text, nil
}
