package egress

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"github.com/boxed-mesh/boxed"
)

// sigV4Scheme is the scheme of AWS's Authorization header.
const sigV4Scheme = "AWS4-HMAC-SHA256"

// maxSigned is how large a body may be that must be read to be signed, in bytes: clients
// say the hash of larger ones, or that they are not signed.
const maxSigned = 8 << 20

// signing is what a request is to be signed with once all else of it has been judged.
type signing struct {
	id, key, region, service string
}

// sigv4 finds out what a request of AWS's is signed for.
func (s *swapping) sigv4(rest string) *verdict {
	for part := range strings.SplitSeq(rest, ",") {
		scope, ok := strings.CutPrefix(strings.TrimSpace(part), "Credential=")
		if !ok {
			continue
		}
		f := strings.Split(scope, "/") // ID/date/region/service/aws4_request
		if len(f) != 5 || f[4] != "aws4_request" {
			return foreign("Authorization")
		}
		real, v := s.take(f[0], "Authorization")
		if v != nil {
			return v
		}
		if s.used.HeldBy != "" { // its holder signs
			return nil
		}
		id, key, _ := strings.Cut(real, ":")
		s.sign = &signing{id: id, key: key, region: f[2], service: f[3]}
		s.req.Header.Del("Authorization") // of the placeholder; the new one comes last
		return nil
	}
	return foreign("Authorization")
}

// resign signs a request anew: after everything else, since the signature is of its headers
// as they leave. EC18: tokenizer#42.
func (g *signing) resign(ctx context.Context, req *http.Request, hash string, now time.Time) *refusal {
	at, err := time.Parse("20060102T150405Z", req.Header.Get("X-Amz-Date"))
	if err != nil {
		at = now
	}
	req.Header.Del("X-Amz-Security-Token") // of a session that is not this credential's
	signer := v4.NewSigner(func(o *v4.SignerOptions) { o.DisableURIPathEscaping = g.service == "s3" })
	if err := signer.SignHTTP(ctx, aws.Credentials{AccessKeyID: g.id, SecretAccessKey: g.key}, req, hash, g.service, g.region, at); err != nil {
		return refuse(boxed.EgressInvalidRequest, "it cannot be signed anew: %v", err)
	}
	return nil
}

// payloadHash is what the signature says of the body. hold is asked before it is read.
func payloadHash(req *http.Request, hold func() *refusal) (string, *refusal) {
	switch said := req.Header.Get("X-Amz-Content-Sha256"); {
	case strings.HasPrefix(said, "STREAMING-AWS4-"):
		return "", refuse(boxed.EgressInvalidRequest, "each chunk of the body is signed, which cannot be done anew; have the client send the body unsigned, over TLS")
	case said != "":
		return said, nil
	}
	if req.Body == nil || req.Body == http.NoBody {
		return emptyHash(), nil
	}
	if r := hold(); r != nil {
		return "", r
	}
	text, err := io.ReadAll(io.LimitReader(req.Body, maxSigned+1))
	switch {
	case err != nil:
		return "", refuse(boxed.EgressInvalidRequest, "the body cannot be read: %v", err)
	case len(text) > maxSigned:
		return "", refuse(boxed.EgressTooMuch, "a body of more than %d bytes, of which the client says no hash", maxSigned)
	}
	req.Body.Close()
	req.Body, req.ContentLength = io.NopCloser(bytes.NewReader(text)), int64(len(text))
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), nil
}

func emptyHash() string {
	sum := sha256.Sum256(nil)
	return hex.EncodeToString(sum[:])
}
