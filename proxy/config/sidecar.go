package config

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Sidecar configures pdproxy beside one engine.
type Sidecar struct {
	// Local is the http or https URL of the engine beside the proxy. If it is set, this
	// process is a sidecar. An [[engine]] with the same url contains the engine's other
	// keys. Default "": not a sidecar.
	Local string `toml:"local"`
	// Role is the phases that the local engine serves. Default "decode".
	Role string `toml:"role"`
	// Connector is the local engine's KV-transfer protocol. Default
	// "vllm-nixl".
	Connector string `toml:"connector"`
	// Header is the request header that names the remote engine as host:port, or
	// several separated by commas; an unknown one is rejected. Default
	// "x-prefiller-host-port"; never empty.
	Header string `toml:"header"`
	// EncoderHeader is the request header that names, in the same form, the engines
	// that encode images and sounds. Default "x-encoder-hosts-ports"; "": none.
	EncoderHeader string `toml:"encoder_header"`
	// Policies are the coordination policies in the order in which they are tried:
	// prefill_named, prefill_placed, decode_named, decode_picked, decode_placed, local.
	// Default empty: an order for the role of the local engine (docs/howto/sidecar.md).
	Policies []string `toml:"policies"`
	// PolicyHeader is the request header that names one of Policies to be tried first.
	// Default "": none.
	PolicyHeader string `toml:"policy_header"`
	// ProfileHeader is the request header with which a caller that coordinates the
	// phases itself names the phase of this request: prefill, decode or encode. Default
	// "": none.
	ProfileHeader string `toml:"profile_header"`
	// Callers are the networks whose requests may use these headers; those of others
	// are ignored. Default empty: all callers.
	Callers []string `toml:"callers"`
	// Picker is an endpoint picker of the Inference Extension, ext_proc://host:port or
	// ext_procs://host:port (TLS). Without Local, it chooses the engines of every request.
	// With Local, it chooses the decode engine for the policy decode_picked. Default "": none.
	Picker string `toml:"picker"`
	// PickerTimeout bounds the wait for Picker. Default 200ms; never 0.
	PickerTimeout Duration `toml:"picker_timeout"`
	// PickerFailureModeAllow places a request by the policies of this proxy if the picker
	// gives no usable answer: Envoy's failure_mode_allow, FailOpen of an InferencePool.
	// Default false: such a request gets 503. A sidecar always uses its policies then.
	PickerFailureModeAllow bool `toml:"picker_failure_mode_allow"`
	// PickerSubset sends the addresses of the ready engines to the picker, as the subset
	// from which it may choose; of a sidecar, those that may decode. Default false.
	PickerSubset bool `toml:"picker_subset"`
	// PickerCA is a file of CA certificates (PEM) that may sign the certificate of an
	// ext_procs picker. Default "": the system's.
	PickerCA string `toml:"picker_ca"`
	// PickerInsecureSkipVerify accepts any certificate of an ext_procs picker. Default
	// false.
	PickerInsecureSkipVerify bool `toml:"picker_insecure_skip_verify"`
}

// The coordination policies: which phase runs on the local engine, and how the engine
// of the other phase is chosen.
const (
	// CoordinateLocal runs both phases on the local engine.
	CoordinateLocal = "local"
	// CoordinatePrefillNamed decodes on the local engine, with prefill on the engine
	// that the request's header names. CoordinatePrefillPlaced does so with prefill on
	// the engine that the place policy chose.
	CoordinatePrefillNamed  = "prefill_named"
	CoordinatePrefillPlaced = "prefill_placed"
	// CoordinateDecodeNamed prefills on the local engine, with decode on the engine
	// that the request's header names. CoordinateDecodePlaced does so with decode on
	// the engine that the place policy chose, and CoordinateDecodePicked with decode on
	// the engine that the picker names after prefill.
	CoordinateDecodeNamed  = "decode_named"
	CoordinateDecodePlaced = "decode_placed"
	CoordinateDecodePicked = "decode_picked"
)

// The values of Sidecar.ProfileHeader.
const (
	ProfilePrefill = "prefill"
	ProfileDecode  = "decode"
	ProfileEncode  = "encode"
)

func coordinations() []string {
	return []string{
		CoordinateLocal, CoordinatePrefillNamed, CoordinatePrefillPlaced,
		CoordinateDecodeNamed, CoordinateDecodePlaced, CoordinateDecodePicked,
	}
}

func defaultSidecar() Sidecar {
	return Sidecar{
		Role: RoleDecode, Connector: ConnectorVLLMNixl, Header: "x-prefiller-host-port", EncoderHeader: "x-encoder-hosts-ports",
		PickerTimeout: Duration(200 * time.Millisecond),
	}
}

// Order returns the configured coordination policies, or the default ones.
func (s Sidecar) Order() []string {
	if len(s.Policies) > 0 {
		return s.Policies
	}
	var picked []string
	if s.Picker != "" {
		picked = []string{CoordinateDecodePicked}
	}
	switch {
	case s.Connector == ConnectorNone:
		return []string{CoordinateLocal}
	case s.Role == RolePrefill:
		return append(append([]string{CoordinateDecodeNamed}, picked...), CoordinateDecodePlaced, CoordinateLocal)
	case s.Role == RoleBoth:
		return append(append([]string{CoordinatePrefillNamed}, picked...), CoordinateLocal, CoordinatePrefillPlaced)
	}
	return []string{CoordinatePrefillNamed, CoordinateLocal, CoordinatePrefillPlaced}
}

