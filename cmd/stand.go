package cmd

import (
	"os"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/coordinator/replica"
	"github.com/pdproxy/pdproxy/proxy/coordinator/standby"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/etcd"
)

// stand makes the coordinator's part in who leads: by fleet.etcd, or alone.
func (l *leading) stand(cfg *config.Config, part Part) error {
	host, _ := os.Hostname() // empty: it only shows
	o := standby.Options{
		Server: l.workers, Listeners: l.listeners, Copy: replica.NewCopy(l.n.knowledge.state.Conversations),
		Instances: named{l.n.registry}, Appear: l.appear, Token: []byte(l.access.token), Dial: l.access.credentials.Dial, Node: host, Log: l.n.log,
	}
	if len(cfg.Fleet.Etcd.Endpoints) > 0 {
		e, err := newElection(cfg, advertised(cfg), l.n)
		if err != nil {
			return err
		}
		o.Address, o.Election = advertised(cfg), e
	} else {
		o.Address = "unix:" + part.Dir.SocketPath(linkName)
		e := election.NewAlone(election.Options{Address: o.Address, Node: host, Log: l.n.log}, part.Dir)
		o.Election, o.Succeed = e, e.Succeed
		l.succeed = e.Succeed
	}
	l.office = standby.New(o)
	return nil
}

// newElection is this process's part in the election by fleet.etcd; an empty
// address only follows it.
func newElection(cfg *config.Config, address string, n *Node) (*election.Election, error) {
	access, err := etcd.Open(cfg.Fleet.Etcd.Access(), "fleet.etcd")
	if err != nil {
		return nil, err
	}
	host, _ := os.Hostname() // empty: it only shows
	return election.New(election.Options{
		Etcd: access, Name: cfg.Fleet.Name, Address: address, Node: host,
		Lease: time.Duration(cfg.Fleet.Etcd.Lease), Log: n.log,
	}), nil
}

// advertised is where the coordinator of this configuration is dialled from other
// hosts.
func advertised(cfg *config.Config) string {
	if cfg.Fleet.Advertise != "" {
		return cfg.Fleet.Advertise
	}
	return cfg.Fleet.Listen
}

// appear makes workers of this host find this coordinator.
func (l *leading) appear() {
	if err := l.name.take(); err != nil {
		l.n.log.Error("workers of this host do not find this coordinator", "error", err)
	}
}

// regain makes workers of this host find this coordinator again, after one that had
// begun to lead in its place has ended. Some may have seen that one's epoch, and would
// refuse this one's, which is below.
func (l *leading) regain() {
	l.n.log.Warn("another coordinator that led here has ended; this one takes its place")
	l.appear()
	if l.succeed != nil {
		l.succeed()
	}
}

// named is the engines of a registry by their names.
type named struct{ *engine.Registry }

// Name implements standby.Instances.
func (r named) Name(number uint32) string {
	for _, i := range r.Snapshot().Instances {
		if i.ID == number {
			return i.Spec.Name
		}
	}
	return ""
}

// Number implements standby.Instances.
func (r named) Number(name string) uint32 {
	if i := r.Snapshot().Instance(name); i != nil {
		return i.ID
	}
	return 0
}
