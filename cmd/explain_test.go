package cmd

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"unicode"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// explained is the answer of a proxy, as GET /v1/explain gives it.
const explained = `{"request_id":"a b","flow":"prefill_first","policy":"kv_aware","disagg_id":7,"outcome":"broken","status":200,"duration_ms":1234.567,
 "model":"m","requested_model":"alias","score_better":"low","score_unit":"s",
 "candidates":[
  {"engine":"p0","rank":0,"score":0.0123456,"facts":{"role":"prefill","tokens":0,"requests":0,"queued":0,"blocks_gpu":12,"blocks_cpu":0,"blocks_disk":3,"block_tokens":16,"home":"prefill","group":1,
   "usage":0.376,"token_us":12.3456,"recent_tokens":123456.7,"recent_requests":354.85052,"busy":0.0123,"trial":true,"pair":"unknown","adapter":"running","colour":"red"}},
  {"engine":"d0","rank":1,"score":-2500.4,"facts":{"role":"both","tokens":1,"requests":1,"queued":80,"blocks_gpu":0,"home":"none","group":0,"trial":false,"pair":"ready"}},
  {"engine":"d1","rank":0,"score":null,"facts":{"role":"decode"}}],
 "legs":[
  {"phase":"prefill","engine":"p0","attempt":1,"start_ms":0.1,"first_byte_ms":null,"end_ms":5.04,"status":0,"error":"dial","cause":"dial engine: connection refused"},
  {"phase":"prefill","engine":"p0","attempt":2,"start_ms":10,"first_byte_ms":12.5,"end_ms":12.5,"status":200,"error":""},
  {"phase":"decode","engine":"d0","rank":1,"attempt":1,"start_ms":13,"first_byte_ms":123.45,"end_ms":1234.6,"status":200,"error":"aborted"}],
 "fallbacks":[{"what":"plan","reason":"late"}],"notes":["a note"],
 "continuations":[{"at_ms":20,"tokens":7,"result":"continued","gap_ms":5.5,"prefill":"p1","decode":"d1"},{"at_ms":30.25,"tokens":9,"result":"seam"}]}`

const explainedText = `request a b: broken (status 200) in 1235 ms
flow prefill_first, policy kv_aware, disagg id 7
model m, requested as alias

LEG      ENGINE  RANK  ATTEMPT  START (ms)  FIRST BYTE (ms)  END (ms)  STATUS  ERROR
prefill  p0      0     1        0.1         -                5.04      -       dial: dial engine: connection
                                                                               refused
prefill  p0      0     2        10          12.5             12.5      200
decode   d0      1     1        13          123.5            1235      200     aborted

CANDIDATE  RANK  CHOSEN FOR  SCORE (s, low is good)  FACTS
p0         0     prefill     0.01235                 prefill, 0 tokens in flight, 0 requests in
                                                     flight, 0 tokens waiting for prefill, 12 KV
                                                     blocks in GPU memory, 3 on disk, 16 tokens per
                                                     block, 37.6 % of KV memory in use, prefill
                                                     takes 12.35 µs per token, 354.9 recent
                                                     requests, 123457 recent prompt tokens, busy
                                                     1.23 % of the last minute, pairs in group 1,
                                                     home of the conversation (prefill), LoRA
                                                     adapter running, gets a trial request, because
                                                     its circuit was open, colour red
d0         1     decode      -2500                   prefill and decode, 1 token in flight, 1
                                                     request in flight, 80 tokens waiting for
                                                     prefill, 0 KV blocks in GPU memory, pair ready
d1         0     -           -                       decode
the stream broke off at 20 ms, behind 7 tokens: continued on p1 and d1 after a gap of 5.5 ms
the stream broke off at 30.25 ms, behind 9 tokens: not continued, seam: no place is known at which the texts of both engines meet
fallback: plan (late)
note: a note
`

