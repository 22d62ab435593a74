package config

import (
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
)

// discovery checks [discovery.*].
func (k *checker) discovery() {
	d := k.config.Discovery
	for i, place := range d.Allow {
		k.place(indexKey("discovery.allow", i), place)
	}
	k.registry(d)
	if d.TRTLLM.ClusterURI != "" {
		k.cluster("discovery.trtllm.cluster_uri", d.TRTLLM.ClusterURI, "etcd://", "http://")
		if strings.LastIndex(d.TRTLLM.ClusterURI, "http://") > 0 {
			k.add("discovery.trtllm.cluster_uri", "an http:// address must be the only address: pdproxy serves the store, or etcd does")
		}
		k.storage(d.TRTLLM)
	}
	if d.TRTLLM.MetadataURI != "" {
		k.cluster("discovery.trtllm.metadata_uri", d.TRTLLM.MetadataURI, "etcd://")
	}
	k.positive("discovery.trtllm.refresh_interval", int64(d.TRTLLM.RefreshInterval))
	k.etcd("discovery.etcd", d.Etcd.Access())
	k.required("discovery.etcd.prefix", d.Etcd.Prefix)
	if strings.Contains(d.TRTLLM.ClusterName, "/") {
		k.add("discovery.trtllm.cluster_name", "must not contain /")
	}
	k.dns()
	k.sglangRegistries()
	k.kubernetes()
}

// etcd checks the access to an etcd in the table at.
func (k *checker) etcd(at string, a EtcdAccess) {
	for i, endpoint := range a.Endpoints {
		k.httpURL(indexKey(joinKey(at, "endpoints"), i), endpoint)
	}
	k.together(joinKey(at, "cert"), a.Cert, joinKey(at, "key"), a.Key)
	k.together(joinKey(at, "username"), a.Username, joinKey(at, "password_file"), a.PasswordFile)
	if a.PasswordFile != "" && !a.PlainHTTP {
		for i, endpoint := range a.Endpoints {
			if exposed(endpoint) {
				k.add(joinKey(at, "password_file"), "would be sent without encryption: endpoints[%d] is neither https nor loopback; needs https or %s.plain_http", i, at)
				break
			}
		}
	}
}

// storage checks the address at which the proxy serves TensorRT-LLM's cluster storage.
func (k *checker) storage(t DiscoveryTRTLLM) {
	address, served := strings.CutPrefix(t.ClusterURI, "http://")
	switch {
	case !served || !validHostPort(address):
	case !isLoopback(address) && !t.Open && t.TokenFile == "":
		k.add("discovery.trtllm.cluster_uri", "%q is not loopback, so any host that can reach it can receive prompts: needs discovery.trtllm.token_file or discovery.trtllm.open", t.ClusterURI)
	case overlap(address, k.config.Server.Listen):
		k.add("discovery.trtllm.cluster_uri", "must differ from server.listen")
	case overlap(address, k.config.Admin.Listen):
		k.add("discovery.trtllm.cluster_uri", "must differ from admin.listen")
	}
}

// registry checks [discovery.moriio].
func (k *checker) registry(d Discovery) {
	m := d.MoRIIO
	if m.Listen == "" {
		return
	}
	// ZMQ writes every address as *.
	address := strings.Replace(m.Listen, "//*:", "//0.0.0.0:", 1)
	k.zmq("discovery.moriio.listen", address)
	guarded := m.Open || m.PasswordFile != "" || m.OwnHost && len(d.Allow) > 0
	if hostPort, isTCP := strings.CutPrefix(address, "tcp://"); isTCP && validHostPort(hostPort) && !isLoopback(hostPort) && !guarded {
		k.add("discovery.moriio.listen", "%q is not loopback, so any host that can reach it can receive prompts: needs discovery.moriio.password_file, or own_host with discovery.allow, or discovery.moriio.open", m.Listen)
	}
}

