package main_test

import (
	"os"
	"path/filepath"
	"testing"

	main "github.com/boxed-mesh/boxed/cmd/boxed-node"
)

func TestALaptopSaysWhatItRunsOn(t *testing.T) {
	for name, tc := range map[string]struct {
		supplies map[string]string // file: content
		want     string
	}{
		"a server":              {map[string]string{}, ""},
		"a server with a mouse": {map[string]string{"hid/type": "Battery", "hid/scope": "Device"}, ""},
		"plugged in":            {map[string]string{"BAT0/type": "Battery", "AC/type": "Mains", "AC/online": "1"}, "mains"},
		"on the way":            {map[string]string{"BAT0/type": "Battery\n", "AC/type": "Mains\n", "AC/online": "0\n"}, "battery"},
		"charged by USB":        {map[string]string{"BAT0/type": "Battery", "ucsi/type": "USB", "ucsi/online": "1"}, "mains"},
	} {
		dir := t.TempDir()
		for file, content := range tc.supplies {
			path := filepath.Join(dir, file)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := main.Power(dir); got != tc.want {
			t.Errorf("%s: got %q", name, got)
		}
	}
	if got := main.Power("/nowhere"); got != "" {
		t.Errorf("without the directory: %q", got)
	}
}
