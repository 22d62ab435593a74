package conformance

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/cmd/node"
	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/internal/loadgen"
	"github.com/pdproxy/pdproxy/internal/replay"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// benchBlock is the number of tokens of a block of the trace, the recording and the engine.
const benchBlock = 16

// TestRecordAndBench: pdproxy bench sends a trace through a proxy that records. The
// recording has the lengths of the trace, and equal ids where the trace has equal ids.
// Sent again, the recording has the same hits in an engine's cache as the trace.
func TestRecordAndBench(t *testing.T) {
	lines, err := os.ReadFile(filepath.Join("..", "internal", "replay", "testdata", "mooncake_300.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	trace := shrunk(t, strings.Join(strings.SplitAfterN(string(lines), "\n", 61)[:60], ""))
	recorded, hits := sendTrace(t, trace)
	again, hitsAgain := sendTrace(t, recorded)
	// Lines of requests that began in the same millisecond have the order of their ends.
	slices.SortFunc(recorded.Requests, func(a, b replay.Request) int { return a.OutputLength - b.OutputLength })
	ids := map[uint64]uint64{}
	names := map[uint64]uint64{}
	for i, q := range trace.Requests {
		got := recorded.Requests[i]
		if got.InputLength != q.InputLength || got.OutputLength != q.OutputLength || len(got.HashIDs) != len(q.HashIDs) {
			t.Fatalf("request %d of the recording is %+v, want %+v", i, got, q)
		}
		for n, id := range q.HashIDs {
			if ids[id] == 0 {
				ids[id] = got.HashIDs[n]
			}
			if names[got.HashIDs[n]] == 0 {
				names[got.HashIDs[n]] = id
			}
			if ids[id] != got.HashIDs[n] || names[got.HashIDs[n]] != id {
				t.Fatalf("request %d: block %d is shared with other requests than in the trace", i, n)
			}
		}
	}
	if recorded.IdealHitRatio != trace.IdealHitRatio || again.IdealHitRatio != trace.IdealHitRatio || trace.IdealHitRatio == 0 {
		t.Errorf("ideal hit ratios %v, %v and %v", trace.IdealHitRatio, recorded.IdealHitRatio, again.IdealHitRatio)
	}
	leading := 0 // whole blocks that an unlimited cache holds
	for _, q := range trace.Requests {
		leading += min(q.Ideal, (q.InputLength-1)/benchBlock)
	}
	if hits != leading*benchBlock || hitsAgain != hits {
		t.Errorf("got %d and %d cached tokens, want %d", hits, hitsAgain, leading*benchBlock)
	}
}

// shrunk returns a trace with blocks of benchBlock tokens. The length of its answers
// identifies each request.
func shrunk(t *testing.T, text string) *replay.Trace {
	t.Helper()
	full, err := replay.ReadTrace("full", strings.NewReader(text), 512)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for i, q := range full.Requests {
		ids := strings.ReplaceAll(fmt.Sprint(q.HashIDs), " ", ",")
		fmt.Fprintf(&b, `{"timestamp":%d,"input_length":%d,"output_length":%d,"hash_ids":%s}`+"\n", i, (q.InputLength*benchBlock+511)/512, i+1, ids)
	}
	trace, err := replay.ReadTrace("shrunk", strings.NewReader(b.String()), benchBlock)
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// sendTrace sends a trace through a proxy to a new engine, one request after the other. It
// returns the proxy's recording and the cached tokens.
func sendTrace(t *testing.T, trace *replay.Trace) (recorded *replay.Trace, cached int) {
	t.Helper()
	e, err := enginesim.New(enginesim.Config{BlockSize: benchBlock, KVBlocks: 1 << 15})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	cfg := config.Default()
	cfg.Server.Listen, cfg.Admin.Listen = "127.0.0.1:0", "127.0.0.1:0"
	cfg.Recording = config.Recording{Path: filepath.Join(t.TempDir(), "trace.jsonl"), BlockTokens: benchBlock}
	spec := config.DefaultEngine()
	spec.Name, spec.URL, spec.Role = "e", e.URL(), "both"
	cfg.Engines = append(cfg.Engines, spec)
	p := startProcess(t, &cfg, nil, node.Options{})
	defer p.end()
	testbed.Eventually(t, "the engine is ready", func() bool {
		resp, err := http.Get(p.URL() + "/health")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	r, err := loadgen.Run(t.Context(), loadgen.Config{
		URL: p.URL(), API: loadgen.APICompletions, Model: "sim", Trace: trace, BlockTokens: benchBlock,
		TokenIDs: loadgen.DefaultIDs, Speed: 1, MaxOpen: 1, Timeout: time.Minute, Seed: 1,
	})
	if err != nil || r.Failed != 0 || r.Requests != len(trace.Requests) {
		t.Fatalf("%d requests, failures %v, %v", r.Requests, r.Failures, err)
	}
	if err := p.end(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(cfg.Recording.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if recorded, err = replay.ReadTrace("recorded", f, benchBlock); err != nil {
		t.Fatal(err)
	}
	return recorded, r.CachedTokens
}
