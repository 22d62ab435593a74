package node

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connlimit"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/httpguard"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Limits of the connections of metrics.listen. A Prometheus server keeps one connection.
const (
	scrapeReadTimeout  = 10 * time.Second
	scrapeWriteTimeout = time.Minute
	scrapeIdle         = 5 * time.Minute
	scrapeGrace        = 5 * time.Second // for an answer that is being sent when the process stops
	scrapeHeader       = 16 << 10        // bytes
)

// metricsListener serves metrics.listen: GET /metrics and nothing else. nil: metrics.listen
// is empty.
type metricsListener struct {
	listener net.Listener
	server   *http.Server
	log      *slog.Logger
	retired  atomic.Bool
}

// listenMetrics opens metrics.listen if it is configured and given is nil.
func (n *Node) listenMetrics(cfg *config.Config, given net.Listener) error {
	if cfg.Metrics.Listen == "" {
		return nil
	}
	if given == nil {
		l, err := net.Listen("tcp", cfg.Metrics.Listen)
		if err != nil {
			return exit.Failed(fmt.Errorf("metrics.listen: %w", err))
		}
		given = l
	}
	refuse := func(w http.ResponseWriter, _ *http.Request, status int, text string) {
		code := map[int]openai.Code{403: openai.CodeForbidden, 415: openai.CodeUnsupportedMediaType}[status]
		downstream.Error(w, &openai.Error{Status: status, Code: code, Message: text})
	}
	guard := httpguard.Guard{
		Name: "metrics.listen", Address: given.Addr(), Hosts: cfg.Admin.InternalHosts(cfg.Metrics.Listen), Refuse: refuse, Log: n.log,
	}
	routes := http.NewServeMux()
	routes.Handle("GET /metrics", n.server.MetricsHandler())
	routes.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Allow", "GET, HEAD")
		downstream.Error(w, openai.NewError(openai.CodeMethodNotAllowed, "this endpoint takes GET and HEAD"))
	})
	routes.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		downstream.Error(w, openai.NewError(openai.CodeNotFound, "this address serves only GET /metrics"))
	})
	n.scrapes = &metricsListener{listener: given, log: n.log, server: &http.Server{
		Handler:     guard.Wrap(routes),
		ReadTimeout: scrapeReadTimeout, WriteTimeout: scrapeWriteTimeout, IdleTimeout: scrapeIdle, MaxHeaderBytes: scrapeHeader,
		ErrorLog: slog.NewLogLogger(n.log.Handler(), slog.LevelDebug),
	}}
	connlimit.HTTP(n.scrapes.server)
	return nil
}

// run serves until retire or the end of ctx. It returns when no answer is being sent, or
// after scrapeGrace.
func (m *metricsListener) run(ctx context.Context) {
	if m == nil {
		return
	}
	stop := context.AfterFunc(ctx, m.retire)
	defer stop()
	if err := m.server.Serve(m.listener); !m.retired.Load() {
		m.log.Error("metrics.listen is no longer served", "error", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), scrapeGrace)
	defer cancel()
	if m.server.Shutdown(ctx) != nil {
		_ = m.server.Close() // its errors are those of closed sockets
	}
}

// retire closes the socket. A successor may serve copies of the socket. Answers that are
// being sent continue.
func (m *metricsListener) retire() {
	if m != nil {
		m.retired.Store(true)
		_ = m.listener.Close() // an error means that it is closed
	}
}

// opened returns the listener, nil without one.
func (m *metricsListener) opened() net.Listener {
	if m == nil {
		return nil
	}
	return m.listener
}

// MetricsAddr returns the address of metrics.listen, nil without one.
func (n *Node) MetricsAddr() net.Addr {
	if n.scrapes == nil {
		return nil
	}
	return n.scrapes.listener.Addr()
}
