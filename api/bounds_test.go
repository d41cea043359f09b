package api_test

import (
	"fmt"
	"testing"

	"github.com/boxed-mesh/boxed"
)

// What the node refuses, the document must not promise, nor the reverse.
func TestTheDocumentsBoundsAreTheNodes(t *testing.T) {
	schemas := loadDocument(t).Components.Schemas
	labels, env := schemas["Labels"].Value, schemas["Env"].Value
	files := schemas["Spec"].Value.Properties["files"].Value
	most := func(v *uint64) any {
		if v == nil {
			return "none"
		}
		return *v
	}
	for what, c := range map[string]struct{ got, want any }{
		"labels":      {most(labels.MaxProps), uint64(boxed.MaxLabels)},
		"label value": {most(labels.AdditionalProperties.Schema.Value.MaxLength), uint64(boxed.MaxLabelValue)},
		"label key":   {labels.PropertyNames.Value.Pattern, fmt.Sprintf(`^[^=\x00-\x1f\x7f]{1,%d}$`, boxed.MaxLabelKey)},
		"env":         {most(env.MaxProps), uint64(boxed.MaxEnv)},
		"files":       {most(files.MaxItems), uint64(boxed.MaxFiles)},
	} {
		if c.got != c.want {
			t.Errorf("%s: %v, want %v", what, c.got, c.want)
		}
	}
}
