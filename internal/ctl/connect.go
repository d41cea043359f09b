package ctl

import (
	"context"
	"net/http"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/api/client"
)

// service is what boxedctl needs of a node.
type service interface {
	boxed.API
	boxed.Admin
	boxed.Cluster
	boxed.SSH
	boxed.Policies
	// Run is an exec as one call, its output collected within bounds.
	Run(ctx context.Context, id boxed.ID, req boxed.ExecRequest) (*client.ExecResult, error)
	// Version needs no key.
	Version(ctx context.Context) (string, error)
}

var _ service = (*client.Client)(nil)

// connect finds the node that the command line means. It sends nothing yet.
func (a *app) connect() (service, error) {
	if a.lobby != nil {
		return a.lobby, nil
	}
	t, err := a.resolve(a.node)
	if err != nil {
		return nil, err
	}
	if a.dial != nil {
		return a.dial(t)
	}
	return dial(t)
}

// connectToOne is connect for what is done to the node itself: a context with
// several nodes does not say which one is meant.
func (a *app) connectToOne() (service, error) {
	t, err := a.resolve(a.node)
	if err != nil {
		return nil, err
	}
	if len(t.Others) > 0 {
		return nil, usagef("this is about one node, and the context %s has %d", t.Context, len(t.all())).
			hint("say which one: --endpoint %s", oneOf(t.urls()))
	}
	return a.connect()
}

func dial(t target) (service, error) {
	cfg := client.Config{
		Endpoint: t.Endpoint, APIKey: t.Key, Fingerprint: t.Pin,
		UserAgent: "boxedctl/" + versionText() + " (" + runtime.GOOS + "; " + runtime.GOARCH + ")",
	}
	if len(t.Others) > 0 {
		f, err := newFailover(t)
		if err != nil {
			return nil, err
		}
		cfg.Name = oneOf(t.urls())
		cfg.HTTPClient = &http.Client{
			Transport:     f,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
	}
	return client.New(cfg)
}

// version is what Main was told.
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

// reach connects to the node and finds a sandbox by ID, name or prefix.
func (a *app) reach(ctx context.Context, ref string) (service, boxed.ID, error) {
	svc, err := a.connect()
	if err != nil {
		return nil, "", err
	}
	id, err := sandboxID(ctx, svc, ref)
	return svc, id, err
}

// sandboxID finds the ID behind an ID, a name or a prefix. A whole ID costs no
// request.
func sandboxID(ctx context.Context, svc service, ref string) (boxed.ID, error) {
	if id, err := boxed.ParseID(ref); err == nil {
		return id, nil
	}
	sb, err := sandbox(ctx, svc, ref)
	if err != nil {
		return "", err
	}
	return sb.ID, nil
}

// sandbox finds a sandbox by ID, name or prefix.
func sandbox(ctx context.Context, svc service, ref string) (*boxed.Sandbox, error) {
	if ref == "" {
		return nil, usagef("an empty word names no sandbox").hint("boxedctl ls lists yours")
	}
	if strings.Trim(ref, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || len(ref) > 64 {
		return nil, usagef("%q names no sandbox", ref).hint("an ID, a name or the first %d characters of an ID do: a-z, 0-9 and -", boxed.MinPrefixLen)
	}
	sb, err := svc.Resolve(ctx, ref)
	if boxed.CodeOf(err) == boxed.CodeNotFound {
		return nil, (&problem{err: err}).hint("boxedctl ls lists yours, boxedctl ls --all also those that have ended")
	}
	return sb, err
}
