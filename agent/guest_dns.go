package agent

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// RCODEs of answers.
const (
	codeFormat   = 1
	codeFailed   = 2
	codeNoName   = 3
	codeRefused  = 5
	maxQuery     = 4096 // bytes of one
	syntheticTTL = 60   // seconds; the address stays the name's, whatever is kept of it
)

// serveDNS answers queries until the socket is closed.
func (e *entries) serveDNS(conn net.PacketConn) {
	buf := make([]byte, maxQuery)
	for {
		n, from, err := conn.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		query := append([]byte(nil), buf[:n]...)
		select {
		case e.queries <- struct{}{}:
		default:
			continue
		}
		go func() {
			defer func() { <-e.queries }()
			if reply := e.reply(query); reply != nil {
				conn.WriteTo(reply, from)
			}
		}()
	}
}

// serveDNSConn answers queries on a TCP connection.
func (e *entries) serveDNSConn(conn net.Conn) {
	conn.SetDeadline(time.Now().Add(dnsTCPLimit))
	r := bufio.NewReader(conn)
	for {
		var head [2]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(head[:]))
		if len(query) > maxQuery {
			return
		}
		if _, err := io.ReadFull(r, query); err != nil {
			return
		}
		reply := e.reply(query)
		if reply == nil {
			return
		}
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(reply))), reply...)); err != nil {
			return
		}
	}
}

// reply answers one query; nil is for what is none.
func (e *entries) reply(query []byte) []byte {
	var p dnsmessage.Parser
	head, err := p.Start(query)
	if err != nil || head.Response {
		return nil
	}
	questions, err := p.AllQuestions()
	if err != nil || len(questions) != 1 {
		return dnsReply(head, nil, codeFormat, netip.Addr{})
	}
	q := questions[0]
	if head.OpCode != 0 || q.Class != dnsmessage.ClassINET {
		return dnsReply(head, &q, codeRefused, netip.Addr{})
	}
	name := strings.ToLower(strings.TrimSuffix(q.Name.String(), "."))
	if name == "localhost" { // RFC 6761
		return dnsReply(head, &q, 0, netip.AddrFrom4([4]byte{127, 0, 0, 1}))
	}
	intent := Intent{Entry: EntryDNS, Host: name, Type: uint16(q.Type)}
	verdict, err := e.judge(intent)
	if err != nil {
		return dnsReply(head, &q, codeFailed, netip.Addr{})
	}
	if verdict.Code != 0 || q.Type != dnsmessage.TypeA {
		return dnsReply(head, &q, verdict.Code, netip.Addr{})
	}
	addr, err := e.address(name, verdict.Ports)
	if err != nil {
		if errors.Is(err, errNoAddress) {
			intent.Full = true
			e.judge(intent) // for the record
		}
		return dnsReply(head, &q, codeFailed, netip.Addr{})
	}
	return dnsReply(head, &q, 0, addr)
}

// judge asks the host for a verdict on a name.
func (e *entries) judge(intent Intent) (v Verdict, err error) {
	host, err := e.dial(intent)
	if err != nil {
		return v, err
	}
	defer host.Close()
	host.SetDeadline(time.Now().Add(egressHelloTime))
	var r Response
	if err := readMessage(host, maxHello, &r); err != nil {
		return v, err
	}
	if r.Error != nil {
		return v, r.Error
	}
	return v, json.Unmarshal(r.Value, &v)
}

// dnsReply builds an answer. An address goes into the answer to a question for one.
func dnsReply(head dnsmessage.Header, q *dnsmessage.Question, code int, addr netip.Addr) []byte {
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{
		ID: head.ID, Response: true, OpCode: head.OpCode, Authoritative: true,
		RecursionDesired: head.RecursionDesired, RecursionAvailable: true, RCode: dnsmessage.RCode(code),
	})
	b.StartQuestions()
	if q != nil {
		b.Question(*q)
	}
	if addr.Is4() && q.Type == dnsmessage.TypeA {
		b.StartAnswers()
		b.AResource(dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: syntheticTTL}, dnsmessage.AResource{A: addr.As4()})
	}
	reply, err := b.Finish()
	if err != nil {
		return nil
	}
	return reply
}

// askDNS asks the guest's own entry for a name, and returns the RCODE.
func askDNS(ctx context.Context, port uint16, name string) (int, error) {
	n, err := dnsmessage.NewName(name + ".")
	if err != nil {
		return 0, err
	}
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: 1, RecursionDesired: true})
	b.StartQuestions()
	b.Question(dnsmessage.Question{Name: n, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET})
	query, err := b.Finish()
	if err != nil {
		return 0, err
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "udp4", "127.0.0.1:"+strconv.Itoa(int(port)))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	conn.SetDeadline(deadline)
	if _, err := conn.Write(query); err != nil {
		return 0, err
	}
	buf := make([]byte, 512)
	size, err := conn.Read(buf)
	if err != nil {
		return 0, err
	}
	var p dnsmessage.Parser
	head, err := p.Start(buf[:size])
	return int(head.RCode), err
}

// askCONNECT asks the guest's own entry for a tunnel, and returns the status.
func askCONNECT(ctx context.Context, port uint16, name string) (status int, err error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp4", "127.0.0.1:"+strconv.Itoa(int(port)))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	conn.SetDeadline(deadline)
	if _, err := fmt.Fprintf(conn, "CONNECT %s:443 HTTP/1.1\r\nHost: %s:443\r\n\r\n", name, name); err != nil {
		return 0, err
	}
	line, err := bufio.NewReaderSize(conn, 512).ReadString('\n')
	if err != nil {
		return 0, err
	}
	_, err = fmt.Sscanf(line, "HTTP/1.1 %d", &status)
	return status, err
}
