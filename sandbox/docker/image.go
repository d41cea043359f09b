package docker

import (
	"context"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/docker/docker/api/types/image"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/sandbox"
)

// Bounds of an image's configuration. It is copied into every container, so a
// large one is a cost that the image's author chooses and the host bears.
const (
	maxImageEnv    = 512       // variables
	maxImageLabels = 512       // labels
	maxImageConfig = 256 << 10 // bytes of both
	maxImages      = 256       // configurations that are remembered
)

// imageConfig is what must be known of an image to keep it from configuring its
// container. It is content-addressed, so it never changes.
type imageConfig struct {
	envNames   []string // of all its variables
	labelNames []string
	volumes    []string // clean absolute paths
	env        map[string]string
}

// Image finds an image on this host, or pulls it. ref is a name with an optional
// tag or digest, or a whole image ID; a malformed one is CodeInvalid.
func (d *Driver) Image(ctx context.Context, ref string, progress func(sandbox.PullProgress)) (sandbox.Image, error) {
	name, err := parseRef(ref)
	if err != nil {
		return sandbox.Image{}, err
	}
	found, err := d.lookUpImage(ctx, name.String())
	if errdefs.IsNotFound(err) {
		named, ok := name.(reference.Named)
		if !ok { // an image ID: no registry is named, so there is nothing to ask
			return sandbox.Image{}, missingImage(ref, err)
		}
		if err := d.pulls.do(ctx, d, named, progress); err != nil {
			return sandbox.Image{}, err
		}
		found, err = d.lookUpImage(ctx, name.String())
	}
	if errdefs.IsNotFound(err) {
		return sandbox.Image{}, missingImage(ref, err)
	}
	if errdefs.IsInvalidArgument(err) { // engines are of different minds about what a name is
		return sandbox.Image{}, malformed(ref)
	}
	if err != nil {
		return sandbox.Image{}, d.engineError("look up image", err)
	}
	c, err := d.judgeImage(ctx, ref, found)
	if err != nil {
		return sandbox.Image{}, err
	}
	return sandbox.Image{Ref: ref, Digest: found.ID, Env: maps.Clone(c.env), Volumes: slices.Clone(c.volumes)}, nil
}

// parseRef reads a reference and completes it, so that the engine takes it for
// nothing else: to the engine a bare "cafe" may also be the start of an ID.
func parseRef(ref string) (reference.Reference, error) {
	parsed, err := reference.ParseAnyReference(ref)
	if err != nil || len(ref) > 1024 {
		return nil, malformed(ref)
	}
	if named, ok := parsed.(reference.Named); ok {
		return reference.TagNameOnly(named), nil
	}
	return parsed, nil
}

func malformed(ref string) error {
	return boxed.Errorf(boxed.CodeInvalid, "%q is not an image reference: write it like python:3.12-slim or registry.example:5000/team/image@sha256:…", clip(ref)).WithField("image")
}

func clip(s string) string {
	const most = 100
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "") + "…"
	}
	return s
}

func (d *Driver) lookUpImage(ctx context.Context, name string) (image.InspectResponse, error) {
	return d.client.ImageInspect(ctx, name)
}

// imageConfig is that of an image on this host, by its digest.
func (d *Driver) imageConfig(ctx context.Context, digest string) (*imageConfig, error) {
	d.mu.Lock()
	c := d.images[digest]
	d.mu.Unlock()
	if c != nil {
		return c, nil
	}
	if !strings.HasPrefix(digest, "sha256:") {
		return nil, boxed.Errorf(boxed.CodeInvalid, "%q is not an image digest", clip(digest)).WithField("image")
	}
	found, err := d.lookUpImage(ctx, digest)
	if errdefs.IsNotFound(err) {
		return nil, missingImage(digest, err)
	}
	if err != nil {
		return nil, d.engineError("look up image", err)
	}
	return d.judgeImage(ctx, digest, found)
}

// judgeImage refuses an image that this host cannot run safely, and remembers
// the configuration of one that it can.
func (d *Driver) judgeImage(ctx context.Context, ref string, found image.InspectResponse) (*imageConfig, error) {
	e, err := d.facts(ctx)
	if err != nil {
		return nil, err
	}
	if found.Os != "" && found.Os != "linux" {
		return nil, unusable(ref, "it is for "+clip(found.Os)+", not linux")
	}
	if found.Architecture != "" && found.Architecture != e.arch {
		return nil, unusable(ref, "it is for "+clip(found.Architecture)+", this host is "+e.arch)
	}
	c, problem := readConfig(found)
	if problem != "" {
		return nil, unusable(ref, problem)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.images) >= maxImages { // any of them: it costs one look-up to have it back
		for digest := range d.images {
			delete(d.images, digest)
			break
		}
	}
	d.images[found.ID] = c
	return c, nil
}

func (d *Driver) forgetImage(digest string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.images, digest)
}

// readConfig takes what matters out of an image's configuration, or says what
// is wrong with it.
func readConfig(found image.InspectResponse) (*imageConfig, string) {
	c := &imageConfig{env: sandbox.VetEnv(nil)}
	if found.Config == nil {
		return c, ""
	}
	size := 0
	for _, entry := range found.Config.Env {
		name, _, _ := strings.Cut(entry, "=")
		if name == "" || strings.ContainsRune(entry, 0) {
			return nil, "a variable of its environment has no name" // none that we could take away, either
		}
		size += len(entry)
		c.envNames = append(c.envNames, name)
	}
	for name, value := range found.Config.Labels {
		size += len(name) + len(value)
		c.labelNames = append(c.labelNames, name)
	}
	slices.Sort(c.labelNames)
	if len(c.envNames) > maxImageEnv || len(c.labelNames) > maxImageLabels || size > maxImageConfig {
		return nil, "its environment and labels are larger than boxed allows"
	}
	for volume := range found.Config.Volumes {
		clean := path.Clean(volume)
		if !volumeAllowed(clean) {
			return nil, "its VOLUME " + clip(volume) + " would hide a part of the system"
		}
		if !slices.Contains(c.volumes, clean) {
			c.volumes = append(c.volumes, clean)
		}
	}
	slices.Sort(c.volumes)
	if len(c.volumes) > sandbox.MaxVolumes {
		return nil, "it declares more VOLUMEs than boxed allows"
	}
	c.env = sandbox.VetEnv(found.Config.Env)
	return c, ""
}

// volumeAllowed: a volume is an empty directory that anybody may write to, which
// must not take the place of anything that the system or the agent relies on.
func volumeAllowed(clean string) bool {
	if !path.IsAbs(clean) || clean == "/" || len(clean) > 1024 || strings.ContainsAny(clean, "\x00\n") {
		return false
	}
	if clean == shmPath {
		return true // one of ours, whatever the image says of it
	}
	for _, taken := range []string{"/proc", "/sys", "/dev", "/etc", sandbox.GuestDir, sandbox.GuestAgent} {
		if clean == taken || strings.HasPrefix(clean, taken+"/") {
			return false
		}
	}
	return true
}

func unusable(ref, why string) error {
	return boxed.Errorf(boxed.CodeImage, "image %s cannot be used here: %s", clip(ref), why).
		With("reason", string(boxed.ImageUnusable)).WithField("image")
}

func missingImage(ref string, cause error) error {
	return &boxed.Error{
		Code: boxed.CodeImage, Err: cause,
		Message: "image " + clip(ref) + " is not on this host: build or `docker load` it here",
		Detail:  map[string]any{"reason": string(boxed.ImageNotFound), "field": "image"},
	}
}
