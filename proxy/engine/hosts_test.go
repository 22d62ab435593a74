package engine

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

func TestOwns(t *testing.T) {
	addresses := func(list ...string) []netip.Addr {
		var a []netip.Addr
		for _, s := range list {
			a = append(a, netip.MustParseAddr(s))
		}
		return a
	}
	at := func(host string, list ...string) *Instance {
		i := &Instance{Host: host}
		i.facts.Store(&Facts{Addresses: addresses(list...)})
		return i
	}
	far := at("10.0.0.9", "10.0.0.9")
	for _, tt := range []struct {
		name    string
		host    string // host of the URL
		spec    config.Engine
		facts   Facts
		peer    *Instance
		yes, no []string
	}{
		{"an address", "10.0.0.5", config.Engine{}, Facts{}, far,
			[]string{"10.0.0.5"}, []string{"", "10.0.0.6", "evil", "127.0.0.1", "localhost", "::1", "0.0.0.0", "10.0.0.5.evil", "10.0.0.5:80", "[10.0.0.5]"}},
		{"a name", "p0.svc", config.Engine{}, Facts{Addresses: addresses("10.0.0.5", "fd00::5")}, far,
			[]string{"p0.svc", "P0.SVC", "10.0.0.5", "fd00::5", "::ffff:10.0.0.5"}, []string{"p1.svc", "p0", "10.0.0.6", "127.0.0.1"}},
		{"the loopback", "localhost", config.Engine{}, Facts{Addresses: addresses("127.0.0.1", "10.0.0.7")}, far,
			[]string{"10.0.0.7"}, []string{"localhost", "127.0.0.1", "::1", "127.0.1.1", "10.0.0.8", "0.0.0.0"}},
		{"the loopback, for no engine", "127.0.0.1", config.Engine{}, Facts{Addresses: addresses("127.0.0.1")}, nil, nil, []string{"127.0.0.1"}},
		{"two on this host", "localhost", config.Engine{}, Facts{Addresses: addresses("127.0.0.1")}, &Instance{Host: "127.0.0.1"},
			[]string{"localhost", "127.0.0.1", "::1"}, []string{"10.0.0.8"}},
		{"two engines on this host, one by its name", "localhost", config.Engine{}, Facts{Addresses: addresses("127.0.0.1", "10.0.0.7", "fd00::7")},
			at("me.svc", "10.0.0.7", "fd00::7"), []string{"localhost", "127.0.0.1"}, nil},
		{"two engines on this host, one of them by its host name", "me.svc", config.Engine{}, Facts{Addresses: addresses("10.0.0.7")},
			at("127.0.0.1", "127.0.0.1", "10.0.0.7", "fd00::7"), []string{"localhost", "127.0.0.1"}, nil},
		{"a service, partly on this host", "localhost", config.Engine{}, Facts{Addresses: addresses("127.0.0.1", "10.0.0.7")},
			at("all.svc", "10.0.0.7", "10.0.0.8"), nil, []string{"localhost", "127.0.0.1"}},
		{"another loopback address", "127.0.0.1", config.Engine{}, Facts{Addresses: addresses("127.0.0.1", "10.0.0.7")},
			at("127.0.0.2", "127.0.0.2", "127.0.0.1", "10.0.0.7"), nil, []string{"localhost", "127.0.0.1"}},
		{"two on one host", "10.0.0.5", config.Engine{}, Facts{}, &Instance{Host: "10.0.0.5"},
			[]string{"10.0.0.5", "127.0.0.1", "localhost"}, []string{"10.0.0.6"}},
		{"configured", "p0.svc", config.Engine{KVHosts: "10.1.0.0/16, 192.168.0.4,rdma0.svc,fd00::/8"}, Facts{}, far,
			[]string{"p0.svc", "10.1.2.3", "192.168.0.4", "rdma0.svc", "fd12::1"}, []string{"10.2.0.1", "192.168.0.5", "rdma1.svc", "127.0.0.1"}},
		{"anywhere", "p0.svc", config.Engine{KVHosts: "*"}, Facts{}, far, []string{"evil", "127.0.0.1"}, []string{""}},
		{"trusted", "p0.svc", config.Engine{Name: SourceStatic}, Facts{}, far,
			[]string{"p0.svc", "10.9.9.9", "rdma.far", "fd00::1"}, []string{"", "localhost", "127.0.0.1", "::1", "127.0.1.1", "0.0.0.0", "::"}},
		{"trusted, on one host", "10.0.0.5", config.Engine{Name: SourceStatic}, Facts{}, &Instance{Host: "10.0.0.5"},
			[]string{"localhost", "127.0.0.1", "10.9.9.9"}, nil},
		{"of the configuration, with hosts", "p0.svc", config.Engine{Name: SourceStatic, KVHosts: "10.1.0.0/16"}, Facts{}, far,
			[]string{"p0.svc", "10.1.2.3"}, []string{"10.9.9.9", "localhost"}},
		{"its other addresses", "p0.svc", config.Engine{SideChannel: "10.0.1.1:5600", BootstrapHost: "10.0.1.2"},
			Facts{KVAddress: config.KVAddress{Host: "10.0.1.3"}}, far,
			[]string{"10.0.1.1", "10.0.1.2", "10.0.1.3"}, []string{"10.0.1.4"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i := &Instance{Host: tt.host, Spec: tt.spec, Source: tt.spec.Name}
			var err error
			if i.kvHosts, err = config.ParseKVHosts(tt.spec.KVHosts); err != nil {
				t.Fatal(err)
			}
			i.facts.Store(&tt.facts)
			for _, host := range tt.yes {
				if !i.Owns(host, tt.peer) {
					t.Errorf("not its own: %q", host)
				}
			}
			for _, host := range tt.no {
				if i.Owns(host, tt.peer) {
					t.Errorf("its own: %q", host)
				}
			}
		})
	}
}

