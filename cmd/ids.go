package cmd

import (
	"context"
	"hash/fnv"
	"io"
	"os"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/idstore"
	"github.com/pdproxy/pdproxy/proxy/etcd"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// openIDs returns what mints for a process that places requests. Where it can it
// keeps the mark of the ids that it may have used, so that no start issues them
// again, even after the clock was set back: in fleet.etcd, or in dir. Without a
// dir, or in one that cannot be written to, ids begin at the clock. One that
// starts while etcd is away has none until that answers.
//
// A coordinator that has neither does not start: it grants ids to workers, which
// have none of their own.
func (n *Node) openIDs(cfg *config.Config) (*disaggid.Source, error) {
	if n.part.Role == RoleWorker {
		return disaggid.NewSource(), nil
	}
	if len(cfg.Fleet.Etcd.Endpoints) > 0 {
		access, err := etcd.Open(cfg.Fleet.Etcd.Access(), "fleet.etcd")
		if err != nil {
			return nil, err
		}
		host, _ := os.Hostname() // empty: the fleet's name alone
		n.ids = idstore.NewKeeper(idstore.NewEtcd(access, idstore.Prefix, cfg.Fleet.Name+" "+host), disaggid.Width, n.log)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = n.ids.Tend(ctx, time.Now()) // it is logged, and tried again
		return n.ids.Source(), nil
	}
	node, worker := idRange(cfg)
	if n.part.Dir == nil {
		return disaggid.New(node, worker)
	}
	lines := disaggid.Block{Node: uint8(node), Lines: 64}
	if cfg.Fleet.NodeID < 0 {
		lines.First, lines.Lines = uint8(worker), 1
	}
	k := idstore.NewKeeper(idstore.NewFile(n.part.Dir, lines), disaggid.Width, n.log)
	if err := k.Tend(context.Background(), time.Now()); err != nil { // it is logged
		if n.part.Role == RoleCoordinator {
			return nil, failed(err)
		}
		n.log.Warn("ids begin at the clock: one that is set back repeats them", "dir", n.part.Dir.Name())
		return disaggid.New(node, worker)
	}
	n.ids = k
	return k.Source(), nil
}

// idRange is this process's node and worker number. Those of fleet.node_id -1 come
// from the names that no other process has.
func idRange(cfg *config.Config) (node, worker int) {
	if cfg.Fleet.NodeID >= 0 {
		return cfg.Fleet.NodeID, 0
	}
	h := fnv.New32a()
	name, _ := os.Hostname()                             // empty: the address alone
	_, _ = io.WriteString(h, name+" "+cfg.Server.Listen) // a hash takes all
	sum := h.Sum32()
	return int(sum & 255), int(sum >> 8 & 63)
}
