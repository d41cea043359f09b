package egress

import (
	"crypto/rand"
	"encoding/base64"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// Slot is a place of a request where a credential may stand.
type Slot struct {
	Kind SlotKind `json:"kind"`
	Name string   `json:"name,omitempty"` // of a header or a query parameter
	User string   `json:"user,omitempty"` // of basic: what the server is told; "": what the program says
}

// SlotKind is the kind of a slot.
type SlotKind string

// The kinds.
const (
	SlotBearer SlotKind = "bearer" // Authorization: Bearer …, or token …
	SlotBasic  SlotKind = "basic"  // Authorization: Basic …, the password, or the user where that is all
	SlotHeader SlotKind = "header" // the whole value of a header
	SlotQuery  SlotKind = "query"  // the whole value of a parameter
	SlotSigV4  SlotKind = "sigv4"  // AWS's signature, made anew
)

// Binding is a secret that a sandbox may use, and the placeholder that stands for it
// inside.
type Binding struct {
	Secret      string // its name
	key         string // OWNER/NAME
	Placeholder string
	Limited     bool         // to some paths: a request that no path can limit is refused
	HeldBy      boxed.NodeID // another node, that has it and swaps it; "": this one does
	Use         boxed.SecretUse
	// ends are where it is of use, whatever a profile's rule says that names it.
	ends []*Rule
	// value is the secret as it is now: a rotation does not touch the sandbox. Nil: it was
	// revoked, or this node has none.
	value func() (Value, bool)
	gone  func() bool // it was revoked; nil: never
}

// goodFor reports whether the secret may be used for a request to the host of a rule that
// names it.
func (b *Binding) goodFor(method, path string, rule *Rule) bool {
	d := Decision{Rules: slices.DeleteFunc(slices.Clone(b.ends), func(e *Rule) bool { return e.Pattern != rule.Pattern })}
	if d.HasPaths() && !Canonical(path) {
		return false
	}
	end, _ := d.Request(method, path)
	return end != nil
}

// credentialWords make a header or a parameter one that holds a credential. An API's own
// headers are many; what is refused wrongly here says so, and what is missed carries data out.
var credentialWords = []string{
	"authorization", "token", "api-key", "apikey", "api_key", "secret", "password", "passwd", "credential", "signature",
	"access-key", "access_key", "private-key", "private_key", "cookie", "x-auth-", "auth-key", "auth_key", "session-key",
}

// notCredentials have such a word, and are none.
var notCredentials = []string{
	"x-csrf-token", "x-xsrf-token", "continuation-token", "continuation_token", "page_token", "page-token", "pagetoken", "next_token", "nexttoken",
	"idempotency-key", "x-idempotency-key", "sec-websocket-key", "x-partition-key", "x-cache-key", "continuationtoken", "max_tokens", "max-tokens", "signature_version", "x-amz-continuation-token",
}

func holdsCredential(name string) bool {
	name = strings.ToLower(name)
	if slices.Contains(notCredentials, name) {
		return false
	}
	return slices.ContainsFunc(credentialWords, func(w string) bool { return strings.Contains(name, w) })
}

// credentialEnds make a header one as the last part of its name: X-Auth, X-Jwt,
// Ocp-Apim-Subscription-Key. Not any part: npm sends Npm-Auth-Type.
var credentialEnds = []string{"auth", "key", "jwt", "passphrase"}

// credentialHeader is holdsCredential of a header.
func credentialHeader(name string) bool {
	if holdsCredential(name) {
		return true
	}
	name = strings.ToLower(name)
	last := name[strings.LastIndexAny(name, "-_.")+1:]
	return slices.Contains(credentialEnds, last) && !slices.Contains(notCredentials, name)
}

// queryCredentials are parameters that hold one by a short name.
var queryCredentials = []string{"key", "sig", "auth", "pwd", "pass", "jwt", "x-amz-signature", "x-goog-signature"}

// Placeholder makes one that looks like the real thing: a prefix, then so many random
// letters and digits.
func Placeholder(prefix string, length int) string {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
	b := make([]byte, 0, length)
	buf := make([]byte, 2*length)
	for len(b) < length {
		rand.Read(buf)
		for _, c := range buf {
			if int(c) < 256-256%len(letters) && len(b) < length {
				b = append(b, letters[int(c)%len(letters)])
			}
		}
	}
	return prefix + string(b)
}

// verdict is what became of a request's credentials.
type verdict struct {
	reason boxed.EgressReason
	detail string
	used   *Binding // whose placeholder was swapped
	sign   *signing // what is still to be signed; nil: nothing
}

// placeholders knows those of one sandbox, by the whole token.
type placeholders struct {
	byToken map[string]*Binding
	scan    *scanner
}

func newPlaceholders(bindings []*Binding) *placeholders {
	p := &placeholders{byToken: map[string]*Binding{}}
	var tokens []string
	for _, b := range bindings {
		p.byToken[b.Placeholder] = b
		tokens = append(tokens, b.Placeholder)
	}
	p.scan = newScanner(tokens...)
	return p
}

// swap judges every slot of a request that is about to leave over TLS to the host of rule,
// and puts the real credential where the sandbox's placeholder for it stands. It changes
// req's headers and URL.
func (p *placeholders) swap(req *http.Request, rule *Rule, slots []Slot) verdict {
	s := swapping{placeholders: p, req: req, rule: rule, slots: slots}
	for _, step := range []func() *verdict{s.userinfo, s.authorization, s.headers, s.query, s.elsewhere} {
		if v := step(); v != nil {
			return *v
		}
	}
	if s.used != nil && !s.used.goodFor(req.Method, req.URL.EscapedPath(), rule) {
		return verdict{reason: boxed.EgressPath, detail: "the secret " + s.used.Secret + " is not for this method and path"}
	}
	if s.used == nil && rule.Binding != nil && rule.Binding.HeldBy == "" && rule.Need != boxed.CredentialOptional {
		if _, ok := rule.Binding.value(); !ok {
			return verdict{reason: boxed.EgressNoCredential, detail: "the secret " + rule.Binding.Secret + " has no value on this node"}
		}
	}
	return verdict{reason: boxed.EgressAllowed, used: s.used, sign: s.sign}
}

// swapping is one request in the works.
type swapping struct {
	*placeholders
	req   *http.Request
	rule  *Rule
	slots []Slot
	used  *Binding
	sign  *signing
}

func foreign(where string) *verdict {
	return &verdict{reason: boxed.EgressForeignCredential, detail: "the credential in " + where + " is not this sandbox's placeholder for the host"}
}

// take is the real credential for a token in a slot, if it is the placeholder of the
// rule's binding.
func (s *swapping) take(token, where string) (string, *verdict) {
	b := s.byToken[token]
	switch {
	case b == nil && s.scan.hits(token):
		return "", &verdict{reason: boxed.EgressMisuse, detail: "a placeholder is part of what is in " + where}
	case b == nil:
		return "", foreign(where)
	case b != s.rule.Binding:
		return "", &verdict{reason: boxed.EgressMisuse, detail: "the placeholder in " + where + " is of " + b.Secret + ", which is not for this host or path"}
	}
	if b.HeldBy != "" { // its holder swaps it
		s.used = b
		return token, nil
	}
	value, ok := b.value()
	if !ok {
		return "", &verdict{reason: boxed.EgressNoCredential, detail: "the secret " + b.Secret + " has no value on this node, or was revoked"}
	}
	s.used = b
	return value.Reveal(), nil
}

func (s *swapping) slot(kind SlotKind, name string) (Slot, bool) {
	for _, slot := range s.slots {
		if slot.Kind == kind && strings.EqualFold(slot.Name, name) {
			return slot, true
		}
	}
	return Slot{}, false
}

func (s *swapping) userinfo() *verdict {
	if s.req.URL.User != nil {
		return foreign("the URL")
	}
	return nil
}

// authorization judges the Authorization header.
func (s *swapping) authorization() *verdict {
	values := s.req.Header.Values("Authorization")
	if len(values) == 0 {
		return nil
	}
	if len(values) > 1 {
		return &verdict{reason: boxed.EgressInvalidRequest, detail: "two Authorization headers"}
	}
	scheme, rest, _ := strings.Cut(values[0], " ")
	rest = strings.TrimSpace(rest)
	_, bearer := s.slot(SlotBearer, "")
	basic, isBasic := s.slot(SlotBasic, "")
	_, sigv4 := s.slot(SlotSigV4, "")
	_, whole := s.slot(SlotHeader, "Authorization")
	switch {
	case whole:
		real, v := s.take(values[0], "Authorization")
		s.set("Authorization", real)
		return v
	case (strings.EqualFold(scheme, "bearer") || strings.EqualFold(scheme, "token")) && bearer:
		real, v := s.take(rest, "Authorization")
		s.set("Authorization", scheme+" "+real)
		return v
	case strings.EqualFold(scheme, "basic") && isBasic:
		return s.basic(rest, basic)
	case scheme == sigV4Scheme && sigv4:
		return s.sigv4(rest)
	case s.scan.hits(values[0]) || s.basicHits(rest):
		return &verdict{reason: boxed.EgressMisuse, detail: "a placeholder in an Authorization header of a kind that the secret is not for"}
	}
	return foreign("Authorization")
}

// basicHits finds a placeholder in what Basic encodes. EC7: microsandbox#702.
func (s *swapping) basicHits(payload string) bool {
	raw, err := base64.StdEncoding.DecodeString(payload)
	return err == nil && s.scan.hits(string(raw))
}

// basic swaps the password, or the user where the password says nothing.
func (s *swapping) basic(payload string, slot Slot) *verdict {
	raw, err := base64.StdEncoding.DecodeString(payload)
	user, password, ok := strings.Cut(string(raw), ":")
	if err != nil || !ok {
		return foreign("Authorization")
	}
	if s.byToken[user] != nil && (password == "" || password == "x-oauth-basic") {
		real, v := s.take(user, "Authorization")
		if v != nil {
			return v
		}
		s.set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(real+":"+password)))
		return nil
	}
	real, v := s.take(password, "Authorization")
	if v != nil {
		return v
	}
	if slot.User != "" {
		user = slot.User
	}
	if s.scan.hits(user) {
		return &verdict{reason: boxed.EgressMisuse, detail: "a placeholder as the user's name"}
	}
	s.set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":"+real)))
	return nil
}