func TestExplain(t *testing.T) {
	answer := explained
	admin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" || r.URL.Path != "/v1/explain/a b" {
			w.WriteHeader(http.StatusNotFound)
			w.Write([]byte(`{"error":{"message":"no request of this id is among the last 4096"}}`))
			return
		}
		w.Write([]byte(answer))
	}))
	defer admin.Close()
	token := write(t, "secret\n")
	explain := func(id string) (code int, stdout, stderr string) {
		return run("explain", id, "--admin", admin.URL, "--token-file", token)
	}
	if code, stdout, stderr := explain("a b"); code != exit.OK || stdout != explainedText {
		t.Errorf("exit %d, stderr %q, got\n%s\nwant\n%s", code, stderr, stdout, explainedText)
	}
	for name, tt := range map[string]struct{ answer, want string }{
		"no scores":    {`{"policy":"least_load","candidates":[{"engine":"e","score":null,"facts":{}}]}`, "policy least_load gives no scores: it compares the facts\n"},
		"no direction": {`{"policy":"p/q","score_unit":"tokens","candidates":[{"engine":"e","score":1,"facts":{}}]}`, "policy p/q does not state whether a high score is good\n"},
		"no unit":      {`{"policy":"p/q","score_better":"high","candidates":[{"engine":"e","score":1e6,"facts":{}}]}`, "SCORE (high is good)  FACTS\ne          0     -           1000000"},
		"no placement": {`{"request_id":"a b","outcome":"rejected","status":429,"flow":"none"}`, "request a b: rejected (status 429) in 0 ms\nthe request had no leg\n"},
		"refused":      {`{"request_id":"a b","outcome":"shed","status":429,"error_code":"queue_full"}`, "request a b: shed (status 429) in 0 ms\nerror queue_full: Too many requests run and wait. A waiting request gets the error if a new one of a higher priority class needs its place.\n"},
		"later code":   {`{"request_id":"a b","outcome":"shed","status":429,"error_code":"later"}`, "\nerror later: \n"},
		"broke off":    {`{"outcome":"broken","legs":[{"phase":"decode","engine":"d0","error":"body","cause":"unexpected EOF"}]}`, "\nthe stream broke off: decode on d0 failed (body: unexpected EOF)\n"},
		"completed":    {`{"continuations":[{"tokens":3,"result":"completed"}]}`, "behind 3 tokens: the proxy sent the missing end\n"},
		"later result": {`{"continuations":[{"tokens":3,"result":"later"}]}`, "behind 3 tokens: not continued, later\n"},
	} {
		answer = tt.answer
		if _, stdout, _ := explain("a b"); !strings.Contains(stdout, tt.want) {
			t.Errorf("%s: %q is missing:\n%s", name, tt.want, stdout)
		}
	}
	if code, _, stderr := explain("other"); code != exit.Failure || !strings.Contains(stderr, "explain other: no request of this id is among the last 4096") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// TestExplainScores: each leg has a table with the contribution of each scorer.
