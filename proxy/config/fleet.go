package config

import (
	"net"
	"slices"
	"time"
)

// Discovery configures the search for instances beyond the [[engine]] entries.
// docs/howto/discovery.md describes each source.
type Discovery struct {
	// Allow lists the permitted addresses of found engines: addresses (10.1.2.3),
	// networks (10.0.0.0/8), host names, or all names below one (.llm.svc). A host name
	// is compared as written, never resolved. Default empty: any address.
	Allow []string `toml:"allow"`
	// MoRIIO accepts registrations of vLLM engines with MoRI-IO.
	MoRIIO DiscoveryMoRIIO `toml:"moriio"`
	// TRTLLM configures the two layouts in which TensorRT-LLM workers register.
	TRTLLM DiscoveryTRTLLM `toml:"trtllm"`
	// Etcd finds engines in records below a prefix of etcd.
	Etcd DiscoveryEtcd `toml:"etcd"`
	// File finds engines in a watched file.
	File DiscoveryFile `toml:"file"`
	// DNS finds engines at the addresses of names.
	DNS DiscoveryDNS `toml:"dns"`
	// SGLang finds prefill engines by their bootstrap registries.
	SGLang DiscoverySGLang `toml:"sglang"`
	// Kubernetes finds engines by EndpointSlices and InferencePools.
	Kubernetes DiscoveryKubernetes `toml:"kubernetes"`
}

// DiscoveryMoRIIO is the registration of vLLM MoRI-IO engines.
type DiscoveryMoRIIO struct {
	// Listen is the address, tcp://host:port, of the ZMQ ROUTER where engines
	// register; engines found need no [[engine]]. Default "": off.
	Listen string `toml:"listen"`
	// PasswordFile is a file with the password that peers must send, by PLAIN security
	// of ZeroMQ. Default "": none, because vLLM's engines support none.
	PasswordFile string `toml:"password_file"`
	// OwnHost allows a peer to register only the address from which it connects.
	// Default false.
	OwnHost bool `toml:"own_host"`
	// Open allows a Listen address beyond loopback without PasswordFile, and without
	// OwnHost with discovery.allow. Any host that can reach the address then receives
	// prompts. Default false.
	Open bool `toml:"open"`
}

// DiscoveryTRTLLM is the two layouts in which TensorRT-LLM workers register.
type DiscoveryTRTLLM struct {
	// ClusterURI is the store of the disagg_cluster layout: one or more etcd://
	// addresses, separated by commas, or http://host:port, at which the proxy itself
	// serves the storage routes. Default "": off.
	ClusterURI string `toml:"cluster_uri"`
	// ClusterName is the cluster's name in that layout. Default "".
	ClusterName string `toml:"cluster_name"`
	// TokenFile is a file with the bearer token that workers must send to the routes
	// that the proxy serves. Default "": none.
	TokenFile string `toml:"token_file"`
	// Open allows the proxy to serve the routes beyond loopback without a token. Any
	// host that can reach the address then receives prompts. Default false.
	Open bool `toml:"open"`
	// MetadataURI is the etcd:// address of the older metadata-server layout.
	// Default "": off.
	MetadataURI string `toml:"metadata_uri"`
	// RefreshInterval is the time between two scans of MetadataURI. Default
	// 10s; never 0.
	RefreshInterval Duration `toml:"refresh_interval"`
}

// DiscoveryEtcd is pdproxy's own records in etcd: JSON of an [[engine]], under
// a lease.
type DiscoveryEtcd struct {
	// Endpoints are the etcd servers, http(s)://host:port. Default empty: off.
	Endpoints []string `toml:"endpoints"`
	// Prefix is the key prefix of the records. Default "/pdproxy/engines/"; never
	// empty.
	Prefix string `toml:"prefix"`
	// Username is the user in etcd; it needs PasswordFile. Default "": etcd requires
	// none.
	Username string `toml:"username"`
	// PasswordFile is a file with the user's password. Default "".
	PasswordFile string `toml:"password_file"`
	// CA is a file of CA certificates (PEM) that may sign etcd's. Default "":
	// the system's.
	CA string `toml:"ca"`
	// Cert is a file (PEM) with the client certificate for etcd; set together with Key.
	// Default "": none.
	Cert string `toml:"cert"`
	// Key is a file (PEM) with the private key of Cert. Default "": none.
	Key string `toml:"key"`
	// PlainHTTP allows the password on http:// endpoints of other hosts, where any host
	// on the path can read it. Default false.
	PlainHTTP bool `toml:"plain_http"`
}

