package conformance

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/disaggid"
)

// These tests cover the two faults that reduced a fleet of TensorRT-LLM's
// orchestrators to two requests per second (its pull request 15905). Two equal
// ids join two transfers into one, which never ends. An id that changes on the
// way to decode was never registered.

// TestNoIDOfAFleetCollides: 64 workers on each of two nodes mint at full speed,
// all in the same milliseconds and from counter 0, like the workers of a fleet
// that start together.
func TestNoIDOfAFleetCollides(t *testing.T) {
	const nodes, workers, each = 2, 64, 3000 // more than one worker's ids of a millisecond
	mint, err := policies.NewNative(policies.Names{Plan: "auto", Place: "least_load", Mint: "snowflake"})
	if err != nil {
		t.Fatal(err)
	}
	ids := make([][]uint64, nodes*workers)
	start := make(chan struct{})
	var wg sync.WaitGroup
	for n := range ids {
		source, err := disaggid.New(n/workers, n%workers)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			<-start
			for i := range each {
				facts, ok := source.Next()
				if !ok {
					t.Error("a line has no ids")
				}
				id := disaggid.Pack(facts) // the proxy's own rule, and the policy's
				if i%100 == 0 {
					if byPolicy, _, ok := mint.Mint(t.Context(), &facts); !ok || byPolicy != id {
						t.Errorf("the policy mints %d, the rule %d", byPolicy, id)
					}
				}
				ids[n] = append(ids[n], id)
			}
		})
	}
	close(start)
	wg.Wait()
	all := slices.Concat(ids...)
	slices.Sort(all)
	if distinct := len(slices.Compact(slices.Clone(all))); distinct != nodes*workers*each {
		t.Errorf("%d ids, %d of them distinct", len(all), distinct)
	}
	if all[0] < abi.MinDisaggID || all[len(all)-1] >= abi.MaxDisaggID {
		t.Errorf("ids from %d to %d", all[0], all[len(all)-1])
	}
}

// TestPlacementKeepsTheID: a decode leg is placed again because its engine was
// unreachable. It has the id that prefill registered. That id is the one in
// prefill's answer, even if the worker had another id.
func TestPlacementKeepsTheID(t *testing.T) {
	var mu sync.Mutex
	asked, registered := map[uint64]bool{}, map[uint64]bool{}
	type params struct {
		P struct {
			Disagg uint64 `json:"disagg_request_id"`
			Ctx    uint64 `json:"ctx_request_id"`
		} `json:"disaggregated_params"`
	}
	prefill := &testbed.Engine{Name: "p0", Role: "prefill", Serve: func(w http.ResponseWriter, l testbed.Leg) {
		var p params
		if err := json.Unmarshal([]byte(l.Text), &p); err != nil {
			t.Error(err)
		}
		mu.Lock()
		id := p.P.Disagg
		asked[id] = true
		if len(asked)%2 == 0 {
			id += 1 << 20 // as a worker's own retry would do
		}
		registered[id] = true
		mu.Unlock()
		fmt.Fprintf(w, `{"id":"c","choices":[{"index":0,"message":{"content":"x"},"finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":%d,"disagg_request_id":%[1]d}}]}`, id)
	}}
	decode := &testbed.Engine{Name: "d1", Role: "decode", Serve: func(w http.ResponseWriter, l testbed.Leg) {
		var p params
		if err := json.Unmarshal([]byte(l.Text), &p); err != nil {
			t.Error(err)
		}
		mu.Lock()
		if !registered[p.P.Disagg] || p.P.Ctx != p.P.Disagg {
			t.Errorf("decode waits for the ids %d and %d, want equal ids among %v", p.P.Disagg, p.P.Ctx, registered)
		}
		mu.Unlock()
		io.WriteString(w, `{"choices":[{"message":{"content":"whole"}}]}`)
	}}
	gone := &testbed.Engine{Name: "d0", Role: "decode"}
	f := startScripted(t, enginesim.ConnectorTRTLLM, func(c *config.Config) {
		c.Policy.Place = "round_robin"
		c.Health.Interval = config.Duration(time.Hour) // so that the end of one decode engine stays unnoticed
	}, prefill, gone, decode)
	gone.Close()
	const requests = 4
	for range requests {
		if a := f.try(chatPath, chat("hello", 5, false)); a.status != 200 || a.text != "whole" {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if n := len(prefill.Seen(nil)); n != requests || len(asked) != requests {
		t.Errorf("%d prompts were computed under %d ids for %d requests", n, len(asked), requests)
	}
	if n := f.metric("pdproxy_retries_total", `phase="decode"`); n == 0 {
		t.Error("no decode leg was placed anew")
	}
}
