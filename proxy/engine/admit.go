package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/state/mediacache"
	"github.com/pdproxy/pdproxy/proxy/state/predict"
)

// maxRanks bounds the ranks of all instances of a registry together, draining ones included. Each
// rank has memory and a slot in the index. Engines that register, and the writers of stores of
// engines, name the number of their ranks.
const maxRanks = 1 << 16

// errRanks is why an instance is refused that has no room beside the others.
var errRanks = fmt.Errorf("the engines together have more than %d ranks", maxRanks)

// newInstance builds an instance from its spec; r.mu is held.
func (r *Registry) newInstance(source string, spec config.Engine) (*Instance, error) {
	i := &Instance{Spec: spec, Source: source, detail: detailOf(&spec), KVLease: spec.KVLease(), evictNow: make(chan struct{}, 1), probeNow: make(chan struct{}, 1)}
	i.staying, i.cancel = context.WithCancel(context.Background())
	u, err := url.Parse(spec.URL)
	if err != nil || u.Hostname() == "" {
		return nil, errors.New("url is not an http address")
	}
	i.Host, i.Prefix = u.Hostname(), strings.TrimRight(u.Path, "/")
	var ok bool
	if i.Role, ok = abi.ParseRole(spec.Role); !ok {
		return nil, fmt.Errorf("unknown role %q", spec.Role)
	}
	if i.protocol, ok = r.o.Protocols(spec.Connector); !ok {
		return nil, cmp.Or(config.RetiredConnector(spec.Connector), fmt.Errorf("unknown connector %q", spec.Connector))
	}
	i.Flow = i.protocol.Flow()
	if i.kvHosts, err = config.ParseKVHosts(spec.KVHosts); err != nil {
		return nil, fmt.Errorf("kv_hosts: %w", err)
	}
	switch {
	case spec.Name == "" || spec.Ranks < 1:
		return nil, errors.New("name and at least one rank are needed")
	case spec.Ranks > maxRanks:
		return nil, errRanks
	}
	if _, err := config.ParseKVAddress(spec.KVAddress); err != nil {
		return nil, fmt.Errorf("kv_address: %w", err)
	} else if err := spec.CheckKVAddress(); err != nil {
		return nil, fmt.Errorf("kv_address: %w", err)
	}
	if host, _ := spec.SideChannelOf(0); spec.Pushes() && (spec.EngineID == "" || host == "") {
		return nil, fmt.Errorf("connector %q needs an engine_id and a side_channel", spec.Connector)
	} else if spec.SideChannelled() && host == "" {
		return nil, fmt.Errorf("connector %q needs a side_channel", spec.Connector)
	}
	i.Load = make([]load.Counter, spec.Ranks)
	i.Queues = make([]predict.Target, spec.Ranks)
	i.Media = make([]mediacache.Cache, spec.Ranks)
	if r.o.APIKey != nil {
		if i.APIKey, err = r.o.APIKey(spec); err != nil {
			return nil, err
		}
	}
	i.since.Store(time.Now().UnixMilli())
	o := circuit.Options{Rules: &r.circuit, Opened: i.evictNow}
	if r.reports != nil {
		o.Report = func(failed bool) { r.reports.breaker(i, failed) }
	}
	i.Breaker.Init(o)
	return i, nil
}

// room returns the number of ranks that further instances may have; r.mu is held.
func (r *Registry) room() int {
	room := maxRanks
	for _, i := range r.instances {
		room -= len(i.Load)
	}
	return room
}

// connect creates the clients of new instances and the transports of their probes.
func (r *Registry) connect(come []*Instance) error {
	for _, i := range come {
		var err error
		if i.Client, err = r.o.NewClient(i.Spec); err != nil {
			return &SpecError{Name: i.Spec.Name, Cause: fmt.Errorf("create client: %w", err)}
		}
		i.asks = &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
		if r.o.NewProbe == nil {
			i.asks.Transport = &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: 10 * time.Second}
		} else if i.asks.Transport, err = r.o.NewProbe(i.Spec); err != nil {
			return &SpecError{Name: i.Spec.Name, Cause: fmt.Errorf("create probe: %w", err)}
		}
		r.watchProbes(i)
	}
	return nil
}

// admit publishes new instances and makes Run probe them; r.mu is held.
func (r *Registry) admit(come []*Instance) {
	for _, i := range come {
		r.number(i)
		r.instances = append(r.instances, i)
	}
	r.publish()
	signal(r.wake)
}

// unwatched returns, once, the instances for which Run has not started a prober yet.
func (r *Registry) unwatched() []*Instance {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []*Instance
	for _, i := range r.instances {
		if !i.watched {
			i.watched = true
			list = append(list, i)
		}
	}
	return list
}