// place requires an entry of discovery.allow: an address, a network, or a name.
func (k *checker) place(key, value string) {
	if strings.Contains(value, "/") {
		if p, err := netip.ParsePrefix(value); err != nil || p.Masked() != p {
			k.add(key, "invalid network %q: want one such as 10.0.0.0/8", value)
		}
		return
	}
	if value == "" || strings.Trim(value, ".") == "" || !validHost(value) {
		k.add(key, "must be an address, a network or a host name, found %q", value)
	}
}

// together requires two keys that need each other to be both set or both empty.
func (k *checker) together(one, value, other, otherValue string) {
	switch {
	case value != "" && otherValue == "":
		k.add(one, "needs %s", other)
	case value == "" && otherValue != "":
		k.add(other, "needs %s", one)
	}
}

// dns checks [discovery.dns] and its patterns.
func (k *checker) dns() {
	d := k.config.Discovery.DNS
	k.positive("discovery.dns.interval", int64(d.Interval))
	if d.Server != "" && !validHostPort(d.Server) {
		k.add("discovery.dns.server", "invalid address %q: want host:port", d.Server)
	}
	k.oneOf("discovery.dns.family", d.Family, "", "4", "6")
	names := map[string]string{}
	for i, e := range d.Engines {
		at := indexKey("discovery.dns.engine", i)
		if u, err := url.Parse(e.URL); err == nil {
			switch srv := strings.HasPrefix(u.Hostname(), "_"); {
			case srv && u.Port() != "":
				k.add(joinKey(at, "url"), "must have no port: it comes from the SRV records")
			case !srv && net.ParseIP(u.Hostname()) != nil:
				k.add(joinKey(at, "url"), "must have a name that is looked up, not an address")
			}
		}
		k.pattern(at, e, names)
	}
}

// sglangRegistries checks [discovery.sglang] and its patterns.
func (k *checker) sglangRegistries() {
	d := k.config.Discovery.SGLang
	k.positive("discovery.sglang.interval", int64(d.Interval))
	names := map[string]string{}
	for i, e := range d.Engines {
		at := indexKey("discovery.sglang.engine", i)
		k.pattern(at, e, names)
		if e.Role != RolePrefill {
			k.add(joinKey(at, "role"), "must be %q: only engines that prefill have a bootstrap registry", RolePrefill)
		}
		if e.Connector != ConnectorSGLang {
			k.add(joinKey(at, "connector"), "must be %q", ConnectorSGLang)
		}
		for key, set := range map[string]bool{"bootstrap_host": e.BootstrapHost != "", "bootstrap_port": e.BootstrapPort != 0} {
			if set {
				k.add(joinKey(at, key), "must not be set: discovery.sglang.engine.url contains it")
			}
		}
	}
}

// pattern checks an engine that is a pattern for found engines: the host of its
// addresses may be *.
func (k *checker) pattern(at string, e Engine, names map[string]string) {
	e.KVEvents = strings.Replace(e.KVEvents, "//*:", "//0.0.0.0:", 1)
	e.KVReplay = strings.Replace(e.KVReplay, "//*:", "//0.0.0.0:", 1)
	k.engine(at, e, names)
}

// kubernetes checks [discovery.kubernetes] and its patterns.
func (k *checker) kubernetes() {
	d := k.config.Discovery.Kubernetes
	if d.API != "" {
		k.httpURL("discovery.kubernetes.api", d.API)
		if exposed(d.API) && d.TokenFile != "" {
			k.add("discovery.kubernetes.token_file", "would be sent without encryption: discovery.kubernetes.api is neither https nor loopback")
		}
	}
	k.podLabels(d)
	names := map[string]string{}
	k.kubePatterns("discovery.kubernetes.engine", d.Engines, names, "the name of a Service as its host: SERVICE or SERVICE.NAMESPACE")
	k.kubePatterns("discovery.kubernetes.pool", d.Pools, names, "the name of an InferencePool as its host: POOL or POOL.NAMESPACE")
}

