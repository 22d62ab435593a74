package config

import "time"

// Discovery is where instances beyond the [[engine]] entries are found.
// docs/discovery.md describes each source.
type Discovery struct {
	// Allow lists where found engines may be: addresses (10.1.2.3), networks
	// (10.0.0.0/8), host names, or the names below one (.llm.svc). A host name
	// is compared as it is written, never looked up. Default empty: anywhere.
	Allow []string `toml:"allow"`
	// MoRIIO is the registration of vLLM MoRI-IO engines.
	MoRIIO DiscoveryMoRIIO `toml:"moriio"`
	// TRTLLM is the two layouts in which TensorRT-LLM workers register.
	TRTLLM DiscoveryTRTLLM `toml:"trtllm"`
	// Etcd is pdproxy's own records.
	Etcd DiscoveryEtcd `toml:"etcd"`
	// File is a list of engines that is watched.
	File DiscoveryFile `toml:"file"`
	// DNS is names whose addresses are engines.
	DNS DiscoveryDNS `toml:"dns"`
	// SGLang is bootstrap registries of prefill engines.
	SGLang DiscoverySGLang `toml:"sglang"`
	// Kubernetes is EndpointSlices.
	Kubernetes DiscoveryKubernetes `toml:"kubernetes"`
}

// DiscoveryMoRIIO is the registration of vLLM MoRI-IO engines.
type DiscoveryMoRIIO struct {
	// Listen is the address, tcp://host:port, of the ZMQ ROUTER where engines
	// register; engines found need no [[engine]]. Default "": off.
	Listen string `toml:"listen"`
	// PasswordFile is a file with the password that peers must show, by PLAIN
	// security of ZeroMQ. Default "": none, which is all that vLLM's engines can.
	PasswordFile string `toml:"password_file"`
	// OwnHost lets a peer register only the address that it calls from. Default
	// false.
	OwnHost bool `toml:"own_host"`
	// Open lets Listen be other than loopback where neither PasswordFile nor
	// OwnHost with discovery.allow says who may register: whoever reaches the
	// address is sent prompts. Default false.
	Open bool `toml:"open"`
}

// DiscoveryTRTLLM is the two layouts in which TensorRT-LLM workers register.
type DiscoveryTRTLLM struct {
	// ClusterURI is the store of the disagg_cluster layout: one or more
	// etcd:// addresses, separated by commas, or http://host:port, where the
	// storage routes are served by the proxy. Default "": off.
	ClusterURI string `toml:"cluster_uri"`
	// ClusterName is the cluster's name in that layout. Default "".
	ClusterName string `toml:"cluster_name"`
	// TokenFile is a file with the bearer token that workers must show where
	// the proxy serves the routes. Default "": none.
	TokenFile string `toml:"token_file"`
	// Open lets the proxy serve the routes on an address that is not loopback
	// without a token. Whoever reaches it is sent prompts. Default false.
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
	// Prefix is where the records are. Default "/pdproxy/engines/"; never
	// empty.
	Prefix string `toml:"prefix"`
	// Username is the user that etcd knows; it needs PasswordFile. Default "":
	// etcd asks for none.
	Username string `toml:"username"`
	// PasswordFile is a file with the user's password. Default "".
	PasswordFile string `toml:"password_file"`
	// CA is a file of CA certificates (PEM) that may sign etcd's. Default "":
	// the system's.
	CA string `toml:"ca"`
	// Cert and Key are files (PEM) of the certificate that etcd is shown, each
	// with the other. Default "": none.
	Cert string `toml:"cert"`
	Key  string `toml:"key"`
	// PlainHTTP lets the password go to http:// endpoints of other hosts, where anybody
	// on the way can read it. Default false.
	PlainHTTP bool `toml:"plain_http"`
}

// Access is how the etcd with the records is reached.
func (d DiscoveryEtcd) Access() EtcdAccess {
	return EtcdAccess{Endpoints: d.Endpoints, Username: d.Username, PasswordFile: d.PasswordFile, CA: d.CA, Cert: d.Cert, Key: d.Key, PlainHTTP: d.PlainHTTP}
}

// EtcdAccess is how an etcd is reached: keys that several tables have.
type EtcdAccess struct {
	Endpoints              []string // http(s)://host:port
	Username, PasswordFile string
	CA, Cert, Key          string // files (PEM)
	PlainHTTP              bool   // the password may go to http:// endpoints of other hosts
}

