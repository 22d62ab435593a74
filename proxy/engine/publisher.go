package engine

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// KVPublisher is an instance's announcement of its KV events, and of its loads. Sources: vLLM GET
// /kv_event_sources, SGLang GET /server_info, member kv_events.
type KVPublisher struct {
	// Ranks are the endpoints as announced, in the order of the data-parallel ranks; nil if the
	// instance announces none.
	Ranks       []KVEndpoints
	BlockTokens int // tokens per block; 0 unknown
}

// KVEndpoints are the ZeroMQ endpoints of one rank, "tcp://host:port"; "" for none.
type KVEndpoints struct {
	Events string // PUB: batches of KV events
	Replay string // ROUTER: batches that were missed
	Loads  string // PUB: loads of the rank
}

// MaxKVRanks bounds the ranks of an announcement.
const MaxKVRanks = 4096

// maxEndpoint bounds an announced endpoint, in bytes: a name of DNS has 253 at most.
const maxEndpoint = 300

// KVEndpoint returns text if it is an address of TCP to which a peer can connect, else "". The host
// may be a wildcard, which stands for the engine's own host.
func KVEndpoint(text string) string {
	if _, _, ok := splitEndpoint(text); !ok {
		return ""
	}
	return text
}

// splitEndpoint returns the host, "" for a wildcard, and the port of an endpoint.
func splitEndpoint(text string) (host string, port int, ok bool) {
	address, tcp := strings.CutPrefix(text, "tcp://")
	if !tcp || len(text) > maxEndpoint {
		return "", 0, false
	}
	host, digits, err := net.SplitHostPort(address)
	if err != nil || strings.ContainsFunc(host, func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune("/@?#[]", r) }) {
		return "", 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || n == 0 {
		return "", 0, false
	}
	if host == "*" {
		host = ""
	} else if ip, err := netip.ParseAddr(host); err == nil && ip.IsUnspecified() {
		host = ""
	}
	return host, int(n), true
}

// rankEndpoint returns the configured endpoint of a rank: base is that of rank 0, and each rank has
// the next higher port. It returns "" for no base.
func rankEndpoint(base string, rank int) (string, error) {
	if base == "" {
		return "", nil
	}
	host, port, ok := splitEndpoint(base)
	if !ok || host == "" || port+rank > 65535 {
		return "", fmt.Errorf("read endpoint %q: no address for rank %d", base, rank)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(port+rank)), nil
}

// KVSources returns the endpoints of each of the instance's ranks to which the proxy connects:
// those of the configuration, else the announced ones. A rank that publishes nothing has none.
//
// The proxy does not connect to an announced host that is not known to be the instance's own; see
// Owns. The error names such a host; the list then lacks the endpoint.
func (i *Instance) KVSources() (list []KVEndpoints, err error) {
	list = make([]KVEndpoints, len(i.Load))
	announced := i.Facts().KVEvents.Ranks
	for rank := range list {
		own, problem := &list[rank], error(nil)
		if rank < len(announced) {
			*own, problem = i.reachable(announced[rank])
		}
		if i.Spec.KVEvents != "" {
			own.Replay = ""
			own.Events, problem = rankEndpoint(i.Spec.KVEvents, rank)
		}
		if i.Spec.KVReplay != "" && problem == nil {
			own.Replay, problem = rankEndpoint(i.Spec.KVReplay, rank)
		}
		if err == nil {
			err = problem
		}
	}
	return list, err
}

// reachable returns the announced endpoints with the hosts to which the proxy connects.
func (i *Instance) reachable(e KVEndpoints) (KVEndpoints, error) {
	var err error
	for _, at := range []*string{&e.Events, &e.Replay, &e.Loads} {
		host, port, ok := splitEndpoint(*at)
		switch {
		case !ok:
			*at = ""
			continue
		case host == "":
			host = strings.Trim(i.Host, "[]")
		case !i.publishesAt(host):
			*at, err = "", fmt.Errorf("the announced host %s is not known to be the engine's; set kv_events, or list the host in kv_hosts", host)
			continue
		}
		*at = "tcp://" + net.JoinHostPort(host, strconv.Itoa(port))
	}
	return e, err
}

// publishesAt reports whether the proxy may connect to host. A loopback address names this machine,
// so it can only be that of an instance on it.
func (i *Instance) publishesAt(host string) bool {
	ip, err := netip.ParseAddr(host)
	if err == nil && ip.Unmap().IsLoopback() || strings.EqualFold(host, "localhost") {
		return i.local()
	}
	return i.Owns(host, nil)
}

// equal reports whether two announcements are the same.
func (p *KVPublisher) equal(o *KVPublisher) bool {
	return p.BlockTokens == o.BlockTokens && slices.Equal(p.Ranks, o.Ranks)
}

// moved reports whether a rank of both announcements publishes at another address in o. A process
// keeps its addresses, so o comes from another one.
func (p *KVPublisher) moved(o *KVPublisher) bool {
	for rank := range min(len(p.Ranks), len(o.Ranks)) {
		if p.Ranks[rank].Events != o.Ranks[rank].Events {
			return true
		}
	}
	return false
}
