package config

import (
	"strings"
	"testing"
)

func TestNearest(t *testing.T) {
	for value, want := range map[string]string{
		"nixl": "vllm-nixl", "push": "vllm-nixl-push", "mooncake": "vllm-mooncake", "vllm_nixl": "vllm-nixl", "SGLang": "sglang",
		"trtlm": "trtllm", "sglnag": "sglang", "vllm": "", "lmcache": "", "": "", "--": "", strings.Repeat("x", 1<<20): "",
	} {
		if got := nearest(value, connectors()); got != want {
			t.Errorf("%.20q: got %q, want %q", value, got, want)
		}
	}
	for value, want := range map[string]string{"kvaware": "kv_aware", "kv": "kv_aware", "power": "power_of_two", "Pair_Aware-2": "pair_aware"} {
		if got := nearest(value, builtinPlaces()); got != want {
			t.Errorf("%s: got %q, want %q", value, got, want)
		}
	}
	// The first word tells more than few changed letters.
	for value, want := range map[string]string{"vllm": "vllm-router", "sglang": "sglang-router", "dynamo-frontend": "dynamo", "llmd": "llm-d", "router": ""} {
		if got := nearest(value, []string{"dynamo", "llm-d", "sglang-router", "vllm-router"}); got != want {
			t.Errorf("%s: got %q, want %q", value, got, want)
		}
	}
	// Two roles that are only as long as the value are no suggestion.
	if got := nearest("chef", roles()); got != "" {
		t.Errorf("chef: got %q", got)
	}
	// One letter for another is no misspelling.
	if got := nearest("9", []string{"1", "2"}); got != "" {
		t.Errorf("9: got %q", got)
	}
}
