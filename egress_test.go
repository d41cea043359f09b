package boxed_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/boxed-mesh/boxed"
)

// The list of reasons is closed: each is known, and in the documents.
func TestEveryReasonIsKnownAndDocumented(t *testing.T) {
	source, err := os.ReadFile("egress.go")
	if err != nil {
		t.Fatal(err)
	}
	document, err := os.ReadFile("docs/egress.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(source), "// The reasons.")
	list, _, _ := strings.Cut(rest, "\n)\n")
	found := regexp.MustCompile(`(?m)^\tEgress\w+ +EgressReason = "([a-z_]+)"`).FindAllStringSubmatch(list, -1)
	if len(found) < 40 {
		t.Fatalf("%d reasons were found", len(found))
	}
	for _, m := range found {
		if reason := boxed.EgressReason(m[1]); !reason.Known() {
			t.Errorf("%s is not known", reason)
		}
		if m[1] != string(boxed.EgressAllowed) && !strings.Contains(string(document), "`"+m[1]+"`") {
			t.Errorf("docs/egress.md does not say what %s is", m[1])
		}
	}
	if boxed.EgressReason("of_a_later_release").Known() {
		t.Error("a reason that there is not is known")
	}
}
