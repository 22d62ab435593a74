package access

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
)

const (
	// dialTimeout bounds a dial to a host that does not answer.
	dialTimeout = time.Second
	// GreetingLimit bounds the time before the first frame of a link, on each side.
	GreetingLimit = 3 * time.Second
)

// Dial connects to a coordinator's address, host:port or unix:path. A connection to
// host:port uses TLS, and Dial has completed the handshake.
func (c *Credentials) Dial(ctx context.Context, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout}
	if path, isUnix := strings.CutPrefix(address, "unix:"); isUnix {
		return d.DialContext(ctx, "unix", path)
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	nc, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return c.Secure(ctx, nc, host)
}

// Secure starts TLS on a worker's connection to host. Secure owns nc and closes nc if
// the handshake fails.
func (c *Credentials) Secure(ctx context.Context, nc net.Conn, host string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, GreetingLimit)
	defer cancel()
	t := link.Client(nc, c.Client(host))
	if err := t.HandshakeContext(ctx); err != nil {
		nc.Close()
		if noTLS := (tls.RecordHeaderError{}); errors.As(err, &noTLS) {
			return nil, errors.New("the peer does not use TLS: it is no coordinator, or one of an earlier version of the fleet's protocol")
		}
		return nil, fmt.Errorf("secure the link: %w", err)
	}
	return t, nil
}
