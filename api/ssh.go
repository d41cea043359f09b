package api

import (
	"io"
	"net/http"

	"github.com/boxed-mesh/boxed"
)

// ssh is the port for SSH, if there is one. Every node answers for itself: what another
// passes on, and may vouch for, is refused.
func (c *call) ssh() (boxed.SSH, error) {
	if _, passedOn := hopOf(c.r); passedOn {
		return nil, boxed.Errorf(boxed.CodeForbidden, "calls about SSH are not passed on from node to node")
	}
	if c.s.cfg.SSH == nil {
		return nil, boxed.Errorf(boxed.CodeUnavailable, "this node has no SSH")
	}
	return c.s.cfg.SSH, nil
}

func (c *call) addSSHKey() error {
	door, err := c.ssh()
	if err != nil {
		return err
	}
	req, err := readInto[boxed.SSHKeyRequest](c)
	if err != nil {
		return err
	}
	key, err := door.AddSSHKey(c.ctx, req)
	if err != nil {
		return err
	}
	return c.reply(http.StatusCreated, key)
}

func (c *call) listSSHKeys() error {
	door, err := c.ssh()
	if err != nil {
		return err
	}
	keys, err := door.ListSSHKeys(c.ctx)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]any{"keys": never(keys)})
}

func (c *call) revokeSSHKey() error {
	door, err := c.ssh()
	if err != nil {
		return err
	}
	if err := door.RevokeSSHKey(c.ctx, c.v.str("key")); err != nil {
		return err
	}
	return c.noContent()
}

func (c *call) sshInfo() error {
	door, err := c.ssh()
	if err != nil {
		return err
	}
	info, err := door.SSHInfo(c.ctx)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, info)
}

func (c *call) listRecordings() error {
	door, err := c.ssh()
	if err != nil {
		return err
	}
	list, err := door.ListRecordings(c.ctx)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]any{"recordings": never(list)})
}

func (c *call) readRecording() error {
	door, err := c.ssh()
	if err != nil {
		return err
	}
	cast, err := door.ReadRecording(c.ctx, c.v.str("recording"))
	if err != nil {
		return err
	}
	defer cast.Close()
	c.w.Header().Set("Content-Type", "application/x-asciicast")
	c.w.WriteHeader(http.StatusOK)
	_, err = io.Copy(c.w, cast)
	return err
}

// sshTunnel is a connection to the SSH front door, as the caller.
func (c *call) sshTunnel() error {
	door, err := c.ssh()
	if err != nil {
		return err
	}
	if err := c.wantUpgrade(); err != nil {
		return err
	}
	conn, err := door.DialSSH(c.ctx)
	if err != nil {
		return err
	}
	return c.join(conn)
}