// set keeps nothing of a failed swap.
func (s *swapping) set(name, value string) { s.req.Header.Set(name, value) }

// headers judges all other headers that may hold a credential.
func (s *swapping) headers() *verdict {
	for name, values := range s.req.Header {
		if name == "Authorization" {
			continue
		}
		_, declared := s.slot(SlotHeader, name)
		switch {
		case !declared && !credentialHeader(name):
		case !declared && name == "X-Amz-Security-Token" && s.signedAnew():
		case !declared && slices.ContainsFunc(values, s.scan.hits):
			return &verdict{reason: boxed.EgressMisuse, detail: "a placeholder in the header " + name}
		case !declared:
			return foreign("the header " + name)
		case len(values) != 1:
			return &verdict{reason: boxed.EgressInvalidRequest, detail: "two headers " + name}
		default:
			real, v := s.take(values[0], "the header "+name)
			if v != nil {
				return v
			}
			s.set(name, real)
		}
	}
	return nil
}

// signedAnew reports whether the request's signature is replaced, here or by the holder.
func (s *swapping) signedAnew() bool {
	_, declared := s.slot(SlotSigV4, "")
	return s.sign != nil || declared && s.used != nil && s.used.HeldBy != ""
}

// query judges the parameters.
func (s *swapping) query() *verdict {
	raw := s.req.URL.RawQuery
	if raw == "" {
		return nil
	}
	if strings.Contains(raw, ";") { // some servers take it for "&", others for a part of a value
		return &verdict{reason: boxed.EgressInvalidRequest, detail: "a query with a semicolon, which can be read in two ways; write %3B"}
	}
	parts := strings.Split(raw, "&")
	for i, part := range parts {
		key, value, _ := strings.Cut(part, "=")
		name, err := url.QueryUnescape(key)
		if err != nil {
			name = key
		}
		_, declared := s.slot(SlotQuery, name)
		if !declared && !holdsCredential(name) && !slices.Contains(queryCredentials, strings.ToLower(name)) {
			continue
		}
		token, err := url.QueryUnescape(value)
		if err != nil {
			token = value
		}
		if !declared {
			if s.scan.hits(token) {
				return &verdict{reason: boxed.EgressMisuse, detail: "a placeholder in a parameter that the secret is not for"}
			}
			if token == "" || s.rule.Binding == nil && !holdsCredential(name) {
				continue
			}
			return foreign("a parameter")
		}
		real, v := s.take(token, "a parameter")
		if v != nil {
			return v
		}
		parts[i] = key + "=" + url.QueryEscape(real)
	}
	s.req.URL.RawQuery = strings.Join(parts, "&")
	return nil
}

