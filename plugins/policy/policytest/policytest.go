// Package policytest provides the guest that the tests of policies run
// (plugins/policy/testdata/guest), and the frames for it.
//
// The decisions behind this package are in docs/design/plugins.md.
package policytest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/pdproxy/pdproxy/abi"
)

// Build compiles the guest into a file with the go command. The flag -trimpath makes all
// tests that build guests, and plugins/build, share the compiled standard library.
func Build(file string) error {
	c := exec.Command("go", "build", "-trimpath", "-buildmode=c-shared", "-ldflags=-s -w", "-o", file,
		"github.com/pdproxy/pdproxy/plugins/policy/testdata/guest")
	c.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm")
	if text, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("build guest: %w: %s", err, text)
	}
	return nil
}

// CacheDir returns the directory for compiled guests. All test programs share a directory
// in the user's cache, because compiling a guest takes seconds. Without a home folder the
// directory is one below dir.
func CacheDir(dir string) string {
	if cache, err := os.UserCacheDir(); err == nil {
		return filepath.Join(cache, "pdproxy")
	}
	return filepath.Join(dir, "cache")
}

// Pair returns facts with two prefill and two decode rows. do, if not "", selects the
// guest's action, through the request's model.
func Pair(do string) *abi.PlaceFacts {
	f := &abi.PlaceFacts{Flow: abi.FlowPrefillFirst, Fixed: -1}
	if do != "" {
		f.Request.Model = "do:" + do
	}
	for i := range uint32(4) {
		role := abi.RolePrefill
		if i >= 2 {
			role = abi.RoleDecode
		}
		f.Candidates = append(f.Candidates, abi.Candidate{Instance: i + 1, Group: 1, Roles: role})
	}
	return f
}
