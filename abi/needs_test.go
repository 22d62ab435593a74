package abi

import (
	"reflect"
	"testing"
)

func TestParsePolicyNeeds(t *testing.T) {
	got, err := ParsePolicyNeeds("place kv_aware 6\n\n plan x 18446744073709551615")
	want := []PolicyNeeds{{HookPlace, "kv_aware", NeedBlocks | NeedConversation}, {HookPlan, "x", 1<<64 - 1}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, text := range []string{"place", "place x", "place x 1 2", "nowhere x 1", "place x -1", "place x 0x1", "none x 1"} {
		if list, err := ParsePolicyNeeds(text); err == nil {
			t.Errorf("%q: ParsePolicyNeeds(text) = %v", text, list)
		}
	}
}
