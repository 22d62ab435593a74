package replay

import (
	"bytes"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/policies"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
)

func conversationLab(t testing.TB, cfg Config, tr *Trace) *SessionLab {
	t.Helper()
	l, err := NewConversations(cfg, tr)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestConversations: a request continues the longest and latest prompt whose whole blocks and answer fit into it,
// and each prompt has one next turn.
func TestConversations(t *testing.T) {
	type request struct {
		input, output int
		ids           []uint64
		name          string // of the conversation
	}
	for name, tt := range map[string]struct {
		requests []request
		want     [][]int // indices of the requests of each session
	}{
		"the next turn":                 {[]request{{1500, 100, []uint64{1, 2, 3}, ""}, {2100, 1, []uint64{1, 2, 4, 5, 6}, ""}}, [][]int{{0, 1}}},
		"exactly prompt and answer":     {[]request{{1500, 100, []uint64{1, 2, 3}, ""}, {1600, 1, []uint64{1, 2, 3, 4}, ""}}, [][]int{{0, 1}}},
		"no room for the answer":        {[]request{{1500, 100, []uint64{1, 2, 3}, ""}, {1599, 1, []uint64{1, 2, 3, 4}, ""}}, [][]int{{0}, {1}}},
		"another text in a whole block": {[]request{{1500, 100, []uint64{1, 2, 3}, ""}, {2100, 1, []uint64{1, 9, 4, 5, 6}, ""}}, [][]int{{0}, {1}}},
		"less than one block":           {[]request{{500, 1, []uint64{1}, ""}, {2100, 1, []uint64{1, 2, 3, 4, 5}, ""}}, [][]int{{0}, {1}}},
		"another conversation":          {[]request{{1500, 100, []uint64{1, 2, 3}, "a"}, {2100, 1, []uint64{1, 2, 4, 5, 6}, "b"}}, [][]int{{0}, {1}}},
		"no ids":                        {[]request{{1500, 1, nil, ""}, {2100, 1, nil, ""}}, [][]int{{0}, {1}}},
		"a second next turn begins another session": {
			[]request{{1024, 1, []uint64{1, 2}, ""}, {1536, 1, []uint64{1, 2, 3}, ""}, {1536, 1, []uint64{1, 2, 4}, ""}, {2048, 1, []uint64{1, 2, 4, 5}, ""}},
			[][]int{{0, 1}, {2, 3}},
		},
		"the longest prompt": {[]request{{1024, 1, []uint64{1, 2}, ""}, {512, 1, []uint64{1}, ""}, {2048, 1, []uint64{1, 2, 3, 4}, ""}, {1536, 1, []uint64{1, 5, 6}, ""}}, [][]int{{0, 2}, {1, 3}}},
		"the latest of equal prompts": {
			[]request{{1024, 1, []uint64{1, 2}, ""}, {1024, 1, []uint64{1, 2}, ""}, {1536, 1, []uint64{1, 2, 3}, ""}, {1600, 1, []uint64{1, 2, 4, 5}, ""}},
			[][]int{{0, 3}, {1, 2}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := new(traceWriter)
			for i, q := range tt.requests {
				w.add(time.Duration(i)*time.Minute, q.input, q.output, q.ids)
			}
			tr := w.trace("t", 512)
			for i := range tr.Requests {
				tr.Requests[i].Conversation = tt.requests[i].name
			}
			var got [][]int
			for _, s := range conversationsOf(tr, 512) {
				var turns []int
				for i := range s.turns {
					at := int(s.turns[i].Arrival / time.Minute)
					if i > 0 && s.turns[i-1].apart != time.Duration(at-turns[i-1])*time.Minute {
						t.Errorf("turn %d comes %v after the turn before", i, s.turns[i-1].apart)
					}
					turns = append(turns, at)
				}
				got = append(got, turns)
			}
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("sessions %v, want %v", got, tt.want)
			}
		})
	}
}

