package egress_test

import (
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/boxed-mesh/boxed"
)

func basicOf(user, password string) string {
	return "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

// EC7, EC15: git sends what it was given as a password, or as a user, and asks again only
// where it is challenged. clawpatrol#291: the challenge was taken out.
func TestGitOverHTTPSWithAPlaceholder(t *testing.T) {
	r := newRig(t)
	s := r.site("github.com", func(w http.ResponseWriter, req *http.Request) {
		if req.Header.Get("Authorization") == "" {
			w.Header().Add("WWW-Authenticate", `Basic realm="GitHub"`)
			w.Header().Add("WWW-Authenticate", `Negotiate abcdef`)
			w.Header().Add("WWW-Authenticate", `Bearer realm="x"`)
			w.WriteHeader(401)
		}
	})
	r.secret(boxed.Secret{Name: "github", Preset: "github"}, realGitHub)
	b := r.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "github"}}})
	token := b.token("GH_TOKEN")
	const target = "https://github.com/alice/repo.git/info/refs?service=git-upload-pack"
	readers(t, b, func(t *testing.T, c *http.Client) {
		a := send(t, c, request(t, "GET", target, ""))
		if got := a.Header.Values("WWW-Authenticate"); a.StatusCode != 401 || !slices.Equal(got, []string{`Basic realm="GitHub"`}) {
			t.Errorf("the challenge is %d %v", a.StatusCode, got)
		}
		for field, want := range map[string]string{
			basicOf("x-access-token", token): "x-access-token:" + realGitHub, basicOf("alice", token): "x-access-token:" + realGitHub,
			basicOf(token, ""): realGitHub + ":", basicOf(token, "x-oauth-basic"): realGitHub + ":x-oauth-basic",
			basicOf(token, token): "x-access-token:" + realGitHub,
		} {
			if a := send(t, c, request(t, "GET", target, "", field)); a.StatusCode != 200 {
				t.Errorf("%s is %d %s", field, a.StatusCode, a.reason)
				continue
			}
			raw, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(s.last(t).Header.Get("Authorization"), "Basic "))
			if string(raw) != want {
				t.Errorf("%s left as %q", field, raw)
			}
		}
		for field, reason := range map[string]boxed.EgressReason{
			basicOf("alice", "ghp_FOREIGN"): boxed.EgressForeignCredential, basicOf(token, "other"): boxed.EgressForeignCredential,
			basicOf("alice", "x"+token):     boxed.EgressMisuse,
			"Authorization: Basic " + token: boxed.EgressForeignCredential, "Authorization: Basic ====": boxed.EgressForeignCredential,
		} {
			if a := send(t, c, request(t, "GET", target, "", field)); a.StatusCode != 403 || a.reason != reason {
				t.Errorf("%s is %d %s, and is to be %s", field, a.StatusCode, a.reason, reason)
			}
		}
	})
	for _, req := range s.requests() {
		if h := req.Header.Get("Authorization"); h != "" {
			if raw, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(h, "Basic ")); strings.Contains(string(raw), token) {
				t.Errorf("a placeholder left: %q", raw)
			}
		}
	}
}

// EC17: microsandbox#986: what stood in the head of a CONNECT went to the proxy outside.
func TestTheHeadOfACONNECTStaysHere(t *testing.T) {
	r, b, models, _ := modelled(t)
	key := b.token("ANTHROPIC_API_KEY")
	got := make(chan string, 1)
	r.server("raw.example.com", 22, func(conn net.Conn) {
		data, _ := io.ReadAll(conn)
		got <- string(data)
	})
	r.profile(boxed.EgressProfile{Name: "other", Rules: []boxed.EgressRule{rawRule("raw.example.com")}})
	for _, field := range []string{"X-Api-Key: " + key, "Authorization: Bearer " + key, "Proxy-" + basicOf("x", key), "X-Anything: x" + key + "y", "X-B: " + base64.StdEncoding.EncodeToString([]byte("ab"+key))} {
		if _, refused := b.tunnel("api.anthropic.com:443", nil, field); refused == nil || refused.Reason != boxed.EgressMisuse || refused.Status != 403 {
			t.Errorf("%s: %v", field, refused)
		}
	}
	conn, refused := b.tunnel("raw.example.com:22", []byte("bytes"), "Proxy-Authorization: Basic eDp5", "X-Secret: 1", "User-Agent: curl/8")
	if refused != nil {
		t.Fatal(refused)
	}
	conn.(halfConn).CloseWrite()
	if data := <-got; data != "bytes" {
		t.Errorf("%q left", data)
	}
	for _, target := range []string{"x:" + key + "@api.anthropic.com:443", "alice:" + foreignKey + "@api.anthropic.com:443"} {
		r.records.hide(foreignKey)
		if _, refused := b.tunnel(target, nil); refused == nil || refused.Status < 400 {
			t.Errorf("CONNECT %s: %v", target, refused)
		}
		raw(t, b.hand(boxed.EgressIntent{Entry: boxed.EntryHTTP}, nil), "GET http://"+strings.TrimSuffix(target, ":443")+"/ HTTP/1.1\r\nHost: x\r\n\r\n")
	}
	if _, refused := b.socks(key+"@api.anthropic.com", 443); refused == nil {
		t.Error("SOCKS5 has taken a name with a placeholder in it")
	}
	models.untouched(t)
}