// elsewhere finds placeholders in what is no slot: they would tell somebody nothing, but
// whoever sends them there does not what the secret is for.
func (s *swapping) elsewhere() *verdict {
	if s.used != nil && s.used.HeldBy != "" { // it is in its slot still; the holder looks
		return nil
	}
	if s.scan.hits(s.req.URL.EscapedPath()) || s.scan.hits(s.req.Host) {
		return &verdict{reason: boxed.EgressMisuse, detail: "a placeholder in the path"}
	}
	if s.scan.hits(s.req.URL.RawQuery) {
		return &verdict{reason: boxed.EgressMisuse, detail: "a placeholder in the query"}
	}
	for name, values := range s.req.Header {
		if slices.ContainsFunc(values, s.scan.hits) || s.scan.hits(name) {
			return &verdict{reason: boxed.EgressMisuse, detail: "a placeholder in the header " + name}
		}
	}
	return nil
}

// scrub takes out of an answer's header what would be a credential, or would lead the
// program elsewhere. It reports whether the real value was in it.
func scrub(h http.Header, real *scanner) (echoed bool) {
	h.Del("Set-Cookie")
	h.Del("Set-Cookie2")
	h.Del("Alt-Svc")
	if challenges := h.Values("Www-Authenticate"); len(challenges) > 0 {
		keep := slices.DeleteFunc(slices.Clone(challenges), func(c string) bool {
			return len(c) < 5 || !strings.EqualFold(c[:5], "basic")
		})
		h.Del("Www-Authenticate")
		for _, c := range keep {
			h.Add("Www-Authenticate", c) // EC15: without it git does not ask again
		}
	}
	for name, values := range h {
		if real.hits(name) || slices.ContainsFunc(values, real.hits) {
			h.Del(name)
			echoed = true
		}
	}
	return echoed
}