// TestSharedBeginning: a prompt that many others begin with has no next turn.
func TestSharedBeginning(t *testing.T) {
	w := new(traceWriter)
	for i := range uint64(maxTurns + 1) {
		w.add(time.Second, 1536, 1, []uint64{1, 2, 100 + i})
	}
	w.add(0, 1024, 1, []uint64{1, 2})
	if n := len(conversationsOf(w.trace("t", 512), 512)); n != maxTurns+2 {
		t.Errorf("%d sessions", n)
	}
	if _, err := NewConversations(Config{Prefill: 1, Ranks: 1, Decode: 1, BlocksPerRank: 100, BlockTokens: 512, Load: 1, Model: simple()}, w.trace("t", 512)); err == nil || !strings.Contains(err.Error(), "no request of the trace continues another one") {
		t.Errorf("error %v", err)
	}
}

// TestTurnTimes: a turn comes at the recorded time after the turn before it, or at the end of that answer if it is
// later. Prefill pulls the KV that the policy retains, and not that of a volatile prompt.
func TestTurnTimes(t *testing.T) {
	w := new(traceWriter)
	w.add(0, 1024, 100, []uint64{1, 2})                              // its answer takes 1 s
	w.add(10*time.Second, 2048, 1000, []uint64{1, 2, 3, 4})          // its answer takes 10 s
	w.add(11*time.Second, 4096, 1, []uint64{1, 2, 3, 4, 5, 6, 7, 8}) // and comes later than this request
	cfg := Config{Prefill: 1, Ranks: 1, Decode: 1, BlocksPerRank: 100, BlockTokens: 512, Load: 1, Seed: 1, Model: simple()}
	for _, tt := range []struct {
		volatile float64
		setting  Setting
		pulled   int
		tokens   int64 // that prefill pulled
	}{
		{0, setting(t, "none"), 0, 0},
		{0, setting(t, "lease"), 2, 99 + 999}, // the prompts are in prefill's own cache
		{1, setting(t, "lease"), 0, 0},
		{1, Setting{Retain: "lease", Decide: setting(t, "lease").Decide, Stable: true}, 2, 99 + 999},
	} {
		cfg.Volatile = tt.volatile
		l := conversationLab(t, cfg, w.trace("t", 512))
		r := l.play(always(0, 1), tt.setting)
		row := r.row()
		if row.Pulled != tt.pulled || row.ToPrefill != float64(tt.tokens)*1000 || row.ToDecode+row.ToPrefill != float64(row.Transferred)*1000 {
			t.Errorf("%+v: %+v", tt, row)
		}
		if first, second, third := r.played[0], r.played[1], r.played[2]; second.arrived != 10*time.Second || first.ended > second.arrived || third.arrived != second.ended {
			t.Errorf("%+v: the turns come at %v, %v, %v, and end at %v, %v", tt, first.arrived, second.arrived, third.arrived, first.ended, second.ended)
		}
		if row.EndedSeconds < 20 {
			t.Errorf("%+v: ended after %v s", tt, row.EndedSeconds)
		}
	}
}

// TestVolatile: the share draws sessions, a larger share contains those of a smaller one, a sub-agent is like its
// agent, and the filter gives the figures of sessions that are not volatile.
func TestVolatile(t *testing.T) {
	count := func(share float64) (n int, drawn []bool) {
		cfg := agentFleet(t, 0.4, 1)
		cfg.Volatile = share
		for _, s := range agentLab(t, cfg, 100).sessions {
			drawn = append(drawn, s.volatile)
			if s.volatile {
				n++
			}
			for i := range s.turns {
				if c := s.turns[i].child; c != nil && c.volatile != s.volatile {
					t.Error("a sub-agent differs from its agent")
				}
			}
		}
		return n, drawn
	}
	none, _ := count(0)
	half, some := count(0.5)
	all, _ := count(1)
	_, more := count(0.7)
	if none != 0 || half < 35 || half > 65 || all != 100 {
		t.Errorf("%d, %d and %d of 100 sessions", none, half, all)
	}
	for i := range some {
		if some[i] && !more[i] {
			t.Fatal("a larger share lacks a session of a smaller one")
		}
	}
	cfg := agentFleet(t, 0.3, 2)
	plain := agentLab(t, cfg, 20).Run(builtin(t, "kv_aware"), setting(t, "likely"))
	cfg.Volatile = 1
	on := setting(t, "likely")
	on.Stable = true
	lab := agentLab(t, cfg, 20)
	stable, changed := lab.Run(builtin(t, "kv_aware"), on), lab.Run(builtin(t, "kv_aware"), setting(t, "likely"))
	if stable.Stable = false; !reflect.DeepEqual(stable, plain) {
		t.Errorf("with the filter %+v, of a client that changes nothing %+v", stable, plain)
	}
	if changed.HitRatio > 0.01 || changed.Pulled != 0 || changed.TTFTP95 < 2*plain.TTFTP95 {
		t.Errorf("without the filter: %+v", changed)
	}
	cfg.Volatile = 1.1
	if _, err := NewAgents(cfg, 1); err == nil {
		t.Error("a share above 1")
	}
}

