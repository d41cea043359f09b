package sandbox_test

import (
	"encoding/binary"
	"encoding/json"
	"io"
	"net"

	"github.com/boxed-mesh/boxed/agent"
)

// sayHello is the beginning of an agent's connection; what follows is yamux.
func sayHello(conn net.Conn) error {
	body, err := json.Marshal(agent.Hello{Version: agent.Version, Build: "hostile"})
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)); err != nil {
		return err
	}
	var head [4]byte
	if _, err := io.ReadFull(conn, head[:]); err != nil {
		return err
	}
	_, err = io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(head[:])))
	return err
}