// EC18: tokenizer#42, #43, clawpatrol#644, iron-proxy#167: signatures of AWS were of headers
// that the proxy then changed, or for a region that it made up. They are made anew, last.
func TestASignatureOfAWSIsMadeAnew(t *testing.T) {
	const id, key = "AKIAREALOFALICE00000", "real/secret+key=of/alice0123456789abcdefg"
	creds := aws.Credentials{AccessKeyID: id, SecretAccessKey: key}
	r := newRig(t)
	r.records.hide(key)
	var problem string
	s := r.site("bucket.s3.eu-central-1.amazonaws.com", func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		problem = checkSigV4(req, body, creds)
	})
	r.secret(boxed.Secret{Name: "aws", Preset: "aws", Hosts: []string{s.name}}, id+":"+key)
	b := r.box(boxed.EgressSpec{Secrets: []boxed.SecretUse{{Name: "aws"}}})
	inside := aws.Credentials{AccessKeyID: b.token("AWS_ACCESS_KEY_ID"), SecretAccessKey: b.token("AWS_SECRET_ACCESS_KEY")}
	if !strings.HasPrefix(inside.AccessKeyID, "AKIA") || len(inside.AccessKeyID) != 20 {
		t.Errorf("the placeholder is %q", inside.AccessKeyID)
	}
	sign := func(t *testing.T, method, target, body, hash string, c aws.Credentials, region string) *http.Request {
		req := request(t, method, target, body, "X-Amz-Content-Sha256: "+hash, "X-Amz-Meta-Owner: alice", "X-Forwarded-For: 10.0.0.1", "Via: 1.1 x")
		err := v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = true }).SignHTTP(t.Context(), c, req, hash, "s3", region, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return req
	}
	const empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	base := "https://" + s.name
	readers(t, b, func(t *testing.T, c *http.Client) {
		for _, target := range []string{"/", "/key%20with%20spaces/a%2Fb?list-type=2&prefix=a%2Fb", "/a?x-id=GetObject"} {
			for _, region := range []string{"eu-central-1", "us-east-1"} {
				problem = "it did not come"
				if a := send(t, c, sign(t, "GET", base+target, "", empty, inside, region)); a.StatusCode != 200 || problem != "" {
					t.Errorf("%s in %s: %d %s: %s", target, region, a.StatusCode, a.reason, problem)
				}
			}
		}
		problem = "it did not come"
		if a := send(t, c, sign(t, "PUT", base+"/key", "content", "UNSIGNED-PAYLOAD", inside, "eu-central-1")); a.StatusCode != 200 || problem != "" {
			t.Errorf("an upload: %d %s: %s", a.StatusCode, a.reason, problem)
		}
		n := len(s.requests())
		other := aws.Credentials{AccessKeyID: "AKIAFOREIGN000000000", SecretAccessKey: "foreign"}
		send(t, c, sign(t, "PUT", base+"/key", "stolen", "UNSIGNED-PAYLOAD", other, "eu-central-1")).want(t, 403, boxed.EgressForeignCredential)
		send(t, c, request(t, "GET", base+"/?X-Amz-Credential="+inside.AccessKeyID+"%2F20260101%2Fx%2Fs3%2Faws4_request&X-Amz-Signature=00", "")).want(t, 403, boxed.EgressMisuse)
		send(t, c, request(t, "GET", base+"/?X-Amz-Credential=AKIAFOREIGN&X-Amz-Signature=00", "")).want(t, 403, boxed.EgressForeignCredential)
		if len(s.requests()) != n {
			t.Errorf("%d requests left that were refused", len(s.requests())-n)
		}
	})
}