// TestNeverWorse: on conversations of Mooncake's trace, turn reuse with `likely`, the filter, and both are not
// worse than without them at any load: neither with the memory of the GPUs alone nor with host memory. The
// figures are the sums of the p95 over seeds with which no parameter was tuned. The tolerance of 10 % is for
// noise, because a pull changes all later placements. The mean of all loads is better with each.
func TestNeverWorse(t *testing.T) {
	loads, memory, requests := []float64{0.1, 0.3, 0.5, 0.7, 0.9}, []int{900, 4000}, 1000
	if raceEnabled {
		loads, memory, requests = loads[3:4], memory[:1], 600 // a run takes ten times as long there
	}
	base, ratios := wholeTrace(t), map[[2]string]float64{} // sums of logarithms
	base.Requests = base.Requests[:requests]
	for _, blocks := range memory {
		for _, load := range loads {
			p95, hits := map[string]float64{}, map[string]float64{}
			for seed := range uint64(3) {
				lab := conversationLab(t, chatFleet(t, blocks, load, 0.5), vary(t, base, "shifted", seed+41))
				for _, s := range turnSettings(t, "none", "likely") {
					row := lab.Run(builtin(t, "kv_aware"), s)
					p95[row.Name()] += row.TTFTP95
					hits[row.Name()] += row.HitRatio
				}
			}
			for _, step := range [][2]string{
				{"none", "likely"}, {"none", "none, stable_prefix"}, {"likely", "likely, stable_prefix"}, {"none, stable_prefix", "likely, stable_prefix"},
			} {
				from, to := step[0], step[1]
				ratios[step] += math.Log(p95[to] / p95[from])
				if p95[to] > 1.1*p95[from] || hits[to] < hits[from] {
					t.Errorf("%d blocks, load %.1f: p95 and hits of %s are %.0f ms and %.4f, of %s %.0f ms and %.4f", blocks, load, to, p95[to], hits[to], from, p95[from], hits[from])
				}
			}
			t.Logf("%d blocks, load %.1f: p95 %v, hits %v", blocks, load, p95, hits)
		}
	}
	if raceEnabled {
		return // one load has no mean
	}
	for step, sum := range ratios {
		if mean := math.Exp(sum / float64(len(loads)*len(memory))); mean > 1 {
			t.Errorf("the p95 of %s is %.3f times that of %s", step[1], mean, step[0])
		}
	}
}

// TestSessionReport: the table and the page name each row, and the page is complete.
func TestSessionReport(t *testing.T) {
	cfg := agentFleet(t, 0.3, 2)
	cfg.Volatile = 0.5
	lab := agentLab(t, cfg, 5)
	var rows []*SessionRow
	for _, name := range policies.RetainNames() {
		s := setting(t, name)
		s.Retain = "<b>" + name
		rows = append(rows, lab.Run(builtin(t, "kv_aware"), s))
		s.Stable = true
		rows = append(rows, lab.Run(builtin(t, "kv_aware"), s))
	}
	report := lab.Report(rows)
	var text, page bytes.Buffer
	if err := report.WriteTable(&text); err != nil {
		t.Fatal(err)
	}
	if err := WriteSessionHTML(&page, []*SessionReport{report, report}); err != nil {
		t.Fatal(err)
	}
	for _, name := range policies.RetainNames() {
		if strings.Count(text.String(), "<b>"+name) != 2 || !strings.Contains(page.String(), "&lt;b&gt;"+name+", stable_prefix") {
			t.Errorf("%s is missing in\n%s", name, text.String())
		}
	}
	checkPage(t, page.String(), 2*4)
	if i := slices.IndexFunc(rows, func(r *SessionRow) bool { return r.Results[turns.Returned] > 0 && r.ToPrefill > 0 }); i < 0 {
		t.Error("no turn pulls KV")
	}
}
