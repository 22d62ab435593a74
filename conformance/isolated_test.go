package conformance

import (
	"os"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir/isolated"
)

func TestMain(m *testing.M) { os.Exit(isolated.Run(m)) }
