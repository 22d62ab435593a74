package discovery

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// newMetadata returns the source for TensorRT-LLM workers that register in the older way,
// at a metadata server: a key trtllm/ID in etcd, without a lease
// (tensorrt_llm/serve/metadata_server.py). The key of a worker stays after the worker's
// death. TensorRT-LLM's own orchestrator deletes such a key. The proxy does not delete
// keys of other processes; the probes of the dead worker fail.
func newMetadata(cfg config.DiscoveryTRTLLM, log *slog.Logger) *etcdSource {
	s := newEtcd("trtllm-metadata", etcdEndpoints(cfg.MetadataURI), "trtllm/", log)
	s.read, s.every = readMetadata, time.Duration(cfg.RefreshInterval)
	// A restarted worker has another key at the same address, and the old key may still
	// exist.
	s.same = func(e config.Engine) string { return e.URL }
	return s
}

// etcdEndpoints returns the addresses of a list of etcd://host:port.
func etcdEndpoints(uris string) (endpoints []string) {
	for uri := range strings.SplitSeq(uris, ",") {
		endpoints = append(endpoints, "http://"+strings.TrimPrefix(strings.TrimSpace(uri), "etcd://"))
	}
	return endpoints
}

// readMetadata converts a worker's record to an engine. Its id is the engine's name,
// with invalid characters replaced.
func readMetadata(key string, value []byte) (config.Engine, error) {
	_, id, _ := strings.Cut(key, "/")
	if strings.Contains(id, "/") {
		return config.Engine{}, fmt.Errorf("a key of more than two parts: %w", errSkip)
	}
	var w struct {
		Role  string `json:"server_role"`
		Older string `json:"server_type"`
		URL   string `json:"url"`
	}
	if err := json.Unmarshal(value, &w); err != nil {
		return config.Engine{}, fmt.Errorf("decode worker: %w", err)
	}
	e := config.DefaultEngine()
	e.Name, e.Connector, e.URL = strings.Map(nameable, id), config.ConnectorTRTLLM, strings.TrimSuffix(w.URL, "/")
	if w.Role == "" {
		w.Role = w.Older
	}
	switch strings.ToUpper(w.Role) {
	case "CONTEXT":
		e.Role = config.RolePrefill
	case "GENERATION":
		e.Role = config.RoleDecode
	default:
		return config.Engine{}, fmt.Errorf("role %q: %w", w.Role, errSkip)
	}
	if u, err := url.Parse(e.URL); err == nil && unspecified(u.Hostname()) {
		return config.Engine{}, errors.New("decode worker: other hosts cannot connect to the host of its URL")
	}
	if err := e.Check(); err != nil {
		return config.Engine{}, err
	}
	return e, nil
}

// nameable returns r, or - if r is not valid in engine names.
func nameable(r rune) rune {
	if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-_.:@", r) {
		return r
	}
	return '-'
}
