package discovery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const (
	// registryTimeout bounds one request to a registry.
	registryTimeout = 5 * time.Second
	// maxTopology bounds an answer, in bytes.
	maxTopology = 64 << 10
	// sglangBootstrapPort is the default of --disaggregation-bootstrap-port.
	sglangBootstrapPort = "8998"
)

// sglangSource queries bootstrap registries of SGLang's prefill engines. A registry
// that answers is an engine, and reports the port of its API and the number of its
// ranks. A registry that does not answer changes nothing: it is a part of the engine's
// process, whose health the probes check.
type sglangSource struct {
	interval   time.Duration
	registries []*sglangRegistry
	http       http.Client
}

// sglangRegistry is one registry and the engine that it reported.
type sglangRegistry struct {
	pattern    config.Engine
	url        *url.URL
	host, port string // of the registry
	found      *config.Engine
	trouble    trouble
}

func newSGLang(cfg config.DiscoverySGLang, log *slog.Logger) *sglangSource {
	s := &sglangSource{interval: time.Duration(cfg.Interval)}
	s.http = http.Client{
		Timeout:       registryTimeout,
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	for _, e := range cfg.Engines {
		u, err := url.Parse(e.URL)
		if err != nil { // cannot happen: cfg was validated
			continue
		}
		r := &sglangRegistry{pattern: e, url: u, host: u.Hostname(), port: u.Port()}
		if r.port == "" {
			r.port = sglangBootstrapPort
		}
		r.trouble = trouble{log: log, source: "sglang " + net.JoinHostPort(r.host, r.port)}
		s.registries = append(s.registries, r)
	}
	return s
}

// Name is the source of these engines in the registry.
func (*sglangSource) Name() string { return "sglang" }

// Run queries the registries periodically.
func (s *sglangSource) Run(ctx context.Context, found func([]config.Engine)) {
	for {
		var wg sync.WaitGroup
		for _, r := range s.registries {
			wg.Go(func() { s.refresh(ctx, r) })
		}
		wg.Wait()
		if ctx.Err() != nil {
			return
		}
		var engines []config.Engine
		for _, r := range s.registries {
			if r.found != nil {
				engines = append(engines, *r.found)
			}
		}
		found(engines)
		if !pause(ctx, s.interval) {
			return
		}
	}
}

// refresh queries one registry.
func (s *sglangSource) refresh(ctx context.Context, r *sglangRegistry) {
	topology, err := s.ask(ctx, r)
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		e := r.engine(topology)
		if err = e.Check(); err == nil {
			r.found = &e
		}
	}
	r.trouble.note(err)
}

// sglangTopology holds the members of a registry's answer that locate the engine.
// Source, in SGLang: srt/disaggregation/common/conn.py PrefillServerInfo.
type sglangTopology struct {
	DPSize   int `json:"dp_size"`
	HTTPPort int `json:"prefill_http_port"`
}

// ask requests the topology of the engine to which a registry belongs.
func (s *sglangSource) ask(ctx context.Context, r *sglangRegistry) (t sglangTopology, err error) {
	at := "http://" + net.JoinHostPort(r.host, r.port) + "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return t, fmt.Errorf("ask registry: %w", err)
	}
	resp, err := s.http.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err
		}
		return t, fmt.Errorf("ask registry: %w", err)
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusServiceUnavailable:
		return t, errors.New("request topology from registry: not all ranks have registered")
	case resp.StatusCode == http.StatusBadRequest:
		return t, errors.New("request topology from registry: its version is too old: configure the engine by its own address")
	case resp.StatusCode != http.StatusOK:
		return t, fmt.Errorf("request topology from registry: it answered with status %d", resp.StatusCode)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxTopology)).Decode(&t); err != nil {
		return t, errors.New("request topology from registry: the answer is no topology")
	}
	if t.HTTPPort <= 0 || t.HTTPPort > 65535 {
		return t, errors.New("request topology from registry: its answer lacks the engine's address: configure the engine by its own address")
	}
	return t, nil
}

// engine returns the pattern with the registry's values.
func (r *sglangRegistry) engine(t sglangTopology) config.Engine {
	e, _ := atHost(r.pattern, r.url, net.JoinHostPort(r.host, strconv.Itoa(t.HTTPPort)))
	e.Ranks = max(1, t.DPSize)
	e.BootstrapHost = r.host
	e.BootstrapPort, _ = strconv.Atoi(r.port)
	return e
}
