package conformance

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/plugins/build"
	"github.com/pdproxy/pdproxy/plugins/policy/policytest"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// scorer returns an entry of a set of scorers.
func scorer(name string, weight float64, params config.ScorerParams) config.Scorer {
	return config.Scorer{Name: name, Weight: weight, Params: params}
}

// tier returns a set whose filter keeps the engines of a tier.
func tier(name, tier string, more ...config.Scorer) config.ScoreSet {
	s := config.DefaultScoreSet()
	s.Name, s.Scorers = name, append([]config.Scorer{scorer("label_filter", 1, config.ScorerParams{"label": "tier", "values": tier})}, more...)
	return s
}

// startScores starts a fleet of two prefill and two decode engines: p0 and d0 of tier 0, p1 and d1 of
// tier 1.
func startScores(t *testing.T, change func(c *config.Config)) *fleet {
	t.Helper()
	return startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 2, decode: 2, config: func(c *config.Config) {
		c.Policy.Place = config.PlaceScores
		c.Server.ExposePlacement = true
		for i := range c.Engines {
			c.Engines[i].Labels = config.LabelsOf(map[string]string{"tier": c.Engines[i].Name[1:]})
		}
		change(c)
	}})
}

// placed asserts that a request is right and ran on the engines of a tier, and returns its
// explanation.
func (f *fleet) placed(id, tier string, header ...string) journal.Explanation {
	f.t.Helper()
	body := chat(id+" "+long, 4, false)
	a := f.post(context.Background(), f.url, chatPath, body, append([]string{"X-Request-Id", id}, header...)...)
	f.right(a, chatPath, body)
	if p, d := a.header.Get("X-Pdproxy-Prefill"), a.header.Get("X-Pdproxy-Decode"); p != "p"+tier || d != "d"+tier {
		f.t.Errorf("%s ran on %q and %q, want tier %s", id, p, d, tier)
	}
	return f.explanation(id)
}

// TestScoreSets: the first set for the model and the class of a request places it, and explain has the
// scores of each leg. A reload changes the weights.
func TestScoreSets(t *testing.T) {
	f := startScores(t, func(c *config.Config) {
		class := config.DefaultPriorityClass()
		class.Name = "batch"
		c.PriorityClasses, c.Limits.PriorityHeader, c.Limits.TrustPriority = []config.PriorityClass{class}, "x-class", true
		other, batch, model := tier("other", "0"), tier("batch", "1"), tier("model", "0", scorer("kv_usage", 2, nil))
		other.Models, batch.Classes, model.Models = []string{"another-model"}, []string{"batch"}, []string{"sim"}
		c.Scores = []config.ScoreSet{other, batch, model}
	})
	f.placed("batch-1", "1", "X-Class", "batch")
	e := f.placed("usual-1", "0")
	if e.Policy != config.PlaceScores || len(e.Scores) != 2 {
		t.Fatalf("policy %q, scores %+v", e.Policy, e.Scores)
	}
	for i, leg := range []string{"prefill", "decode"} {
		s := e.Scores[i]
		if s.Leg != leg || s.Set != "model" || len(s.Scorers) != 2 || s.Scorers[1] != (journal.ExplainedScorer{Name: "kv_usage", Weight: 2, Unit: "share"}) || len(s.Candidates) != 2 {
			t.Errorf("scores %+v", s)
			continue
		}
		for _, c := range s.Candidates {
			switch chosen := c.Engine == leg[:1]+"0"; {
			case c.Chosen != chosen, chosen != (c.Sum != nil):
				t.Errorf("candidate %+v", c)
			case chosen && (*c.Sum <= 0 || *c.Sum != c.Scores[1].Contribution):
				t.Errorf("the sum is %v, with the scores %+v", *c.Sum, c.Scores)
			case !chosen && !c.Scores[0].Removed:
				t.Errorf("candidate %+v was not removed", c)
			}
		}
	}
	next := f.cfg
	next.Scores = slices.Clone(next.Scores)
	next.Scores[2].Scorers = []config.Scorer{scorer("label", 7.5, config.ScorerParams{"label": "tier", "values": "1"}), scorer("kv_usage", 1, nil)}
	if err := f.reload(&next); err != nil {
		t.Fatal(err)
	}
	e = f.placed("usual-2", "1")
	if got := e.Scores[0].Scorers; len(got) != 2 || got[0].Weight != 7.5 {
		t.Errorf("scorers after the reload %+v", got)
	}
}

