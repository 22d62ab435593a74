package filter

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
)

// maxState is the limit of the properties that guests store in one stream, in
// bytes. A property costs stateCost in addition to its name and value.
const (
	maxState  = 1 << 20
	stateCost = 128
)

// state holds the properties that guests made in a stream. It is safe for
// concurrent use.
type state struct {
	mu     sync.Mutex
	values map[string][]byte // guarded by mu
	size   int               // guarded by mu
}

// set stores a copy of value for f's guest. InternalFailure: the stream holds
// too much, or the plugin's budget is too small.
func (s *state) set(f *filter, key string, value []byte) host.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, there := s.values[key]
	size := s.size + len(value) - len(old)
	if !there {
		size += len(key) + stateCost
	}
	if size > maxState || !f.hold(ofStream, int64(size-s.size)) {
		return host.InternalFailure
	}
	if s.values == nil {
		s.values = make(map[string][]byte)
	}
	s.values[key], s.size = append([]byte(nil), value...), size
	return host.OK
}

func (s *state) get(key string) ([]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	value, ok := s.values[key]
	return value, ok
}

// SetProperty implements host.Env. Later filters of the stream see the property
// under the same path, unless the proxy has a property of that path. NotFound:
// there is no stream.
func (v *vm) SetProperty(ctx uint32, path []string, value []byte) host.Status {
	f := v.stream(ctx)
	if f == nil {
		return host.NotFound
	}
	return f.s.state.set(f, strings.Join(path, "\x00"), value)
}

// Property implements host.Env. The tree consists of the properties of Envoy
// (its "attributes" and those of its Wasm extension) that have a meaning here,
// and of pdproxy's own. Values are encoded as in Envoy: text raw; numbers,
// times and durations (in nanoseconds) 8 bytes little-endian; bools one byte;
// string maps as header maps.
func (v *vm) Property(ctx uint32, path []string) ([]byte, host.Status) {
	value, ok := v.property(path)
	if f := v.stream(ctx); !ok && f != nil {
		if value, ok = f.s.property(path); !ok {
			value, ok = f.s.state.get(strings.Join(path, "\x00"))
		}
	}
	if !ok {
		return nil, host.NotFound
	}
	return value, host.OK
}

// property returns a property that is the same for all streams of the plugin.
func (v *vm) property(path []string) ([]byte, bool) {
	spec, node := &v.p.spec, &v.p.deps.Node
	switch strings.Join(path, ".") {
	case "plugin_name":
		return text(spec.Name)
	case "plugin_root_id":
		return text(spec.RootID)
	case "plugin_vm_id":
		return text(spec.VMID)
	case "node.id", "xds.node.id":
		return text(node.ID)
	case "node.cluster", "xds.node.cluster":
		return text(node.Cluster)
	case "node.metadata", "xds.node.metadata":
		return stringMap(node.Metadata), true
	case "cluster_name", "xds.cluster_name", "route_name", "xds.route_name", "xds.virtual_host_name":
		return text("pdproxy") // there is only one route and one cluster
	case "listener_direction", "xds.listener_direction", "plugin_direction":
		return number(1) // inbound
	case "listener.address":
		return text(node.Listener)
	}
	if len(path) == 3 && path[0] == "node" && path[1] == "metadata" {
		value, ok := node.Metadata[path[2]]
		return []byte(value), ok
	}
	return nil, false
}

// property returns a property of the stream.
func (s *stream) property(path []string) ([]byte, bool) {
	if len(path) < 2 {
		return nil, false
	}
	rest := path[1:]
	switch path[0] {
	case "request":
		return s.requestProperty(rest)
	case "response":
		return s.responseProperty(rest)
	case "source":
		return addressProperty(s.r.RemoteAddr, rest[0])
	case "destination":
		local, _ := s.ctx.Value(http.LocalAddrContextKey).(net.Addr)
		if local == nil {
			return nil, false
		}
		return addressProperty(local.String(), rest[0])
	case "connection":
		return s.connectionProperty(rest[0])
	case "upstream":
		return s.upstreamProperty(rest[0])
	case "pdproxy":
		return s.exchangeProperty(rest)
	case "filter_state":
		return s.state.get("filter_state\x00" + strings.Join(rest, "\x00"))
	}
	return nil, false
}

