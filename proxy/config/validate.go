package config

import (
	"cmp"
	"net/url"
	"slices"
	"strings"
)

// Validate checks the whole of c and returns all problems, in no particular order.
// Parse calls it; code that builds a Config must call it too.
func (c *Config) Validate() []Problem {
	k := &checker{config: c}
	k.server()
	k.timeouts()
	k.policy()
	k.kv()
	k.conversation()
	k.plugins()
	k.upstreams()
	k.models()
	k.remotes()
	k.priorities()
	k.scores()
	k.tenants()
	k.jwts()
	k.engines()
	k.pairs()
	k.sleep()
	k.engineCare()
	k.discovery()
	k.fleet()
	k.election()
	k.sidecar()
	k.epp()
	k.listeners()
	k.durations()
	return c.complete(k.problems)
}

// leastBuffers is the minimum memory for buffers with which requests can be served.
const leastBuffers = ByteSize(1 << 20)

// server checks [server], [admin] and [limits].
func (k *checker) server() {
	s := k.config.Server
	k.positive("server.max_body", int64(s.MaxBody))
	k.positive("server.max_header", int64(s.MaxHeader))
	k.positive("server.read_header_timeout", int64(s.ReadHeaderTimeout))
	k.oneOf("server.http1", s.HTTP1, HTTP1Own, HTTP1NetHTTP)
	k.oneOf("server.access_log_format", s.AccessLogFormat, AccessLogJSON, AccessLogCommon)
	k.positive("server.idle_timeout", int64(s.IdleTimeout))
	k.positive("server.write_timeout", int64(s.WriteTimeout))
	if s.HTTP3 != "" && !s.UsesTLS() {
		k.add("server.http3", "needs TLS: set server.tls.cert and server.tls.key, server.acme.domains, or server.tls.self_signed")
	}
	k.tls("server.tls", s.TLS, s.ACME.Enabled())
	k.acme()

	for i, text := range s.TrustedProxies {
		if n, err := parseNetwork(text); err != nil {
			k.add(indexKey("server.trusted_proxies", i), "must be an IP address or a network such as 10.0.0.0/8, found %q", text)
		} else if n.Bits() == 0 {
			k.add(indexKey("server.trusted_proxies", i), "%q trusts every client to name its own address", text)
		}
	}
	for i, origin := range s.CORSOrigins {
		if !validOrigin(origin) {
			k.add(indexKey("server.cors_origins", i), "must be * or an origin as browsers send it, such as https://chat.example.org or http://localhost:3000, found %q", origin)
		}
	}
	k.engineRoutes()
	for i, name := range k.config.Admin.AllowedHosts {
		if name == "" || !validHost(name) {
			k.add(indexKey("admin.allowed_hosts", i), "must be a host name without a port, found %q", name)
		}
	}

	l := k.config.Limits
	k.atLeast("limits.max_exchanges", l.MaxExchanges, 1)
	k.atLeast("limits.queue", l.Queue, 0)
	if l.Queue > 0 {
		k.positive("limits.queue_timeout", int64(l.QueueTimeout))
	}
	k.atLeast("limits.no_engine_timeout", int(l.NoEngineTimeout), 0)
	k.atLeast("limits.per_client", l.PerClient, 0)
	k.atLeast("limits.max_connections", l.MaxConnections, 0)
	k.atLeast("limits.max_connections_per_address", l.MaxConnectionsPerAddress, -1)
	k.atLeast("limits.max_reading", l.MaxReading, 0)
	k.saturation(l)
	if l.BufferMemory > 0 && l.BufferMemory < leastBuffers {
		k.add("limits.buffer_memory", "must be at least %s, or 0B for a quarter of the memory, found %s", leastBuffers, l.BufferMemory)
	}
}

// saturation checks the limits of the engines' load.
func (k *checker) saturation(l Limits) {
	k.atLeast("limits.saturation_queue_depth", l.SaturationQueueDepth, 0)
	if u := l.SaturationKVUsage; !(u >= 0 && u <= 1) {
		k.add("limits.saturation_kv_usage", "must be from 0 to 1, found %v", u)
	} else if u > 0 && l.SaturationQueueDepth == 0 {
		k.add("limits.saturation_kv_usage", "needs limits.saturation_queue_depth, which bounds the requests between two reports of an engine")
	}
	if l.SaturationQueueDepth > 0 && k.config.Health.LoadInterval == 0 {
		k.add("limits.saturation_queue_depth", "needs health.load_interval, because the proxy learns the load of engines from their reports")
	}
}

// validOrigin reports whether browsers send the origin in this form (RFC 6454, 6.2): in
// lower case, without a default port, and without a path or a slash.
func validOrigin(origin string) bool {
	if origin == "*" {
		return true
	}
	u, err := url.Parse(origin)
	if err != nil || u.Scheme == "" || u.Hostname() == "" || u.Scheme+"://"+u.Host != origin || origin != strings.ToLower(origin) {
		return false
	}
	return !(u.Scheme == "http" && u.Port() == "80" || u.Scheme == "https" && u.Port() == "443")
}