// Access returns the access to the etcd with the records.
func (d DiscoveryEtcd) Access() EtcdAccess {
	return EtcdAccess{Endpoints: d.Endpoints, Username: d.Username, PasswordFile: d.PasswordFile, CA: d.CA, Cert: d.Cert, Key: d.Key, PlainHTTP: d.PlainHTTP}
}

// EtcdAccess has the keys for access to an etcd. Several tables of the configuration have
// these keys.
type EtcdAccess struct {
	Endpoints              []string // http(s)://host:port
	Username, PasswordFile string
	CA, Cert, Key          string // files (PEM)
	PlainHTTP              bool   // the password may go to http:// endpoints of other hosts
}

// Complete reports whether a has the keys that need each other.
func (a EtcdAccess) Complete() bool {
	return (a.Cert != "") == (a.Key != "") && (a.Username != "") == (a.PasswordFile != "")
}

// DiscoveryFile is a watched list of engines.
type DiscoveryFile struct {
	// Path is the file, TOML or JSON. Default "": off.
	Path string `toml:"path"`
}

// DiscoveryDNS lists DNS names whose addresses are engines.
type DiscoveryDNS struct {
	// Interval is the time between two lookups of a name. Default 5s; never 0.
	Interval Duration `toml:"interval"`
	// Server is the DNS server, host:port. Default "": the system's.
	Server string `toml:"server"`
	// Family selects the addresses of a name that are engines: "4", "6", or "" for
	// both. Default "".
	Family string `toml:"family"`
	// Engines lists the names to look up. Each entry is an [[engine]] that is a pattern for the
	// found engines. The proxy looks up the host of the entry's url: A and AAAA records, or SRV
	// records if the host begins with an underscore. The proxy replaces a host "*" in kv_events and
	// kv_replay by the found host.
	Engines []Engine `toml:"engine"`
}

// DiscoverySGLang lists bootstrap registries of SGLang's prefill engines. A registry
// reports the engine's address and its number of ranks.
type DiscoverySGLang struct {
	// Interval is the time between two queries of a registry. Default 5s; never 0.
	Interval Duration `toml:"interval"`
	// Engines are the registries: each is an [[engine]] whose url is the registry's
	// address; the port may be omitted if it is 8998.
	Engines []Engine `toml:"engine"`
}

// DiscoveryKubernetes is the EndpointSlices of Services.
type DiscoveryKubernetes struct {
	// API is the API server, http(s)://host:port. Default "": that of the cluster in
	// which this process is a pod.
	API string `toml:"api"`
	// TokenFile is a file with the token for the API server, read for each request.
	// Default "": inside a cluster that of the pod's service account, else none.
	TokenFile string `toml:"token_file"`
	// CA is a file of CA certificates (PEM) that may sign the API server's.
	// Default "": inside a cluster that of the service account, else the
	// system's.
	CA string `toml:"ca"`
	// Namespace is the namespace of Services whose name has none. Default "": the pod's
	// own.
	Namespace string `toml:"namespace"`
	// Pods is a label selector of the pods whose labels and annotations describe the
	// engines further; "*" selects all. It also bounds the pods of Pools. Default "": pods
	// are read for Pools only.
	Pods string `toml:"pods"`
	// Labels lists the labels of pods that become labels of their engines, for policies:
	// NAME, or NAME=LABEL for a label of another name. Without Pods, the labels are those
	// of the Service. Default empty.
	Labels []string `toml:"labels"`
	// Engines are the Services: each is an [[engine]] that serves as a pattern for the
	// found engines. The host of its url is SERVICE or SERVICE.NAMESPACE; without a
	// port the port is that of the EndpointSlices. A host "*" in kv_events and
	// kv_replay is replaced by the found one.
	Engines []Engine `toml:"engine"`
	// Pools are InferencePools of the Gateway API Inference Extension (v1), whose ready
	// pods are engines: each is an [[engine]] that serves as a pattern, as in Engines. The
	// host of its url is POOL or POOL.NAMESPACE; without a port, each target port of the
	// pool is an engine of each pod.
	Pools []Engine `toml:"pool"`
}

