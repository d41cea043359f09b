package egress_test

import (
	"bytes"
	"io"
	"net"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// h2Writer is a client of HTTP/2 that sends what it is told to.
type h2Writer struct {
	*http2.Framer
	encoder *hpack.Encoder
	encoded bytes.Buffer
}

func newH2Writer(conn net.Conn) *h2Writer {
	io.WriteString(conn, http2.ClientPreface)
	w := &h2Writer{Framer: http2.NewFramer(conn, conn)}
	w.encoder = hpack.NewEncoder(&w.encoded)
	w.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	w.WriteSettings()
	return w
}

// block encodes fields.
func (w *h2Writer) block(fields [][2]string) []byte {
	w.encoded.Reset()
	for _, f := range fields {
		w.encoder.WriteField(hpack.HeaderField{Name: f[0], Value: f[1], Sensitive: true})
	}
	return bytes.Clone(w.encoded.Bytes())
}

func (w *h2Writer) headers(stream uint32, block []byte, whole bool) {
	w.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: block, EndHeaders: whole, EndStream: true})
}

// status is that of a stream's answer; "" is for one that was reset, or a connection that has
// ended.
func (w *h2Writer) status(stream uint32) string {
	for {
		frame, err := w.ReadFrame()
		if err != nil {
			return ""
		}
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				w.WriteSettingsAck()
			}
		case *http2.MetaHeadersFrame:
			if frame.StreamID == stream {
				return frame.PseudoValue("status")
			}
		case *http2.RSTStreamFrame:
			if frame.StreamID == stream {
				return ""
			}
		case *http2.GoAwayFrame:
			if frame.ErrCode != http2.ErrCodeNo {
				return ""
			}
		}
	}
}

// rawH2 sends one request of just these fields and returns its status.
func rawH2(t testing.TB, conn net.Conn, fields [][2]string) string {
	t.Helper()
	w := newH2Writer(conn)
	w.headers(1, w.block(fields), true)
	return w.status(1)
}
