// Package docker makes sandboxes' containers with a Docker engine, 20.10 or
// later, and any OCI runtime that the engine knows.
//
// The engine creates, starts and removes; while a container runs, its limits,
// freezer and usage are read and written in its cgroup directly, which takes a
// hundredth of the time. After every start the driver looks at the process from
// outside and refuses a container whose mounts, user or filter are not the ones
// that were asked for: the image is hostile, and engines resolve links and read
// /etc/passwd inside it.
//
// It knows nothing of lifecycles, execs or owners' rights. Start reading at
// [Driver]; create.go has what a container looks like.
package docker
