package vllm

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// mooncakeBootstrap is the bootstrap server of a producer. Workers register, and decode
// engines and proxies request the list of workers. It is plain HTTP without
// authentication. Source: vLLM mooncake_utils.py MooncakeBootstrapServer.
type mooncakeBootstrap struct {
	e        *core.Engine
	server   *http.Server
	listener net.Listener

	mu      sync.Mutex
	engines map[int]*mooncakeEngine // by data-parallel rank
}

// mooncakeEngine is one data-parallel rank: its workers' addresses by
// tensor-parallel and pipeline-parallel rank.
type mooncakeEngine struct {
	Engine  string                 `json:"engine_id"`
	Workers map[int]map[int]string `json:"worker_addr"`
}

// mooncakeWorker is the body of POST /register.
type mooncakeWorker struct {
	Engine  string `json:"engine_id"`
	DPRank  int    `json:"dp_rank"`
	TPRank  int    `json:"tp_rank"`
	PPRank  int    `json:"pp_rank"`
	Address string `json:"addr"`
}

func newMooncakeBootstrap(e *core.Engine) *mooncakeBootstrap {
	b := &mooncakeBootstrap{e: e, engines: make(map[int]*mooncakeEngine)}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /query", b.query)
	mux.HandleFunc("POST /register", b.registerWorker)
	b.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if _, pattern := mux.Handler(r); pattern == "" {
				w = &core.FastAPIError{ResponseWriter: w}
			}
			mux.ServeHTTP(w, r)
		}),
		ConnState: e.Conns.State, ReadHeaderTimeout: time.Minute,
		BaseContext: func(net.Listener) context.Context { return e.Ctx },
	}
	return b
}

func (b *mooncakeBootstrap) Start(host string) error {
	var err error
	b.listener, err = net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(b.e.Cfg.BootstrapPort)))
	if err != nil {
		return fmt.Errorf("listen bootstrap: %w", err)
	}
	context.AfterFunc(b.e.Ctx, func() { b.listener.Close() })
	b.e.Spawn(func(context.Context) { b.server.Serve(b.listener) })
	return nil
}

// port returns the port on which it listens; before start the configured one.
func (b *mooncakeBootstrap) port() int {
	if b.listener == nil {
		return b.e.Cfg.BootstrapPort
	}
	return b.listener.Addr().(*net.TCPAddr).Port
}

// register records a worker. Each rank has one engine id, and each place one
// worker. problem is "" if the worker is valid.
func (b *mooncakeBootstrap) register(w mooncakeWorker) (problem string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	entry := b.engines[w.DPRank]
	if entry == nil {
		entry = &mooncakeEngine{Engine: w.Engine, Workers: make(map[int]map[int]string)}
		b.engines[w.DPRank] = entry
	}
	if entry.Engine != w.Engine {
		return fmt.Sprintf("Engine ID mismatch for dp_rank=%d: expected %s, got %s", w.DPRank, entry.Engine, w.Engine)
	}
	if entry.Workers[w.TPRank] == nil {
		entry.Workers[w.TPRank] = make(map[int]string)
	}
	if entry.Workers[w.TPRank][w.PPRank] != "" {
		return "Worker is already registered"
	}
	entry.Workers[w.TPRank][w.PPRank] = w.Address
	return ""
}

func (b *mooncakeBootstrap) registerWorker(w http.ResponseWriter, r *http.Request) {
	var worker mooncakeWorker
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<20)).Decode(&worker); err != nil {
		core.WriteJSON(w, http.StatusUnprocessableEntity, core.Obj("detail", err.Error()))
	} else if problem := b.register(worker); problem != "" {
		core.WriteJSON(w, http.StatusBadRequest, core.Obj("detail", problem))
	} else {
		core.WriteJSON(w, http.StatusOK, core.Obj("status", "ok"))
	}
}

func (b *mooncakeBootstrap) query(w http.ResponseWriter, _ *http.Request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	core.WriteJSON(w, http.StatusOK, b.engines)
}