func (s *stream) requestProperty(path []string) ([]byte, bool) {
	m := s.requestHeaders
	switch path[0] {
	case "path":
		return mapText(m, ":path")
	case "url_path":
		p, _, _ := strings.Cut(m.get(":path"), "?")
		return text(p)
	case "query":
		_, query, _ := strings.Cut(m.get(":path"), "?")
		return text(query)
	case "host":
		return mapText(m, ":authority")
	case "scheme":
		return mapText(m, ":scheme")
	case "method":
		return mapText(m, ":method")
	case "id":
		if id := s.info.Facts().RequestID; id != "" {
			return text(id)
		}
		return mapText(m, "X-Request-Id")
	case "referer":
		return mapText(m, "Referer")
	case "useragent":
		return mapText(m, "User-Agent")
	case "protocol":
		return text(protocol(s.r))
	case "time":
		return number(uint64(s.start.UnixNano()))
	case "duration":
		if d := s.responseDone.Load(); d != 0 {
			return number(uint64(d))
		}
		return nil, false
	case "size":
		if n := s.r.ContentLength; n > 0 {
			return number(uint64(n))
		}
		return number(uint64(s.requestBytes.Load()))
	case "total_size":
		return number(uint64(s.requestBytes.Load()) + uint64(m.Pairs().EncodedSize()))
	case "headers":
		return headerProperty(m, path[1:])
	}
	return nil, false
}

func (s *stream) responseProperty(path []string) ([]byte, bool) {
	m := s.responseHeaders.Load()
	switch path[0] {
	case "code":
		if code := s.status.Load(); code != 0 {
			return number(uint64(code))
		}
		if m != nil {
			if code, err := strconv.Atoi(m.get(":status")); err == nil {
				return number(uint64(code))
			}
		}
	case "code_details":
		if details := s.details.Load(); details != nil {
			return text(*details)
		}
		if m != nil {
			return text("via_upstream")
		}
	case "flags":
		return number(0) // Envoy's response flags, none of which exist here
	case "grpc_status":
		return nil, false
	case "size":
		return number(uint64(s.responseBytes.Load()))
	case "total_size":
		n := uint64(s.responseBytes.Load())
		if m != nil {
			n += uint64(m.Pairs().EncodedSize())
		}
		return number(n)
	case "backend_latency":
		if done, head := s.requestDone.Load(), s.headSet.Load(); head > done {
			return number(uint64(head - done))
		}
	case "headers":
		if m != nil {
			return headerProperty(m, path[1:])
		}
	case "trailers":
		if t := s.responseTrailers.Load(); t != nil {
			return headerProperty(t, path[1:])
		}
	}
	return nil, false
}

// headerProperty returns a whole map, or one line of it by its name.
func headerProperty(m *headerMap, path []string) ([]byte, bool) {
	if len(path) == 0 {
		return m.Pairs().Append(nil), true
	}
	value, ok := m.Value(path[0])
	return []byte(value), ok
}

// addressProperty returns one of the two ends of the client's connection.
func addressProperty(address, name string) ([]byte, bool) {
	switch name {
	case "address":
		return text(address)
	case "port":
		_, port, err := net.SplitHostPort(address)
		n, err2 := strconv.ParseUint(port, 10, 16)
		if err != nil || err2 != nil {
			return nil, false
		}
		return number(n)
	}
	return nil, false
}

func (s *stream) connectionProperty(name string) ([]byte, bool) {
	tlsState := s.r.TLS
	switch name {
	case "mtls":
		return boolean(tlsState != nil && len(tlsState.PeerCertificates) > 0)
	case "termination_details", "requested_server_name", "tls_version":
	default:
		return s.certificateProperty(name)
	}
	if tlsState == nil || name == "termination_details" {
		return nil, false
	}
	if name == "tls_version" {
		return text(tlsVersions[tlsState.Version])
	}
	return text(tlsState.ServerName)
}

// tlsVersions are Envoy's names of TLS versions.
var tlsVersions = map[uint16]string{tls.VersionTLS10: "TLSv1", tls.VersionTLS11: "TLSv1.1", tls.VersionTLS12: "TLSv1.2", tls.VersionTLS13: "TLSv1.3"}

