package node

import (
	"context"
	"hash/fnv"
	"io"
	"os"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/coordinator/idstore"
	"github.com/pdproxy/pdproxy/proxy/etcd"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// openIDs returns the source of the disagg ids that this process uses.
//
// If possible, a mark in fleet.etcd, beside fleet.lease or in the fleet's directory shows which ids may have
// been used. Then no later start issues these ids again, even if the clock was set back.
// Without a writable directory, ids begin at the time of the clock. A process that starts
// while etcd or the API server does not answer has no ids until it answers.
//
// In a coordinator, openIDs fails without the mark: the coordinator grants ids to
// workers, which have no marks. A worker's source is empty at first.
func (n *Node) openIDs(cfg *config.Config) (*disaggid.Source, error) {
	if n.options.Role == RoleWorker {
		return disaggid.NewSource(), nil
	}
	if len(cfg.Fleet.Etcd.Endpoints) > 0 {
		access, err := etcd.Open(cfg.Fleet.Etcd.Access(), "fleet.etcd")
		if err != nil {
			return nil, err
		}
		host, _ := os.Hostname() // may be empty: then the fleet's name alone identifies the process
		return n.keepIDs(idstore.NewEtcd(access, idstore.Prefix, cfg.Fleet.Name+" "+host)), nil
	}
	node, worker := idRange(cfg)
	if cfg.Fleet.Lease.Name != "" {
		lease, err := openLease(cfg)
		if err != nil {
			return nil, err
		}
		store := idstore.NewLease(lease.Client, election.LeasePath(lease.Namespace), lease.Name+"-ids", disaggid.Block{Node: uint8(node), Lines: 64})
		return n.keepIDs(store), nil
	}
	if n.options.Dir == nil {
		return disaggid.New(node, worker)
	}
	lines := disaggid.Block{Node: uint8(node), Lines: 64}
	if cfg.Fleet.NodeID < 0 {
		lines.First, lines.Lines = uint8(worker), 1
	}
	k := idstore.NewKeeper(idstore.NewFile(n.options.Dir, lines), disaggid.Width, n.log)
	if err := k.Tend(context.Background(), time.Now()); err != nil { // the keeper logged it
		if n.options.Role == RoleCoordinator {
			return nil, exit.Failed(err)
		}
		n.log.Warn("ids begin at the clock: if the clock is set back, ids repeat", "dir", n.options.Dir.Name())
		return disaggid.New(node, worker)
	}
	n.ids = k
	return k.Source(), nil
}

// keepIDs returns the source of the ids that a store of several coordinators reserves.
func (n *Node) keepIDs(store idstore.Store) *disaggid.Source {
	n.ids = idstore.NewKeeper(store, disaggid.Width, n.log)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = n.ids.Tend(ctx, time.Now()) // the keeper logs an error and tries again
	return n.ids.Source()
}

// idRange returns the node number and the worker number of this process. With
// fleet.node_id -1 they are hashes of the host name and the public address, which no
// other process has in common.
func idRange(cfg *config.Config) (node, worker int) {
	if cfg.Fleet.NodeID >= 0 {
		return cfg.Fleet.NodeID, 0
	}
	h := fnv.New32a()
	name, _ := os.Hostname()                             // may be empty: then the address alone counts
	_, _ = io.WriteString(h, name+" "+cfg.Server.Listen) // a hash returns no error
	sum := h.Sum32()
	return int(sum & 255), int(sum >> 8 & 63)
}