// Fleet configures one coordinator with many workers.
type Fleet struct {
	// Workers is how many worker processes, at most 64, share the public port.
	// Default 0: one process does everything.
	Workers int `toml:"workers"`
	// Listen is the coordinator's address for workers: host:port or unix:path. If it is
	// set, it also serves TensorRT-LLM's fleet workers (docs/concepts/fleet.md). Default "": a
	// private Unix socket.
	Listen string `toml:"listen"`
	// TokenFile is a file with the token, of at least 16 characters, by which workers
	// and coordinators authenticate each other; in HTTP it is a bearer token. Default
	// "": none.
	TokenFile string `toml:"token_file"`
	// Open allows Listen and Coordinator beyond loopback, and Listen on a TCP port of
	// loopback while engines have API keys, without a token and without certificates.
	// The connections are encrypted but not authenticated: any host that reaches Listen
	// can join as a worker, and gets the engines' API keys. Default false.
	Open bool `toml:"open"`
	// PlainHTTP also serves the routes of TensorRT-LLM's workers to other hosts over
	// HTTP without TLS. Any host on the path can then read and change the token, the
	// engines' addresses, conversation ids and prompt hashes. The link of pdproxy's own
	// workers between hosts always uses TLS. Default false.
	PlainHTTP bool `toml:"plain_http"`
	// Coordinator is the address of the coordinator, host:port or unix:path, or
	// "leader" for the one that is elected through Etcd or Lease. If it is set, this process
	// runs workers of that coordinator. Default "": none.
	Coordinator string `toml:"coordinator"`
	// NodeID is this host's part of the disagg ids, 0 to 255. Hosts with the same engines
	// need different numbers. -1 derives one of 16384 numbers from the host's name and
	// server.listen, for one process. With Etcd, NodeID is not used: each coordinator
	// gets its number from etcd. Default 0.
	NodeID int `toml:"node_id"`
	// Patience is how long a worker waits for the coordinator to place a request before
	// it places the request itself. Default 50ms; never 0.
	Patience Duration `toml:"patience"`
	// Name distinguishes the fleets that share an etcd. Default "pdproxy"; never empty.
	Name string `toml:"name"`
	// Advertise is this coordinator's address for workers and coordinators of other
	// hosts, host:port or unix:path. Default "": Listen; with Lease and a Listen on all
	// addresses, the address that connections of this host to the API server have.
	Advertise string `toml:"advertise"`
	// Dir is the directory, of mode 0700, for the sockets and locks of this
	// configuration's processes. It must belong to the user of the processes, and only
	// root and that user may be able to write to the folders above, unless they have
	// the sticky bit. Default "": one derived from the path of the configuration file,
	// below pdproxy in $XDG_RUNTIME_DIR, below /run/pdproxy, or below pdproxy-UID in
	// the temporary directory.
	Dir string `toml:"dir"`
	// TLS is certificates for Listen and Coordinator.
	TLS FleetTLS `toml:"tls"`
	// Etcd is the etcd through which several coordinators elect their leader.
	Etcd FleetEtcd `toml:"etcd"`
	// Lease is the Lease of Kubernetes through which several coordinators elect their leader.
	Lease FleetLease `toml:"lease"`
}

// Elects reports whether several coordinators elect their leader.
func (f Fleet) Elects() bool { return len(f.Etcd.Endpoints) > 0 || f.Lease.Name != "" }

// ListensEverywhere reports whether Listen is a port on all addresses of the host.
func (f Fleet) ListensEverywhere() bool {
	host, _, err := net.SplitHostPort(f.Listen)
	ip := net.ParseIP(host)
	return err == nil && (host == "" || ip != nil && ip.IsUnspecified())
}

// FleetTLS holds certificates by which the hosts of a fleet authenticate each other:
// all three files, or none. They are read again when they change. Without them the
// connections between hosts use TLS too, and the token authenticates both sides.
type FleetTLS struct {
	// Cert is a file (PEM) with this host's certificate, for clients and servers: its
	// names and addresses are those that other hosts dial. Default "".
	Cert string `toml:"cert"`
	// Key is a file (PEM) with the private key of Cert. Default "".
	Key string `toml:"key"`
	// CA is a file (PEM) with the certificates of the CAs that sign every host's Cert.
	// Default "".
	CA string `toml:"ca"`
}

