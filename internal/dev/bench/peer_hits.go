package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/internal/dev/traces"
	"github.com/pdproxy/pdproxy/internal/replay"
)

const (
	hitEngines   = 4    //
	hitCache     = 2000 // blocks that an engine keeps: a million tokens
	hitRequests  = 4000 // of a trace
	hitConns     = 16
	hitMaxRounds = 3
)

// heldOutOf is the trace whose variants the part hits uses.
const heldOutOf = "internal/replay/testdata/mooncake.gz"

// heldOut are the traces of the part hits: variants of heldOutOf whose seeds chose no
// parameter of pdproxy's policies (docs/concepts/routing.md).
var heldOut = []string{"resampled:11", "mixed:11"}

// hitRow is the result of one router on one trace, in one round.
type hitRow struct {
	Peer     string  `json:"peer"`
	Trace    string  `json:"trace"`
	Round    int     `json:"round"`
	Requests int     `json:"requests"`
	Hits     float64 `json:"hits"`     // share of all blocks of prompts that the engine had
	Possible float64 `json:"possible"` // the same of one cache with the room of all engines
	Uneven   float64 `json:"uneven"`   // requests of the busiest engine, of an even share
	CPU      float64 `json:"cpu_us"`   // of a request
	Rate     float64 `json:"per_second"`
	Others   float64 `json:"others"` // share of the two cores that other programs used
	Failed   string  `json:"failed,omitempty"`
}

// tracePrompts returns the prompts of a variant of a trace. A block of the trace
// becomes promptBlock bytes that depend on its id.
func tracePrompts(path, variant string, n int) ([][]byte, error) {
	lines, err := traces.Lines(path)
	if err != nil {
		return nil, err
	}
	t, err := replay.ReadTrace(path, lines, traces.BlockTokens)
	if err != nil {
		return nil, err
	}
	kind, text, _ := strings.Cut(variant, ":")
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return nil, fmt.Errorf("variant %q: %w", variant, err)
	}
	if t, err = replay.Vary(t, kind, seed, traces.BlockTokens); err != nil {
		return nil, err
	}
	var prompts [][]byte
	for _, q := range t.Requests[:min(n, len(t.Requests))] {
		prompt := make([]byte, 0, len(q.HashIDs)*promptBlock)
		for _, id := range q.HashIDs {
			prompt = appendBlock(prompt, id)
		}
		prompts = append(prompts, prompt)
	}
	return prompts, nil
}

func appendBlock(b []byte, id uint64) []byte {
	end := len(b) + promptBlock
	var word [8]byte
	h := fnv.New64a()
	for i := uint64(0); len(b) < end; i++ {
		h.Reset()
		binary.LittleEndian.PutUint64(word[:], id)
		h.Write(word[:])
		binary.LittleEndian.PutUint64(word[:], i)
		h.Write(word[:])
		b = append(hex.AppendEncode(b, h.Sum(nil)), ' ')
	}
	return b[:end]
}

func (s *peerSuite) hitsAll(ctx context.Context) error {
	all := append([]*peer{&kvAware}, s.chosen((*peer).isRouter)...)
	possible := map[string]float64{}
	for _, trace := range heldOut {
		prompts, err := tracePrompts(heldOutOf, trace, hitRequests)
		if err != nil {
			return err
		}
		cache := prefixCache{room: hitEngines * hitCache}
		blocks, hits := 0, 0
		for _, p := range prompts {
			b, h := cache.add(p)
			blocks, hits = blocks+b, hits+h
		}
		possible[trace] = float64(hits) / float64(blocks)
	}
	for round := 1; round <= min(s.rounds, hitMaxRounds); round++ {
		for _, trace := range heldOut {
			for _, p := range all {
				row := hitRow{Peer: p.Name, Trace: trace, Round: round, Possible: rounded(possible[trace])}
				if err := s.hitsOf(ctx, p, &row); err != nil {
					row.Failed = err.Error()
				}
				if ctx.Err() != nil {
					return ctx.Err()
				}
				fmt.Fprintf(s.log, "hits  %-24s %-13s %5.1f %% of possible %.1f %%, busiest %.2f, cpu %.0f, %.0f/s %s\n",
					p.Name, trace, row.Hits*100, row.Possible*100, row.Uneven, row.CPU, row.Rate, row.Failed)
				s.result.Hits = replace(s.result.Hits, row, func(o hitRow) bool { return o.Peer == row.Peer && o.Trace == trace && o.Round == round })
			}
		}
	}
	return nil
}

