package connector

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/engine"
)

// metricsPath is the only HTTP route on which a vLLM server describes its KV cache. An
// engine may lack it; that is no error.
const metricsPath = "/metrics"

// metricsRoute reports load if the engine serves its metrics: vLLM does, SGLang with
// --enable-metrics.
var metricsRoute = engine.LoadRoute{Path: metricsPath, Form: engine.LoadMetrics}

// readCacheConfig copies block size and type of the KV cache. They are labels of a
// gauge (v1/metrics/loggers.py, vllm:cache_config_info). The type auto means the
// model's type.
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

// processStart returns the start time of the engine's process from its metrics, or "".
// Source: vLLM, v1/metrics/prometheus.py get_prometheus_registry, which is
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

// maxProcessStart bounds the text of a time, in bytes.
const maxProcessStart = 32

// maxCacheType bounds the name of a type, in bytes.
const maxCacheType = 32

// label returns the value of a label without escapes, or "".
func label(line []byte, name string) string {
	for {
		_, rest, ok := bytes.Cut(line, []byte(name+`="`))
		if !ok {
			return ""
		}
		if before := line[:len(line)-len(rest)-len(name)-2]; len(before) > 0 && before[len(before)-1] != ',' {
			line = rest // this is the end of a longer name
			continue
		}
		value, _, _ := bytes.Cut(rest, []byte(`"`))
		return string(value)
	}
}

// nixlCompatible rejects pairs that the engines' own handshake would reject at the
// first request (nixl/metadata.py compute_nixl_compatibility_hash, which since vLLM
// 0.13 contains the release and the type of the KV cache), and pairs between which no
// block can be copied (base_worker.py _validate_remote_agent_handshake: prefill's block
// size must divide decode's). No HTTP route reports the model's hash, the attention
// back end or the layout.
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

// hashesVersion reports whether a vLLM release compares its version with its peer's.
func hashesVersion(version string) bool {
	major, minor := release(version)
	return major > 0 || minor >= 13
}

// release returns the numbers of a vLLM release. It returns 0, 0 if the version is
// unknown, or for a build without a release number (0.1.dev…).
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
