package node

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// newClient returns the pooled client of one engine.
func newClient(cfg *config.Config, spec config.Engine) (upstream.Client, error) {
	u, err := url.Parse(spec.URL)
	if err != nil {
		return nil, err
	}
	tlsConfig, err := engineTLS(spec)
	if err != nil {
		return nil, err
	}
	opts := upstream.Options{
		URL: u, TLS: tlsConfig, MaxConns: spec.MaxConns, MaxIdle: cfg.Transport.MaxIdle,
		IdleTimeout: time.Duration(cfg.Transport.IdleTimeout), DialTimeout: time.Duration(cfg.Timeouts.Dial),
	}
	if spec.Connector == config.ConnectorTRTLLM && cfg.TRTLLM.PerfMetrics {
		opts.MaxHeadBytes = 64<<10 + connector.MaxTiming
	}
	return upstream.New(opts), nil
}

// newProbe returns the transport of the probes of one engine.
func newProbe(spec config.Engine) (http.RoundTripper, error) {
	tlsConfig, err := engineTLS(spec)
	if err != nil {
		return nil, err
	}
	return &http.Transport{TLSClientConfig: tlsConfig, MaxIdleConnsPerHost: 1, IdleConnTimeout: 4 * time.Second, DisableCompression: true}, nil
}

// engineTLS returns how the certificate of one engine is verified; nil for Go's default.
func engineTLS(spec config.Engine) (*tls.Config, error) {
	if spec.CA == "" && !spec.InsecureSkipVerify {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: spec.InsecureSkipVerify}
	if spec.CA == "" {
		return c, nil
	}
	var err error
	c.RootCAs, err = readCAs("ca", spec.CA)
	return c, err
}

// resolve returns the addresses of a host name. If the name is that of this machine,
// it also returns the addresses of all network interfaces: the proxy may call an engine
// on this machine over the loopback address, while other engines use another address.
func resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, err
	}
	own := false
	for i, ip := range found {
		found[i] = ip.Unmap().WithZone("")
		own = own || found[i].IsLoopback()
	}
	if !own {
		return found, nil
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	for _, a := range all {
		if network, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(network.IP); ok {
				found = append(found, ip.Unmap())
			}
		}
	}
	return found, nil
}