// hitsOf replays a trace through a new process, with engines whose caches are
// empty.
func (s *peerSuite) hitsOf(ctx context.Context, p *peer, row *hitRow) error {
	if why := s.unfit(p); why != "" {
		return errors.New(why)
	}
	st, err := startStub(ctx, s.self, s.dir, s.loadCore, hitEngines, "-cache", strconv.Itoa(hitCache))
	if err != nil {
		return err
	}
	defer st.stop()
	r, err := s.start(ctx, p, st.scene(p.Work, 1), fmt.Sprint(s.core), s.loadCore)
	if err != nil {
		return err
	}
	defer r.stop()
	took, err := s.replay(ctx, st, r, "-variant", row.Trace)
	if err != nil {
		return err
	}
	row.Requests, row.CPU, row.Rate, row.Others = took.Requests, rounded(took.CPU), rounded(float64(took.Requests)/took.Seconds), rounded(took.Others)
	var sum hitCounts
	busiest := int64(0)
	for _, e := range st.engines {
		var c hitCounts
		if err := getJSON(ctx, "http://"+e+hitsPath, &c); err != nil {
			return err
		}
		sum.Requests, sum.Blocks, sum.Hits = sum.Requests+c.Requests, sum.Blocks+c.Blocks, sum.Hits+c.Hits
		busiest = max(busiest, c.Requests)
	}
	row.Hits = rounded(float64(sum.Hits) / float64(max(1, sum.Blocks)))
	row.Uneven = rounded(float64(busiest) * hitEngines / float64(max(1, sum.Requests)))
	return nil
}

func (p *page) hitTable() {
	p.say("## Cache hits\n\nRequests of two traces that no parameter of pdproxy was tuned to: variants of Mooncake's conversations ([which](concepts/routing.md#on-traces-that-no-parameter-was-tuned-to)), "+
		"%s requests each, sent in order over %d connections, to %d engines with room for %s blocks of %d tokens each. A block is %d bytes of text. No router gets KV events, so each knows only its own requests. Hits are counted by the engines. Possible is the share of one cache with the room of all.\n",
		number3(hitRequests), hitConns, hitEngines, number3(hitCache), traces.BlockTokens, promptBlock)
	for _, trace := range heldOut {
		type total struct {
			hits, uneven, cpu, rate []float64
			failed                  string
		}
		var names []string
		totals := map[string]*total{}
		possible := 0.0
		for _, h := range p.Hits {
			if h.Trace != trace {
				continue
			}
			if totals[h.Peer] == nil {
				totals[h.Peer] = &total{}
				names = append(names, h.Peer)
			}
			t := totals[h.Peer]
			if h.Failed != "" {
				t.failed = h.Failed
				continue
			}
			possible = h.Possible
			t.hits, t.uneven = append(t.hits, h.Hits*100), append(t.uneven, h.Uneven)
			t.cpu = append(t.cpu, h.CPU)
			if h.Others <= disturbedTime {
				t.rate = append(t.rate, h.Rate)
			}
		}
		if names == nil {
			continue
		}
		slices.SortStableFunc(names, func(a, b string) int { return cmp.Compare(median(totals[b].hits), median(totals[a].hits)) })
		var rows [][]string
		for _, name := range names {
			t := totals[name]
			if t.hits == nil {
				rows = append(rows, []string{name, "failed: " + oneLine(t.failed), "–", "–", "–"})
				continue
			}
			rows = append(rows, []string{name, spread(t.hits), spread(t.uneven), spread(t.cpu), spread(t.rate)})
		}
		p.say("### %s\n\nPossible: %.1f %%.\n", trace, possible*100)
		p.table([]string{"router", "hits, %", "busiest engine, of an even share", "CPU of a request, µs", "requests/s"}, rows)
	}
}

// spread is the median of values with their range.
func spread(v []float64) string {
	switch len(v) {
	case 0:
		return "–"
	case 1:
		return number3(v[0])
	}
	return fmt.Sprintf("%s [%s–%s]", number3(median(v)), number3(slices.Min(v)), number3(slices.Max(v)))
}
