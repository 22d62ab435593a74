package importer

import (
	"net"
	"strconv"
	"strings"
)

// misspelled is the spelling of refresh_interval in the README of TensorRT-LLM's
// examples; TensorRT-LLM's loader rejects it.
const misspelled = "refersh_interval"

// metadataKeys returns the keys that only MetadataServerConfig has (disagg_utils.py).
func metadataKeys() []string {
	return []string{"server_type", "health_check_timeout", "refresh_interval", misspelled}
}

// isMetadata reports whether a file is the metadata server's: it has some of its keys,
// and none of the orchestrator's except the address.
func isMetadata(t *table) bool {
	own := false
	for _, key := range metadataKeys() {
		_, found := t.find(key)
		own = own || found
	}
	for _, key := range trtllmKeys() {
		if _, found := t.find(key); found && key != "hostname" && key != "port" {
			return false
		}
	}
	return own
}

// metadata reads the metadata server's file: the older way in which workers register.
func (r *trtllm) metadata(t *table) {
	kind, e, ok := r.text(t, "server_type")
	switch {
	case !ok:
		r.warn(r.file, 0, "server_type", "is missing: TensorRT-LLM would reject the file; pdproxy import assumes etcd")
	case kind != "etcd":
		r.problem(r.file, e.line, "server_type", "want etcd")
	}
	host, e, ok := r.text(t, "hostname")
	if !ok {
		host = "localhost"
	}
	if strings.ContainsAny(host, "/@") {
		r.problem(r.file, e.line, "hostname", "want a name or an address, without a scheme, user or password")
	}
	port, _, ok := r.integer(t, "port", 1, 65535)
	if !ok {
		port = 2379
	}
	r.doc.set("discovery.trtllm", "metadata_uri", text("etcd://"+net.JoinHostPort(host, strconv.Itoa(port))), "hostname, port of the metadata server")
	r.refresh(t)
	if x, _, ok := r.float(t, "health_check_timeout", 0.001, 1e6); ok {
		r.doc.set("health", "timeout", seconds(x), "health_check_timeout")
	}
	r.doc.note(0, "metadata server", "TensorRT-LLM deletes the keys of dead workers; pdproxy deletes no keys of other processes")
	for _, left := range t.entries {
		r.problem(r.file, left.line, left.key, "unknown key")
	}
}

// refresh returns the time between two scans, from the correct or the misspelled key.
func (r *trtllm) refresh(t *table) {
	x, _, ok := r.float(t, "refresh_interval", 0.001, 1e6)
	wrong, e, misspelt := r.float(t, misspelled, 0.001, 1e6)
	switch {
	case ok && misspelt:
		r.problem(r.file, e.line, misspelled, "is a misspelled refresh_interval, and the file also has refresh_interval")
	case misspelt:
		r.warn(r.file, e.line, misspelled, "is a misspelled refresh_interval: TensorRT-LLM would reject the file; pdproxy import reads it as refresh_interval")
		x, ok = wrong, true
	}
	if ok {
		r.doc.set("discovery.trtllm", "refresh_interval", seconds(x), "refresh_interval")
	}
}

// misplaced warns about the metadata server's keys in disagg_config.yaml, where they
// have no effect.
func (r *trtllm) misplaced(root *table) {
	for _, key := range append(metadataKeys(), "metadata_config") {
		e, found := root.take(key)
		if !found {
			continue
		}
		spelling := ""
		if key == misspelled {
			spelling = ", as refresh_interval"
		}
		r.warn(r.file, e.line, key, "has no effect in this file: move it to the file of the metadata server (-m)%s", spelling)
	}
}
