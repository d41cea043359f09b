package main

import (
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"text/tabwriter"
)

// interval is a value with its confidence interval; NaN where there is none.
type interval struct{ value, low, high float64 }

var unknown = interval{math.NaN(), math.NaN(), math.NaN()}

// over is a ratio. Its interval is the widest that both allow.
func (a interval) over(b interval) interval {
	return interval{a.value / b.value, a.low / b.high, a.high / b.low}
}

// beyond is a difference. Its interval is the widest that both allow.
func (a interval) beyond(b interval) interval {
	return interval{a.value - b.value, a.low - b.high, a.high - b.low}
}

// aim is something that boxed wants to reach, always a comparison within one
// run, or a bound on a machine like the one of the results.
type aim struct {
	what    string
	atLeast bool // or at most
	bound   float64
	unit    string // "×" for ratios
	of      func(get getter) interval
}

// getter finds what was measured, on a quiet or on a busy machine.
type getter func(experiment, system, metric string) row

// med is the median with its interval.
func (get getter) med(experiment, system, metric string) interval {
	r := get(experiment, system, metric)
	return interval{r.P50, r.Low, r.High}
}

// aims is what is aimed at, in the order of the table.
func aims() []aim {
	const less, more = false, true
	failures := func(experiment, system string) func(getter) interval {
		return func(get getter) interval { return get.med(experiment, system, "failures") }
	}
	return []aim{
		{"warm create + python print + destroy, faster than stock Docker", more, 15, "×", func(get getter) interval {
			return get.med("lifecycle", dockerStock, "total").over(get.med("lifecycle", boxedWarm, "total"))
		}},
		{"the same, its 99th percentile against its median", less, 2.5, "×", func(get getter) interval {
			r := get("lifecycle", boxedWarm, "total")
			return interval{r.P99 / r.P50, math.NaN(), math.NaN()}
		}},
		{"cold, faster than Docker hardened by hand", more, 1, "×", func(get getter) interval {
			return get.med("lifecycle", dockerHardened, "total").over(get.med("lifecycle", boxedCold, "total"))
		}},
		{"exec of `true` at the driver", less, 1.2, "ms", func(get getter) interval {
			return get.med("exec", boxedDriver, "exec_true")
		}},
		{"exec of `true` over HTTP", less, 2, "ms", func(get getter) interval {
			return get.med("exec", boxedHTTP, "exec_true")
		}},
		{"exec of `true` over HTTP, faster than `docker exec`", more, 20, "×", func(get getter) interval {
			return get.med("exec", dockerStock, "exec_true").over(get.med("exec", boxedHTTP, "exec_true"))
		}},
		{"standard output at an API client, faster than `docker exec`", more, 2.5, "×", func(get getter) interval {
			return get.med("stdout", boxedStream, "stdout_mb_s").over(get.med("stdout", dockerStock, "stdout_mb_s"))
		}},
		{"growth of the node's memory for 100 MiB of output", less, 32 * 1024, "KiB", func(get getter) interval {
			return get.med("stdout", boxedStream, "node_rss_growth_kib")
		}},
		{"growth of the node's memory for 1 GiB of output", less, 32 * 1024, "KiB", func(get getter) interval {
			return get.med("stdout", boxedStream, "node_rss_growth_1gib_kib")
		}},
		{"failures in a burst with a full pool", less, 0, "", failures("burst", burstFull)},
		{"first result in a burst with a full pool", less, 300, "ms", func(get getter) interval {
			return get.med("burst", burstFull, "first_exec")
		}},
		{"failures in a burst with an empty pool", less, 0, "", failures("burst", burstEmpty)},
		{"those in that burst who were told their place", more, 1, "share", func(get getter) interval {
			return get.med("burst", burstEmpty, "told_place_share")
		}},
		{"sustained sandboxes per second, against the best of Docker hardened by hand", more, 1.3, "×", sustainedRatio},
		{"memory of an agent that is pooled and unused", less, 4 * 1024, "KiB", func(get getter) interval {
			return get.med("memory", memoryPooled, "agent_rss_kib")
		}},
		{"memory of an agent after many execs and a minute idle", less, 8 * 1024, "KiB", func(get getter) interval {
			return get.med("memory", memoryUsed, "agent_rss_kib")
		}},
		{"a node that starts is seen by all", less, 1000, "ms", func(get getter) interval { return get.med("mesh", boxedMesh, "converge") }},
		{"a killed node is known everywhere", less, 3000, "ms", func(get getter) interval { return get.med("mesh", boxedMesh, "detect") }},
		{"a live node is called dead while all cores are busy", less, 5000, "ms", func(get getter) interval { return get.med("mesh", boxedMesh, "called_dead_busy") }},
		{"a healed partition is one mesh", less, 10_000, "ms", func(get getter) interval { return get.med("mesh", boxedMesh, "heal") }},
		{"placing among 1,000 nodes", less, 0.2, "ms", func(get getter) interval { return get.med("mesh", boxedMesh, "place_1000") }},
		{"claims over 20 nodes in one process", more, 990, "1/s", func(get getter) interval { return get.med("mesh", boxedMesh, "claims_s") }},
		{"the same, the 99th percentile of a claim", less, 50, "ms", func(get getter) interval {
			return interval{get("mesh", boxedMesh, "claim").P99, math.NaN(), math.NaN()}
		}},
		{"a request through another node, beyond a direct one", less, 1, "ms", func(get getter) interval { return get.med("mesh", boxedMesh, "hop_extra") }},
		{"an exec of `true` through another node, beyond a direct one", less, 1, "ms", func(get getter) interval { return get.med("mesh", boxedMesh, "hop_extra_exec") }},
		{"a stream through another node, of a direct one", more, 0.7, "×", func(get getter) interval {
			return get.med("mesh", boxedMesh, "mb_s_hop").over(get.med("mesh", boxedMesh, "mb_s_direct"))
		}},
		{"growth of the other node's memory for 1 GiB", less, 32 * 1024, "KiB", func(get getter) interval {
			return get.med("mesh", boxedMesh, "hop_rss_growth_1gib_kib")
		}},
		{"ssh: connect, run `true`, have its status, against OpenSSH's own server", less, 1.5, "×", func(get getter) interval {
			return get.med("ssh", boxedPool, "connect_true").over(get.med("ssh", openssh, "connect_true"))
		}},
		{"scp of 1 GiB there and back, against OpenSSH's own server", more, 0.5, "×", func(get getter) interval {
			return get.med("ssh", boxedPool, "scp_mb_s").over(get.med("ssh", openssh, "scp_mb_s"))
		}},
		{"the prompt of ssh new@…, with a warm sandbox", less, 250, "ms", func(get getter) interval { return get.med("ssh", boxedPool, "new_prompt") }},
		{"tunnel throughput out of a sandbox, against socat", more, 0.7, "×", func(get getter) interval {
			return get.med("egress", boxedPool, "tunnel_mb_s").over(get.med("egress", socat, "tunnel_mb_s"))
		}},
		{"the same, uploading", more, 0.7, "×", func(get getter) interval {
			return get.med("egress", boxedPool, "tunnel_up_mb_s").over(get.med("egress", socat, "tunnel_up_mb_s"))
		}},
		{"first byte of a streamed answer through a tunnel, later than direct", less, 5, "ms", func(get getter) interval {
			return get.med("egress", boxedPool, "first_byte").beyond(get.med("egress", direct, "first_byte"))
		}},
		{"the same, intercepted", less, 5, "ms", func(get getter) interval {
			return get.med("egress", boxedPool, "first_byte_intercept").beyond(get.med("egress", direct, "first_byte"))
		}},
		{"a warm create with an egress profile, beyond one without", less, 5, "ms", func(get getter) interval {
			return get.med("egress", boxedPool, "create_egress").beyond(get.med("egress", boxedPool, "create_plain"))
		}},
		{"descriptors after 100,000 short connections, more than before", less, 8, "", func(get getter) interval { return get.med("egress", boxedPool, "short_fds") }},
	}
}