// DiscoveryFile is a list of engines that is watched.
type DiscoveryFile struct {
	// Path is the file, TOML or JSON. Default "": off.
	Path string `toml:"path"`
}

// DiscoveryDNS is names whose addresses are engines.
type DiscoveryDNS struct {
	// Interval is the time between two lookups of a name. Default 5s; never 0.
	Interval Duration `toml:"interval"`
	// Server is the DNS server that is asked, host:port. Default "": the
	// system's.
	Server string `toml:"server"`
	// Family is which addresses of a name are engines: "4", "6", or "" for
	// both. Default "".
	Family string `toml:"family"`
	// Engines are the names: each an [[engine]] that is a pattern for what is
	// found. The host of its url is looked up: A and AAAA records, or SRV where
	// it begins with an underscore. A host "*" in kv_events and kv_replay is
	// that of the found one.
	Engines []Engine `toml:"engine"`
}

// DiscoverySGLang is bootstrap registries of SGLang's prefill engines, which
// tell where the engine is and how many ranks it has.
type DiscoverySGLang struct {
	// Interval is the time between two questions to a registry. Default 5s;
	// never 0.
	Interval Duration `toml:"interval"`
	// Engines are the registries: each an [[engine]] whose url is the registry's
	// address, without a port 8998.
	Engines []Engine `toml:"engine"`
}

// DiscoveryKubernetes is the EndpointSlices of Services.
type DiscoveryKubernetes struct {
	// API is the API server, http(s)://host:port. Default "": that of the
	// cluster this process is a pod of.
	API string `toml:"api"`
	// TokenFile is a file with the token that the API server is shown, read
	// again for each request. Default "": inside a cluster that of the pod's
	// service account, else none.
	TokenFile string `toml:"token_file"`
	// CA is a file of CA certificates (PEM) that may sign the API server's.
	// Default "": inside a cluster that of the service account, else the
	// system's.
	CA string `toml:"ca"`
	// Namespace is where Services are whose name has none. Default "": the
	// pod's own.
	Namespace string `toml:"namespace"`
	// Pods is a label selector of the pods whose labels and annotations say
	// more of the engines; "*" is all. Default "": pods are not read.
	Pods string `toml:"pods"`
	// Engines are the Services: each an [[engine]] that is a pattern for what is
	// found. The host of its url is SERVICE or SERVICE.NAMESPACE; without a port
	// it is that of the EndpointSlices. A host "*" in kv_events and kv_replay is
	// that of the found one.
	Engines []Engine `toml:"engine"`
}

// Fleet is one coordinator with many workers.
type Fleet struct {
	// Workers is how many worker processes, at most 64, share the public port.
	// Default 0: one process does everything.
	Workers int `toml:"workers"`
	// Listen is the coordinator's address for workers: host:port or
	// unix:path. Where it is set, TensorRT-LLM's fleet workers are served there
	// too (docs/fleet.md). Default "": a private Unix socket.
	Listen string `toml:"listen"`
	// TokenFile is a file with the token, of at least 16 characters, by which workers
	// and coordinators prove themselves to each other; in HTTP it is a bearer token.
	// Default "": none.
	TokenFile string `toml:"token_file"`
	// Open lets Listen and Coordinator be other than loopback, and Listen a TCP port of
	// loopback while engines have API keys, without a token and without certificates. The connections are encrypted, but nobody is proven: any
	// host that reaches Listen can follow as a worker, and gets the engines' API keys.
	// Default false.
	Open bool `toml:"open"`
	// PlainHTTP serves the routes of TensorRT-LLM's workers to other hosts over HTTP
	// without TLS too. Then anybody on the way can read and change the token, the
	// engines' addresses, conversation ids and prompt hashes. The link of pdproxy's own
	// workers is always over TLS between hosts. Default false.
	PlainHTTP bool `toml:"plain_http"`
	// Coordinator is the coordinator to dial, host:port or unix:path, or
	// "leader" for the one that leads by Etcd; set, this process is workers of
	// it. Default "": none.
	Coordinator string `toml:"coordinator"`
	// NodeID is this host's part, 0 to 255, of the disagg ids; hosts that
	// front the same engines need different ones. -1 takes one of 16384 by the
	// host's name and server.listen, for one process. Not used with Etcd, which
	// has one for each coordinator. Default 0.
	NodeID int `toml:"node_id"`
	// Patience is how long a worker waits for the coordinator to place a request
	// before it does so itself. Default 50ms; never 0.
	Patience Duration `toml:"patience"`
	// Name tells the fleets apart that share an etcd. Default "pdproxy"; never
	// empty.
	Name string `toml:"name"`
	// Advertise is where workers and coordinators of other hosts reach this
	// coordinator, host:port or unix:path. Default "": Listen.
	Advertise string `toml:"advertise"`
	// Dir is the directory, of mode 0700, in which the processes of this
	// configuration meet: sockets and locks. It must belong to the user of the
	// processes, and only root and that user may be able to write to the folders
	// above, unless they have the sticky bit. Default "": one by the path of the
	// configuration file, below pdproxy in $XDG_RUNTIME_DIR, below /run/pdproxy, or
	// below pdproxy-UID in the temporary directory; see privatedir.Runtime.
	Dir string `toml:"dir"`
	// TLS is certificates for Listen and Coordinator.
	TLS FleetTLS `toml:"tls"`
	// Etcd is where several coordinators settle which of them leads.
	Etcd FleetEtcd `toml:"etcd"`
}

