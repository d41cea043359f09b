# Everything a newcomer or a maintainer does, by name. The recipes are scripts: they can be read, and run by hand.

SHELL := bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# Tools are pinned here and not in go.mod: what checks the code is no part of it.
export GOFUMPT     := mvdan.cc/gofumpt@v0.12.0
export STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
export GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.9.0
# gVisor, a runtime with a kernel of its own.
export GVISOR      := gvisor.dev/gvisor/runsc@v0.0.0-20260905035102-160fafc42237

# make test PKGS=./sandbox/... TESTFLAGS='-run Pool -v'
PKGS ?= ./...
TESTFLAGS ?=
# What loads the whole host is run by itself, after all others.
ALONE := ABusyHost|ASandboxAtIts|FiveHundred|TakeTheNodesMemory
# make gobench BENCH=Exec
BENCH ?= .
# make bench BENCHFLAGS='-only lifecycle,exec'
BENCHFLAGS ?=

# make install PREFIX=/usr DESTDIR=/tmp/package
export PREFIX ?= /usr/local
export DESTDIR ?=
export UNITDIR ?= $(PREFIX)/lib/systemd/system

.PHONY: help
help: ## says what there is to do
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: up
up: ## from a fresh clone to a running node and a first result; repeating it takes seconds
	@scripts/up

.PHONY: down
down: ## stops what `make up` started
	@scripts/down

.PHONY: logs
logs: ## follows the node's log
	@scripts/logs

.PHONY: build
build: ## builds bin/boxed-node and bin/boxedctl
	@scripts/build

.PHONY: test
test: ## sets up what tests need and runs them all (PKGS=, TESTFLAGS=)
	@scripts/setup
	@scripts/test
	@scripts/gotest $(TESTFLAGS) $(PKGS)
ifeq ($(PKGS)$(TESTFLAGS),./...)
	@BOXED_ALONE=1 scripts/gotest -run '$(ALONE)' ./e2e
endif

.PHONY: e2e
e2e: ## the part of `make test` with real programs, sandboxes, networks and a tailnet
	@scripts/setup
	@scripts/gotest $(TESTFLAGS) ./e2e

.PHONY: check
check: ## formatting, vet, staticcheck, known vulnerabilities, go.mod, other platforms, scripts
	@scripts/check

.PHONY: fmt
fmt: ## formats the Go code
	@scripts/go run $(GOFUMPT) -w .

.PHONY: docs
docs: ## writes the documents that are made from code
	@scripts/go generate ./...

.PHONY: bench
bench: ## measures boxed against Docker and writes docs/benchmarks.md, half an hour (BENCHFLAGS=)
	@scripts/setup
	@scripts/bench $(BENCHFLAGS)

.PHONY: bench-quick
bench-quick: ## the same with few trials, to see that it works; minutes, and only prints
	@scripts/setup
	@scripts/bench -quick $(BENCHFLAGS)

.PHONY: bench-report
bench-report: ## writes docs/benchmarks.md and its plots from bench/results
	@scripts/go run ./bench report

.PHONY: gobench
gobench: ## runs Go's benchmarks of single packages (BENCH=, PKGS=)
	@scripts/setup
	@scripts/gotest --bench -run '^$$' -bench '$(BENCH)' -benchmem $(TESTFLAGS) $(PKGS)

.PHONY: runsc
runsc: ## builds gVisor's runtime and says how to give it to the engine
	@scripts/runsc

.PHONY: install
install: ## installs the programs and a systemd unit (PREFIX=, DESTDIR=)
	@scripts/build
	@scripts/install

.PHONY: uninstall
uninstall: ## removes what `make install` installed; data and images stay
	@scripts/install --remove

.PHONY: clean
clean: ## removes what `make build` made
	rm -rf bin cmd/boxed-node/bin/boxed-agent-* cmd/boxed-node/bin/boxed-tools-*

.PHONY: purge
purge: ## removes what `make up` made: node, data, images, packages, context; nothing else
	@scripts/purge