// kubePatterns checks patterns whose host names an object of Kubernetes.
func (k *checker) kubePatterns(key string, patterns []Engine, names map[string]string, host string) {
	for i, e := range patterns {
		at := indexKey(key, i)
		if u, err := url.Parse(e.URL); err == nil && u.Hostname() != "" && (net.ParseIP(u.Hostname()) != nil || !validHost(u.Hostname()) || strings.HasPrefix(u.Hostname(), "_")) {
			k.add(joinKey(at, "url"), "must have %s", host)
		}
		k.pattern(at, e, names)
	}
}

// cluster requires one or more addresses, separated by commas, each a scheme followed
// by host:port.
func (k *checker) cluster(key, value string, schemes ...string) {
	for part := range strings.SplitSeq(value, ",") {
		valid := false
		for _, scheme := range schemes {
			address, found := strings.CutPrefix(strings.TrimSpace(part), scheme)
			valid = valid || found && validHostPort(address)
		}
		if !valid {
			k.add(key, "invalid address: want %shost:port", strings.Join(schemes, "host:port or "))
			return
		}
	}
}

// fleet checks [fleet].
func (k *checker) fleet() {
	f := k.config.Fleet
	k.together("fleet.tls.cert", f.TLS.Cert, "fleet.tls.key", f.TLS.Key)
	k.together("fleet.tls.cert", f.TLS.Cert, "fleet.tls.ca", f.TLS.CA)
	// A disagg id has 6 bits for the worker and 8 for the node.
	k.within("fleet.workers", f.Workers, 0, 64)
	k.within("fleet.node_id", f.NodeID, -1, 255)
	k.positive("fleet.patience", int64(f.Patience))
	if f.NodeID == -1 && f.Workers > 0 {
		k.add("fleet.node_id", "must not be -1 with fleet.workers: the ids would have no bits for the workers")
	}
	if f.Listen != "" {
		k.dialOrListen("fleet.listen", f.Listen)
		if betweenHosts(f.Listen) && !f.proven() && !f.Open {
			k.add("fleet.listen", "%q is not loopback: needs fleet.token_file, fleet.tls or fleet.open", f.Listen)
		}
		if isLoopback(f.Listen) && !f.proven() && !f.Open && k.config.hasKeys() {
			k.add("fleet.listen", "every user of this host could connect as a worker and read the API keys of engines and remotes: needs fleet.token_file, fleet.tls, fleet.open or a Unix socket")
		}
		if betweenHosts(f.Listen) && f.PlainHTTP && f.TokenFile == "" && !f.Open {
			k.add("fleet.plain_http", "needs fleet.token_file or fleet.open: plain HTTP shows no certificate")
		}
	}
	if f.Coordinator != "" {
		if f.Coordinator != CoordinatorLeader {
			k.dialOrListen("fleet.coordinator", f.Coordinator)
		} else if !f.Elects() {
			k.add("fleet.coordinator", "%q needs fleet.etcd.endpoints or fleet.lease.name", CoordinatorLeader)
		}
		if f.dialsHosts() && !f.proven() && !f.Open {
			k.add("fleet.coordinator", "%q is not loopback, so a host on the path could pose as the coordinator: needs fleet.token_file, fleet.tls or fleet.open", f.Coordinator)
		}
		if f.Listen != "" {
			k.add("fleet.coordinator", "must not be set together with fleet.listen: a process is a coordinator or connects to one")
		}
	}
}

// proven reports whether workers and coordinators authenticate each other.
func (f Fleet) proven() bool { return f.TokenFile != "" || f.TLS.Enabled() }

