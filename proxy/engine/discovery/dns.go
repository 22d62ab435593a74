package discovery

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const (
	// lookupTimeout bounds one lookup, all servers and tries of it included.
	lookupTimeout = 10 * time.Second
	// missesBorne is how many good answers in a row may lack an engine that was
	// found before it is taken out: name servers may answer with a part of what
	// they have, and say that a name is unknown while they start.
	missesBorne = 2
)

// dnsSource is names whose addresses are engines.
type dnsSource struct {
	resolver *net.Resolver
	interval time.Duration
	networks []string // families of addresses, as LookupIP wants them
	names    []*dnsName
	log      *slog.Logger
}

// dnsName is one name and what is known behind it.
type dnsName struct {
	pattern config.Engine
	url     *url.URL
	found   map[string]*dnsEngine // by the host and port of the engine's URL
	trouble trouble
}

// dnsEngine is one engine that was found.
type dnsEngine struct {
	spec   config.Engine
	misses int // good answers in a row that lacked it
}

func newDNS(cfg config.DiscoveryDNS, log *slog.Logger) *dnsSource {
	s := &dnsSource{resolver: &net.Resolver{}, interval: time.Duration(cfg.Interval), networks: []string{"ip4", "ip6"}, log: log}
	if cfg.Family != "" {
		s.networks = []string{"ip" + cfg.Family}
	}
	if cfg.Server != "" {
		s.resolver.PreferGo = true
		s.resolver.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, cfg.Server)
		}
	}
	for _, e := range cfg.Engines {
		u, err := url.Parse(e.URL)
		if err != nil { // cfg is checked
			continue
		}
		s.names = append(s.names, &dnsName{
			pattern: e, url: u, found: map[string]*dnsEngine{}, trouble: trouble{log: log, source: "dns " + u.Hostname()},
		})
	}
	return s
}

// Name is the source of these engines in the registry.
func (*dnsSource) Name() string { return "dns" }

// Run looks every name up again and again.
func (s *dnsSource) Run(ctx context.Context, found func([]config.Engine)) {
	for {
		var wg sync.WaitGroup
		for _, n := range s.names {
			wg.Go(func() { s.refresh(ctx, n) })
		}
		wg.Wait()
		if ctx.Err() != nil {
			return
		}
		var engines []config.Engine
		for _, n := range s.names {
			for _, host := range slices.Sorted(maps.Keys(n.found)) {
				engines = append(engines, n.found[host].spec)
			}
		}
		found(engines)
		if !pause(ctx, s.interval) {
			return
		}
	}
}

// refresh looks one name up.
func (s *dnsSource) refresh(ctx context.Context, n *dnsName) {
	hosts, err := s.lookup(ctx, n)
	if ctx.Err() != nil {
		return
	}
	n.trouble.note(err)
	if err == nil {
		s.update(n, hosts)
	}
}

// lookup returns the host and port, as a URL has them, of each engine behind a
// name. That a name does not exist is a good answer.
func (s *dnsSource) lookup(ctx context.Context, n *dnsName) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	if host := n.url.Hostname(); strings.HasPrefix(host, "_") {
		return s.lookupSRV(ctx, host)
	}
	var hosts []string
	for _, network := range s.networks {
		ips, err := s.resolver.LookupNetIP(ctx, network, n.url.Hostname())
		if err != nil && !notFound(err) {
			return nil, err
		}
		for _, ip := range ips {
			host := ip.Unmap().WithZone("").String()
			switch port := n.url.Port(); {
			case port != "":
				host = net.JoinHostPort(host, port)
			case strings.Contains(host, ":"):
				host = "[" + host + "]"
			}
			hosts = append(hosts, host)
		}
	}
	return hosts, nil
}

// lookupSRV returns the engines behind a service's name.
func (s *dnsSource) lookupSRV(ctx context.Context, name string) ([]string, error) {
	_, records, err := s.resolver.LookupSRV(ctx, "", "", name)
	if err != nil && !notFound(err) && len(records) == 0 {
		return nil, err
	}
	return services(records), nil
}

// services returns the targets of SRV records, whatever their priority and
// weight: who gets which request is for the place policy to say.
func services(records []*net.SRV) (hosts []string) {
	for _, r := range records {
		target := strings.TrimSuffix(r.Target, ".")
		if target == "" || r.Port == 0 { // RFC 2782: the service is decidedly not there
			continue
		}
		hosts = append(hosts, net.JoinHostPort(target, strconv.Itoa(int(r.Port))))
	}
	return hosts
}

// notFound reports whether an error says that there is no such record.
func notFound(err error) bool {
	var e *net.DNSError
	return errors.As(err, &e) && e.IsNotFound
}

// update takes a good answer in.
func (s *dnsSource) update(n *dnsName, hosts []string) {
	for host, e := range n.found {
		if slices.Contains(hosts, host) {
			e.misses = 0
		} else if e.misses++; e.misses > missesBorne {
			delete(n.found, host)
		}
	}
	for _, host := range hosts {
		if n.found[host] != nil {
			continue
		}
		spec := n.engineAt(host)
		if err := spec.Check(); err != nil {
			s.log.Error("found engine refused", "source", s.Name(), "engine", spec.Name, "error", err)
			continue
		}
		n.found[host] = &dnsEngine{spec: spec}
	}
}

// engineAt is the pattern with a found host and port.
func (n *dnsName) engineAt(host string) config.Engine {
	e, found := atHost(n.pattern, n.url, host)
	at := found.Hostname()
	if n.url.Port() == "" && found.Port() != "" { // SRV: one host may have several
		at += ":" + found.Port()
	}
	e.Name = n.pattern.Name + "@" + at
	return e
}

// atHost is a pattern, whose URL is at, with a found host, and port if it has
// one, in its addresses; and its URL.
func atHost(pattern config.Engine, at *url.URL, host string) (config.Engine, *url.URL) {
	u := *at
	u.Host = host
	pattern.URL = u.String()
	bare := u.Hostname()
	if strings.Contains(bare, ":") {
		bare = "[" + bare + "]"
	}
	pattern.KVEvents = strings.Replace(pattern.KVEvents, "//*:", "//"+bare+":", 1)
	pattern.KVReplay = strings.Replace(pattern.KVReplay, "//*:", "//"+bare+":", 1)
	return pattern, &u
}
