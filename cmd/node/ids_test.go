package node

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// TestIDsOfOneProcess: with a folder, the ids of a start begin after those that the start before
// may have used, whatever the clock shows. They stay in the process's own range.
func TestIDsOfOneProcess(t *testing.T) {
	mint := func(nodeID int, dir *privatedir.Dir) (abi.MintFacts, *Node) {
		t.Helper()
		cfg := config.Default()
		cfg.Fleet.NodeID = nodeID
		n := &Node{log: slog.New(slog.DiscardHandler), options: Options{Dir: dir}}
		s, err := n.openIDs(&cfg)
		if err != nil {
			t.Fatal(err)
		}
		f, ok := s.Next()
		if !ok {
			t.Fatal("no id")
		}
		return f, n
	}
	dir := privatedirtest.Open(t)
	first, n := mint(7, dir)
	if n.ids == nil || first.Node != 7 || first.UnixMilli > time.Now().UnixMilli() {
		t.Errorf("mint(7, dir) = %+v", first)
	}
	if next, _ := mint(7, dir); next.UnixMilli < first.UnixMilli+disaggid.Width.Milliseconds() {
		t.Errorf("%+v after %+v", next, first)
	}
	cfg := config.Default()
	cfg.Fleet.NodeID = -1
	node, worker := idRange(&cfg)
	if f, _ := mint(-1, dir); int(f.Node) != node || int(f.Worker) != worker {
		t.Errorf("got %+v, want node %d and worker %d", f, node, worker)
	}
	away := privatedirtest.Open(t)
	if err := os.RemoveAll(away.Name()); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []*privatedir.Dir{nil, away} {
		if f, n := mint(7, dir); n.ids != nil || f.Node != 7 || f.Worker != 0 || f.UnixMilli > time.Now().UnixMilli() {
			t.Errorf("in %v: %+v", dir, f)
		}
	}
}

// TestIDsWithoutTheirEtcd: a process that does not reach etcd starts without ids.
func TestIDsWithoutTheirEtcd(t *testing.T) {
	cfg := config.Default()
	cfg.Fleet.Etcd.Endpoints = []string{"http://127.0.0.1:1"}
	n := &Node{log: slog.New(slog.DiscardHandler), options: Options{Dir: privatedirtest.Open(t)}}
	s, err := n.openIDs(&cfg)
	if err != nil || n.ids == nil {
		t.Fatal(err)
	}
	if f, ok := s.Next(); ok {
		t.Errorf("s.Next() = %+v", f)
	}
	cfg.Fleet.Etcd.CA = filepath.Join(t.TempDir(), "away")
	if _, err := n.openIDs(&cfg); err == nil {
		t.Error("no error, although the file does not exist")
	}
}

func TestIDRange(t *testing.T) {
	cfg := config.Default()
	cfg.Fleet.NodeID = 7
	if node, worker := idRange(&cfg); node != 7 || worker != 0 {
		t.Errorf("idRange(&cfg) = %d, %d, want 7, 0", node, worker)
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
	if len(seen) < 60 { // with a probability of 7/8 all differ
		t.Errorf("64 processes have %d numbers", len(seen))
	}
}
