package config

import "strings"

// removed maps each key that is no longer configurable to its fixed value or to its
// replacement. Entries of an array have no index: plugin.memory_total.
var removed = map[string]string{
	"kv_index.expect":        "is not configurable any more: it is always 30s. Remove the key",
	"kv_index.text_ttl":      "is not configurable any more: it is always 10m. Remove the key; kv_index.text_tokens still limits the estimate",
	"pairs.warm_up_interval": "is not configurable any more: it is always 100ms. Remove the key",
	"plugin.crash_cpu_share": "is not configurable any more: it is always 0.1 of one processor. Remove the key; timeout and crash_budget still limit a plugin",
	"plugin.memory_total":    "is not configurable any more: it is always memory × (processors + 2). Remove the key; memory still limits each instance",
	"tokens.cache_tokens":    "is not configurable any more: it is always 4194304. Remove the key",
}

// removedKey returns the text of removed for key, or "". It ignores the indexes of entries.
func removedKey(key string) string {
	var b strings.Builder
	for key != "" {
		before, rest, indexed := strings.Cut(key, "[")
		b.WriteString(before)
		if !indexed {
			break
		}
		_, key, _ = strings.Cut(rest, "]")
	}
	return removed[b.String()]
}
