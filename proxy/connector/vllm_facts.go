package connector

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// metricsPath has the one account that a vLLM server gives of its KV cache over
// HTTP. An engine without it tells nothing of that, which is no error.
const metricsPath = "/metrics"

// readCacheConfig takes over block size and type of the KV cache. They are the
// labels of a gauge (v1/metrics/loggers.py, vllm:cache_config_info). The type
// auto is whatever the model's is.
func readCacheConfig(f *engine.Facts, body []byte) {
	_, rest, ok := bytes.Cut(body, []byte("\nvllm:cache_config_info{"))
	if !ok {
		return
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	if n, err := strconv.Atoi(label(line, "block_size")); err == nil && n > 0 && n <= 1<<20 {
		f.PageSize = n
	}
	if kind := label(line, "cache_dtype"); kind != "auto" && len(kind) <= maxCacheType {
		f.KVCacheType = kind
	}
}

// processStart is when the engine's process began, by its metrics; "" where they do
// not tell. Source: vLLM, v1/metrics/prometheus.py get_prometheus_registry, which is
// prometheus_client's REGISTRY with its ProcessCollector, unless several API servers
// share a directory of metrics.
func processStart(body []byte) string {
	_, rest, ok := bytes.Cut(body, []byte("\nprocess_start_time_seconds "))
	if !ok {
		return ""
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	if _, err := strconv.ParseFloat(string(line), 64); err != nil || len(line) > maxProcessStart {
		return ""
	}
	return string(line)
}

// maxProcessStart bounds the text of a time.
const maxProcessStart = 32

// maxCacheType bounds what is believed to be the name of a type.
const maxCacheType = 32

// label gives the value of a label that needs no escapes, "" for none.
func label(line []byte, name string) string {
	for {
		_, rest, ok := bytes.Cut(line, []byte(name+`="`))
		if !ok {
			return ""
		}
		if before := line[:len(line)-len(rest)-len(name)-2]; len(before) > 0 && before[len(before)-1] != ',' {
			line = rest // the end of a longer name
			continue
		}
		value, _, _ := bytes.Cut(rest, []byte(`"`))
		return string(value)
	}
}

// nixlCompatible refuses what the engines' own handshake would refuse at the
// first request (nixl/metadata.py compute_nixl_compatibility_hash, which has the
// release in it and the type of the KV cache, since vLLM 0.13), and what no block
// can be copied by (base_worker.py _validate_remote_agent_handshake: prefill's
// blocks divide decode's). Of the model, the attention back end and the layout no
// HTTP route tells.
func nixlCompatible(p, d *engine.Facts) error {
	switch {
	case p.Version != d.Version && hashesVersion(p.Version) && hashesVersion(d.Version):
		return fmt.Errorf("releases differ: prefill %s, decode %s", p.Version, d.Version)
	case p.KVCacheType != "" && d.KVCacheType != "" && p.KVCacheType != d.KVCacheType:
		return fmt.Errorf("KV cache types differ: prefill %s, decode %s", p.KVCacheType, d.KVCacheType)
	case p.PageSize != 0 && d.PageSize != 0 && d.PageSize%p.PageSize != 0:
		return fmt.Errorf("prefill's blocks of %d tokens do not divide decode's of %d", p.PageSize, d.PageSize)
	}
	return nil
}

// hashesVersion reports whether a vLLM release compares its version with its
// peer's.
func hashesVersion(version string) bool {
	major, minor := release(version)
	return major > 0 || minor >= 13
}

// release gives the numbers of a vLLM release; 0, 0 for a build that has none
// (0.1.dev…), which tells nothing, and where the version is not known.
func release(version string) (major, minor int) {
	first, rest, _ := strings.Cut(version, ".")
	second, _, _ := strings.Cut(rest, ".")
	major, errA := strconv.Atoi(first)
	minor, errB := strconv.Atoi(second)
	if errA != nil || errB != nil || major < 0 || minor < 0 || major == 0 && minor <= 1 {
		return 0, 0
	}
	return major, minor
}
