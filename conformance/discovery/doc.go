// Package discovery proves that engines are found where they register: in a
// real etcd, which is killed, restarted, compacted and emptied while requests
// run, and behind an API server of Kubernetes, simulated, or with the build tag
// kubernetes a real one. It needs Debian's etcd-server, and installs it if it
// may.
package discovery
