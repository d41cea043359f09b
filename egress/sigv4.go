package egress

import (
	"strings"

	"github.com/boxed-mesh/boxed"
)

// sigV4Scheme is the scheme of AWS's Authorization header.
const sigV4Scheme = "AWS4-HMAC-SHA256"

// sigv4 notes that a request is to be signed anew, which is done when all else of it has
// been judged.
func (s *swapping) sigv4(rest string) *verdict {
	for part := range strings.SplitSeq(rest, ",") {
		if cred, ok := strings.CutPrefix(strings.TrimSpace(part), "Credential="); ok {
			id, _, _ := strings.Cut(cred, "/")
			_, v := s.take(id, "Authorization")
			return v
		}
	}
	return &verdict{reason: boxed.EgressForeignCredential, detail: "a signature without a credential"}
}
