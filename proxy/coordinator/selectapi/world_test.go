package selectapi

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// probes answers the probes of TensorRT-LLM workers that all serve one model.
type probes struct{ model string }

func (p probes) RoundTrip(r *http.Request) (*http.Response, error) {
	body := "{}"
	switch strings.TrimPrefix(r.URL.Path, "/x") {
	case "/v1/models":
		body = `{"data":[{"id":"` + p.model + `"}]}`
	case "/version":
		body = `{"version":"1.3.0rc24"}`
	case "/server_info":
		body = `{"disaggregated_params":{"ctx_info_endpoint":["tcp://` + r.URL.Hostname() + `:9"],"encoded_opaque_state":"AA=="},"tokens_per_block":32,"kv_cache_hash_algo":"v1_block_key"}`
	}
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}, nil
}

type client struct{}

func (client) Do(context.Context, *upstream.Request) (*upstream.Response, error) {
	return nil, errors.New("not in this test")
}
func (client) EvictIdle(any, time.Duration) {}
func (client) Withdraw()                    {}
func (client) CloseIdle()                   {}
func (client) Stats() upstream.Stats        { return upstream.Stats{} }

// counts counts fallbacks.
type counts struct {
	mu sync.Mutex
	of map[string]int // guarded by mu
}

func (c *counts) Fallback(what, reason string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.of[what+"/"+reason]++
}

func (c *counts) Minted(string) {}

func (c *counts) count(key string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.of[key]
}

// world is a handler with TensorRT-LLM instances that are all ready.
type world struct {
	*Handler
	reg   *engine.Registry
	local *coordinator.Local
	index *kvindex.Index
	seen  *counts
}

// newWorld starts the instances and the place policy with the name place. An instance is
// "role host:port" or "role host:port model". The world ends with the test.
func newWorld(t testing.TB, place string, change func(*Options), instances ...string) *world {
	t.Helper()
	w := &world{index: kvindex.New(kvindex.Options{}), seen: &counts{of: map[string]int{}}}
	ready := make(chan struct{}, 2*len(instances))
	var engines []config.Engine
	models := map[string]string{}
	for _, text := range instances {
		part := strings.Fields(text)
		e := config.Engine{Name: strings.NewReplacer(":", "-").Replace(part[0] + "-" + part[1]), URL: "http://" + part[1], Role: part[0], Connector: config.ConnectorTRTLLM, Ranks: 1}
		models[e.Name] = "m"
		if len(part) > 2 {
			models[e.Name] = part[2]
		}
		engines = append(engines, e)
	}
	w.reg = engine.New(engine.Options{
		Index:     w.index,
		Health:    config.Health{Interval: config.Duration(time.Hour), Timeout: config.Duration(time.Minute), UnhealthyAfter: 1, HealthyAfter: 1},
		Circuit:   config.Circuit{Failures: 3, OpenFor: config.Duration(time.Hour)},
		Protocols: func(name string) (engine.Protocol, bool) { return connector.ByName(name) },
		NewClient: func(config.Engine) (upstream.Client, error) { return client{}, nil },
		NewProbe:  func(e config.Engine) (http.RoundTripper, error) { return probes{models[e.Name]}, nil },
		OnState: func(_ *engine.Instance, s engine.State) {
			if s == engine.Ready {
				ready <- struct{}{}
			}
		},
	})
	if err := w.reg.Apply(engine.SourceStatic, engines, time.Hour); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { w.reg.Run(ctx) })
	for range instances {
		<-ready
	}
	native, err := policies.NewNative(policies.Names{Plan: "auto", Place: place, Mint: "snowflake"})
	if err != nil {
		t.Fatal(err)
	}
	mint, err := disaggid.New(1, 2)
	if err != nil {
		t.Fatal(err)
	}
	state := coordinator.State{Index: w.index, Conversations: conversation.New(100)}
	w.local = coordinator.NewLocal(w.reg, native, native, state, mint, w.seen)
	wg.Go(func() { w.local.Run(ctx) })
	o := Options{Local: w.local, Registry: w.reg, Index: w.index, Fallback: w.seen.Fallback, Version: "1.2.3"}
	if change != nil {
		change(&o)
	}
	w.Handler = New(o)
	t.Cleanup(func() { cancel(); wg.Wait() })
	return w
}

// request has the Host and the Content-Type of a worker's request.
func request(method, path, body string) *http.Request {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Host = "10.0.0.9:8000"
	switch {
	case body == "":
	case body[0] < 0x80:
		r.Header.Set("Content-Type", typeJSON)
	default:
		r.Header.Set("Content-Type", typeMsgpack)
	}
	return r
}

// call sends a request with a body. headers are pairs of name and value.
func (w *world) call(t testing.TB, method, path, body string, headers ...string) (status int, answer, media string) {
	t.Helper()
	r := request(method, path, body)
	for i := 0; i+1 < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	rec := httptest.NewRecorder()
	w.ServeHTTP(rec, r)
	return rec.Code, rec.Body.String(), rec.Header().Get("Content-Type")
}

// post sends JSON with POST. The test fails unless the answer has the status want.
func (w *world) post(t testing.TB, path, body string, want int) string {
	t.Helper()
	status, answer, _ := w.call(t, "POST", path, body)
	if status != want {
		t.Fatalf(`%s %s: w.call("POST", path, body) = %d %s, want %d`, path, body, status, answer, want)
	}
	return answer
}

// idle fails the test if a reservation or load is still held.
func (w *world) idle(t testing.TB) {
	t.Helper()
	for _, i := range w.reg.Snapshot().Instances {
		if i.Load[0].Requests() != 0 || i.Load[0].Tokens() != 0 || i.Load[0].Queued() != 0 {
			t.Errorf("%s still carries %d requests, %d tokens, %d queued", i.Spec.Name, i.Load[0].Requests(), i.Load[0].Tokens(), i.Load[0].Queued())
		}
	}
	if w.local.Open() != 0 || w.local.LiveIDs() != 0 || w.Open() != 0 {
		t.Errorf("%d leases, %d ids and %d reservations remain", w.local.Open(), w.local.LiveIDs(), w.Open())
	}
}