// checkSigV4 signs a request as it came once more, and says what is different.
func checkSigV4(req *http.Request, body []byte, creds aws.Credentials) string {
	auth := req.Header.Get("Authorization")
	var scope, signed string
	for part := range strings.SplitSeq(strings.TrimPrefix(auth, "AWS4-HMAC-SHA256 "), ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		switch name {
		case "Credential":
			scope = value
		case "SignedHeaders":
			signed = value
		}
	}
	f := strings.Split(scope, "/")
	if len(f) != 5 || f[0] != creds.AccessKeyID {
		return "it is signed by " + scope
	}
	for _, name := range []string{"host", "x-amz-date", "x-amz-content-sha256", "x-amz-meta-owner"} {
		if !slices.Contains(strings.Split(signed, ";"), name) {
			return name + " is not among what is signed: " + signed
		}
	}
	again, err := http.NewRequest(req.Method, "https://"+req.Host+req.RequestURI, nil)
	if err != nil {
		return err.Error()
	}
	again.ContentLength = req.ContentLength
	for name := range strings.SplitSeq(signed, ";") {
		if name != "host" && name != "content-length" {
			again.Header[http.CanonicalHeaderKey(name)] = req.Header.Values(name)
		}
	}
	at, err := time.Parse("20060102T150405Z", req.Header.Get("X-Amz-Date"))
	if err != nil {
		return err.Error()
	}
	signer := v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = true })
	if err := signer.SignHTTP(req.Context(), creds, again, req.Header.Get("X-Amz-Content-Sha256"), f[3], f[2], at); err != nil {
		return err.Error()
	}
	if got := again.Header.Get("Authorization"); got != auth {
		return fmt.Sprintf("it came as %s, and is to be %s (%d bytes)", auth, got, len(body))
	}
	return ""
}

// EC19: iron-proxy#136, OpenShell#2049, #2780: a placeholder of before a rotation gave the old
// token. A rotation does not touch the sandbox, and its next request has the new value.
func TestARotationKeepsThePlaceholder(t *testing.T) {
	r, b, models, _ := modelled(t)
	key := b.token("ANTHROPIC_API_KEY")
	const next = "sk-ant-api03-NEXT-of-alice-0123456789abcdefghij"
	for i, proto := range []string{"http/1.1", "h2"} {
		c := b.client(boxed.EntryHTTP, proto)
		for _, value := range []string{realAnthropic, next + proto} {
			if value != realAnthropic || i > 0 {
				r.secret(boxed.Secret{Name: "anthropic", Preset: "anthropic", Version: 2}, value)
			}
			if a := send(t, c, request(t, "POST", messages, "{}", "X-Api-Key: "+key)); a.StatusCode != 200 {
				t.Fatalf("%d %s", a.StatusCode, a.body)
			}
			if got := models.last(t).Header.Get("X-Api-Key"); got != value {
				t.Errorf("%q left, and %q is the value", got, value)
			}
		}
	}
	if n := models.connections(); n > 4 {
		t.Errorf("%d connections were made: a rotation ends none", n)
	}
}

// What is revoked is used no more: not by a connection that is open, nor by a new one.
func TestARevokedSecretIsUsedNoMore(t *testing.T) {
	for _, proto := range []string{"http/1.1", "h2"} {
		t.Run(proto, func(t *testing.T) {
			r, b, models, _ := modelled(t)
			key := b.token("ANTHROPIC_API_KEY")
			c := b.client(boxed.EntryHTTP, proto)
			if a := send(t, c, request(t, "POST", messages, "{}", "X-Api-Key: "+key)); a.StatusCode != 200 {
				t.Fatalf("%d %s", a.StatusCode, a.body)
			}
			r.revoke(rigOwner, "anthropic")
			for range 2 {
				resp, err := c.Do(request(t, "POST", messages, "{}", "X-Api-Key: "+key))
				if err == nil {
					resp.Body.Close()
					if resp.StatusCode < 400 {
						t.Errorf("it is used still: %d", resp.StatusCode)
					}
				}
			}
			if n := len(models.requests()); n != 1 {
				t.Errorf("%d requests left", n)
			}
			if st := r.keeper.Status(b.id); st.State == boxed.EgressOpen {
				t.Errorf("the status is %s", st.State)
			}
		})
	}
}
