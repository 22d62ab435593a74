package proxy

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// sidecar is a proxy beside one engine: the coordination policies that say which
// phase of a request runs on that engine, and the headers by which a gateway in
// front has its say. Reload replaces it; only the order of the policies, which
// operators change, and the addresses change meanwhile.
type sidecar struct {
	cfg     config.Sidecar
	local   string         // name of the engine beside the proxy
	callers []netip.Prefix // whose headers are heeded; nil: everyone's
	order   atomic.Pointer[[]string]
	picker  *picker // nil: none
	book    atomic.Pointer[addressBook]
}

// newSidecar returns the sidecar of a configuration, nil for one without. old is
// kept, with what operators made of it, if nothing changed.
func newSidecar(cfg *config.Config, old *sidecar) *sidecar {
	if cfg.Sidecar.Local == "" {
		return nil
	}
	local, _ := cfg.LocalEngine()
	if old != nil && old.local == local && old.same(cfg.Sidecar) {
		return old
	}
	sc := &sidecar{cfg: cfg.Sidecar, local: local, callers: cfg.Sidecar.Networks()}
	if cfg.Sidecar.Picker != "" {
		sc.picker = newPicker(cfg.Sidecar)
	}
	sc.configured()
	return sc
}

func (sc *sidecar) same(o config.Sidecar) bool {
	mine := sc.cfg
	if !slices.Equal(mine.Policies, o.Policies) || !slices.Equal(mine.Callers, o.Callers) {
		return false
	}
	mine.Policies, mine.Callers, o.Policies, o.Callers = nil, nil, nil, nil
	return mine.Local == o.Local && mine.Role == o.Role && mine.Connector == o.Connector && mine.Header == o.Header &&
		mine.EncoderHeader == o.EncoderHeader &&
		mine.PolicyHeader == o.PolicyHeader && mine.ProfileHeader == o.ProfileHeader &&
		mine.Picker == o.Picker && mine.PickerTimeout == o.PickerTimeout
}

// configured puts the policies in the order of the configuration.
func (sc *sidecar) configured() {
	order := sc.cfg.Order()
	sc.order.Store(&order)
}

// close gives up the connections; nil-safe.
func (sc *sidecar) close() {
	if sc != nil && sc.picker != nil {
		sc.picker.client.CloseIdleConnections()
	}
}

// home is the engine beside the proxy; nil while it is being replaced.
func (sc *sidecar) home(s *engine.Snapshot) *engine.Instance { return s.Instance(sc.local) }

// home is the engine beside the proxy, nil while it is being replaced; all: there
// is none, and any two engines are this proxy's to pair.
func (s *Server) home() (i *engine.Instance, all bool) {
	sc := s.sidecar.Load()
	if sc == nil {
		return nil, true
	}
	return sc.home(s.deps.Registry.Snapshot()), false
}

// ready reports whether one request could be served now.
func (s *Server) ready(sc *sidecar) bool {
	snapshot := s.deps.Registry.Snapshot()
	home := sc.home(snapshot)
	if home == nil || home.State() != engine.Ready {
		return false
	}
	partner := func(role abi.Role) bool {
		return slices.ContainsFunc(snapshot.Instances, func(i *engine.Instance) bool {
			return i.State() == engine.Ready && partners(home, i, role)
		})
	}
	for _, name := range *sc.order.Load() {
		switch name {
		case config.CoordinateLocal:
			if s.servesWhole(home) {
				return true
			}
		case config.CoordinatePrefillNamed, config.CoordinatePrefillPlaced:
			if partner(abi.RolePrefill) {
				return true
			}
		default:
			if partner(abi.RoleDecode) {
				return true
			}
		}
	}
	return false
}

// servesWhole reports whether an engine answers a request alone.
func (s *Server) servesWhole(i *engine.Instance) bool {
	return i.Role == abi.RoleBoth || i.Role&s.connector(i.Spec.Connector).AggregatesOn() != 0
}

// partners reports whether i may take the phase of that role beside home.
func partners(home, i *engine.Instance, role abi.Role) bool {
	return i != home && i.Role&role != 0 && i.Spec.Connector == home.Spec.Connector
}

// coordination is what an exchange of a sidecar is told by its headers, and what
// became of it. Its zero value is that of a proxy that is no sidecar.
type coordination struct {
	sc     *sidecar
	named  []*engine.Instance // by the header; reused memory
	encode []*engine.Instance // the encoders by theirs; reused memory
	first  string             // the policy to be tried first; "" as ever
	phase  string             // the phase that the caller coordinates itself; "" for none
	policy string             // that made the last placement
	home   [1]*engine.Instance
	choice [1]*engine.Instance // the picker's
}

func (c *coordination) reset() {
	clear(c.named)
	clear(c.encode)
	*c = coordination{named: c.named[:0], encode: c.encode[:0]}
}

