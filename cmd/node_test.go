package cmd

import (
	"fmt"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

func TestIDRange(t *testing.T) {
	cfg := config.Default()
	cfg.Fleet.NodeID = 7
	if node, worker := idRange(&cfg); node != 7 || worker != 0 {
		t.Errorf("%d, %d", node, worker)
	}
	cfg.Fleet.NodeID = -1
	seen := map[[2]int]bool{}
	for n := range 64 {
		cfg.Server.Listen = fmt.Sprintf("10.0.0.%d:8000", n)
		node, worker := idRange(&cfg)
		if again, _ := idRange(&cfg); again != node {
			t.Error("not the same twice")
		}
		if _, err := disaggid.New(node, worker); err != nil {
			t.Error(err)
		}
		seen[[2]int{node, worker}] = true
	}
	if len(seen) < 60 { // all, but for a chance of one in eight
		t.Errorf("64 processes have %d numbers", len(seen))
	}
}
