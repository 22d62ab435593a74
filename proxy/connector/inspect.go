package connector

import (
	"bytes"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Inspection has statements of an engine that explain a wrong configuration. The proxy serves
// requests without them.
type Inspection struct {
	// Mode is SGLang's disaggregation_mode: "prefill", "decode", or "null" for an engine that
	// serves whole requests; "" unknown.
	Mode string
	// Transfer is the KV connector of which a vLLM engine shows metrics, "nixl" or "mooncake"; "none"
	// if the engine shows metrics of neither; "" unknown.
	Transfer string
	// Caching is "on" or "off": whether the engine keeps the blocks of ended requests; "" unknown.
	Caching string
	// Hash is vLLM's algorithm of block hashes, prefix_caching_hash_algo; "" unknown.
	Hash string
}

// InspectPath is the path of a GET whose answer Inspect reads; "" for a connector without one.
func InspectPath(name string) string {
	switch c, _ := ByName(name); c.(type) {
	case sglang:
		return serverInfoPath
	case trtllm, remote, nil:
		return ""
	}
	return metricsPath
}

// Inspect reads the answer to a path of InspectPath. It leaves out statements of a wrong type.
func Inspect(path string, body []byte) (i Inspection) {
	if path == serverInfoPath {
		i.sglang(body)
	} else {
		i.vllm(body)
	}
	return i
}

// sglang reads the server's arguments. Source: srt/entrypoints/http_server.py server_info.
func (i *Inspection) sglang(body []byte) {
	var info openai.Object
	if info.Parse(body) != nil {
		return
	}
	switch mode := textOf(&info, "disaggregation_mode"); mode {
	case "prefill", "decode", "null":
		i.Mode = mode
	}
	switch off, _ := info.Get("disable_radix_cache"); string(off) {
	case "true":
		i.Caching = "off"
	case "false":
		i.Caching = "on"
	}
}

// vllm reads the metrics. A connector has metrics only in an engine with --kv-transfer-config.
// Sources: config/cache.py metrics_info, distributed/kv_transfer/kv_connector/v1/nixl/stats.py and
// mooncake/stats.py.
func (i *Inspection) vllm(body []byte) {
	_, rest, ok := bytes.Cut(body, []byte("\nvllm:cache_config_info{"))
	if !ok {
		return
	}
	line, _, _ := bytes.Cut(rest, []byte("\n"))
	switch label(line, "enable_prefix_caching") {
	case "True":
		i.Caching = "on"
	case "False":
		i.Caching = "off"
	}
	if hash := label(line, "prefix_caching_hash_algo"); len(hash) <= maxCacheType {
		i.Hash = hash
	}
	i.Transfer = "none"
	for _, name := range []string{"nixl", "mooncake"} {
		if bytes.Contains(body, []byte("\nvllm:"+name+"_")) {
			i.Transfer = name
		}
	}
}

// ShowsTransfer returns the Transfer of engines of a connector whose metrics Inspect knows, else "".
// Releases before 0.13 may lack the metrics.
func ShowsTransfer(name, version string) string {
	if !hashesVersion(version) {
		return ""
	}
	switch {
	case name == (mooncake{}).Name():
		return "mooncake"
	case strings.HasPrefix(name, (nixl{}).Name()):
		return "nixl"
	}
	return ""
}

// Owner returns the program that serves an engine, by the facts of GET /v1/models: "vllm", "sglang",
// "tensorrt_llm", or "" for another one. wants is that of the connector, "" for any.
func Owner(f *engine.Facts, name string) (is, wants string) {
	switch f.Owner {
	case "vllm", "sglang", "tensorrt_llm":
		is = f.Owner
	}
	switch {
	case strings.HasPrefix(name, "vllm-"):
		wants = "vllm"
	case name == (sglang{}).Name():
		wants = "sglang"
	case name == (trtllm{}).Name():
		wants = "tensorrt_llm"
	}
	return is, wants
}

// ReadModels copies an OpenAI list of models, the answer to ModelsPath, into f.
func ReadModels(f *engine.Facts, body []byte) error { return readModels(f, body) }

// ModelsPath is the path of the list of models, which engines of all kinds have.
const ModelsPath = modelsPath
