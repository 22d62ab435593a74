package grpcserver

import (
	"testing"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

func TestMain(m *testing.M) { proxytest.Main(m) }
