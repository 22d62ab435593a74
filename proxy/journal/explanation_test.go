package journal

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

var origin = time.UnixMilli(1_700_000_000_000)

func targetNamed(name string) engine.Target {
	return engine.Target{Instance: &engine.Instance{Spec: config.Engine{Name: name}}}
}

// begin begins a leg that nobody reuses.
func begin(j *Journal, phase abi.Phase, t engine.Target, attempt int, id string) *Leg {
	l := new(Leg)
	j.BeginLeg(l, phase, t, attempt, id)
	return l
}

func at(ms int) time.Time { return origin.Add(time.Duration(ms) * time.Millisecond) }

// books writes the journals of all tests to the same metrics.
var books = NewBooks(telemetry.New(prometheus.NewRegistry()), nil, nil, slog.New(slog.DiscardHandler), nil)

// opened returns a journal of a request that arrived at origin.
func opened(id string) *Journal {
	j := new(Journal)
	j.Open(books, context.Background(), nil, id)
	books.Running.remove(&j.view)
	j.Start = origin
	return j
}

// fullRecord returns a record with a value in every field: a prefill that failed and was
// placed again, and a decode.
func fullRecord(id string) *Record {
	r := opened(id)
	r.Model, r.Stream = "m", true
	p0, p1, d0 := targetNamed("p0"), targetNamed("p1"), targetNamed("d0")
	d0.Rank = 2
	r.Placed(&coordinator.Placement{
		Flow: abi.FlowPrefillFirst, Prefill: p1, Decode: d0, ID: 1<<53 + 1, Policy: "least_load",
		Facts: abi.PlaceFacts{Scored: true, Candidates: []abi.Candidate{
			{Roles: abi.RolePrefill, Requests: 1, Tokens: 20, Score: -0.5, Adapter: abi.AdapterRunning}, {Roles: abi.RolePrefill, Score: float32(math.NaN())},
			{Roles: abi.RoleDecode, Rank: 2, Trial: true},
		}},
		Targets: []engine.Target{p0, p1, d0}, Matched: -1,
	}, 7)
	r.Fallback("mint", "late")
	decode := begin(r, abi.Decode, d0, 1, "leg-b") // another goroutine begins this leg before prefill's row
	failed := begin(r, abi.Prefill, p0, 1, "leg-a")
	good := begin(r, abi.Prefill, p1, 2, "leg-b")
	r.LegAnswered(failed, 500)
	r.LegFailed(failed, "status_500", "the engine answered with status 500")
	r.LegAnswered(good, 200)
	r.LegSucceeded(good, "vllm-nixl")
	r.LegAnswered(decode, 200)
	r.AnswerBegins(decode)
	r.LegSucceeded(decode, "vllm-nixl")
	r.Fallback("retry", "budget")
	r.Status = 200
	r.Outcome, r.Usage = telemetry.OutcomeOK, openai.Usage{Prompt: 7, Completion: 5, Cached: -1}
	r.End(HTTP{})
	if r.FirstByte.IsZero() || r.placed.IsZero() || r.ended.IsZero() || decode.firstByte != r.FirstByte {
		panic("the journal has not noted all times")
	}
	failed.Start, failed.head, failed.ended = at(3), at(4), at(4)
	good.Start, good.head, good.ended = at(5), at(8), at(9)
	decode.Start, decode.head, decode.firstByte, decode.ended = at(10), at(11), at(12), at(30)
	r.placed, r.FirstByte, r.ended = at(2), at(12), at(31)
	return &r.Record
}