// CheckOrder returns why the coordination policies cannot be used in that order.
func (s Sidecar) CheckOrder(order []string) error {
	if len(order) == 0 {
		return errors.New("the list has no policy")
	}
	for i, name := range order {
		prefill := name == CoordinatePrefillNamed || name == CoordinatePrefillPlaced
		switch {
		case !slices.Contains(coordinations(), name):
			return OneOf(name, coordinations()...)
		case slices.Contains(order[:i], name):
			return fmt.Errorf("%q occurs twice in the list", name)
		case name == CoordinateLocal:
		case s.Connector == ConnectorNone:
			return fmt.Errorf("connector %q has no second leg for %q", ConnectorNone, name)
		case prefill && s.Role == RolePrefill, !prefill && s.Role == RoleDecode:
			return fmt.Errorf("the local engine's role %q does not suit %q", s.Role, name)
		case name == CoordinateDecodePicked && s.Picker == "":
			return fmt.Errorf("%q needs sidecar.picker", name)
		case name == CoordinateDecodeNamed && slices.Contains(order, CoordinatePrefillNamed):
			return fmt.Errorf("%q and %q would both read sidecar.header", name, CoordinatePrefillNamed)
		}
	}
	return nil
}

// Networks returns Callers, which must be valid; nil: all callers.
func (s Sidecar) Networks() []netip.Prefix {
	var list []netip.Prefix
	for _, text := range s.Callers {
		if p, err := parseNetwork(text); err == nil {
			list = append(list, p)
		}
	}
	return list
}

// parseNetwork parses a network, or an address as a network of one address.
func parseNetwork(text string) (netip.Prefix, error) {
	if ip, err := netip.ParseAddr(text); err == nil {
		return netip.PrefixFrom(ip, ip.BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err == nil && p.Masked() != p {
		err = errors.New("the address has bits after the prefix")
	}
	return p, err
}

// localName is the name of the local engine if no [[engine]] describes it.
const localName = "local"

// AllEngines returns the configured engines: Engines, and the sidecar's local engine if
// it is not among them.
func (c *Config) AllEngines() []Engine {
	if _, among := c.LocalEngine(); among || c.Sidecar.Local == "" {
		return c.Engines
	}
	e := DefaultEngine()
	e.Name, e.URL, e.Role, e.Connector = localName, c.Sidecar.Local, c.Sidecar.Role, c.Sidecar.Connector
	return append(slices.Clip(c.Engines), e)
}

// LocalEngine returns the name of the sidecar's local engine, and whether it is among
// Engines.
func (c *Config) LocalEngine() (name string, among bool) {
	for _, e := range c.Engines {
		if e.URL == c.Sidecar.Local && e.URL != "" {
			return e.Name, true
		}
	}
	return localName, false
}

// sidecar checks [sidecar].
func (k *checker) sidecar() {
	s := k.config.Sidecar
	if s.Local != "" {
		k.httpURL("sidecar.local", s.Local)
		k.sidecarEngine()
	}
	k.oneOf("sidecar.role", s.Role, RolePrefill, RoleDecode, RoleBoth)
	k.oneOf("sidecar.connector", s.Connector, connectors()...)
	if s.Connector == ConnectorNone && s.Role != RoleBoth {
		k.add("sidecar.connector", "%q transfers nothing: it needs role %q", ConnectorNone, RoleBoth)
	}
	k.header("sidecar.header", s.Header)
	if s.EncoderHeader != "" {
		k.header("sidecar.encoder_header", s.EncoderHeader)
	}
	if s.PolicyHeader != "" {
		k.header("sidecar.policy_header", s.PolicyHeader)
	}
	if s.ProfileHeader != "" {
		k.header("sidecar.profile_header", s.ProfileHeader)
		if s.Connector != ConnectorVLLMNixl {
			k.add("sidecar.profile_header", "is only for connector %q: the proxy cannot check the hosts in the parameters of the other connectors", ConnectorVLLMNixl)
		}
	}
	if len(s.Policies) > 0 {
		if err := s.CheckOrder(s.Policies); err != nil {
			k.add("sidecar.policies", "%v", err)
		}
	}
	for i, network := range s.Callers {
		if _, err := parseNetwork(network); err != nil {
			k.add(indexKey("sidecar.callers", i), "invalid network %q: want one such as 10.0.0.0/8, or an address", network)
		}
	}
	k.picker()
}

// sidecarEngine compares the local engine with the [[engine]] of the same address.
func (k *checker) sidecarEngine() {
	s := k.config.Sidecar
	if k.config.Fleet.Workers > 0 || k.config.Fleet.Coordinator != "" {
		k.add("sidecar.local", "must not be set together with fleet.workers and fleet.coordinator: a sidecar is one process")
	}
	name, among := k.config.LocalEngine()
	for i, e := range k.config.Engines {
		switch {
		case among && e.Name == name && (e.Role != s.Role || e.Connector != s.Connector):
			k.add(engineKey(i, "url"), "is that of sidecar.local, whose role is %q and connector %q", s.Role, s.Connector)
		case !among && e.Name == localName:
			k.add(engineKey(i, "name"), "%q is the name of the engine of sidecar.local", localName)
		}
	}
	if local := (Engine{Connector: s.Connector}); !among && local.MoRIIO() {
		k.add("sidecar.connector", "%q needs an [[engine]] with the url of sidecar.local and a kv_address", s.Connector)
	}
}

// header requires the name of a header.
func (k *checker) header(key, name string) {
	if !isHeaderName(name) {
		k.add(key, "must be the name of a header, found %q", name)
	}
}
