package retain

import (
	"testing"

	"github.com/pdproxy/pdproxy/abi"
)

func TestRetain(t *testing.T) {
	f := &abi.RetainFacts{MostMillis: 450_000, Tokens: 100, All: abi.Gaps{Turns: 9}}
	if got, want := Lease(f), (abi.RetainDecision{Millis: 450_000, Likelihood: abi.FullLikelihood}); got != want {
		t.Errorf("Lease = %+v, want %+v", got, want)
	}
	if got := None(f); got != (abi.RetainDecision{}) {
		t.Errorf("None = %+v", got)
	}
}
