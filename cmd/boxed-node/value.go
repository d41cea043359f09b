package main

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed"
)

// size is a number of bytes, written "512MiB".
type size int64

// units of a size, largest first.
var units = []struct {
	name  string
	bytes int64
}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}}

func (s size) String() string {
	for _, u := range units {
		if s != 0 && int64(s)%u.bytes == 0 {
			return strconv.FormatInt(int64(s)/u.bytes, 10) + u.name
		}
	}
	return strconv.FormatInt(int64(s), 10)
}

func parseSize(text string) (size, error) {
	number, bytes := text, int64(1)
	for _, u := range units {
		if n, ok := strings.CutSuffix(text, u.name); ok {
			number, bytes = strings.TrimSpace(n), u.bytes
		}
	}
	v, err := strconv.ParseFloat(number, 64)
	if err != nil || v < 0 || v*float64(bytes) > math.MaxInt64/2 || v*float64(bytes) != math.Trunc(v*float64(bytes)) {
		return 0, strconv.ErrSyntax
	}
	return size(v * float64(bytes)), nil
}

// set reads text into the setting's value, and leaves that alone if it cannot.
// Lists are separated by commas.
func (s setting) set(text string) error {
	switch v := s.value.(type) {
	case *string:
		*v = text
		return nil
	case *bool:
		return parse(v, text, strconv.ParseBool, "true or false")
	case *int:
		return parse(v, text, strconv.Atoi, "a whole number")
	case *int64:
		return parse(v, text, func(s string) (int64, error) { return strconv.ParseInt(s, 10, 64) }, "a whole number")
	case *float64:
		return parse(v, text, parseFloat, "a number")
	case *size:
		return parse(v, text, parseSize, "a size; write it like 512MiB, 1.5GiB or 1048576")
	case *boxed.Duration:
		return parse(v, text, boxed.ParseDuration, "a duration; write it like 90s, 10m, 1h30m or 2d")
	case *slog.Level:
		return parse(v, text, parseLevel, "debug, info, warn or error")
	case *[]string, *[]netip.Prefix:
		return s.setList(splitList(text))
	case *map[string]string:
		m := map[string]string{}
		for _, pair := range splitList(text) {
			key, value, ok := strings.Cut(pair, "=")
			if !ok || key == "" {
				return fmt.Errorf("%q is not NAME=VALUE; several are separated by commas", pair)
			}
			m[key] = value
		}
		*v = m
		return nil
	}
	return errors.New("it can only be set in the file")
}

// setList is set for a list in the file.
func (s setting) setList(items []string) error {
	switch v := s.value.(type) {
	case *[]string:
		*v = items
		return nil
	case *[]netip.Prefix:
		prefixes, err := parsePrefixes(items)
		if err == nil {
			*v = prefixes
		}
		return err
	}
	return fmt.Errorf("it takes a %s, not a list", s.kind())
}

// text is the value as set reads it back.
func (s setting) text() string {
	switch v := s.value.(type) {
	case *string:
		return *v
	case *float64:
		return strconv.FormatFloat(*v, 'f', -1, 64)
	case *slog.Level:
		return strings.ToLower(v.String())
	case *[]string:
		return strings.Join(*v, ",")
	case *[]netip.Prefix:
		texts := []string{}
		for _, p := range *v {
			texts = append(texts, p.String())
		}
		return strings.Join(texts, ",")
	case *map[string]string:
		pairs := []string{}
		for _, k := range slices.Sorted(maps.Keys(*v)) {
			pairs = append(pairs, k+"="+(*v)[k])
		}
		return strings.Join(pairs, ",")
	case *bool:
		return strconv.FormatBool(*v)
	case *int:
		return strconv.Itoa(*v)
	case *int64:
		return strconv.FormatInt(*v, 10)
	case fmt.Stringer: // *size, *boxed.Duration
		return v.String()
	}
	panic(fmt.Sprintf("setting %s has a value of type %T", s.path, s.value))
}

// json is the value for programs.
func (s setting) json() any {
	switch v := s.value.(type) {
	case *slog.Level, *size, *boxed.Duration:
		return s.text()
	case *[]netip.Prefix:
		return splitList(s.text())
	case *[]string:
		return append([]string{}, *v...)
	case *map[string]string:
		return maps.Clone(*v)
	}
	return s.value
}

// kind is the type of the value for people.
func (s setting) kind() string {
	switch s.value.(type) {
	case *bool:
		return "true or false"
	case *int, *int64:
		return "whole number"
	case *float64:
		return "number"
	case *size:
		return "size"
	case *boxed.Duration:
		return "duration"
	case *[]string, *[]netip.Prefix:
		return "list"
	case *map[string]string:
		return "map"
	}
	return "text"
}

func parse[T any](v *T, text string, fn func(string) (T, error), want string) error {
	got, err := fn(text)
	if err != nil {
		return fmt.Errorf("%q is not %s", text, want)
	}
	*v = got
	return nil
}

func parseFloat(s string) (float64, error) {
	v, err := strconv.ParseFloat(s, 64)
	if err == nil && (math.IsNaN(v) || math.IsInf(v, 0)) {
		err = strconv.ErrRange
	}
	return v, err
}

func parseLevel(s string) (slog.Level, error) {
	switch s {
	case "debug":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return 0, strconv.ErrSyntax
}

func parsePrefixes(texts []string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			addr, addrErr := netip.ParseAddr(text)
			if addrErr != nil {
				return nil, fmt.Errorf("%q is neither an address nor a prefix like 10.0.0.0/8", text)
			}
			p = netip.PrefixFrom(addr, addr.BitLen())
		}
		prefixes = append(prefixes, p.Masked())
	}
	return prefixes, nil
}

func splitList(text string) []string {
	list := []string{}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part != "" {
			list = append(list, part)
		}
	}
	return list
}

func num(n int) string { return strconv.Itoa(n) }