// TestOwnsPort: an instance owns its known ports and the following ports, one for each
// rank.
func TestOwnsPort(t *testing.T) {
	for _, tt := range []struct {
		name    string
		spec    config.Engine
		facts   Facts
		yes, no []int
	}{
		{"nothing known", config.Engine{Ranks: 2}, Facts{}, []int{1, 5600, 65535}, nil},
		{"side channel", config.Engine{SideChannel: "h:5600"}, Facts{}, []int{5600}, []int{0, 5599, 5601, 22}},
		{"ranks", config.Engine{SideChannel: "h:5600", Ranks: 4}, Facts{}, []int{5600, 5603}, []int{5604, 5599}},
		{"ranks that it reports", config.Engine{SideChannel: "h:5600"}, Facts{DPSize: 2}, []int{5601}, []int{5602}},
		{"registered", config.Engine{}, Facts{KVAddress: config.KVAddress{Host: "h", Handshake: 6301, Notify: 61005}}, []int{6301, 61005}, []int{6302, 22}},
	} {
		i := &Instance{Spec: tt.spec}
		i.facts.Store(&tt.facts)
		for _, port := range tt.yes {
			if !i.OwnsPort(port) {
				t.Errorf("%s: not its own: %d", tt.name, port)
			}
		}
		for _, port := range tt.no {
			if i.OwnsPort(port) {
				t.Errorf("%s: its own: %d", tt.name, port)
			}
		}
	}
}

// TestAddresses: names are resolved together with the facts. Known addresses stay while
// the name server does not answer.
func TestAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		var found []netip.Addr
		f.o.Resolve = func(_ context.Context, host string) ([]netip.Addr, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			if host != "p" || found == nil {
				return nil, errors.New("no such host")
			}
			return found, nil
		}
		set := func(list []netip.Addr) {
			f.mu.Lock()
			defer f.mu.Unlock()
			found = list
		}
		set([]netip.Addr{netip.MustParseAddr("10.0.0.5")})
		f.must(t, f.Apply("etcd", []config.Engine{f.spec("p", "prefill", "fake")}, 0))
		f.start(t)
		p := f.get(t, "p")
		if !p.Owns("10.0.0.5", nil) || p.Owns("10.0.0.6", nil) {
			t.Errorf("addresses %v", p.Facts().Addresses)
		}
		for _, now := range [][]netip.Addr{nil, {netip.MustParseAddr("10.0.0.6")}} {
			set(now)
			time.Sleep(time.Minute)
			synctest.Wait()
			if p.Owns("10.0.0.5", nil) != (now == nil) || p.Owns("10.0.0.6", nil) != (now != nil) {
				t.Errorf("addresses %v", p.Facts().Addresses)
			}
		}
		if f.said() != "p ready" {
			t.Error("a change of the address was reported as a restart")
		}
	})
}
