package config

import (
	"net"
	"net/netip"

	"golang.org/x/net/http/httpguts"
)

// EPP is the endpoint picker for gateways: Envoy and others ask it by ext_proc on which
// engine a request runs, and send the legs themselves.
type EPP struct {
	// Listen is the TCP address, host:port, of the gRPC services
	// envoy.service.ext_proc.v3.ExternalProcessor and grpc.health.v1.Health. In a fleet
	// each worker serves them. Default "": off.
	Listen string `toml:"listen"`
	// Fallbacks is the number of further endpoints that an answer lists after the chosen
	// one, for gateways that retry on the next endpoint of the list. Default 0.
	Fallbacks int `toml:"fallbacks"`
	// PassThrough sends requests for paths that are no endpoint of the picker to a ready engine,
	// except paths by which engines are managed. Default true.
	PassThrough bool `toml:"pass_through"`
	// Metadata is the namespace of dynamic metadata in which the picker tells the gateway the
	// model, engine, tenant and class of a request, and the tokens of its answer. Default "": none.
	Metadata string `toml:"metadata"`
	// DrainQuiet is the time without a new request after which a process that ends closes Listen,
	// within server.drain_timeout. Until then gateways notice that the picker is not ready.
	// Default 5s; 0s closes Listen at once.
	DrainQuiet Duration `toml:"drain_quiet"`
	// Pool is an InferencePool of the Gateway API Inference Extension, POOL or POOL.NAMESPACE.
	// Its InferenceObjectives give the requests of this process priorities, and its
	// InferenceModelRewrites rename their models. The keys of discovery.kubernetes name the API
	// server. Default "": no objects are read.
	Pool string `toml:"pool"`
	// Status writes the status of the objects of Pool, and an entry of the picker in the status
	// of the pool. Default false: gateway controllers write the status of the pool.
	Status bool `toml:"status"`
	// ModelHeader is the header line in which a gateway names the model of a request, instead
	// of the model in the body. Default "": none.
	ModelHeader string `toml:"model_header"`
	// TLS is the certificate of Listen.
	TLS TLS `toml:"tls"`
}

// maxFallbacks bounds the length of the header line with the endpoints.
const maxFallbacks = 16

// GatewayEndpoint returns the address to which gateways send the requests for an engine:
// Endpoint, or the host and port of URL. ok is false if its host is not an IP address;
// gateways look up no names.
func (e *Engine) GatewayEndpoint() (address netip.AddrPort, ok bool) {
	host, port, err := net.SplitHostPort(e.Address())
	if err != nil {
		return netip.AddrPort{}, false
	}
	if e.Endpoint != "" {
		own := host
		if host, port, err = net.SplitHostPort(e.Endpoint); err != nil {
			return netip.AddrPort{}, false
		}
		if host == "" {
			host = own
		}
	}
	address, err = netip.ParseAddrPort(net.JoinHostPort(host, port))
	return netip.AddrPortFrom(address.Addr().Unmap(), address.Port()), err == nil
}

// epp checks [epp] and the endpoints of the engines.
func (k *checker) epp() {
	c := k.config
	k.within("epp.fallbacks", c.EPP.Fallbacks, 0, maxFallbacks)
	if c.EPP.Metadata != "" {
		k.name("epp.metadata", c.EPP.Metadata)
	}
	k.tls("epp.tls", c.EPP.TLS, false)
	if c.EPP.Pool != "" {
		k.kubeName("epp.pool", c.EPP.Pool)
	} else if c.EPP.Status {
		k.add("epp.status", "needs epp.pool")
	}
	if h := c.EPP.ModelHeader; h != "" && !httpguts.ValidHeaderFieldName(h) {
		k.add("epp.model_header", "must be the name of a header line, found %q", h)
	}
	if c.EPP.Listen == "" {
		return
	}
	if c.Sidecar.Local != "" {
		k.add("epp.listen", "must not be set together with sidecar.local: a sidecar carries out the choice of an endpoint picker")
	}
	for i, e := range c.Engines {
		if e.Role != RoleDecode && e.Role != RoleBoth || e.Address() == "" {
			continue
		}
		if _, ok := e.GatewayEndpoint(); !ok && k.validEndpoint(e.Endpoint) {
			k.add(engineKey(i, "endpoint"), "is needed for epp.listen: gateways look up no names, and the host of url is not an IP address; want ip:port")
		}
	}
}

// endpoint checks the endpoint of an engine: ip:port, :port, or "".
func (k *checker) endpoint(key, value string) {
	if !k.validEndpoint(value) {
		k.add(key, "invalid endpoint %q: want ip:port, or :port on the host of url", value)
	}
}

func (k *checker) validEndpoint(value string) bool {
	if value == "" {
		return true
	}
	host, port, err := net.SplitHostPort(value)
	if err != nil || !validPort(port, 1) {
		return false
	}
	_, err = netip.ParseAddr(host)
	return host == "" || err == nil
}
