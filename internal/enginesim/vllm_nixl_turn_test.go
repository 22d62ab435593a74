package enginesim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// turn is the KV that a decode engine keeps of an answer.
type turn struct {
	params string
	ids    []int // prompt and answer
}

// firstTurn runs a request of n tokens through both engines.
func (pd pair) firstTurn(t *testing.T, n int) turn {
	t.Helper()
	prompt := words(n, n)
	a := post(t, pd.d.URL()+core.RouteCompletions,
		completion(prompt, `"max_tokens":12,"return_token_ids":true,"kv_transfer_params":`+pd.prefill(t, prompt)))
	var v struct {
		Choices []struct {
			Prompt []int `json:"prompt_token_ids"`
			Answer []int `json:"token_ids"`
		}
	}
	if err := json.Unmarshal(a.body, &v); err != nil || a.status != http.StatusOK {
		t.Fatalf("json.Unmarshal(a.body, &v) = %v, %s", err, a.body)
	}
	return turn{a.params(t), append(v.Choices[0].Prompt, v.Choices[0].Answer...)}
}

func idsBody(ids []int, more string) string {
	list, _ := json.Marshal(ids)
	return fmt.Sprintf(`{"prompt":%s,%s}`, list, more)
}

// emptyCache empties an engine's prefix cache, so that the engine has to pull.
func emptyCache(t *testing.T, e *Engine) {
	t.Helper()
	eventually(t, "the engine is idle", func() bool { return e.State().BlocksUsed == 0 })
	post(t, e.URL()+"/reset_prefix_cache", "")
}

func bothWays(c *Config) { c.Nixl.Bidirectional = true }

// The second turn of a conversation has a longer prompt: prefill pulls decode's
// KV and frees it there.
func TestTurnEqualsDirect(t *testing.T) {
	for _, n := range []int{65, 100, 117, 118, 119, 300} {
		t.Run(fmt.Sprint(n, " tokens"), func(t *testing.T) {
			pd := startPair(t, bothWays)
			first := pd.firstTurn(t, n)
			if s := pd.d.State(); s.BlocksPinned != (n+11+15)/16 {
				t.Errorf("decode retains %d blocks", s.BlocksPinned)
			}
			emptyCache(t, pd.p)
			next := append(first.ids, 'a', 'b', 'c')
			a := post(t, pd.p.URL()+core.RouteCompletions, idsBody(next, `"max_tokens":1,"kv_transfer_params":`+first.params))
			if a.status != http.StatusOK {
				t.Fatal(a.body)
			}
			eventually(t, "decode has freed it", func() bool { return pd.d.State().BlocksPinned == 0 })
			b := post(t, pd.d.URL()+core.RouteCompletions, idsBody(next, `"max_tokens":12,"kv_transfer_params":`+a.params(t)))
			want := post(t, pd.both.URL()+core.RouteCompletions, idsBody(next, `"max_tokens":12`))
			if b.text(t) != want.text(t) {
				t.Errorf("got %q, want %q", b.text(t), want.text(t))
			}
		})
	}
}

// Engines do not compare tokens: KV that is pulled for another prompt is used
// as if it were right, and the text is wrong.
func TestTurnOfAnotherPromptIsWrong(t *testing.T) {
	pd := startPair(t, bothWays)
	first := pd.firstTurn(t, 100)
	next := append(first.ids, 'a', 'b', 'c')
	next[50]++
	emptyCache(t, pd.p)
	a := post(t, pd.p.URL()+core.RouteCompletions, idsBody(next, `"max_tokens":1,"kv_transfer_params":`+first.params))
	b := post(t, pd.d.URL()+core.RouteCompletions, idsBody(next, `"max_tokens":12,"kv_transfer_params":`+a.params(t)))
	want := post(t, pd.both.URL()+core.RouteCompletions, idsBody(next, `"max_tokens":12`))
	if b.status != http.StatusOK || b.text(t) == want.text(t) {
		t.Errorf("got status %d, %q", b.status, b.text(t))
	}
}

// Blocks are matched from the end, so one additional block shifts all of them.
func TestTurnOfShiftedBlocksIsWrong(t *testing.T) {
	pd := startPair(t, bothWays, func(c *Config) { c.Nixl.Lookahead = true })
	first := pd.firstTurn(t, 101) // with 11 of the answer's tokens 7 blocks, and one ahead
	if s := pd.d.State(); s.BlocksPinned != 8 {
		t.Fatalf("decode retains %d blocks", s.BlocksPinned)
	}
	emptyCache(t, pd.p)
	next := append(first.ids, 'a', 'b', 'c')
	a := post(t, pd.p.URL()+core.RouteCompletions, idsBody(next, `"max_tokens":1,"kv_transfer_params":`+first.params))
	b := post(t, pd.d.URL()+core.RouteCompletions, idsBody(next, `"max_tokens":12,"kv_transfer_params":`+a.params(t)))
	want := post(t, pd.both.URL()+core.RouteCompletions, idsBody(next, `"max_tokens":12`))
	if b.status != http.StatusOK || b.text(t) == want.text(t) {
		t.Errorf("got status %d, %q", b.status, b.text(t))
	}
}

// Decode frees kept KV without a next turn when a request names it whose prompt
// is too short for a pull, or after its timeout.
func TestTurnThatDoesNotCome(t *testing.T) {
	pd := startPair(t, bothWays)
	first := pd.firstTurn(t, 100)
	a := post(t, pd.p.URL()+core.RouteCompletions, idsBody([]int{0}, `"max_tokens":1,"kv_transfer_params":`+first.params))
	if a.status != http.StatusOK {
		t.Fatal(a.body)
	}
	eventually(t, "decode has freed it", func() bool { return pd.d.State().BlocksPinned == 0 })
	if s := pd.d.State(); s.Transfers != 1 {
		t.Errorf("got %d transfers, want that of the first turn", s.Transfers)
	}

	short := startPair(t, bothWays, func(c *Config) { c.Nixl.KeepFor = 30 * time.Millisecond })
	first = short.firstTurn(t, 100)
	eventually(t, "it has expired", func() bool { return short.d.State().LeasesExpired == 1 })
	emptyCache(t, short.p)
	a = post(t, short.p.URL()+core.RouteCompletions, idsBody(append(first.ids, 'a'), `"max_tokens":1,"kv_transfer_params":`+first.params))
	if a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), "InternalServerError") {
		t.Errorf("answer of prefill for expired KV: %d %s", a.status, a.body)
	}
}