// TestScorerOfAuthor: a scorer that `pdproxy plugin new` and `pdproxy plugin build` made counts beside
// the built-in ones, with its unit.
func TestScorerOfAuthor(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "mine")
	if _, err := build.New(build.NewOptions{Dir: dir, Kind: build.Score, Language: build.Go}); err != nil {
		t.Fatal(err)
	}
	module, err := build.Build(t.Context(), build.Options{Dir: dir, Log: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	f := startScores(t, func(c *config.Config) {
		p := config.DefaultPlugin()
		p.Name, p.Path, p.Timeout = "mine", module.Output, config.Duration(time.Minute)
		c.Plugins = []config.Plugin{p}
		c.Scores = []config.ScoreSet{tier("set", "1", scorer("mine/few_requests", 3, nil), scorer("prefix", 1, nil))}
	})
	for _, leg := range f.placed("author", "1").Scores {
		i := slices.IndexFunc(leg.Candidates, func(c journal.ExplainedScoredCandidate) bool { return c.Chosen })
		if want := (journal.ExplainedScorer{Name: "mine/few_requests", Weight: 3, Unit: "requests"}); i < 0 || leg.Scorers[1] != want || leg.Candidates[i].Scores[1].Contribution != 3 {
			t.Errorf("scores %+v", leg)
		}
	}
}

// TestScorerThatTraps: if a scorer of a plugin fails, the native rule places the request, and explain
// and the metrics say so.
func TestScorerThatTraps(t *testing.T) {
	module := filepath.Join(t.TempDir(), "guest.wasm")
	if err := policytest.Build(module); err != nil {
		t.Fatal(err)
	}
	f := startScores(t, func(c *config.Config) {
		p := config.DefaultPlugin()
		p.Name, p.Path, p.Config, p.CrashBudget, p.Timeout = "bad", module, "score=trap", 2, config.Duration(time.Minute)
		c.Plugins = []config.Plugin{p}
		c.Scores = []config.ScoreSet{tier("set", "1", scorer("bad", 1, nil))}
	})
	reasons := map[string]bool{}
	for n := range 6 {
		id, body := fmt.Sprint("trap-", n), chat(fmt.Sprint("trap ", n, " ", long), 4, false)
		f.right(f.post(context.Background(), f.url, chatPath, body, "X-Request-Id", id), chatPath, body)
		e := f.explanation(id)
		if e.Policy != "native" || len(e.Scores) != 0 || len(e.Fallbacks) == 0 || e.Fallbacks[0].What != "place" {
			t.Errorf("policy %q, scores %+v, fallbacks %+v", e.Policy, e.Scores, e.Fallbacks)
			continue
		}
		reasons[e.Fallbacks[0].Reason] = true
	}
	if !reasons["trap"] || !reasons["parked"] {
		t.Errorf("reasons %v", reasons)
	}
	if failed := f.metric("pdproxy_policy_failures_total", `policy="bad"`, `hook="score"`); failed != 6 {
		t.Errorf("%v failures are counted", failed)
	}
}

// TestMediaCache: requests with the same image go to the prefill engine that was sent it before, and
// explain has the share of the media. An image that no engine was sent counts nowhere.
func TestMediaCache(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 2, decode: 2, config: func(c *config.Config) {
		c.Policy.Place = config.PlaceScores
		c.Server.ExposePlacement = true
		set := config.DefaultScoreSet()
		set.Name, set.Scorers = "media", []config.Scorer{scorer("mm_cache", 2, nil)}
		c.Scores = []config.ScoreSet{set}
	}})
	request := func(id, text, image string) (prefill string, contributions []float64) {
		t.Helper()
		body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":[{"type":"text","text":%q},{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}]}],"max_tokens":2,"ignore_eos":true}`, text+" "+long, image)
		a := f.post(context.Background(), f.url, chatPath, body, "X-Request-Id", id)
		f.right(a, chatPath, body)
		e := f.explanation(id)
		if len(e.Scores) != 2 || e.Scores[0].Leg != "prefill" || e.Scores[0].Scorers[0] != (journal.ExplainedScorer{Name: "mm_cache", Weight: 2, Unit: "share"}) {
			t.Fatalf("%s: scores %+v", id, e.Scores)
		}
		for i, leg := range e.Scores {
			for _, c := range leg.Candidates {
				got := c.Scores[0].Contribution
				if i == 1 && got != 0 {
					t.Errorf("%s: decode on %s scores %v", id, c.Engine, got)
				}
				if i == 0 {
					contributions = append(contributions, got)
				}
			}
		}
		slices.Sort(contributions)
		return a.header.Get("X-Pdproxy-Prefill"), contributions
	}
	homes := map[string]string{}
	for n := range 6 { // with 6 images it is unlikely that one engine gets all
		image := fmt.Sprint("AAAA", n)
		home, scores := request(fmt.Sprint("first-", n), fmt.Sprint("first ", n), image)
		if homes[image] = home; !slices.Equal(scores, []float64{0, 0}) {
			t.Errorf("a new image scores %v", scores)
		}
	}
	for image, home := range homes {
		for n := range 4 {
			got, scores := request(fmt.Sprint(image, "-", n), fmt.Sprint(n, " asks about ", image), image)
			if got != home || !slices.Equal(scores, []float64{0, 2}) {
				t.Errorf("%s was sent to %s, then to %s with the scores %v", image, home, got, scores)
			}
		}
	}
}
