package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/boxed-mesh/boxed/node"
	"github.com/boxed-mesh/boxed/store"
)

// version is set by the linker; a program made by `go install` has it from its
// module.
var version string

func versionText() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "dev"
}

func (p *program) version(ctx *cli.Context) error {
	asJSON, err := wantsJSON(ctx)
	if err != nil {
		return err
	}
	agent := "no agent: built without make"
	program, agentErr := agentProgram("", embedded)
	if agentErr == nil {
		agent = "agent " + agentHash(program)
	}
	if asJSON {
		return json.NewEncoder(p.stdout).Encode(map[string]any{
			"version": versionText(), "go": runtime.Version(), "arch": runtime.GOARCH, "agent": agentHash(program), "store_format": store.Format,
		})
	}
	fmt.Fprintf(p.stdout, "boxed-node %s (%s, %s, store format %d, %s)\n", versionText(), runtime.Version(), runtime.GOARCH, store.Format, agent)
	return nil
}

func (p *program) configCheck(ctx *cli.Context) error {
	l, err := p.load(ctx)
	if l != nil {
		for _, warning := range l.Warnings {
			fmt.Fprintln(p.stderr, "note:", warning)
		}
	}
	if err == nil {
		fmt.Fprintln(p.stdout, "the configuration has no mistakes")
	}
	return err
}

func (p *program) configPrint(ctx *cli.Context) error {
	asJSON, err := wantsJSON(ctx)
	if err != nil {
		return err
	}
	l, err := p.load(ctx)
	if l == nil {
		return err
	}
	if asJSON {
		if err := l.printJSON(p.stdout); err != nil {
			return err
		}
	} else if err := l.print(p.stdout); err != nil {
		return err
	}
	return err
}

func (p *program) keyGenerate(ctx *cli.Context) error {
	if err := noArguments(ctx); err != nil {
		return err
	}
	fmt.Fprintln(p.stdout, node.NewKeySecret())
	return nil
}

func (p *program) fingerprint(ctx *cli.Context) error {
	l, err := p.load(ctx)
	if err != nil {
		return err
	}
	log := newLogger(l.Config, p.stderr, nil)
	if err := prepareDataDir(l.DataDir, log); err != nil {
		return err
	}
	cert, err := openCertificate(l.Config, log, time.Now)
	if err != nil {
		return err
	}
	if cert == nil {
		return fmt.Errorf("the node serves without TLS; set tls.auto, or tls.cert_file and tls.key_file")
	}
	fmt.Fprintln(p.stdout, cert.fingerprint())
	return nil
}

func (p *program) salvage(ctx *cli.Context) error {
	l, err := p.load(ctx)
	if err != nil {
		return err
	}
	got, err := store.Salvage(store.Options{Dir: l.path("store"), Logger: newLogger(l.Config, p.stderr, nil)})
	switch {
	case err != nil:
		return err
	case got.Damage == nil:
		fmt.Fprintln(p.stdout, "the store is not damaged; nothing was done")
	default:
		fmt.Fprintf(p.stdout, "damage:    %v\ngiven up:  %s\nkept:      %s\n", got.Damage, got.Lost, got.Copy)
	}
	return nil
}
