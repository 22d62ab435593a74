package access

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// Reasons for a refusal: the label reason of pdproxy_fleet_refused_total.
const (
	ReasonSilent   = "silent"   // the peer sent nothing, or closed the connection
	ReasonBusy     = "busy"     // too many connections are not authenticated yet
	ReasonTLS      = "tls"      // the handshake failed because of the version or a certificate
	ReasonVersion  = "version"  // a worker of another version of the protocol
	ReasonToken    = "token"    // the peer does not have the token
	ReasonEpoch    = "epoch"    // the peer has seen a later coordinator
	ReasonProtocol = "protocol" // the peer uses another protocol
)

const (
	// After a logged refusal of an address, further refusals of this address are only
	// counted for refusalEvery.
	refusalEvery = 10 * time.Minute
	// maxUnproven bounds the number of TCP connections from all addresses that are not
	// authenticated yet. maxUnprovenOfOne bounds the number of such connections from one
	// address. A host has at most 64 workers.
	maxUnproven           = 512
	maxUnprovenOfOne      = 128
	longestError          = 200
	greeting         byte = 0x00 // first byte of a worker's greeting
	handshake        byte = 0x16 // first byte of TLS (RFC 8446, section 5.1)
)

// GateOptions holds the settings of a Gate. Log is required.
type GateOptions struct {
	Credentials *Credentials // nil: the gate accepts no TLS
	Log         *slog.Logger
	OnRefused   func(reason string) // called for each refusal; nil: not called
}

// Gate checks the connections to a coordinator's listeners. Safe for concurrent use.
type Gate struct {
	o        GateOptions
	tls      *tls.Config                 // nil without Credentials
	refusals lograte.Limiter[netip.Addr] // decides which refusals are logged

	mu       sync.Mutex
	unproven map[netip.Addr]int // guarded by mu
	all      int                // the sum of unproven; guarded by mu
}

// NewGate returns a gate.
func NewGate(o GateOptions) *Gate {
	g := &Gate{o: o, refusals: lograte.Limiter[netip.Addr]{Every: refusalEvery}, unproven: make(map[netip.Addr]int)}
	if o.Credentials != nil {
		g.tls = o.Credentials.Server()
	}
	return g
}

// Visitor is a connection that is not authenticated yet. The owner calls Admit or
// Refuse.
type Visitor struct {
	Conn  net.Conn // over TLS if the peer began a TLS handshake
	Begun []byte   // bytes that have been read from Conn already
	HTTP  bool     // the peer uses HTTP; otherwise the peer sends a worker's greeting

	gate *Gate
	nc   net.Conn
	from netip.Addr
	stop func() bool
}

// Receive reads the first bytes of a connection, and does the TLS handshake if the peer
// begins one. It returns nil if it has refused the connection. The connection is cut
// when ctx ends, or if Admit is not called within GreetingLimit.
func (g *Gate) Receive(ctx context.Context, nc net.Conn) *Visitor {
	v := &Visitor{Conn: nc, gate: g, nc: nc, from: addressOf(nc)}
	v.stop = context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	if !g.enter(v.from) {
		g.refuse(v, ReasonBusy, errors.New("too many connections have not proven themselves yet"))
		return nil
	}
	nc.SetDeadline(time.Now().Add(GreetingLimit))
	v.Begun = make([]byte, 1)
	if _, err := io.ReadFull(nc, v.Begun); err != nil {
		v.Refuse(ReasonSilent, err)
		return nil
	}
	switch {
	case v.Begun[0] == greeting:
	case v.Begun[0] == handshake && g.tls == nil:
		v.Refuse(ReasonTLS, errors.New("this listener has no TLS"))
		return nil
	case v.Begun[0] == handshake:
		t := link.Server(nc, v.Begun, g.tls)
		if err := t.Handshake(); err != nil { // the deadline of nc bounds it
			v.Refuse(ReasonTLS, err)
			return nil
		}
		v.Conn, v.Begun, v.HTTP = t, nil, t.ConnectionState().NegotiatedProtocol != Protocol
	default:
		v.HTTP = true
	}
	return v
}

// Admit ends the limits of a connection that is authenticated. It returns false if ctx
// has ended in the meantime. Then the connection is closed.
func (v *Visitor) Admit() bool {
	v.gate.leave(v.from)
	if !v.stop() {
		v.nc.Close()
		return false
	}
	v.nc.SetDeadline(time.Time{})
	return true
}

// Refuse closes the connection, and counts and logs the reason.
func (v *Visitor) Refuse(reason string, err error) {
	v.gate.leave(v.from)
	v.gate.refuse(v, reason, err)
}

// refuse closes a connection. It counts no refusal if the coordinator itself has ended
// the connection by ctx.
func (g *Gate) refuse(v *Visitor, reason string, err error) {
	wanted := v.stop()
	v.nc.Close()
	if !wanted {
		return
	}
	if reason != ReasonSilent && g.refusals.Allow(v.from) {
		g.logRefusal(v, reason, err)
	}
	if g.o.OnRefused != nil {
		g.o.OnRefused(reason)
	}
}

func (g *Gate) logRefusal(v *Visitor, reason string, err error) {
	text := err.Error()
	if len(text) > longestError { // the peer may choose a part of the text
		text = text[:longestError] + "..."
	}
	g.o.Log.Warn("a worker was refused", "address", v.nc.RemoteAddr().String(), "reason", reason, "error", text, "further_refusals_of_the_address", "counted and not logged for "+refusalEvery.String())
}

// enter counts a connection. It returns false if there are too many.
func (g *Gate) enter(from netip.Addr) bool {
	if !from.IsValid() {
		return true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.all >= maxUnproven || g.unproven[from] >= maxUnprovenOfOne {
		return false
	}
	g.all++
	g.unproven[from]++
	return true
}

// leave removes a connection from the count of enter.
func (g *Gate) leave(from netip.Addr) {
	if !from.IsValid() {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all--
	if g.unproven[from]--; g.unproven[from] == 0 {
		delete(g.unproven, from)
	}
}