// dialsHosts reports whether the coordinator that workers dial may be on another host.
func (f Fleet) dialsHosts() bool {
	if f.Coordinator != CoordinatorLeader {
		return betweenHosts(f.Coordinator)
	}
	if f.Lease.Name != "" {
		return true
	}
	for _, endpoint := range f.Etcd.Endpoints {
		if u, err := url.Parse(endpoint); err == nil && !hostIP(u.Hostname()).IsLoopback() {
			return true
		}
	}
	return false
}

// betweenHosts reports whether other hosts can reach a well-formed host:port or
// unix:path.
func betweenHosts(address string) bool {
	_, _, err := net.SplitHostPort(address)
	return err == nil && !strings.HasPrefix(address, "unix:") && !isLoopback(address)
}

// exposed reports whether traffic to a well-formed URL can be read on the path: it is
// http:// to another host.
func exposed(address string) bool {
	u, err := url.Parse(address)
	return err == nil && u.Scheme == "http" && !hostIP(u.Hostname()).IsLoopback()
}

// election checks the requirements of several coordinators: [fleet.etcd], and an
// address that other hosts can dial.
func (k *checker) election() {
	f := k.config.Fleet
	k.name("fleet.name", f.Name)
	k.etcd("fleet.etcd", f.Etcd.Access())
	if lease := time.Duration(f.Etcd.Lease); lease < 2*time.Second || lease%time.Second != 0 {
		k.add("fleet.etcd.lease", "must be whole seconds, at least 2s, found %v", f.Etcd.Lease)
	}
	k.fleetLease(f)
	if f.Advertise != "" {
		k.dialOrListen("fleet.advertise", f.Advertise)
		if f.Listen == "" {
			k.add("fleet.advertise", "needs fleet.listen")
		}
	}
	if !f.Elects() || f.Coordinator != "" {
		return
	}
	if f.Listen == "" {
		key := "fleet.etcd.endpoints"
		if f.Lease.Name != "" {
			key = "fleet.lease.name"
		}
		k.add(key, "needs fleet.listen, where workers and other coordinators reach this one, or fleet.coordinator = %q", CoordinatorLeader)
		return
	}
	if f.Advertise == "" && f.Lease.Name == "" && f.ListensEverywhere() {
		k.add("fleet.listen", "other hosts cannot connect to %q: needs fleet.advertise", f.Listen)
	}
}

// fleetLease checks [fleet.lease].
func (k *checker) fleetLease(f Fleet) {
	if d := time.Duration(f.Lease.Duration); d < 2*time.Second || d%time.Second != 0 {
		k.add("fleet.lease.duration", "must be whole seconds, at least 2s, found %v", f.Lease.Duration)
	}
	if f.Lease.Name == "" {
		return
	}
	k.kubeName("fleet.lease.name", f.Lease.Name)
	if len(f.Etcd.Endpoints) > 0 {
		k.add("fleet.lease.name", "must not be set together with fleet.etcd.endpoints")
	}
}

// kubeName requires NAME or NAME.NAMESPACE of an object in Kubernetes.
func (k *checker) kubeName(key, value string) {
	name, namespace, named := strings.Cut(value, ".")
	if !kubeLabel.MatchString(name) || named && !kubeLabel.MatchString(namespace) {
		k.add(key, "want NAME or NAME.NAMESPACE in the form of Kubernetes, found %q", value)
	}
}

// kubeLabel is the form of names in Kubernetes without dots (RFC 1123).
var kubeLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

// isHeaderName reports whether name is a token of RFC 9110, section 5.6.2.
func isHeaderName(name string) bool {
	for _, c := range []byte(name) {
		if !isAlphanumeric(c) && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return name != ""
}

// hasKeys reports whether an engine, also a found one, or a remote has an API key. Workers get all
// these keys.
func (c *Config) hasKeys() bool {
	return slices.ContainsFunc(c.Serving(), func(e Engine) bool { return e.APIKeyFile != "" }) ||
		slices.ContainsFunc(c.Remotes, func(r Remote) bool { return r.APIKeyFile != "" })
}
