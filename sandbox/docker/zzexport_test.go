package docker
import ("fmt";"context")
func (d *Driver) CgroupRead(id, c, f string) (string, error) { return d.containers[id].cgroup.read(c, f) }
func (d *Driver) Proc(id string) string { s, _ := d.Status(context.Background(), id); return fmt.Sprintf("/proc/%d", s.PID) }