// The JSON has exactly the names of the documented interface.
func TestExplainJSON(t *testing.T) {
	s := new(Ring)
	s.put(fullRecord("r1"))
	e, ok := s.Get("r1")
	if !ok {
		t.Fatal("not found")
	}
	got, err := json.MarshalIndent(e, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	const want = `{
 "request_id": "r1",
 "disagg_id": 9007199254740993,
 "arrival": 1700000000,
 "model": "m",
 "flow": "prefill_first",
 "policy": "least_load",
 "outcome": "ok",
 "status": 200,
 "duration_ms": 31,
 "candidates": [
  {
   "engine": "p0",
   "rank": 0,
   "score": -0.5,
   "facts": {
    "adapter": "running",
    "block_tokens": 0,
    "blocks_cpu": 0,
    "blocks_disk": 0,
    "blocks_gpu": 0,
    "busy": 0,
    "group": 0,
    "home": "none",
    "pair": "unknown",
    "queued": 0,
    "recent_requests": 0,
    "recent_tokens": 0,
    "requests": 1,
    "role": "prefill",
    "token_us": 0,
    "tokens": 20,
    "trial": false,
    "usage": 0
   }
  },
  {
   "engine": "p1",
   "rank": 0,
   "score": null,
   "facts": {
    "block_tokens": 0,
    "blocks_cpu": 0,
    "blocks_disk": 0,
    "blocks_gpu": 0,
    "busy": 0,
    "group": 0,
    "home": "none",
    "pair": "unknown",
    "queued": 0,
    "recent_requests": 0,
    "recent_tokens": 0,
    "requests": 0,
    "role": "prefill",
    "token_us": 0,
    "tokens": 0,
    "trial": false,
    "usage": 0
   }
  },
  {
   "engine": "d0",
   "rank": 2,
   "score": 0,
   "facts": {
    "block_tokens": 0,
    "blocks_cpu": 0,
    "blocks_disk": 0,
    "blocks_gpu": 0,
    "busy": 0,
    "group": 0,
    "home": "none",
    "pair": "unknown",
    "queued": 0,
    "recent_requests": 0,
    "recent_tokens": 0,
    "requests": 0,
    "role": "decode",
    "token_us": 0,
    "tokens": 0,
    "trial": true,
    "usage": 0
   }
  }
 ],
 "legs": [
  {
   "id": "leg-a",
   "phase": "prefill",
   "engine": "p0",
   "rank": 0,
   "attempt": 1,
   "start_ms": 3,
   "first_byte_ms": 4,
   "end_ms": 4,
   "status": 500,
   "error": "status_500",
   "cause": "the engine answered with status 500"
  },
  {
   "id": "leg-b",
   "phase": "prefill",
   "engine": "p1",
   "rank": 0,
   "attempt": 2,
   "start_ms": 5,
   "first_byte_ms": 8,
   "end_ms": 9,
   "status": 200,
   "error": ""
  },
  {
   "id": "leg-b",
   "phase": "decode",
   "engine": "d0",
   "rank": 2,
   "attempt": 1,
   "start_ms": 10,
   "first_byte_ms": 12,
   "end_ms": 30,
   "status": 200,
   "error": ""
  }
 ],
 "fallbacks": [
  {
   "what": "mint",
   "reason": "late"
  },
  {
   "what": "retry",
   "reason": "budget"
  }
 ]
}`
	if string(got) != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// An exchange without any leg has empty lists instead of null, and null times.
func TestExplainEmpty(t *testing.T) {
	s := new(Ring)
	r := opened("r")
	begin(r, abi.Decode, targetNamed("d"), 1, "").Start = at(1)
	r.ended, r.Outcome = at(5), telemetry.OutcomeCancelled
	s.put(&r.Record)
	e, _ := s.Get("r")
	got, _ := json.Marshal(e)
	const want = `{"request_id":"r","disagg_id":0,"arrival":1700000000,"model":"","flow":"none","policy":"","outcome":"cancelled","status":0,"duration_ms":5,` +
		`"candidates":[],"legs":[{"id":"","phase":"decode","engine":"d","rank":0,"attempt":1,"start_ms":1,"first_byte_ms":null,"end_ms":null,"status":0,"error":""}],"fallbacks":[]}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestPerfRows(t *testing.T) {
	s := new(Ring)
	s.put(fullRecord("r1"))
	only := fullRecord("r2") // a record without a decode leg
	only.rows[0].Phase, only.rows[0].Start = abi.Prefill, time.Time{}
	only.FirstByte = time.Time{}
	s.put(only)
	got, err := json.Marshal(s.PerfRows())
	if err != nil {
		t.Fatal(err)
	}
	const want = `[{"request_id":"r1","ctx_request_id":"9007199254740993","ctx_server":"p1","gen_server":"d0",` +
		`"disagg_server_arrival_time":1700000000,"ctx_dispatch_time":1700000000.005,"ctx_done_time":1700000000.009,"gen_dispatch_time":1700000000.01,` +
		`"disagg_server_first_token_time":1700000000.012,"disagg_server_end_time":1700000000.031,"outcome":"ok","prompt_tokens":7,"output_tokens":5,"cached_tokens":0},`
	if !strings.HasPrefix(string(got), want) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if !strings.Contains(string(got)[len(want):], `"gen_dispatch_time":0,"disagg_server_first_token_time":0`) {
		t.Errorf("a leg that never began has a time: %s", got)
	}
}

// The ring drops the oldest record. If two records have the same id, the id finds the
// later one.
func TestExplainRing(t *testing.T) {
	s := new(Ring)
	put := func(id string, disagg uint64) {
		s.put(&Record{RequestID: id, DisaggID: disagg})
	}
	put("twice", 1)
	put("once", 2)
	put("twice", 3)
	if e, ok := s.Get("twice"); !ok || e.DisaggID != 3 {
		t.Errorf("twice: %d, %v", e.DisaggID, ok)
	}
	for i := range RingSize - 2 { // overwrites the first two slots and not the third
		put(fmt.Sprint("n", i), 9)
		if e, ok := s.Get("twice"); i < RingSize-3 && (!ok || e.DisaggID != 3) {
			t.Fatalf("after %d more records the later record is lost", i+1)
		}
	}
	if _, ok := s.Get("once"); !ok {
		t.Error("the second slot was overwritten too early")
	}
	put("more", 9)
	if _, ok := s.Get("once"); ok {
		t.Error("the ring still has the overwritten record")
	}
	if e, ok := s.Get("twice"); !ok || e.DisaggID != 3 {
		t.Error("the later record was dropped together with the slot of the earlier record")
	}
	put("more2", 9)
	if _, ok := s.Get("twice"); ok {
		t.Error("the ring has the later record after its slot was overwritten")
	}
	rows := s.PerfRows()
	if len(rows) != RingSize || rows[0].RequestID != "n0" || rows[RingSize-1].RequestID != "more2" {
		t.Errorf("%d rows from %s to %s", len(rows), rows[0].RequestID, rows[len(rows)-1].RequestID)
	}
}

// The memory for candidates does not grow with the engines: with many engines, only the later
// records have their candidates, and the others say so.
func TestRingLimitsCandidates(t *testing.T) {
	s := new(Ring)
	held := func() (sum int) {
		for i := range s.ring {
			sum += cap(s.ring[i].candidates)
		}
		return sum
	}
	n := 0
	put := func(candidates int) (id string) {
		n++
		id = fmt.Sprint("r", n)
		s.put(&Record{RequestID: id, candidates: make([]candidate, candidates)})
		return id
	}
	shows := func(id string, want int, complete bool) {
		t.Helper()
		if e, ok := s.Get(id); !ok || len(e.Candidates) != want || (len(e.Notes) == 0) != complete {
			t.Errorf("%s: found %v, %d candidates, notes %q; want %d", id, ok, len(e.Candidates), e.Notes, want)
		}
	}
	for range RingSize {
		put(64)
	}
	shows("r1", 64, true)
	put(1000)
	shows("r2", 0, false)
	shows("r1000", 64, true)
	for range 3 * RingSize {
		put(1000)
		put(3)
		if s.candidates.entries > maxCandidates {
			t.Fatalf("%d candidates after %d records", s.candidates.entries, n)
		}
	}
	if sum := held(); sum != s.candidates.entries {
		t.Errorf("the records have memory for %d candidates, counted are %d", sum, s.candidates.entries)
	}
	shows(put(1000), 1000, true)
	shows(fmt.Sprint("r", n-200), 1000, true)
	shows(fmt.Sprint("r", n-2000), 0, false)
	shows(put(maxCandidates+1), maxCandidates+1, true)
	shows(put(2), 2, true)
	shows(put(2), 2, true)
	shows(fmt.Sprint("r", n-2), 0, false)
}

// The stored record shares no memory with the exchange, which reuses its own memory for
// the next request.
func TestExplainCopies(t *testing.T) {
	b := NewBooks(books.metrics, nil, nil, books.log, nil)
	r := &Journal{Record: *fullRecord("r1"), books: b}
	r.Close()
	s := &b.Ended
	before, _ := s.Get("r1")
	want, _ := json.Marshal(before)
	if len(before.Legs) != 3 || len(before.Candidates) != 3 || len(before.Fallbacks) != 2 {
		t.Errorf("explained %+v", before)
	}
	if len(r.rows) != 0 || len(r.candidates) != 0 || len(r.fallbacks) != 0 || r.RequestID != "" {
		t.Errorf("after Close: %d legs, %d candidates, %d fallbacks", len(r.rows), len(r.candidates), len(r.fallbacks))
	}
	r.Open(b, t.Context(), nil, "r2")
	for range 3 {
		r.LegEnded(begin(r, abi.Decode, targetNamed("other"), 9, "other"), "other", "other")
	}
	r.Fallback("other", "other")
	r.candidates = append(r.candidates, candidate{engine: "other"})
	after, _ := s.Get("r1")
	if got, _ := json.Marshal(after); string(got) != string(want) {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestExplainHammer(t *testing.T) {
	s := new(Ring)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 500 {
				id := fmt.Sprint(i, "-", n%50)
				s.put(fullRecord(id))
				if e, ok := s.Get(id); !ok || e.RequestID != id || len(e.Legs) != 3 {
					t.Errorf("%s: s.Get(id) = %+v", id, e)
				}
				if n%100 == 0 {
					s.PerfRows()
				}
			}
		})
	}
	wg.Wait()
}

func TestExpose(t *testing.T) {
	h := http.Header{}
	(&Journal{Record: *fullRecord("r")}).Expose(h)
	if h.Get("X-Pdproxy-Prefill") != "p1" || h.Get("X-Pdproxy-Decode") != "d0" || h.Get("X-Pdproxy-Flow") != "prefill_first" {
		t.Errorf("header %v", h)
	}
	h = http.Header{}
	(&Journal{Record: Record{Flow: abi.FlowAggregated, decode: "e"}}).Expose(h)
	if _, ok := h["X-Pdproxy-Prefill"]; ok || h.Get("X-Pdproxy-Decode") != "e" || h.Get("X-Pdproxy-Flow") != "aggregated" {
		t.Errorf("header %v", h)
	}
}