// Enabled reports whether there are certificates.
func (t FleetTLS) Enabled() bool { return t.CA != "" }

// Complete reports whether the table has the keys that need each other.
func (t FleetTLS) Complete() bool {
	return (t.Cert != "") == (t.Key != "") && (t.Cert != "") == (t.CA != "")
}

// CoordinatorLeader, as Fleet.Coordinator, is the coordinator that leads.
const CoordinatorLeader = "leader"

// FleetEtcd is the etcd through which several coordinators elect their leader. Below
// /pdproxy/fleets/NAME/ are the leader's record and the candidates, each with a lease.
type FleetEtcd struct {
	// Endpoints are the etcd servers, http(s)://host:port. Default empty: there
	// is one coordinator.
	Endpoints []string `toml:"endpoints"`
	// Lease is the time for which a coordinator stays the leader after its last contact
	// with etcd. It is a whole number of seconds, at least 2. Default 5s.
	Lease Duration `toml:"lease"`
	// Username is the user in etcd; it needs PasswordFile. Default "": etcd requires
	// none.
	Username string `toml:"username"`
	// PasswordFile is a file with the user's password. Default "".
	PasswordFile string `toml:"password_file"`
	// CA is a file of CA certificates (PEM) that may sign etcd's. Default "":
	// the system's.
	CA string `toml:"ca"`
	// Cert is a file (PEM) with the client certificate for etcd; set together with Key.
	// Default "": none.
	Cert string `toml:"cert"`
	// Key is a file (PEM) with the private key of Cert. Default "": none.
	Key string `toml:"key"`
	// PlainHTTP allows the password on http:// endpoints of other hosts, where any host
	// on the path can read it. Default false.
	PlainHTTP bool `toml:"plain_http"`
}

// FleetLease is the Lease (coordination.k8s.io/v1) through which several coordinators elect their
// leader. The keys of discovery.kubernetes name the API server.
type FleetLease struct {
	// Name is the Lease: NAME or NAME.NAMESPACE. The coordinators make it, and NAME-ids for the
	// disagg ids. Default "": there is one coordinator, or Etcd elects it.
	Name string `toml:"name"`
	// Duration is the time after the leader's last contact with the API server after which
	// another coordinator leads. It is a whole number of seconds, at least 2. Default 5s.
	Duration Duration `toml:"duration"`
}

// Access returns the access to the fleet's etcd.
func (e FleetEtcd) Access() EtcdAccess {
	return EtcdAccess{Endpoints: e.Endpoints, Username: e.Username, PasswordFile: e.PasswordFile, CA: e.CA, Cert: e.Cert, Key: e.Key, PlainHTTP: e.PlainHTTP}
}

func defaultFleet() Fleet {
	return Fleet{Patience: Duration(50 * time.Millisecond), Name: "pdproxy", Etcd: FleetEtcd{Lease: seconds(5)}, Lease: FleetLease{Duration: seconds(5)}}
}

func defaultDiscovery() Discovery {
	return Discovery{
		TRTLLM:     DiscoveryTRTLLM{RefreshInterval: seconds(10)},
		Etcd:       DiscoveryEtcd{Prefix: "/pdproxy/engines/"},
		DNS:        DiscoveryDNS{Interval: seconds(5)},
		SGLang:     DiscoverySGLang{Interval: seconds(5)},
		Kubernetes: DiscoveryKubernetes{Labels: []string{}},
	}
}

// Serving lists the engines that the configuration names, with the patterns of discovery.
func (c *Config) Serving() []Engine {
	d := &c.Discovery
	return slices.Concat(c.AllEngines(), d.DNS.Engines, d.SGLang.Engines, d.Kubernetes.Engines, d.Kubernetes.Pools)
}

// Enabled reports whether any source of engines is configured.
func (d Discovery) Enabled() bool {
	return d.MoRIIO.Listen != "" || d.TRTLLM.ClusterURI != "" || d.TRTLLM.MetadataURI != "" ||
		len(d.Etcd.Endpoints) > 0 || d.File.Path != "" || len(d.DNS.Engines) > 0 || len(d.SGLang.Engines) > 0 || len(d.Kubernetes.Engines)+len(d.Kubernetes.Pools) > 0
}