// sustainedRatio takes the best of Docker's rates, however short.
func sustainedRatio(get getter) interval {
	best := unknown
	for _, metric := range append([]string{"rate_sustained"}, rateMetrics()...) {
		if r := get.med("throughput", dockerHardened, metric); math.IsNaN(best.value) || r.value > best.value {
			best = r
		}
	}
	return get.med("throughput", boxedPool, "rate_sustained").over(best)
}

// printAims shows a person how the results of a directory compare with them.
func printAims(w io.Writer, dir string) error {
	rs, err := readResults(os.DirFS(dir))
	if err != nil {
		return err
	}
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(out, "what\taim\tmeasured\treached")
	for _, a := range aims() {
		if v := a.of(rs.get); !math.IsNaN(v.value) {
			reached := map[bool]string{true: "yes", false: "NO"}[a.reached(v)]
			fmt.Fprintf(out, "%s\t%s\t%s\t%s\n", a.what, a.limit(), a.say(v), reached)
		}
	}
	return out.Flush()
}

func (a aim) reached(v interval) bool {
	if a.atLeast {
		return v.value >= a.bound
	}
	return v.value <= a.bound
}

// limit says the bound: "≥ 15×".
func (a aim) limit() string {
	sign := "≤"
	if a.atLeast {
		sign = "≥"
	}
	return sign + " " + withUnit(a.bound, a.unit)
}

// say is the value, with its interval if there is one.
func (a aim) say(v interval) string {
	if math.IsNaN(v.value) {
		return "–"
	}
	text := withUnit(v.value, a.unit)
	if !math.IsNaN(v.low) && !math.IsNaN(v.high) && v.low != v.high {
		text += fmt.Sprintf(" (%s–%s)", figures(v.low), figures(v.high))
	}
	return text
}

func withUnit(v float64, unit string) string {
	if unit == "×" || unit == "" {
		return figures(v) + unit
	}
	return figures(v) + " " + unit
}

// figures writes a number as people read it: three of them that count.
func figures(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v):
		return "–"
	case a >= 100 || a == math.Trunc(a):
		return thousands(fmt.Sprintf("%.0f", v))
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2f", v)
}

func thousands(digits string) string {
	var b strings.Builder
	for i, c := range digits {
		if i > 0 && c != '-' && (len(digits)-i)%3 == 0 && digits[i-1] != '-' {
			b.WriteByte(',')
		}
		b.WriteRune(c)
	}
	return b.String()
}
