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
	"github.com/pdproxy/pdproxy/proxy/lograte"
)

const (
	// lookupTimeout bounds one lookup, including all servers and tries.
	lookupTimeout = 10 * time.Second
	// maxMisses is the number of consecutive valid answers that may lack a found engine
	// before it is removed: name servers may answer with a part of their records, and
	// report an unknown name while they start.
	maxMisses = 2
)

// dnsSource looks up names whose addresses are engines.
type dnsSource struct {
	resolver *net.Resolver
	server   string // host:port; "": the system's
	interval time.Duration
	networks []string // address families, in the form of LookupIP
	names    []*dnsName
	log      *slog.Logger
	refusals *lograte.Limiter[string] // decides which refused engines are logged, by name
}

// dnsName is one name and the engines found for it.
type dnsName struct {
	pattern config.Engine
	url     *url.URL
	found   map[string]*dnsEngine // by the host and port of the engine's URL
	trouble trouble
}

// dnsEngine is one engine that was found.
type dnsEngine struct {
	spec   config.Engine
	misses int // consecutive valid answers without it
}

func newDNS(cfg config.DiscoveryDNS, log *slog.Logger) *dnsSource {
	s := &dnsSource{resolver: &net.Resolver{}, server: cfg.Server, interval: time.Duration(cfg.Interval), networks: []string{"ip4", "ip6"}, log: log, refusals: newRefusals()}
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
		if err != nil { // cannot happen: cfg was validated
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

// Run looks up every name periodically.
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
	n.trouble.note(s.named(err))
	if err == nil {
		s.update(n, hosts)
	}
}

// named makes an error name the server that was asked. The resolver names the system's server,
// because it does not know that Dial connects to another one.
func (s *dnsSource) named(err error) error {
	if e := (*net.DNSError)(nil); s.server != "" && errors.As(err, &e) {
		asked := *e
		asked.Server = s.server
		return &asked
	}
	return err
}

// lookup returns the host and port, in URL form, of each engine of a name. The answer
// that a name does not exist is valid.
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

// lookupSRV returns the engines of a service name.
func (s *dnsSource) lookupSRV(ctx context.Context, name string) ([]string, error) {
	_, records, err := s.resolver.LookupSRV(ctx, "", "", name)
	if err != nil && !notFound(err) && len(records) == 0 {
		return nil, err
	}
	return services(records), nil
}

// services returns the targets of SRV records. Priority and weight are ignored: the
// place policy distributes requests.
func services(records []*net.SRV) (hosts []string) {
	for _, r := range records {
		target := strings.TrimSuffix(r.Target, ".")
		if target == "" || r.Port == 0 { // RFC 2782: the service is explicitly not available
			continue
		}
		hosts = append(hosts, net.JoinHostPort(target, strconv.Itoa(int(r.Port))))
	}
	return hosts
}

// notFound reports whether an error reports that there is no such record.
func notFound(err error) bool {
	var e *net.DNSError
	return errors.As(err, &e) && e.IsNotFound
}

// update applies a valid answer.
func (s *dnsSource) update(n *dnsName, hosts []string) {
	for host, e := range n.found {
		if slices.Contains(hosts, host) {
			e.misses = 0
		} else if e.misses++; e.misses > maxMisses {
			delete(n.found, host)
		}
	}
	for _, host := range hosts {
		if n.found[host] != nil {
			continue
		}
		spec := n.engineAt(host)
		if err := spec.Check(); err != nil {
			if s.refusals.Allow(spec.Name) {
				s.log.Error("found engine refused", "source", s.Name(), "engine", excerpt(spec.Name), "error", excerpt(err.Error()))
			}
			continue
		}
		n.found[host] = &dnsEngine{spec: spec}
	}
}

// engineAt returns the pattern with a found host and port.
func (n *dnsName) engineAt(host string) config.Engine {
	e, found := atHost(n.pattern, n.url, host)
	at := found.Hostname()
	if n.url.Port() == "" && found.Port() != "" { // SRV: a host may have several engines
		at += ":" + found.Port()
	}
	e.Name = n.pattern.Name + "@" + at
	return e
}

// atHost returns a pattern whose addresses contain a found host, and its port if there
// is one, and the pattern's new URL. at is the pattern's URL.
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
