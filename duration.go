package boxed

import (
	"encoding/json"
	"fmt"
	"math"
	"time"
)

// Duration is a time.Duration that is written as text ("90s", "1h30m") in JSON
// and in configuration. [Never] is written "never".
type Duration time.Duration

// Never is a duration without an end: a ttl that never expires.
const Never Duration = math.MaxInt64

// D is the value as a time.Duration.
func (d Duration) D() time.Duration { return time.Duration(d) }

// String is the shortest text that ParseDuration reads back.
func (d Duration) String() string {
	if d == Never {
		return "never"
	}
	s := time.Duration(d).String()
	for _, zero := range []string{"m0s", "h0m"} {
		if n := len(s) - len(zero) + 1; n > 0 && s[n-1:] == zero {
			s = s[:n]
		}
	}
	return s
}

// ParseDuration reads "never", Go's form ("1h30m") and whole days ("2d").
func ParseDuration(s string) (Duration, error) {
	if s == "never" {
		return Never, nil
	}
	var days int64
	if n, err := fmt.Sscanf(s, "%dd", &days); n == 1 && err == nil && s == fmt.Sprintf("%dd", days) {
		if days < 0 || days > 36500 {
			return 0, Errorf(CodeInvalid, "%q is out of range", clip(s, 40))
		}
		return Duration(days) * Duration(24*time.Hour), nil
	}
	d, err := time.ParseDuration(s)
	if err != nil || d < 0 {
		return 0, Errorf(CodeInvalid, "%q is not a duration; write it like 90s, 10m, 1h30m or 2d", clip(s, 40))
	}
	return Duration(d), nil
}

// MarshalText writes the String form.
func (d Duration) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads what ParseDuration reads.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := ParseDuration(string(text))
	if err == nil {
		*d = v
	}
	return err
}

// UnmarshalJSON reads a JSON string.
func (d *Duration) UnmarshalJSON(b []byte) error {
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return Errorf(CodeInvalid, "a duration is a string like \"90s\"")
	}
	return d.UnmarshalText([]byte(s))
}