func TestExplainScores(t *testing.T) {
	sum := func(v float64) *float64 { return &v }
	e := journal.Explanation{Scores: []journal.ExplainedScores{{
		Leg: "prefill", Set: "chat", Scorers: []journal.ExplainedScorer{{Name: "label_filter", Weight: 1}, {Name: "prefix", Weight: 3, Unit: "tokens"}, {Name: "kv_usage", Weight: 2, Unit: "share"}},
		Candidates: []journal.ExplainedScoredCandidate{
			{Engine: "p0", Rank: 1, Chosen: true, Sum: sum(3.9), Scores: []journal.ExplainedScore{{}, {Score: 0.8, Value: 4096, Contribution: 2.4}, {Score: 0.75, Value: 0.25, Contribution: 1.5}}},
			{Engine: "p1", Scores: []journal.ExplainedScore{{Removed: true}}},
		},
	}, {Leg: "decode", Set: "chat", Candidates: []journal.ExplainedScoredCandidate{{Engine: "d0", Sum: sum(0)}}}, {
		Leg: "aggregated", Set: "chat", Scorers: []journal.ExplainedScorer{{Name: "label", Weight: 2}, {Name: "power/price", Weight: 1}},
		Candidates: []journal.ExplainedScoredCandidate{{Engine: "b0", Sum: sum(2.5), Scores: []journal.ExplainedScore{{Score: 1, Value: 1, Contribution: 2}, {Score: 0.5, Value: 0.24, Contribution: 0.5}}}},
	}}}
	const want = `
PREFILL BY SET chat  RANK  SUM  label_filter × 1  prefix × 3              kv_usage × 2
p0 (chosen)          1     3.9  0 (0)             2.4 (0.8, 4096 tokens)  1.5 (0.75, 25 %)
p1                   0     -    removed           -                       -

DECODE BY SET chat  RANK  SUM
d0                  0     0

AGGREGATED BY SET chat  RANK  SUM  label × 2  power/price × 1
b0                      0     2.5  2 (1)      0.5 (0.5, 0.24)
a cell has weight × score, and in parentheses the score and the fact that it was made of
`
	if got := scoreTables(&e); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// TestExplainWritesNothingToTheTerminal: clients and engines choose texts, and no text has a
// character that a terminal obeys.
func TestExplainWritesNothingToTheTerminal(t *testing.T) {
	const evil = "x\x1b]0;evil\a\u009b2J\r\ny"
	var e journal.Explanation
	e.RequestID, e.Outcome, e.Policy, e.Flow, e.Model, e.RequestedModel, e.Coordination, e.Conversation, e.Turn = evil, evil, evil, evil, evil, evil, evil, evil, 1
	e.ErrorCode, e.ScoreUnit, e.Notes = evil, evil, []string{evil}
	e.Candidates = []journal.ExplainedCandidate{{Engine: evil, Facts: map[string]any{"role": evil, "pair": evil, evil: evil}}}
	e.Legs = []journal.ExplainedLeg{{Phase: evil, Engine: evil, Error: evil, Cause: evil}}
	e.Fallbacks = []journal.ExplainedFallback{{What: evil, Reason: evil}}
	e.Scores = []journal.ExplainedScores{{Leg: evil, Set: evil, Scorers: []journal.ExplainedScorer{{Name: evil, Unit: evil}}, Candidates: []journal.ExplainedScoredCandidate{{Engine: evil, Scores: []journal.ExplainedScore{{}}}}}}
	e.Continuations = []journal.ExplainedContinuation{{Result: evil, Prefill: evil, Decode: evil}, {Result: "continued", GapMS: new(float64), Prefill: evil, Decode: evil}}
	for status, answer := range map[int]any{
		http.StatusOK:       e,
		http.StatusNotFound: map[string]any{"error": map[string]string{"message": evil}},
	} {
		admin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_ = json.NewEncoder(w).Encode(answer) // the client is the test
		}))
		defer admin.Close()
		_, stdout, stderr := run("explain", evil, "--admin", admin.URL)
		if !strings.Contains(stdout+stderr, "x?]0;evil??2J??y") || strings.ContainsFunc(stdout+stderr, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
			t.Errorf("%d: %q %q", status, stdout, stderr)
		}
	}
}

// TestResultsOfContinuations: explain has words for each reason that the documents list.
func TestResultsOfContinuations(t *testing.T) {
	text, err := os.ReadFile("../docs/concepts/failures.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "| reason | meaning |\n| --- | --- |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	listed := map[string]bool{}
	for row := range strings.Lines(table) {
		names := strings.Split(row, "`")
		for i := 1; i < len(names) && strings.Count(strings.Join(names[:i], "`"), "|") == 1; i += 2 {
			listed[names[i]] = true
		}
	}
	for name := range listed {
		if notContinued[name] == "" {
			t.Errorf("explain has no words for %s", name)
		}
	}
	if !found || len(listed) != len(notContinued) {
		t.Errorf("the documents list %d reasons, explain %d", len(listed), len(notContinued))
	}
}
