// Package discovery tests that the proxy finds engines where they register: in
// a real etcd, which is killed, restarted, compacted and emptied while requests
// run, and behind a Kubernetes API server, simulated, or with the build tag
// kubernetes a real one. It needs Debian's etcd-server, and installs it if it
// may.
package discovery
