package sandbox

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"github.com/boxed-mesh/boxed"
	"github.com/boxed-mesh/boxed/agent"
)

// makeMount fills the directory that a sandbox sees at GuestDir. Its files are
// mounted over the image's, so that an image cannot give its uid a name, or its
// user a group, that means something.
// tools is the program at boxed.ToolsPath, "" for none.
func makeMount(dir string, id boxed.ID, uid int, tools string) error {
	if err := os.Mkdir(dir, 0o711); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	host := Hostname(id)
	files := map[string]string{
		"passwd": fmt.Sprintf("root:x:0:0:root:/:/bin/false\n%s:x:%d:%d:sandbox:%s:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n", GuestUser, uid, uid, GuestHome),
		"group":  fmt.Sprintf("root:x:0:\ntty:x:5:\n%s:x:%d:\nnogroup:x:65534:\n", GuestUser, uid),
		"hosts":  fmt.Sprintf("127.0.0.1\tlocalhost %s\n::1\tlocalhost\n", host),
		// Nobody listens there: a lookup fails at once.
		"resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	if tools != "" {
		if err := linkFile(tools, filepath.Join(dir, ToolsName)); err != nil {
			return fmt.Errorf("give the sandbox its tools: %w", err)
		}
	}
	return os.Chmod(dir, 0o711) // whatever the umask
}

// linkFile makes a file the same as another, without a copy where that can be.
func linkFile(from, to string) error {
	err := os.Link(from, to)
	if err == nil || errors.Is(err, os.ErrExist) {
		return nil
	}
	if errors.Is(err, os.ErrNotExist) {
		return err
	}
	text, err := os.ReadFile(from) // on another file system, or one without links
	if err != nil {
		return err
	}
	return os.WriteFile(to, text, 0o755)
}

// ListenSocket binds the agent's socket in a Box.Mount, however deep that lies.
func ListenSocket(dir string) (*net.UnixListener, error) { return agent.ListenUnix(dir, SocketName) }
