package main

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Frame types and flags of the multiplexer.
const (
	typeData, typeWindow, typePing, typeGoAway = 0, 1, 2, 3
	flagSYN, flagACK, flagFIN, flagRST         = 1, 2, 4, 8
)

func frame(typ byte, flags uint16, id, length uint32) []byte {
	b := []byte{0, typ}
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint32(b, id)
	return binary.BigEndian.AppendUint32(b, length)
}

// floods give the n-th piece of what a hostile agent writes without end.
var floods = map[string]func(n int) []byte{
	"pings":          repeat(frame(typePing, flagSYN, 0, 7)),
	"answers":        repeat(frame(typePing, flagACK, 0, 7)),
	"streams":        func(n int) []byte { return frame(typeWindow, flagSYN, uint32(2*n+2), 0) },
	"window updates": repeat(frame(typeWindow, 0, 1, 1)),
	"resets":         repeat(frame(typeWindow, flagRST, 1, 0)),
	"resets of any":  func(n int) []byte { return frame(typeWindow, flagRST, uint32(2*n+1), 0) },
	"empty frames":   repeat(frame(typeData, 0, 1, 0)),
	"go away":        repeat(frame(typeGoAway, 0, 0, 0)),
	"filled windows": func(n int) []byte {
		return append(frame(typeData, 0, uint32(2*(n%64)+1), 256<<10), make([]byte, 256<<10)...)
	},
	"noise": func(int) []byte { return bytes.Repeat([]byte{0xa5}, 4096) },
}

func repeat(b []byte) func(int) []byte {
	many := bytes.Repeat(b, 4096/len(b))
	return func(int) []byte { return many }
}

// hostile shakes hands as the agent does, waits for SIGUSR1, and misbehaves.
// It reads nothing more, but where it is to answer.
func hostile(how string) {
	begin := make(chan os.Signal, 1)
	signal.Notify(begin, syscall.SIGUSR1)
	conn, err := net.Dial("unix", sock)
	if err != nil {
		return
	}
	hello := []byte(`{"version":1,"features":["exec"],"build":"x"}`)
	_, err = conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(hello))), hello...))
	var size [4]byte
	if _, err2 := io.ReadFull(conn, size[:]); err != nil || err2 != nil {
		return
	}
	if _, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(size[:]))); err != nil {
		return
	}
	<-begin
	switch next := floods[how]; {
	case next != nil:
		for n := 0; err == nil; n++ {
			_, err = conn.Write(next(n))
		}
	case how == "a byte a second":
		for _, b := range bytes.Repeat(frame(typeData, 0, 1, 1<<10), 1000) {
			if _, err = conn.Write([]byte{b}); err != nil {
				break
			}
			time.Sleep(time.Second)
		}
	}
	time.Sleep(time.Hour) // nor does it read, from here on
}