// certificateProperty returns a property of the client's certificate.
func (s *stream) certificateProperty(name string) ([]byte, bool) {
	if s.r.TLS == nil || len(s.r.TLS.PeerCertificates) == 0 {
		return nil, false
	}
	return peerProperty(s.r.TLS.PeerCertificates[0], name)
}

func peerProperty(peer *x509.Certificate, name string) ([]byte, bool) {
	switch name {
	case "subject_peer_certificate":
		return text(peer.Subject.String())
	case "dns_san_peer_certificate":
		if len(peer.DNSNames) > 0 {
			return text(peer.DNSNames[0])
		}
	case "uri_san_peer_certificate":
		if len(peer.URIs) > 0 {
			return text(peer.URIs[0].String())
		}
	case "sha256_peer_certificate_digest":
		digest := sha256.Sum256(peer.Raw)
		return text(hex.EncodeToString(digest[:]))
	}
	return nil, false
}

// upstreamProperty returns a property of the engine that computes the answer,
// once it is chosen.
func (s *stream) upstreamProperty(name string) ([]byte, bool) {
	facts := s.info.Facts()
	if facts.Decode.Address == "" {
		return nil, false
	}
	switch name {
	case "address", "port":
		return addressProperty(facts.Decode.Address, name)
	case "request_attempt_count":
		return number(uint64(max(facts.Attempts, 1)))
	}
	return nil, false
}

// exchangeProperty returns a fact of the exchange. A fact that is not known
// (yet) is not found.
func (s *stream) exchangeProperty(path []string) ([]byte, bool) {
	facts := s.info.Facts()
	switch strings.Join(path, ".") {
	case "request_id":
		return known(facts.RequestID)
	case "tenant":
		return known(facts.Tenant)
	case "model":
		return known(facts.Model)
	case "stream":
		return boolean(facts.Stream)
	case "flow":
		if facts.Flow != abi.FlowNone {
			return text(facts.Flow.String())
		}
	case "disagg_id":
		if facts.DisaggID != 0 {
			return number(facts.DisaggID)
		}
	case "attempts":
		return number(uint64(facts.Attempts))
	case "prefill.engine":
		return known(facts.Prefill.Engine)
	case "prefill.address":
		return known(facts.Prefill.Address)
	case "prefill.rank":
		return rank(facts.Prefill)
	case "decode.engine":
		return known(facts.Decode.Engine)
	case "decode.address":
		return known(facts.Decode.Address)
	case "decode.rank":
		return rank(facts.Decode)
	case "prompt_tokens":
		return number(uint64(facts.PromptTokens))
	case "usage.input_tokens":
		return number(uint64(facts.InputTokens))
	case "usage.output_tokens":
		return number(uint64(facts.OutputTokens))
	case "usage.cached_tokens":
		return number(uint64(facts.CachedTokens))
	}
	return nil, false
}

func rank(t abi.StreamTarget) ([]byte, bool) {
	if t.Engine == "" {
		return nil, false
	}
	return number(uint64(t.Rank))
}

// protocol returns Envoy's name of the request's protocol.
func protocol(r *http.Request) string {
	switch r.ProtoMajor {
	case 3:
		return "HTTP/3"
	case 2:
		return "HTTP/2"
	}
	return r.Proto
}

func text(s string) ([]byte, bool) { return []byte(s), true }

// known returns a text; an empty text counts as not found.
func known(s string) ([]byte, bool) { return []byte(s), s != "" }

func mapText(m *headerMap, key string) ([]byte, bool) {
	value, ok := m.Value(key)
	return []byte(value), ok
}

func number(n uint64) ([]byte, bool) { return binary.LittleEndian.AppendUint64(nil, n), true }

func boolean(b bool) ([]byte, bool) {
	if b {
		return []byte{1}, true
	}
	return []byte{0}, true
}

func stringMap(m map[string]string) []byte {
	pairs := make(host.Pairs, 0, len(m))
	for _, key := range slices.Sorted(maps.Keys(m)) {
		pairs = append(pairs, host.Pair{Key: key, Value: m[key]})
	}
	return pairs.Append(nil)
}
