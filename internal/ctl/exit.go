package ctl

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/internal/table"
)

// The exit statuses of boxedctl that are not the program's own, as env(1),
// timeout(1) and docker run have them.
const (
	exitOK          = 0
	exitFailed      = 1   // smoke, doctor, wait, egress check, audit verify: what was checked is not so
	exitTimeout     = 124 // a timeout passed
	exitBoxed       = 125 // boxed could not do it; no status of the program is known
	exitCannotStart = 126 // the program is there and cannot be started
	exitNotFound    = 127 // the sandbox has no such program
	exitInterrupted = 130 // 128 + INT
	exitKilled      = 137 // 128 + KILL
	exitPipe        = 141 // 128 + PIPE: nobody reads our output any more
)

// exitStatus ends boxedctl with a status and without a message.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// asStatus is nil for 0.
func asStatus(code int) error {
	if code == 0 {
		return nil
	}
	return exitStatus(code)
}

// exitOf is the one table from an error to an exit status.
func exitOf(err error) int {
	switch boxed.CodeOf(err) {
	case "":
		return exitOK
	case boxed.CodeDeadline:
		return exitTimeout
	case boxed.CodeStartFailed:
		if reason, _ := boxed.AsError(err).Detail["reason"].(string); reason == "not_found" {
			return exitNotFound
		}
		return exitCannotStart
	case boxed.CodeCanceled:
		return exitInterrupted
	}
	return exitBoxed
}

// exitOfProgram is the one table from how a program ended to an exit status.
func exitOfProgram(st boxed.ExitStatus) int {
	switch st.Reason {
	case boxed.ReasonTimeout:
		return exitTimeout
	case boxed.ReasonOOM, boxed.ReasonOutputLimit:
		return exitKilled
	case boxed.ReasonLost:
		return exitBoxed
	}
	if st.Code < 0 || st.Code > 255 {
		return exitBoxed
	}
	return st.Code
}

// explain says what a program's exit status does not, or "".
func explain(st boxed.ExitStatus) string {
	if st.Message != "" && st.Reason != boxed.ReasonExited {
		return st.Message
	}
	switch st.Reason {
	case boxed.ReasonTimeout:
		return "the program was ended: its timeout passed"
	case boxed.ReasonOOM:
		return "the program was killed: the sandbox's memory limit was reached"
	case boxed.ReasonOutputLimit:
		return "the program was ended: it wrote more than its output limit"
	case boxed.ReasonLost:
		return "the link to the program broke, how it ended is not known"
	}
	return ""
}

func (a *app) cmdExitCodes() *cli.Command {
	return &cli.Command{
		Name: "exit-codes", Category: catOther,
		Usage:       "explain boxedctl's exit statuses",
		UsageText:   "boxedctl exit-codes",
		Description: "Prints what each exit status of boxedctl means." + examples("boxedctl exit-codes", "boxedctl help exit-codes"),
		Action: func(*cli.Context) error {
			_, err := fmt.Fprint(a.stdout, exitCodes(a.color))
			return err
		},
	}
}

// exitCodes is the table for people.
func exitCodes(color bool) string {
	t := table.New(table.Column{Name: "STATUS", Right: true}, table.Column{Name: "MEANING"})
	for _, row := range [][2]string{
		{"0", "it worked; of run, exec, shell, repl, logs -f: the program ended with 0"},
		{"n", "run, exec, shell, repl, logs -f: the program's own status, 128 + n if signal n ended it"},
		{fmt.Sprint(exitFailed), "smoke, doctor, audit verify: a check failed; wait: the sandbox ended first; egress check: it is not allowed"},
		{fmt.Sprint(exitTimeout), "a timeout passed: the program's (--timeout) or that of wait"},
		{fmt.Sprint(exitBoxed), "boxed itself: a bad command line, no connection, a refusal, a lost link; nothing is known of the program"},
		{"", "of explain: no node would take the sandbox"},
		{fmt.Sprint(exitCannotStart), "the program could not be started: no permission, no such directory, a bad format"},
		{fmt.Sprint(exitNotFound), "the sandbox has no such program"},
		{fmt.Sprint(exitInterrupted), "interrupted (Ctrl-C); 143 by TERM, 129 by HUP"},
		{fmt.Sprint(exitKilled), "the program was killed: out of memory, over its output limit, by kill"},
		{fmt.Sprint(exitPipe), "whoever read boxedctl's output went away"},
	} {
		t.Row(row[:]...)
	}
	var b stringWriter
	_ = t.Write(&b, table.Layout{Color: color}) // a stringWriter does not fail
	return string(b)
}

// stringWriter collects what is written.
type stringWriter []byte

func (w *stringWriter) Write(p []byte) (int, error) {
	*w = append(*w, p...)
	return len(p), nil
}
