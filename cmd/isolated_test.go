package cmd

import (
	"os"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

// asProgram is the environment variable with which the binary of the tests is the program.
const asProgram = "PDPROXY_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Exit(Main(os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(isolated.Run(m))
}
