package api

import (
	"encoding/json"
	"net/http"
	"strconv"
	"unicode/utf8"

	"github.com/boxed-mesh/boxed"
)

func (c *call) healthz() error {
	return c.reply(http.StatusOK, map[string]string{"status": "ok"})
}

func (c *call) readyz() error {
	if c.s.cfg.Ready != nil {
		if problems := c.s.cfg.Ready(c.ctx); len(problems) > 0 {
			return boxed.Errorf(boxed.CodeNotReady, "not ready: %s", problems[0]).With("problems", problems)
		}
	}
	return c.reply(http.StatusOK, map[string]bool{"ready": true})
}

func (c *call) version() error {
	return c.reply(http.StatusOK, map[string]string{"version": c.s.cfg.Version, "api": "v1"})
}

func (c *call) page(contentType, csp string, body []byte) error {
	h := c.w.Header()
	h.Set("Content-Type", contentType)
	h.Set("Cache-Control", "no-cache")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	if csp != "" {
		h.Set("Content-Security-Policy", csp)
	}
	c.w.WriteHeader(http.StatusOK)
	c.w.Write(body)
	return nil
}

func (c *call) openapiYAML() error { return c.page("application/yaml", "", documentYAML) }
func (c *call) openapiJSON() error { return c.page("application/json", "", c.s.doc.json) }
func (c *call) docs() error {
	return c.page("text/html; charset=utf-8", c.s.pages.csp, c.s.pages.html)
}

// admin is the port for keys, if there is one and the caller may use it.
func (c *call) admin() (boxed.Admin, error) {
	switch {
	case !c.who.Admin():
		return nil, boxed.Errorf(boxed.CodeForbidden, "only an administrator's key may do this")
	case c.s.cfg.Admin == nil:
		return nil, boxed.Errorf(boxed.CodeUnavailable, "this node does not manage keys")
	}
	return c.s.cfg.Admin, nil
}

func (c *call) createKey() error {
	admin, err := c.admin()
	if err != nil {
		return err
	}
	req, err := readInto[boxed.KeyRequest](c)
	if err != nil {
		return err
	}
	key, err := admin.CreateKey(c.ctx, req)
	if err != nil {
		return err
	}
	return c.reply(http.StatusCreated, key)
}

func (c *call) listKeys() error {
	admin, err := c.admin()
	if err != nil {
		return err
	}
	keys, err := admin.ListKeys(c.ctx)
	if err != nil {
		return err
	}
	return c.reply(http.StatusOK, map[string]any{"keys": never(keys)})
}

func (c *call) revokeKey() error {
	admin, err := c.admin()
	if err != nil {
		return err
	}
	if err := admin.RevokeKey(c.ctx, c.v.str("key")); err != nil {
		return err
	}
	return c.noContent()
}

// asciiJSON is JSON that may stand in a header.
func asciiJSON(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return ""
	}
	out := make([]byte, 0, len(raw))
	for len(raw) > 0 {
		r, n := utf8.DecodeRune(raw)
		switch {
		case r < utf8.RuneSelf:
			out = append(out, raw[0])
		case r > 0xffff:
			r -= 0x10000
			out = appendU(appendU(out, 0xd800+(r>>10)), 0xdc00+(r&0x3ff))
		default:
			out = appendU(out, r)
		}
		raw = raw[n:]
	}
	return string(out)
}

func appendU(b []byte, r rune) []byte {
	const hex = "0123456789abcdef"
	return append(b, '\\', 'u', hex[r>>12&15], hex[r>>8&15], hex[r>>4&15], hex[r&15])
}
