package sandboxtest

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// The shell scripts of the suite. A real sandbox runs them; the fake one knows
// what each does.
const (
	scriptArgs    = `printf '%s\0' "$@"`
	scriptStreams = `printf out; printf err >&2; exit 7`
	scriptTrap    = `trap 'echo got it; exit 3' TERM; echo ready; while :; do sleep 0.05; done`
	scriptTree    = `sleep 1001 & sleep 1002 & echo started; wait`
	scriptLeave   = `sleep 1000 & echo left`
	scriptSpew    = `i=0; while [ $i -lt 160 ]; do printf '%65536d' $i; i=$((i+1)); done`
	scriptCount   = `i=0; while :; do echo $i; i=$((i+1)); sleep 0.01; done`
	scriptLines   = `i=0; while [ $i -lt 200000 ]; do echo $i; i=$((i+1)); done; sleep 0.1; exit 3`
	scriptTTY     = `test -t 0 && test -t 1 && test -t 2 && echo tty; stty size`
	scriptPlain   = `test -t 0 || test -t 1 || echo plain; printf err >&2`
	scriptResize  = `trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done`
	scriptUser    = `id -u; id -g`
	scriptHello   = `echo hello`
	scriptSignal  = `kill -9 $$`
	scriptListen  = `exec perl -MIO::Socket::INET -e '$|=1; $s=IO::Socket::INET->new(LocalAddr=>"127.0.0.1",LocalPort=>8123,Listen=>9,ReuseAddr=>1) or die $!; print "listening\n"; while($c=$s->accept){ if(!fork){ while(sysread($c,$b,65536)){syswrite($c,$b)} exit } close $c }'`
)

// lineCount is how many lines scriptLines writes.
const lineCount = 200_000

// spewed is what scriptSpew writes.
func spewed() []byte {
	var b strings.Builder
	for i := range 160 {
		fmt.Fprintf(&b, "%65536d", i)
	}
	return []byte(b.String())
}

func idle(p *Proc) int {
	p.Sleep(time.Hour)
	return 0
}

// scripts are what the fake driver's sh can do. It is a function, for they call
// one another.
func scripts() map[string]Program {
	return map[string]Program{
		scriptArgs: func(p *Proc) int {
			for _, arg := range p.Args[4:] {
				io.WriteString(p.Stdout, arg+"\x00")
			}
			return 0
		},
		scriptStreams: func(p *Proc) int {
			io.WriteString(p.Stdout, "out")
			io.WriteString(p.Stderr, "err")
			return 7
		},
		scriptTrap: func(p *Proc) int {
			signals := p.Trap()
			fmt.Fprintln(p.Stdout, "ready")
			for {
				select {
				case <-p.Context().Done():
					return 1
				case s := <-signals:
					if s == "TERM" {
						fmt.Fprintln(p.Stdout, "got it")
						return 3
					}
				}
			}
		},
		scriptTree: func(p *Proc) int {
			p.Fork(idle)
			p.Fork(idle)
			fmt.Fprintln(p.Stdout, "started")
			return idle(p)
		},
		scriptLeave: func(p *Proc) int {
			p.Fork(idle)
			fmt.Fprintln(p.Stdout, "left")
			return 0
		},
		scriptSpew: func(p *Proc) int {
			if _, err := p.Stdout.Write(spewed()); err != nil {
				return 1
			}
			return 0
		},
		scriptCount: func(p *Proc) int {
			for i := 0; ; i++ {
				if _, err := fmt.Fprintln(p.Stdout, i); err != nil || !p.Sleep(10*time.Millisecond) {
					return 1
				}
			}
		},
		scriptLines: func(p *Proc) int {
			for text := lines(); len(text) > 0; p.Sleep(time.Millisecond) {
				n, err := io.WriteString(p.Stdout, text[:min(len(text), 4<<10)])
				if err != nil {
					return 1
				}
				text = text[n:]
			}
			p.Sleep(100 * time.Millisecond)
			return 3
		},
		scriptTTY: func(p *Proc) int {
			if p.TTY {
				cols, rows := p.Size()
				fmt.Fprintf(p.Stdout, "tty\n%d %d\n", rows, cols)
			}
			return 0
		},
		scriptPlain: func(p *Proc) int {
			if !p.TTY {
				fmt.Fprintln(p.Stdout, "plain")
			}
			io.WriteString(p.Stderr, "err")
			return 0
		},
		scriptResize: func(p *Proc) int {
			signals := p.Trap()
			fmt.Fprintln(p.Stdout, "ready")
			for {
				select {
				case <-p.Context().Done():
					return 1
				case s := <-signals:
					if s == "WINCH" {
						cols, rows := p.Size()
						fmt.Fprintf(p.Stdout, "%d %d\n", rows, cols)
					}
				}
			}
		},
		scriptUser: func(p *Proc) int {
			uid := strconv.Itoa(p.tree.c.box.UID)
			fmt.Fprintln(p.Stdout, uid+"\n"+uid)
			return 0
		},
		scriptHello:  func(p *Proc) int { fmt.Fprintln(p.Stdout, "hello"); return 0 },
		scriptSignal: func(p *Proc) int { p.kill("KILL"); return 0 },
		scriptListen: func(p *Proc) int { p.Args = []string{"listen", "8123"}; return listen(p) },
	}
}