// FleetTLS is certificates by which the hosts of a fleet know each other: all three
// files, or none. They are read again when they change. Without them the connections
// between hosts are over TLS too, and the token proves both sides.
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

// CoordinatorLeader, as Fleet.Coordinator, is the coordinator that leads.
const CoordinatorLeader = "leader"

// FleetEtcd is where several coordinators settle which of them leads. Below
// /pdproxy/fleets/NAME/ are the leader's record and the candidates, each with a
// lease.
type FleetEtcd struct {
	// Endpoints are the etcd servers, http(s)://host:port. Default empty: there
	// is one coordinator.
	Endpoints []string `toml:"endpoints"`
	// Lease is how long a coordinator leads that is not heard of any more, in
	// whole seconds from 2 on. Default 5s.
	Lease Duration `toml:"lease"`
	// Username is the user that etcd knows; it needs PasswordFile. Default "":
	// etcd asks for none.
	Username string `toml:"username"`
	// PasswordFile is a file with the user's password. Default "".
	PasswordFile string `toml:"password_file"`
	// CA is a file of CA certificates (PEM) that may sign etcd's. Default "":
	// the system's.
	CA string `toml:"ca"`
	// Cert and Key are files (PEM) of the certificate that etcd is shown, each
	// with the other. Default "": none.
	Cert string `toml:"cert"`
	Key  string `toml:"key"`
	// PlainHTTP lets the password go to http:// endpoints of other hosts, where anybody
	// on the way can read it. Default false.
	PlainHTTP bool `toml:"plain_http"`
}

// Access is how the fleet's etcd is reached.
func (e FleetEtcd) Access() EtcdAccess {
	return EtcdAccess{Endpoints: e.Endpoints, Username: e.Username, PasswordFile: e.PasswordFile, CA: e.CA, Cert: e.Cert, Key: e.Key, PlainHTTP: e.PlainHTTP}
}

func defaultFleet() Fleet {
	return Fleet{Patience: Duration(50 * time.Millisecond), Name: "pdproxy", Etcd: FleetEtcd{Lease: seconds(5)}}
}

func defaultDiscovery() Discovery {
	return Discovery{
		TRTLLM: DiscoveryTRTLLM{RefreshInterval: seconds(10)},
		Etcd:   DiscoveryEtcd{Prefix: "/pdproxy/engines/"},
		DNS:    DiscoveryDNS{Interval: seconds(5)},
		SGLang: DiscoverySGLang{Interval: seconds(5)},
	}
}

// Enabled reports whether engines are looked for anywhere.
func (d Discovery) Enabled() bool {
	return d.MoRIIO.Listen != "" || d.TRTLLM.ClusterURI != "" || d.TRTLLM.MetadataURI != "" ||
		len(d.Etcd.Endpoints) > 0 || d.File.Path != "" || len(d.DNS.Engines) > 0 || len(d.SGLang.Engines) > 0 || len(d.Kubernetes.Engines) > 0
}