// heed reads the headers that are for a sidecar. One that names what is not
// known is refused, before anything is called.
func (x *exchange) heed() error {
	c := &x.side
	if c.sc = x.s.sidecar.Load(); c.sc == nil || !c.sc.heeds(x.client.RemoteAddr()) {
		return nil
	}
	cfg, h := &c.sc.cfg, x.client.Header()
	order := *c.sc.order.Load()
	if cfg.PolicyHeader != "" {
		if c.first = h.Get(cfg.PolicyHeader); c.first != "" && !slices.Contains(order, c.first) {
			return badHeader(cfg.PolicyHeader, 400, "is not one of the coordination policies in use: "+strings.Join(order, ", "))
		}
	}
	if cfg.ProfileHeader != "" {
		if err := x.heedProfile(h.Get(cfg.ProfileHeader)); err != nil {
			return err
		}
	}
	var err error
	if cfg.EncoderHeader != "" {
		if c.encode, err = x.heedNames(c.encode, cfg.EncoderHeader, abi.RoleEncode); err != nil {
			return err
		}
	}
	switch {
	case slices.Contains(order, config.CoordinatePrefillNamed):
		c.named, err = x.heedNames(c.named, cfg.Header, abi.RolePrefill)
	case slices.Contains(order, config.CoordinateDecodeNamed):
		c.named, err = x.heedNames(c.named, cfg.Header, abi.RoleDecode)
	}
	return err
}

// heedNames appends the engines that a header names. All must be known, and be
// able to take the phase of that role.
func (x *exchange) heedNames(list []*engine.Instance, header string, role abi.Role) ([]*engine.Instance, error) {
	c := &x.side
	snapshot := x.s.deps.Registry.Snapshot()
	home := c.sc.home(snapshot)
	for _, line := range x.client.Header().Values(header) {
		for name := range strings.SplitSeq(line, ",") {
			if name = strings.TrimSpace(name); name == "" {
				continue
			}
			i := c.sc.find(snapshot, withoutScheme(name))
			if i == nil || home != nil && !partners(home, i, role) {
				return list, badHeader(header, 403, "does not name an engine that may be called for "+role.String())
			}
			list = append(list, i)
		}
	}
	return list, nil
}

// withoutScheme returns the host:port of an address that a header may also give
// as a URL, http://host:port, as llm-d's sidecar accepts it. The scheme of the
// call is that of the engine's own URL.
func withoutScheme(address string) string {
	for _, scheme := range [...]string{"http://", "https://"} {
		if len(address) >= len(scheme) && strings.EqualFold(address[:len(scheme)], scheme) {
			return strings.TrimSuffix(address[len(scheme):], "/")
		}
	}
	return address
}

// heedProfile notes the phase that the caller coordinates itself.
func (x *exchange) heedProfile(profile string) error {
	cfg := &x.side.sc.cfg
	role, _ := abi.ParseRole(cfg.Role)
	fits := true
	switch x.side.phase = strings.ToLower(profile); x.side.phase {
	case "", config.ProfileEncode:
	case config.ProfilePrefill:
		fits = role&abi.RolePrefill != 0
	case config.ProfileDecode:
		fits = role&abi.RoleDecode != 0
	default:
		return badHeader(cfg.ProfileHeader, 400, "must be prefill, decode or encode")
	}
	if !fits {
		return badHeader(cfg.ProfileHeader, 400, "asks for a phase that the engine here, of role "+cfg.Role+", does not serve")
	}
	return nil
}

// badHeader is a refusal because of a header. Its value is not repeated.
func badHeader(name string, status int, problem string) error {
	return &openai.Error{Status: status, Code: "bad_header", Param: name, Message: "the header " + name + " " + problem}
}

// heeds reports whether the headers of a client are the sidecar's business.
func (sc *sidecar) heeds(remoteAddr string) bool {
	if sc.callers == nil {
		return true
	}
	from, err := netip.ParseAddrPort(remoteAddr)
	if err != nil {
		return false
	}
	ip := from.Addr().Unmap().WithZone("")
	return slices.ContainsFunc(sc.callers, func(n netip.Prefix) bool { return n.Contains(ip) })
}

// strip takes the lines that end at the sidecar out of those that legs carry,
// heeded or not.
func (sc *sidecar) strip(fields []upstream.Field) []upstream.Field {
	for _, name := range [...]string{sc.cfg.Header, sc.cfg.EncoderHeader, sc.cfg.PolicyHeader, sc.cfg.ProfileHeader} {
		if name != "" {
			fields = downstream.Without(fields, name)
		}
	}
	return fields
}

// addressBook finds the instances of one snapshot by host:port.
type addressBook struct {
	of *engine.Snapshot
	by map[string]*engine.Instance
}

// find returns the instance at an address, host:port; nil for one that is not
// known.
func (sc *sidecar) find(s *engine.Snapshot, address string) *engine.Instance {
	b := sc.book.Load()
	if b == nil || b.of != s {
		b = &addressBook{of: s, by: make(map[string]*engine.Instance)}
		for _, i := range s.Instances {
			at := canonicalAddress(i.Spec.Address())
			if other := b.by[at]; other == nil || other.State() == engine.Draining {
				b.by[at] = i
			}
		}
		sc.book.Store(b)
	}
	return b.by[canonicalAddress(address)]
}

// canonicalAddress writes host:port in one way; what is none is left as it is.
func canonicalAddress(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	return net.JoinHostPort(canonicalHost(host), port)
}

// canonicalHost writes a host in one way.
func canonicalHost(host string) string {
	if ip, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return ip.Unmap().String()
	}
	return strings.TrimSuffix(strings.ToLower(host), ".")
}
