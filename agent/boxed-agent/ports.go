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
	ports := []agent.Port{}
	inodes := map[string]int{} // of listening sockets: their place in ports
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(file)
		if err != nil {
			continue // no IPv6
		}
		for scanner := bufio.NewScanner(f); scanner.Scan() && len(ports) < agent.MaxPorts; {
			// "sl local remote state … uid timeout inode"
			fields := strings.Fields(scanner.Text())
			if len(fields) < 10 || fields[3] != "0A" || fields[7] == "0" {
				continue // not listening, or the agent's own
			}
			if addr, ok := parseProcAddr(fields[1]); ok {
				inodes[fields[9]] = len(ports)
				ports = append(ports, agent.Port{Port: addr.Port(), Address: addr.Addr().String()})
			}
		}
		f.Close()
	}
	s.nameOwners(ports, inodes)
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

// nameOwners finds the processes that hold the sockets. It is done process by
// process, so that a sandbox full of descriptors holds no thread for long.
func (s *system) nameOwners(ports []agent.Port, inodes map[string]int) {
	for _, pid := range pids() {
		if len(inodes) == 0 {
			return
		}
		if pid == 1 {
			continue
		}
		s.user.do(func() error {
			dir := "/proc/" + strconv.Itoa(pid)
			fds, err := os.ReadDir(dir + "/fd")
			if err != nil {
				return err
			}
			for _, fd := range fds {
				target, _ := os.Readlink(path.Join(dir, "fd", fd.Name()))
				inode, _ := strings.CutPrefix(target, "socket:[")
				if i, wanted := inodes[strings.TrimSuffix(inode, "]")]; wanted {
					name, _ := os.ReadFile(dir + "/comm")
					ports[i].Process = strings.TrimSpace(string(name))
					delete(inodes, strings.TrimSuffix(inode, "]"))
				}
			}
			return nil
		})
	}
}
