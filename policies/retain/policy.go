// Package retain holds the built-in retain policies without parameters. They decide how long a
// decode engine retains the KV of a finished turn. Each is a pure function of the facts.
package retain

import "github.com/pdproxy/pdproxy/abi"

// Lease retains the KV for the longest time: until the lease of the engine ends.
func Lease(f *abi.RetainFacts) abi.RetainDecision {
	return abi.RetainDecision{Millis: f.MostMillis, Likelihood: abi.FullLikelihood}
}

// None frees the KV now.
func None(*abi.RetainFacts) abi.RetainDecision { return abi.RetainDecision{} }
