package loadgen

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/internal/replay"
)

// shortTrace has a shared first block, a continued conversation with a partial last block,
// a repeated prompt, and tokens after the last id.
const shortTrace = `{"timestamp": 500, "input_length": 40, "output_length": 3, "hash_ids": [7, 1, 2]}
{"timestamp": 1500, "input_length": 64, "output_length": 4, "hash_ids": [7, 1, 3, 4]}
{"timestamp": 2500, "input_length": 64, "output_length": 4, "hash_ids": [7, 1, 3, 4]}
{"timestamp": 4500, "input_length": 20, "output_length": 0, "hash_ids": [7], "conversation": "c1"}
`

func readTrace(t *testing.T) *replay.Trace {
	t.Helper()
	tr, err := replay.ReadTrace("short", strings.NewReader(shortTrace), 16)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func traceConfig(t *testing.T) Config {
	return Config{API: APICompletions, Concurrency: 1, Trace: readTrace(t), BlockTokens: 16, TokenIDs: DefaultIDs, Timeout: time.Minute, Seed: 1}
}

func TestTraceArrivals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(int) (int, []string) { return 200, good() }}
		c := traceConfig(t)
		c.URL, c.Transport, c.Speed = "http://h", s, 2
		r := measure(t, s, c)
		if want := []time.Duration{0, 500 * time.Millisecond, time.Second, 2 * time.Second}; !slices.Equal(s.at, want) || r.Requests != 4 {
			t.Errorf("requests at %v", s.at)
		}
		var b struct {
			Prompt    []uint32
			MaxTokens int  `json:"max_tokens"`
			IgnoreEOS bool `json:"ignore_eos"`
		}
		if err := json.Unmarshal([]byte(strings.TrimPrefix(s.asked[0], "/v1/completions ")), &b); err != nil || len(b.Prompt) != 40 || b.MaxTokens != 3 || !b.IgnoreEOS {
			t.Errorf("%s: %v", s.asked[0], err)
		}
		if slices.Min(b.Prompt) < DefaultIDs.First || slices.Max(b.Prompt) > DefaultIDs.Last {
			t.Errorf("ids of %v", b.Prompt)
		}
		c.Requests = 2
		if r := measure(t, s, c); r.Requests != 2 {
			t.Errorf("%d of 2 requests", r.Requests)
		}
	})
}

// Leading blocks of two prompts are equal exactly where the ids of the trace are.
func TestTraceShares(t *testing.T) {
	for _, api := range []string{APICompletions, APIChat} {
		c := traceConfig(t)
		c.API = api
		w := newWorkload(&c)
		var prompts [][]string
		for n := range w.conversations() {
			p := w.task(n, 0).prompt
			parts := strings.Fields(p.text)
			for _, id := range p.ids {
				parts = append(parts, string(rune(id)))
			}
			if len(parts) != c.Trace.Requests[n].InputLength {
				t.Errorf("%s: prompt %d has %d tokens", api, n, len(parts))
			}
			prompts = append(prompts, parts)
		}
		for i, a := range prompts {
			for j, b := range prompts {
				if i == j {
					continue
				}
				equal := 0
				for equal < min(len(a), len(b)) && a[equal] == b[equal] {
					equal++
				}
				x, y, blocks := c.Trace.Requests[i].HashIDs, c.Trace.Requests[j].HashIDs, 0
				for blocks < min(len(x), len(y)) && x[blocks] == y[blocks] {
					blocks++
				}
				if equal/16 != blocks || equal%16 > 3 && i+j != 3 { // requests 1 and 2 are equal
					t.Errorf("%s: prompts %d and %d have %d equal tokens, want %d blocks of 16", api, i, j, equal, blocks)
				}
			}
		}
		c.Seed = 2
		if other := newWorkload(&c).task(0, 0).prompt; other.text != "" && other.text == strings.Join(prompts[0], " ") {
			t.Errorf("%s: another seed made the same prompt", api)
		}
	}
}

// A simulated engine finds exactly the whole blocks that the trace shares.
func TestTraceOnEngine(t *testing.T) {
	e, err := enginesim.New(enginesim.Config{BlockSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	c := traceConfig(t)
	c.URL, c.Speed, c.MaxOpen, c.WarmUp = e.URL(), 1e6, 1, 1
	r, err := Run(t.Context(), c)
	if err != nil || r.Failed != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	var cached, prompt []int
	for _, s := range r.Samples {
		cached, prompt = append(cached, s.Cached), append(prompt, s.Prompt)
	}
	// The engine computes the last block of a prompt that it has as a whole.
	if !slices.Equal(cached, []int{0, 32, 48, 16}) || !slices.Equal(prompt, []int{40, 64, 64, 20}) {
		t.Errorf("cached %v of %v tokens", cached, prompt)
	}
	if r.OutputTokens != 3+4+4+1 {
		t.Errorf("%d output tokens", r.OutputTokens)
	}
}

func TestParseIDRange(t *testing.T) {
	if r, err := ParseIDRange("5-9"); err != nil || r != (IDRange{5, 9}) || r.String() != "5-9" {
		t.Errorf("%v %v", r, err)
	}
	for _, text := range []string{"", "5", "5-", "5-5", "9-5", "-1-5", "a-b", "1-99999999999"} {
		if r, err := ParseIDRange(text); err == nil {
			t.Errorf("%q is %v", text, r)
		}
	}
}

func TestMeanBlock(t *testing.T) {
	if n := MeanBlock(readTrace(t)); n != 188/12 {
		t.Errorf("a block has %d tokens", n)
	}
	if n := MeanBlock(&replay.Trace{}); n != 1 {
		t.Errorf("a block of no request has %d tokens", n)
	}
}
