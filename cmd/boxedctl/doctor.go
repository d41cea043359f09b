package main

import "github.com/urfave/cli/v2"

func (a *app) cmdDoctor() *cli.Command { return &cli.Command{Name: "doctor"} }
