package node

import (
	"cmp"
	"net"
	"os"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator/election"
	"github.com/pdproxy/pdproxy/proxy/coordinator/replica"
	"github.com/pdproxy/pdproxy/proxy/coordinator/standby"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/etcd"
	"github.com/pdproxy/pdproxy/proxy/kube"
)

// joinElection makes the coordinator a member of the election of the leader: by
// fleet.etcd or fleet.lease, or else among the coordinators of this host.
func (l *leaderSide) joinElection(cfg *config.Config) error {
	host, _ := os.Hostname() // may be empty: the name is only displayed
	dir := l.n.options.Dir
	o := standby.Options{
		Server: l.workers, Listeners: l.listeners, Copy: replica.NewCopy(l.n.knowledge.state.Conversations),
		Instances: engineNames{l.n.registry}, ClaimSocket: l.claimSocket, Token: []byte(l.access.token), Dial: l.access.credentials.Dial, Node: host, Log: l.n.log,
	}
	if cfg.Fleet.Elects() {
		address, err := advertised(cfg)
		if err != nil {
			return err
		}
		e, err := newElection(cfg, address, l.n)
		if err != nil {
			return err
		}
		o.Address, o.Election = address, e
	} else {
		o.Address = "unix:" + dir.SocketPath(linkName)
		e := election.NewAlone(election.Options{Address: o.Address, Node: host, Log: l.n.log}, dir)
		o.Election, o.Succeed = e, e.Succeed
		l.raiseEpoch = e.Succeed
	}
	l.member = standby.New(o)
	return nil
}

// newElection returns this process's access to the election by fleet.etcd or fleet.lease. With an empty
// address the process is no candidate and only follows the leader's record.
func newElection(cfg *config.Config, address string, n *Node) (*election.Election, error) {
	host, _ := os.Hostname() // may be empty: the name is only displayed
	o := election.Options{Name: cfg.Fleet.Name, Address: address, Node: host, TTL: time.Duration(cfg.Fleet.Etcd.Lease), Log: n.log}
	var err error
	if cfg.Fleet.Lease.Name != "" {
		o.TTL = time.Duration(cfg.Fleet.Lease.Duration)
		o.Lease, err = openLease(cfg)
	} else {
		o.Etcd, err = etcd.Open(cfg.Fleet.Etcd.Access(), "fleet.etcd")
	}
	if err != nil {
		return nil, err
	}
	return election.New(o), nil
}

// openLease returns the access to fleet.lease.
func openLease(cfg *config.Config) (*election.Lease, error) {
	client, err := kube.Open(cfg.Discovery.Kubernetes)
	if err != nil {
		return nil, err
	}
	name, namespace, _ := strings.Cut(cfg.Fleet.Lease.Name, ".")
	if namespace = cmp.Or(namespace, client.Namespace); namespace == "" {
		return nil, config.Problems{cfg.Problem("fleet.lease.name", "needs NAME.NAMESPACE, or discovery.kubernetes.namespace")}
	}
	return &election.Lease{Client: client, Namespace: namespace, Name: name}, nil
}

// advertised returns the address at which other hosts reach the coordinator of this
// configuration. Pods with one configuration listen on all addresses; the address of a pod is the
// one that its connections to the API server have.
func advertised(cfg *config.Config) (string, error) {
	if cfg.Fleet.Advertise != "" {
		return cfg.Fleet.Advertise, nil
	}
	if cfg.Fleet.Lease.Name == "" || !cfg.Fleet.ListensEverywhere() {
		return cfg.Fleet.Listen, nil
	}
	client, err := kube.Open(cfg.Discovery.Kubernetes)
	if err != nil {
		return "", err
	}
	ip, err := client.LocalIP()
	if err != nil {
		return "", config.Problems{cfg.Problem("fleet.advertise", "is needed: the address of this host toward the API server is unknown: "+err.Error())}
	}
	_, port, _ := net.SplitHostPort(cfg.Fleet.Listen) // validated
	return net.JoinHostPort(ip.String(), port), nil
}

// claimSocket makes workers of this host find this coordinator.
func (l *leaderSide) claimSocket() {
	if err := l.name.claim(); err != nil {
		l.n.log.Error("workers of this host do not find this coordinator", "error", err)
	}
}

// reclaim makes workers of this host find this coordinator again, after another
// coordinator took the lead and ended. Some workers may have seen the higher epoch of the
// other coordinator and would refuse the present epoch. So reclaim raises the epoch.
func (l *leaderSide) reclaim() {
	l.n.log.Warn("another coordinator that led here has ended; this one takes its place")
	l.claimSocket()
	if l.raiseEpoch != nil {
		l.raiseEpoch()
	}
}

// engineNames translates between the numbers and the names of a registry's engines.
type engineNames struct{ *engine.Registry }

// Name implements standby.Instances.
func (r engineNames) Name(number uint32) string {
	for _, i := range r.Snapshot().Instances {
		if i.ID == number {
			return i.Spec.Name
		}
	}
	return ""
}

// Number implements standby.Instances.
func (r engineNames) Number(name string) uint32 {
	if i := r.Snapshot().Instance(name); i != nil {
		return i.ID
	}
	return 0
}