// tls checks the certificate of a listener at the key at. elsewhere reports that another table
// has the certificate.
func (k *checker) tls(at string, t TLS, elsewhere bool) {
	switch {
	case t.Cert != "" && t.Key == "":
		k.add(at+".cert", "needs %s.key", at)
	case t.Cert == "" && t.Key != "":
		k.add(at+".key", "needs %s.cert", at)
	}
	if t.SelfSigned && (t.Cert != "" || t.Key != "") {
		k.add(at+".self_signed", "must not be set together with %s.cert and %s.key", at, at)
	}
	if t.ClientCA != "" && !t.Enabled() && !elsewhere {
		k.add(at+".client_ca", "needs TLS: set %s.cert and %s.key, or %s.self_signed", at, at, at)
	}
}

// timeouts checks [timeouts], in which zero would end every exchange.
func (k *checker) timeouts() {
	t := k.config.Timeouts
	k.positive("timeouts.prefill", int64(t.Prefill))
	k.positive("timeouts.first_byte", int64(t.FirstByte))
	k.positive("timeouts.stream_idle", int64(t.StreamIdle))
	k.positive("timeouts.handshake", int64(t.Handshake))
	k.positive("timeouts.transfer", int64(t.Transfer))
	k.positive("timeouts.deferred_write", int64(t.DeferredWrite))
	k.positive("timeouts.policy", int64(t.Policy))
	k.positive("timeouts.dial", int64(t.Dial))
	k.positive("timeouts.cleanup", int64(t.Cleanup))
}

// listeners checks the listening addresses, and that no two TCP addresses overlap.
// HTTP/3 uses UDP: it may have the port of server.listen.
func (k *checker) listeners() {
	c := k.config
	if c.Server.HTTP3 != "" {
		k.listen("server.http3", c.Server.HTTP3)
	}
	type listener struct{ key, address string }
	var tcp []listener
	if k.listen("server.listen", c.Server.Listen) {
		tcp = append(tcp, listener{"server.listen", c.Server.Listen})
	}
	if k.listen("admin.listen", c.Admin.Listen) {
		tcp = append(tcp, listener{"admin.listen", c.Admin.Listen})
		if !isLoopback(c.Admin.Listen) && c.Admin.TokenFile == "" {
			k.add("admin.listen", "%q is not loopback: needs admin.token_file", c.Admin.Listen)
		}
	}
	for i, name := range c.Metrics.Names {
		k.oneOf(indexKey("metrics.names", i), name, MetricNamesExtension, MetricNamesLLMD)
	}
	if c.Metrics.Listen != "" && k.listen("metrics.listen", c.Metrics.Listen) {
		tcp = append(tcp, listener{"metrics.listen", c.Metrics.Listen})
	}
	if c.EPP.Listen != "" && k.listen("epp.listen", c.EPP.Listen) {
		tcp = append(tcp, listener{"epp.listen", c.EPP.Listen})
	}
	tcp = append(tcp, listener{"discovery.moriio.listen", strings.TrimPrefix(c.Discovery.MoRIIO.Listen, "tcp://")},
		listener{"fleet.listen", c.Fleet.Listen})
	for i, l := range tcp {
		for _, earlier := range tcp[:i] {
			if !overlap(earlier.address, l.address) {
				continue
			}
			if _, set := k.config.lines[l.key]; !set && k.config.lines[earlier.key] > 0 {
				k.add(earlier.key, "%q is already used by %s, whose default is %q", earlier.address, l.key, l.address)
			} else {
				k.add(l.key, "%q is already used by %s", l.address, earlier.key)
			}
			break
		}
	}
}

// policy checks [policy]: every name must be a built-in's or a policy
// plugin's.
func (k *checker) policy() {
	p := k.config.Policy
	k.policyName("policy.plan", p.Plan, builtinPlans())
	k.policyName("policy.place", p.Place, builtinPlaces())
	k.policyName("policy.mint", p.Mint, builtinMints())
	k.policyName("policy.retain", p.Retain, builtinRetains())
	k.policyName("policy.evict", p.Evict, builtinEvicts())
	for i, name := range p.Order {
		k.policyName(indexKey("policy.order", i), name, builtinPlans())
		if slices.Contains(p.Order[:i], name) {
			k.add(indexKey("policy.order", i), "%q occurs twice in the list", name)
		}
	}
	k.oneOf("policy.runtime", p.Runtime, "wasm", "native")
}

// policyName requires the name of a built-in policy, of a [[plugin]], or of one policy
// of a [[plugin]] with several: plugin/policy. The policies of a plugin are known only
// when it is loaded.
func (k *checker) policyName(key, name string, builtins []string) {
	plugin, policy, within := strings.Cut(name, "/")
	for _, p := range k.config.Plugins {
		if p.Name != plugin || name == "" {
			continue
		}
		switch {
		case p.Phase == PhaseFilter:
			k.add(key, "[[plugin]] %q is a filter, not a policy", plugin)
		case within && policy == "":
			k.add(key, "%q has no policy name after the slash", name)
		}
		return
	}
	if !slices.Contains(builtins, name) {
		k.add(key, "no built-in policy or [[plugin]] is named %q%s the built-in ones are %s", plugin, cmp.Or(DidYouMean(plugin, builtins), ";"), quoteAll(builtins))
	}
}
