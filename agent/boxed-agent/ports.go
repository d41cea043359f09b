package main

import (
	"bufio"
	"encoding/hex"
	"net/netip"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/boxed-mesh/boxed/agent"
)

// Ports lists the user's listening TCP sockets.
func (s *system) Ports() ([]agent.Port, error) {
	owners := s.socketOwners()
	ports := []agent.Port{}
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(file)
		if err != nil {
			continue // no IPv6
		}
		for scanner := bufio.NewScanner(f); scanner.Scan(); {
			// "sl local remote state … uid timeout inode"
			fields := strings.Fields(scanner.Text())
			if len(fields) < 10 || fields[3] != "0A" || fields[7] == "0" {
				continue // not listening, or the agent's own
			}
			if addr, ok := parseProcAddr(fields[1]); ok {
				ports = append(ports, agent.Port{Port: addr.Port(), Address: addr.Addr().String(), Process: owners[fields[9]]})
			}
		}
		f.Close()
	}
	slices.SortFunc(ports, func(a, b agent.Port) int { return int(a.Port) - int(b.Port) })
	return ports, nil
}

// parseProcAddr reads "0100007F:1F90": 32-bit words in host (little-endian)
// order, then the port.
func parseProcAddr(s string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(s, ":")
	raw, err := hex.DecodeString(host)
	p, perr := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || perr != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		slices.Reverse(raw[i : i+4])
	}
	addr, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr.Unmap(), uint16(p)), ok
}

// socketOwners maps socket inodes to the names of the processes that hold them.
func (s *system) socketOwners() map[string]string {
	owners := map[string]string{}
	s.user.do(func() error {
		for _, pid := range pids() {
			dir := "/proc/" + strconv.Itoa(pid)
			fds, err := os.ReadDir(dir + "/fd")
			if err != nil || pid == 1 {
				continue
			}
			name, _ := os.ReadFile(dir + "/comm")
			for _, fd := range fds {
				target, _ := os.Readlink(path.Join(dir, "fd", fd.Name()))
				if inode, ok := strings.CutPrefix(target, "socket:["); ok {
					owners[strings.TrimSuffix(inode, "]")] = strings.TrimSpace(string(name))
				}
			}
		}
		return nil
	})
	return owners
}
