package config

import (
	"fmt"
	"strings"
)

// retired maps each key that this version does not have any more to the end of the problem: the
// fixed value or the replacement. Entries of an array have no index: plugin.memory_total.
var retired = map[string]string{
	"kv_index.expect":        "it is always 30s; remove the key",
	"kv_index.text_ttl":      "it is always 10m; remove the key. kv_index.text_tokens still limits the estimate",
	"pairs.warm_up_interval": "it is always 100ms; remove the key",
	"plugin.crash_cpu_share": "it is always 0.1 of one processor; remove the key. timeout and crash_budget still limit a plugin",
	"plugin.memory_total":    "it is always memory × (processors + 2); remove the key. memory still limits each instance",
	"retry.schedule_style":   "use trtllm.schedule_style",
	"tokens.cache_tokens":    "it is always 4194304; remove the key",
	"transport.client":       "engines are called with one HTTP/1.1 client; remove the key",
	"trtllm.base64_ids":      "prefill answers token ids as a list of numbers; remove the key",
	"trtllm.msgpack":         "bodies are JSON, which every worker reads; remove the key",
	"trtllm.strip_history":   "decode gets all messages of a chat; remove the key",
}

// retiredConnectors maps each connector that this version does not have any more to its
// replacement.
var retiredConnectors = map[string]string{
	"vllm-p2p-nccl": `vLLM removed P2pNcclConnector in June 2026; use "vllm-nixl", with NixlConnector in the engine's --kv-transfer-config`,
}

// RetiredConnector returns an error that names the replacement if the connector is retired;
// else nil.
func RetiredConnector(name string) error {
	if why := retiredConnectors[name]; why != "" {
		return fmt.Errorf("%q is retired: %s", name, why)
	}
	return nil
}

// retiredKey returns the problem of a key that is retired, or "". It ignores the indexes of
// entries.
func retiredKey(key string) string {
	var b strings.Builder
	for key != "" {
		before, rest, indexed := strings.Cut(key, "[")
		b.WriteString(before)
		if !indexed {
			break
		}
		_, key, _ = strings.Cut(rest, "]")
	}
	if why := retired[b.String()]; why != "" {
		return "is retired: " + why
	}
	return ""
}
