package ctl

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"time"
)

// dialWithin bounds how long an endpoint is waited for while there are others.
const dialWithin = 2 * time.Second

// failover carries requests to the first of several endpoints that answers, and
// remembers which one that was for as long as the process lives. It goes on to
// the next only if a request certainly reached nobody: no connection was made.
// Anything else, a certificate that is not trusted or a connection that broke,
// is an answer: the request may have been served, or somebody is in the way.
type failover struct {
	base string // what the client takes to be the address
	to   []way
	last atomic.Int64 // index of the one that answered
}

// way is one endpoint, with connections of its own: each has its own
// certificate to trust.
type way struct {
	endpoint string
	via      *http.Transport
}

// newFailover reaches the endpoints of t.
func newFailover(t target) (*failover, error) {
	f := &failover{base: t.Endpoint}
	for _, e := range t.all() {
		trust, err := pinned(e.pin)
		if err != nil {
			return nil, err
		}
		f.to = append(f.to, way{e.url, &http.Transport{
			Proxy:                 http.ProxyFromEnvironment,
			DialContext:           (&net.Dialer{Timeout: dialWithin, KeepAlive: 15 * time.Second}).DialContext,
			TLSClientConfig:       trust,
			TLSHandshakeTimeout:   10 * time.Second,
			ExpectContinueTimeout: time.Second,
			MaxIdleConnsPerHost:   64,
			IdleConnTimeout:       90 * time.Second,
			DisableCompression:    true,
		}})
	}
	return f, nil
}

// RoundTrip sends a request once. The body is untouched until there is a
// connection, and the client's bodies are not closed by a transport: so the
// next endpoint gets all of it.
func (f *failover) RoundTrip(req *http.Request) (*http.Response, error) {
	start := int(f.last.Load())
	var failed error
	for i := range f.to {
		at := (start + i) % len(f.to)
		w := f.to[at]
		u, err := url.Parse(w.endpoint + strings.TrimPrefix(req.URL.String(), f.base))
		if err != nil {
			return nil, err
		}
		there := req.Clone(req.Context())
		there.URL, there.Host = u, u.Host
		resp, err := w.via.RoundTrip(there)
		switch {
		case err == nil:
			f.last.Store(int64(at))
			return resp, nil
		case req.Context().Err() != nil || !neverArrived(err):
			return nil, fmt.Errorf("%s: %w", w.endpoint, err)
		}
		failed = err
	}
	return nil, failed
}

// CloseIdleConnections closes those that no request uses.
func (f *failover) CloseIdleConnections() {
	for _, w := range f.to {
		w.via.CloseIdleConnections()
	}
}

// neverArrived reports whether no connection was made, so that nobody can have
// got the request.
func neverArrived(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// pinned trusts the certificate with this SHA-256 and no other; "" trusts the
// system's authorities.
func pinned(pin string) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if pin == "" {
		return c, nil
	}
	want, err := hex.DecodeString(pin)
	if err != nil || len(want) != sha256.Size {
		return nil, usagef("%q is not the SHA-256 of a certificate", pin)
	}
	c.InsecureSkipVerify = true // the pin is the verification
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		got := sha256.Sum256(cs.PeerCertificates[0].Raw)
		if subtle.ConstantTimeCompare(got[:], want) != 1 {
			return fmt.Errorf("the node's certificate is not the pinned one: it has sha256:%x", got)
		}
		return nil
	}
	return c, nil
}
