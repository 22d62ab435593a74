package edge

import (
	"context"
	"net"
	"net/http"
	"time"

	"github.com/pdproxy/pdproxy/proxy/edge/http1"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// addHTTP1 adds a server of HTTP/1.1. Requests have base as the parent of their context. http2 takes
// over connections of HTTP/2; nil: there are none.
func (s *Server) addHTTP1(h http.Handler, l net.Listener, base context.Context, http2 func(net.Conn)) {
	limit := int(s.cfg.Server.MaxHeader)
	s.servers = append(s.servers, endpoint{listener: l, server: &http1.Server{
		Handler:   h,
		Base:      base,
		State:     countState,
		Refuse:    func(why http1.Refusal) []byte { return appendRefusal(nil, refusalOf(why, limit)) },
		HTTP2:     http2,
		HeadLimit: limit + headSlack,
		HeadTime:  s.stall.head,
		IdleTime:  time.Duration(s.cfg.Server.IdleTimeout),
		Log:       s.log,
	}})
}

// countState keeps the state of a connection in its place.
func countState(c net.Conn, state http.ConnState) {
	if t := tcpOf(c); state == http.StateActive {
		t.busy()
	} else {
		t.rest()
	}
}

// refusalOf returns the error that a client gets.
func refusalOf(why http1.Refusal, limit int) *openai.Error {
	switch why {
	case http1.UnclearLength:
		return errFraming
	case http1.BadLine:
		return errLine
	case http1.BadName:
		return invalidHead(http.StatusBadRequest, ": invalid header name")
	case http1.HeadTooLarge:
		return headTooLarge(limit)
	case http1.NoHost:
		return invalidHead(http.StatusBadRequest, ": missing required Host header")
	case http1.BadHost:
		return invalidHead(http.StatusBadRequest, ": malformed Host header")
	case http1.BadExpectation:
		return invalidHead(http.StatusExpectationFailed, "")
	case http1.UnknownCoding:
		return invalidHead(http.StatusNotImplemented, "")
	case http1.UnknownMethod:
		e := invalidHead(http.StatusNotImplemented, "")
		e.Message = "the method of the request is not known"
		return e
	case http1.UnknownVersion:
		return invalidHead(http.StatusHTTPVersionNotSupported, "")
	}
	return invalidHead(http.StatusBadRequest, "")
}
