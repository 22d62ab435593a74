// Package plugins is where WebAssembly guests will be hosted: loading, pools,
// limits, chains, hot reload. It is empty in this build, whose policies are
// compiled in (package policies) behind coordinator.Decider.
package plugins
