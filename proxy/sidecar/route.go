package sidecar

import (
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Journal is the record of the request that a Route belongs to.
type Journal interface {
	// Fallback counts that a coordination policy was not used, and why.
	Fallback(policy, reason string)
	// Coordinated records which coordination policy has placed the request.
	Coordinated(policy string)
}

// Request is the request that a Route is for. The Route changes Ask.
type Request struct {
	Body          *openai.Request // parsed after Read
	Ask           *coordinator.PlacementRequest
	Journal       Journal
	ScheduleStyle string // trtllm.schedule_style
}

// Route is which engines one request may use, by its headers and the coordination
// policies. The exchange's goroutine uses it. The zero value is that of a proxy that is
// no sidecar.
type Route struct {
	Request
	// Restricted: the request is that of a sidecar, or a picker has chosen its engines. Otherwise the
	// other methods need not be called.
	Restricted bool

	sc      *Sidecar
	named   []*engine.Instance // by the header; memory is used again
	encode  []*engine.Instance // encoders by their header; memory is used again
	first   string             // the policy to try first; "" for the usual order
	profile string             // the phase that the caller coordinates itself; "" for none
	policy  string             // the policy of the last placement
	local   [1]*engine.Instance
	picked  [1]*engine.Instance // by the picker, for decode alone
	step    step

	destinations []*engine.Instance // by an ext_proc picker, best first; memory is used again
}

// Reset clears the request and keeps the allocated memory.
func (r *Route) Reset() {
	clear(r.named)
	clear(r.encode)
	clear(r.destinations)
	*r = Route{named: r.named[:0], encode: r.encode[:0], destinations: r.destinations[:0]}
}

// Sidecar returns the sidecar of the request, nil for none.
func (r *Route) Sidecar() *Sidecar { return r.sc }

// CallerCoordinates reports whether the caller runs the other phases of the request
// itself.
func (r *Route) CallerCoordinates() bool { return r.profile != "" }

// AllowsEncoder reports whether an instance may encode for the request.
func (r *Route) AllowsEncoder(i *engine.Instance) bool {
	return len(r.encode) == 0 || slices.Contains(r.encode, i)
}

// Fixes reports whether no other engine may replace i for this request. Safe for
// concurrent use while the route is not placed again.
func (r *Route) Fixes(i *engine.Instance) bool {
	if len(r.destinations) > 0 {
		return len(r.destinations) == 1 && i == r.destinations[0]
	}
	return r.profile != "" || r.sc != nil && (len(r.named) > 0 || i == r.local[0])
}

// Read begins the route of a request to a sidecar, and reads the headers
// that are for the sidecar. The error refuses a header that names an unknown engine or
// policy. Remote is the address of the client.
func (r *Route) Read(sc *Sidecar, request Request, h http.Header, remote string) error {
	r.Request, r.Restricted, r.sc = request, true, sc
	if !sc.trusts(remote) {
		return nil
	}
	return r.readHeaders(h)
}

func (r *Route) readHeaders(h http.Header) error {
	cfg, order := &r.sc.cfg, r.sc.Order()
	if cfg.PolicyHeader != "" {
		if r.first = h.Get(cfg.PolicyHeader); r.first != "" && !slices.Contains(order, r.first) {
			return badHeader(cfg.PolicyHeader, 400, "is not one of the coordination policies in use: "+strings.Join(order, ", "))
		}
	}
	if cfg.ProfileHeader != "" {
		if err := r.readProfile(h.Get(cfg.ProfileHeader)); err != nil {
			return err
		}
	}
	var err error
	if cfg.EncoderHeader != "" {
		if r.encode, err = r.appendNamed(r.encode, h, cfg.EncoderHeader, abi.RoleEncode); err != nil {
			return err
		}
	}
	switch {
	case slices.Contains(order, config.CoordinatePrefillNamed):
		r.named, err = r.appendNamed(r.named, h, cfg.Header, abi.RolePrefill)
	case slices.Contains(order, config.CoordinateDecodeNamed):
		r.named, err = r.appendNamed(r.named, h, cfg.Header, abi.RoleDecode)
	}
	return err
}

// appendNamed appends the engines that a header names. The registry must know each of
// them, and each must serve the phase of that role.
func (r *Route) appendNamed(list []*engine.Instance, h http.Header, header string, role abi.Role) ([]*engine.Instance, error) {
	snapshot := r.sc.registry.Snapshot()
	local := r.sc.localIn(snapshot)
	for _, line := range h.Values(header) {
		for name := range strings.SplitSeq(line, ",") {
			if name = strings.TrimSpace(name); name == "" {
				continue
			}
			i := r.sc.addresses.find(snapshot, withoutScheme(name))
			if i == nil || local != nil && !isPeer(local, i, role) {
				return list, badHeader(header, 403, "does not name an engine that may be called for "+role.String())
			}
			list = append(list, i)
		}
	}
	return list, nil
}

// readProfile reads the phase that the caller coordinates itself.
func (r *Route) readProfile(profile string) error {
	cfg := &r.sc.cfg
	role, _ := abi.ParseRole(cfg.Role)
	fits := true
	switch r.profile = strings.ToLower(profile); r.profile {
	case "", config.ProfileEncode:
	case config.ProfilePrefill:
		fits = role&abi.RolePrefill != 0
	case config.ProfileDecode:
		fits = role&abi.RoleDecode != 0
	default:
		return badHeader(cfg.ProfileHeader, 400, "must be prefill, decode or encode")
	}
	if !fits {
		return badHeader(cfg.ProfileHeader, 400, "requests a phase that the engine here, of role "+cfg.Role+", does not serve")
	}
	return nil
}

// badHeader returns the refusal of a header. It does not repeat the header's value.
func badHeader(name string, status int, problem string) error {
	return &openai.Error{Status: status, Code: openai.CodeBadHeader, Param: name, Message: "the header " + name + " " + problem}
}

// trusts reports whether the sidecar reads the headers of a client with that address.
func (sc *Sidecar) trusts(remote string) bool {
	if sc.callers == nil {
		return true
	}
	from, err := netip.ParseAddrPort(remote)
	if err != nil {
		return false
	}
	ip := from.Addr().Unmap().WithZone("")
	return slices.ContainsFunc(sc.callers, func(n netip.Prefix) bool { return n.Contains(ip) })
}

// failedOn reports whether an earlier attempt failed on the instance.
func (r *Route) failedOn(i *engine.Instance) bool {
	return slices.ContainsFunc(r.Ask.Excluded, func(t engine.Target) bool { return t.Instance == i })
}
