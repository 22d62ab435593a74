package config

import "strings"

// discovery checks [discovery.*].
func (k *checker) discovery() {
	d := k.config.Discovery
	if d.MoRIIO.Listen != "" {
		// ZMQ writes every address as *.
		k.zmq("discovery.moriio.listen", strings.Replace(d.MoRIIO.Listen, "//*:", "//0.0.0.0:", 1))
	}
	if d.TRTLLM.ClusterURI != "" {
		k.cluster("discovery.trtllm.cluster_uri", d.TRTLLM.ClusterURI, "etcd://", "http://")
	}
	if d.TRTLLM.MetadataURI != "" {
		k.cluster("discovery.trtllm.metadata_uri", d.TRTLLM.MetadataURI, "etcd://")
	}
	k.positive("discovery.trtllm.refresh_interval", int64(d.TRTLLM.RefreshInterval))
	for i, endpoint := range d.Etcd.Endpoints {
		k.httpURL(indexKey("discovery.etcd.endpoints", i), endpoint)
	}
	k.required("discovery.etcd.prefix", d.Etcd.Prefix)
}

// cluster wants one or more addresses, separated by commas, each scheme
// followed by host:port.
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
	// A disagg id has 6 bits for the worker and 8 for the node.
	k.within("fleet.workers", f.Workers, 0, 64)
	k.within("fleet.node_id", f.NodeID, 0, 255)
	if f.Listen != "" {
		k.dialOrListen("fleet.listen", f.Listen)
	}
	if f.Coordinator != "" {
		k.dialOrListen("fleet.coordinator", f.Coordinator)
		if f.Listen != "" {
			k.add("fleet.coordinator", "cannot be together with fleet.listen: a process is the coordinator or dials one")
		}
	}
}

// sidecar checks [sidecar].
func (k *checker) sidecar() {
	s := k.config.Sidecar
	if s.Local != "" {
		k.httpURL("sidecar.local", s.Local)
	}
	k.oneOf("sidecar.role", s.Role, roles()...)
	k.oneOf("sidecar.connector", s.Connector, connectors()...)
	if s.Connector == ConnectorNone && s.Role != RoleBoth {
		k.add("sidecar.connector", "%q transfers nothing: it needs role %q", ConnectorNone, RoleBoth)
	}
	if !isHeaderName(s.Header) {
		k.add("sidecar.header", "must be the name of a header, found %q", s.Header)
	}
}

// isHeaderName reports whether name is a token of RFC 9110, section 5.6.2.
func isHeaderName(name string) bool {
	for _, c := range []byte(name) {
		if !isAlphanumeric(c) && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return name != ""
}
