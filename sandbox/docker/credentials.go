package docker

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/docker/docker/api/types/registry"
)

// Docker Hub has three names: in references, for its API, and in credentials.
const (
	hubDomain = "docker.io"
	hubKey    = "https://index.docker.io/v1/"
)

// Bounds of reading credentials.
const (
	maxDockerConfig = 4 << 20 // bytes
	maxHelperOutput = 1 << 20 // bytes
	helperTimeout   = 20 * time.Second
)

// dockerConfig is the part of the Docker CLI's configuration file that holds
// credentials. docker/cli has a reader of it, which would bring in some thirty
// modules for these few lines.
type dockerConfig struct {
	Auths map[string]struct {
		Auth          string `json:"auth"` // base64 of user:password
		Username      string `json:"username"`
		Password      string `json:"password"`
		IdentityToken string `json:"identitytoken"`
		RegistryToken string `json:"registrytoken"`
	} `json:"auths"`
	CredHelpers map[string]string `json:"credHelpers"`
	CredsStore  string            `json:"credsStore"`
}

// credentials are those for a registry as the engine takes them, or "" for
// none. An error means that there should be some and they cannot be used.
func (d *Driver) credentials(ctx context.Context, domain string) (string, error) {
	file := d.cfg.DockerConfig
	if file == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", nil // a service without a home has no logins
		}
		file = filepath.Join(home, ".docker", "config.json")
	}
	config, err := readDockerConfig(file)
	if err != nil {
		return "", err
	}
	auth, err := config.find(ctx, domain)
	if err != nil || auth == nil {
		return "", err
	}
	return registry.EncodeAuthConfig(*auth)
}

// readDockerConfig reads a configuration file; one that is not there is empty.
func readDockerConfig(file string) (dockerConfig, error) {
	var config dockerConfig
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return config, nil
	}
	if err != nil {
		return config, err
	}
	defer f.Close()
	if err := json.NewDecoder(io.LimitReader(f, maxDockerConfig)).Decode(&config); err != nil && err != io.EOF {
		return config, fmt.Errorf("read %s: %w", file, err)
	}
	return config, nil
}

// find asks the registry's own helper, then the store, then the file, as the
// Docker CLI does.
func (c dockerConfig) find(ctx context.Context, domain string) (*registry.AuthConfig, error) {
	key := domain
	if domain == hubDomain {
		key = hubKey
	}
	for _, name := range []string{key, domain} {
		if helper := c.CredHelpers[name]; helper != "" {
			return askHelper(ctx, helper, key)
		}
	}
	if c.CredsStore != "" {
		auth, err := askHelper(ctx, c.CredsStore, key)
		if auth != nil || err != nil {
			return auth, err
		}
	}
	entry, ok := c.Auths[key]
	for name, e := range c.Auths {
		if !ok && registryHost(name) == registryHost(key) {
			entry, ok = e, true
		}
	}
	if !ok {
		return nil, nil
	}
	auth := registry.AuthConfig{
		ServerAddress: key, Username: entry.Username, Password: entry.Password,
		IdentityToken: entry.IdentityToken, RegistryToken: entry.RegistryToken,
	}
	if entry.Auth != "" {
		plain, err := base64.StdEncoding.DecodeString(entry.Auth)
		user, password, ok := strings.Cut(string(plain), ":")
		if err != nil || !ok {
			return nil, fmt.Errorf("the login for %s is not base64 of user:password", domain)
		}
		auth.Username, auth.Password = user, strings.Trim(password, "\x00")
	}
	return &auth, nil
}

// registryHost takes scheme and path off a key of auths.
func registryHost(key string) string {
	key = strings.TrimPrefix(strings.TrimPrefix(key, "https://"), "http://")
	host, _, _ := strings.Cut(key, "/")
	return host
}

// askHelper runs docker-credential-<name>. One that knows nothing of the
// registry gives nil.
func askHelper(ctx context.Context, name, key string) (*registry.AuthConfig, error) {
	if strings.ContainsAny(name, "/\\") {
		return nil, fmt.Errorf("credential helper %q is not a name", name)
	}
	ctx, cancel := context.WithTimeout(ctx, helperTimeout)
	defer cancel()
	var out limitedBuffer
	cmd := exec.CommandContext(ctx, "docker-credential-"+name, "get")
	cmd.Stdin = strings.NewReader(key)
	cmd.Stdout = &out
	cmd.WaitDelay = time.Second
	if err := cmd.Run(); err != nil {
		if strings.Contains(out.String(), "credentials not found") { // part of the helpers' protocol
			return nil, nil
		}
		return nil, fmt.Errorf("credential helper %s: %w", name, err)
	}
	var got struct{ Username, Secret string }
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		return nil, fmt.Errorf("credential helper %s: %w", name, err)
	}
	auth := &registry.AuthConfig{ServerAddress: key, Username: got.Username, Password: got.Secret}
	if got.Username == "<token>" { // the same: the secret is an identity token
		auth.Username, auth.Password, auth.IdentityToken = "", "", got.Secret
	}
	return auth, nil
}

// limitedBuffer keeps the first maxHelperOutput bytes.
type limitedBuffer struct{ bytes.Buffer }

func (b *limitedBuffer) Write(p []byte) (int, error) {
	room := max(0, maxHelperOutput-b.Len())
	b.Buffer.Write(p[:min(len(p), room)])
	return len(p), nil
}
