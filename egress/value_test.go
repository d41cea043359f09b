package egress_test

import (
	"bytes"
	"encoding/base64"
	"encoding/gob"
	"encoding/hex"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/boxed-mesh/boxed/egress"
)

// EC13: clawpatrol#313, #325, #829, OpenShell#1322, #569: credentials were in samples, in what
// was printed of a struct, in answers of an API. Whatever prints a Value prints none.
func TestAValueNeverPrints(t *testing.T) {
	const secret = "s3cret-of-alice-0123456789"
	v := egress.NewValue(secret)
	type holder struct {
		Shown  egress.Value
		hidden egress.Value
		ptr    *egress.Value
		list   []egress.Value
		byName map[string]egress.Value
		any    any
	}
	h := holder{v, v, &v, []egress.Value{v}, map[string]egress.Value{"a": v}, v}
	things := map[string]any{
		"value": v, "pointer": &v, "slice": []egress.Value{v}, "array": [1]egress.Value{v}, "map": map[string]egress.Value{"a": v}, "key": map[egress.Value]int{v: 1},
		"struct": h, "pointer to struct": &h, "any": any(v), "nested": struct{ h holder }{h},
	}
	for name, thing := range things {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%T", "%10.5s", "%p"} {
			leaksNot(t, name+" "+verb, secret, fmt.Sprintf(verb, thing))
		}
		leaksNot(t, name+" Sprint", secret, fmt.Sprint(thing))
		leaksNot(t, name+" Errorf", secret, fmt.Errorf("wrap %v", thing).Error())
		if text, err := json.Marshal(thing); err == nil {
			leaksNot(t, name+" JSON", secret, string(text))
		}
		if text, err := xml.Marshal(thing); err == nil {
			leaksNot(t, name+" XML", secret, string(text))
		}
		var buf bytes.Buffer
		if err := gob.NewEncoder(&buf).Encode(thing); err == nil {
			leaksNot(t, name+" gob", secret, buf.String())
		}
		for kind, handler := range map[string]func(*bytes.Buffer) slog.Handler{
			"text": func(b *bytes.Buffer) slog.Handler { return slog.NewTextHandler(b, nil) },
			"JSON": func(b *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(b, nil) },
		} {
			var buf bytes.Buffer
			slog.New(handler(&buf)).With("with", thing).WithGroup("g").Info("logged", "it", thing, slog.Group("in", "x", thing))
			leaksNot(t, name+" slog "+kind, secret, buf.String())
		}
	}
	if v.Reveal() != secret || v.Empty() || !(egress.Value{}).Empty() || (egress.Value{}).Reveal() != "" || !egress.NewValue("").Empty() {
		t.Error("it is not what it holds")
	}
}

// leaksNot finds a secret in what was printed, in any form.
func leaksNot(t *testing.T, what, secret, printed string) {
	t.Helper()
	if strings.Contains(printed, secret) || strings.Contains(strings.ToLower(printed), hex.EncodeToString([]byte(secret))) || egress.Hits(secret, printed) {
		t.Errorf("%s prints %s", what, printed)
	}
}

// printable is what a credential may be of.
var printable = func() string {
	var b strings.Builder
	for c := '!'; c <= '~'; c++ {
		b.WriteRune(c)
	}
	return b.String()
}()

// EC7, EC8: OpenShell scan-tail: a window that was shorter than the longest form let a part
// through. Whatever stands around a credential, in every form it is found.
func TestACredentialIsFoundInEveryFormAndPlace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secret := rapid.StringOfN(rapid.RuneFrom([]rune(printable)), egress.MinScan, 120, -1).Draw(t, "secret")
		before := rapid.SliceOfN(rapid.Byte(), 0, 50).Draw(t, "before")
		after := rapid.SliceOfN(rapid.Byte(), 0, 50).Draw(t, "after")
		whole := append(append(bytes.Clone(before), secret...), after...)
		all := ""
		for i := range len(secret) {
			all += fmt.Sprintf("%%%02X", secret[i])
		}
		for name, text := range map[string]string{
			"plain": string(whole), "base64": base64.StdEncoding.EncodeToString(whole), "raw base64": base64.RawStdEncoding.EncodeToString(whole),
			"base64url": base64.URLEncoding.EncodeToString(whole), "raw base64url": base64.RawURLEncoding.EncodeToString(whole),
			"hex": hex.EncodeToString(whole), "HEX": strings.ToUpper(hex.EncodeToString(whole)),
			"query": url.QueryEscape(string(whole)), "path": url.PathEscape(string(whole)), "query in lower case": lowerEscapes(url.QueryEscape(string(whole))),
			"percent": "x" + strings.ToLower(all) + "y", "PERCENT": "x" + all + "y",
		} {
			if !egress.Hits(secret, text) {
				t.Errorf("%q is not found as %s in %q", secret, name, text)
			}
		}
	})
}

// What is not there is not found, and what is too short is not looked for.
func TestACredentialIsNotFoundWhereItIsNot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secret := egress.Placeholder("sk-", rapid.IntRange(20, 60).Draw(t, "length"))
		text := rapid.String().Draw(t, "text")
		part := secret[:len(secret)-1]
		for _, other := range []string{text, base64.StdEncoding.EncodeToString([]byte(text)), part, strings.ToLower(secret[:10]), ""} {
			if egress.Hits(secret, other) {
				t.Errorf("%q is found in %q", secret, other)
			}
		}
	})
	for _, short := range []string{"", "a", "abcdefg"} {
		if len(egress.Forms(short)) != 0 || egress.Hits(short, "abcdefg and more") {
			t.Errorf("%q is looked for", short)
		}
	}
}

func TestPlaceholdersLookLikeTheRealThing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prefix := rapid.SampledFrom([]string{"ghp_", "sk-ant-api03-", ""}).Draw(t, "prefix")
		n := rapid.IntRange(1, 200).Draw(t, "length")
		p := egress.Placeholder(prefix, n)
		if !strings.HasPrefix(p, prefix) || len(p) != len(prefix)+n || strings.Trim(p[len(prefix):], "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789") != "" {
			t.Errorf("%q", p)
		}
	})
}

// What a name says of whether it holds a credential.
func TestNamesThatHoldCredentials(t *testing.T) {
	for _, name := range []string{
		"Authorization", "Cookie", "X-Api-Key", "X-Auth-Token", "X-Goog-Api-Key", "Private-Token", "X-Vault-Token", "Ocp-Apim-Subscription-Key-Secret",
		"X-Amz-Security-Token", "Signature", "Signature-Input", "Proxy-Authorization", "Api-Key", "apikey", "access_token", "client_secret", "X-Access-Key",
	} {
		if !egress.HoldsCredential(name) {
			t.Errorf("%s passes", name)
		}
	}
	for _, name := range []string{
		"Accept", "Content-Type", "User-Agent", "Anthropic-Version", "Idempotency-Key", "X-Request-Id", "X-Csrf-Token", "Sec-WebSocket-Key", "If-Match", "Range",
		"Git-Protocol", "X-Github-Api-Version", "Docker-Content-Digest", "Npm-Command", "max_tokens", "page_token", "Dpop-Nonce", "X-Goog-Api-Client",
	} {
		if egress.HoldsCredential(name) {
			t.Errorf("%s is refused", name)
		}
	}
}
