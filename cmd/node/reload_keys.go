package node

import (
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// fixedKeys are the keys, and the tables, that are read only at the start.
var fixedKeys = []string{
	"server.listen", "server.http1", "server.http3", "server.max_header", "server.read_header_timeout", "server.tls", "server.acme",
	"admin.listen", "admin.token_file", "admin.allowed_hosts", "metrics.listen", "metrics.names", "epp.listen", "epp.pool", "epp.status", "epp.tls",
	"conversation.capacity", "kv_index", "tokens", "recording", "discovery", "fleet",
}

// engineKeys are the keys, and the tables, that the client of an engine reads when it is made.
var engineKeys = []string{"transport", "timeouts.dial"}

// partlyFixed are the keys of which one part of the process keeps the value of the start. The
// values are the log lines.
var partlyFixed = map[string]string{
	"server.idle_timeout":  "HTTP connections keep the old value of this key until a restart; WebSockets use the new value",
	"server.max_body":      "the endpoint picker (epp.listen) keeps the old value of this key until a restart; other requests use the new value",
	"server.write_timeout": "TCP connections keep the old value of this key until a restart; streams of HTTP/2 and HTTP/3 use the new value",
	"trtllm.perf_metrics":  "engines that are neither new nor changed keep their limit for the head of an answer, which depends on this key, until a restart",
}

// covers reports whether list has key or a table with key.
func covers(list []string, key string) bool {
	return slices.ContainsFunc(list, func(k string) bool { return key == k || strings.HasPrefix(key, k+".") })
}

// warnFixed logs each key of next that has another value than the one with which the process,
// or a part of it, works after the reload. old is the configuration before the reload.
func (n *Node) warnFixed(old, next *config.Config) {
	for _, key := range n.started.Changed(next) {
		switch text := partlyFixed[key]; {
		case covers(fixedKeys, key):
			n.log.Warn("this key is read only at the start; the old value stays until a restart", "key", key)
		case key == "server.max_body" && n.started.EPP.Listen == "": // there is no endpoint picker
		case text != "":
			n.log.Warn(text, "key", key)
		}
	}
	for _, key := range old.Changed(next) {
		if covers(engineKeys, key) {
			n.log.Warn("this key applies only to engines that are new or have other keys; the other engines keep the old value until a restart", "key", key)
		}
	}
}
