package boxed

import (
	"io"
	"time"
)

// FileInfo describes one entry of a directory. Links are described, never
// followed.
type FileInfo struct {
	Name       string    `json:"name"` // last element
	Path       string    `json:"path"` // absolute
	Type       string    `json:"type"` // file, dir, symlink, fifo, socket, device
	Size       int64     `json:"size"`
	Mode       uint32    `json:"mode"` // permission bits
	ModifiedAt time.Time `json:"modified_at"`
	Target     string    `json:"target,omitempty"` // of a symlink
}

// Port is a listening socket inside a sandbox.
type Port struct {
	Port    uint16 `json:"port"`
	Address string `json:"address"` // "127.0.0.1", "0.0.0.0", "::"
	Process string `json:"process,omitempty"`
}

// ReadRequest names a part of a file. Length < 0 means to the end.
type ReadRequest struct {
	Path   string
	Offset int64
	Length int64
}

// FileReader is a file being read. The caller closes it.
type FileReader struct {
	io.ReadCloser
	Info   FileInfo
	Offset int64 // where it starts
	Length int64 // how many bytes follow
}

// WriteRequest writes one file, whole: it appears under Path only when all of
// it has arrived.
type WriteRequest struct {
	Path    string
	Content io.Reader
	Mode    uint32 // 0: 0644, or as before where the file exists
	Parents bool   // make missing directories
}
