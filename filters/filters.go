// Package filters provides the built-in filters. Each is a folder in plain Go, and a module in
// WebAssembly that `make policies` builds from it. The proxy loads the module like that of any
// other plugin, if the configuration names it: path = "builtin:NAME".
//
// The decisions behind this package are in docs/design/plugins.md.
package filters

import (
	_ "embed" // for the modules

	"github.com/pdproxy/pdproxy/filters/stableprefix"
)

// module is the module of stableprefix/wasm.
//
//go:embed stable_prefix.wasm
var module string

// StablePrefix is the name of the only built-in filter.
const StablePrefix = "stable_prefix"

// Module returns the module of a built-in filter, "" for an unknown name.
func Module(name string) string {
	if name == StablePrefix {
		return module
	}
	return ""
}

// Check checks the configuration text of a built-in filter, as its module does when it starts. The
// error is a *stableprefix.Error.
func Check(name, config string) error {
	if name != StablePrefix {
		return nil
	}
	_, err := stableprefix.Parse(config)
	return err
}
