package sandboxtest

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// builtins are the programs that every container of a Driver has. sh runs only
// scripts that it knows by heart; see scripts.
var builtins = map[string]Program{
	"true":  func(*Proc) int { return 0 },
	"false": func(*Proc) int { return 1 },
	"echo": func(p *Proc) int {
		fmt.Fprintln(p.Stdout, strings.Join(p.Args[1:], " "))
		return 0
	},
	"print": func(p *Proc) int {
		io.WriteString(p.Stdout, strings.Join(p.Args[1:], " "))
		return 0
	},
	"cat": func(p *Proc) int {
		if _, err := io.Copy(p.Stdout, p.Stdin); err != nil {
			return 1
		}
		return 0
	},
	"pwd": func(p *Proc) int {
		fmt.Fprintln(p.Stdout, p.Dir)
		return 0
	},
	"env": func(p *Proc) int {
		for _, name := range slices.Sorted(maps.Keys(p.Env)) {
			fmt.Fprintf(p.Stdout, "%s=%s\n", name, p.Env[name])
		}
		return 0
	},
	"exit": func(p *Proc) int {
		code, _ := strconv.Atoi(p.arg(1))
		return code
	},
	"sleep": func(p *Proc) int {
		seconds, err := strconv.ParseFloat(p.arg(1), 64)
		if err != nil {
			return 1
		}
		p.Sleep(time.Duration(seconds * float64(time.Second)))
		return 0
	},
	"yes": func(p *Proc) int {
		line := []byte(strings.Repeat("y\n", 2048))
		for {
			if _, err := p.Stdout.Write(line); err != nil {
				return 1
			}
		}
	},
	// leave leaves a child behind that holds the output.
	"leave": func(p *Proc) int {
		p.Fork(func(p *Proc) int { p.Sleep(time.Hour); return 0 })
		fmt.Fprintln(p.Stdout, "left")
		return 0
	},
	"oom":    func(p *Proc) int { return p.OOM() },
	"listen": listen,
	"sh": func(p *Proc) int {
		script, known := scripts()[p.arg(2)]
		if p.arg(1) != "-c" || !known {
			fmt.Fprintf(p.Stderr, "sh: the fake driver does not know the script %q\n", p.arg(2))
			return 127
		}
		return script(p)
	},
}

func (p *Proc) arg(i int) string {
	if i < len(p.Args) {
		return p.Args[i]
	}
	return ""
}

// listen PORT echoes what each connection sends.
func listen(p *Proc) int {
	port, _ := strconv.Atoi(p.arg(1))
	l, err := p.Listen(uint16(port))
	if err != nil {
		fmt.Fprintln(p.Stderr, err)
		return 1
	}
	fmt.Fprintln(p.Stdout, "listening")
	for {
		conn, err := l.Accept()
		if err != nil {
			return 1
		}
		p.Fork(func(p *Proc) int {
			defer conn.Close()
			go func() { <-p.Context().Done(); conn.Close() }()
			io.Copy(conn, conn)
			return 0
		})
	}
}
