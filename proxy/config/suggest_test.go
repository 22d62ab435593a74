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
	if got := nearest("kvaware", builtinPlaces()); got != "kv_aware" {
		t.Errorf("kvaware: got %q", got)
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
