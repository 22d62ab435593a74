package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// keepTurns makes an engine of one leg bidirectional. The call that frees the KV of a turn ends at the
// first token of prefill. So prefill takes some time for each token, as real engines do. Without that,
// it computes all tokens of the call before a proxy on a busy machine ends the call, and then holds
// blocks of its own.
func keepTurns(role string, c *enginesim.Config) {
	if c.Nixl.Bidirectional = role != enginesim.RoleBoth; role == enginesim.RolePrefill {
		c.DecodeUsPerToken = 5000
	}
}

// turnFleet is a fleet whose decode engines keep the KV of their answers, and
// whose prefill engines pull it.
func turnFleet(t *testing.T, change func(role string, c *enginesim.Config), more func(*config.Config)) *fleet {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{
		prefill: 1, decode: 2, workers: manyWorkers,
		engine: func(role string, _ int, c *enginesim.Config) {
			keepTurns(role, c)
			if change != nil {
				change(role, c)
			}
		},
		config: func(c *config.Config) {
			for i := range c.Engines {
				c.Engines[i].Bidirectional = true
			}
			if more != nil {
				more(c)
			}
		},
	})
	return f
}

// kept returns the number of blocks that decode engines hold for a next turn.
func (f *fleet) kept() (n int) {
	for _, d := range f.decode {
		n += d.State().BlocksPinned
	}
	return n
}

// emptyPrefill empties prefill's own cache, so that prefill has to pull.
func (f *fleet) emptyPrefill() {
	f.eventually("prefill is idle", func() bool { return f.prefill[0].State().BlocksUsed == 0 })
	f.post(context.Background(), f.prefill[0].URL(), "/reset_prefix_cache", "")
}

// turns returns the count of kept KV by outcome.
func (f *fleet) turns(outcome string) float64 {
	return f.metric("pdproxy_turn_kv_total", `outcome="`+outcome+`"`)
}

func (f *fleet) unusedTurns(reason string) float64 {
	return f.metric("pdproxy_fallbacks_total", `what="turn_kv"`, `reason="`+reason+`"`)
}

// allForgotten ends the test of a fleet in which KV may still be kept: a proxy
// that ends frees it.
func (f *fleet) allForgotten() {
	f.t.Helper()
	if err := f.drain(); err != nil {
		f.t.Errorf("the drain was not clean: %v", err)
	}
	f.eventually("nothing is kept for turns that cannot come", func() bool { return f.kept() == 0 })
}

// words returns n token ids.
func words(n int) []int {
	ids := make([]int, n)
	for i := range ids {
		ids[i] = 'a' + i*7%26
	}
	return ids
}

// idsOf returns the token ids of an answer.
func idsOf(t *testing.T, a answer) []int {
	t.Helper()
	var v struct {
		Choices []struct {
			IDs []int `json:"token_ids"`
		}
	}
	if err := json.Unmarshal([]byte(a.body), &v); err != nil || len(v.Choices) == 0 {
		t.Fatalf("json.Unmarshal([]byte(a.body), &v) = %v, %s", err, a.body)
	}
	return v.Choices[0].IDs
}

func completionOf(ids []int, more string) string {
	list, _ := json.Marshal(ids)
	return fmt.Sprintf(`{"model":"sim","prompt":%s,"max_tokens":20,"ignore_eos":true%s}`, list, more)
}

func generateOf(ids []int, more string) string {
	list, _ := json.Marshal(ids)
	return fmt.Sprintf(`{"model":"sim","token_ids":%s,"sampling_params":{"max_tokens":20,"ignore_eos":true}%s}`, list, more)
}

// In a conversation in token ids, each turn's KV is pulled from the decode
// engine that kept it, and freed there. The text equals that of one engine
// alone. The client sees nothing of it.
func TestTurnIsPulled(t *testing.T) {
	for path, body := range map[string]func([]int, string) string{"/v1/completions": completionOf, "/inference/v1/generate": generateOf} {
		t.Run(path, func(t *testing.T) {
			f := turnFleet(t, nil, nil)
			ids := words(100)
			for turn := range 4 {
				f.emptyPrefill()
				before := f.prefill[0].State().Transfers
				a := f.try(path, body(ids, ""))
				f.right(a, path, body(ids, ""))
				if strings.Contains(a.body, "remote_block_ids") || strings.Contains(a.body, `"prompt_token_ids":[`) {
					t.Fatalf("the client's answer contains transfer parameters: %s", a.body)
				}
				if path == "/v1/completions" && !strings.Contains(a.body, `"token_ids":null`) {
					t.Fatalf("the client did not ask for token ids: %s", a.body)
				}
				if pulls := f.prefill[0].State().Transfers - before; turn > 0 && pulls != 2 { // one pulled, one sent to decode
					t.Errorf("turn %d: %d transfers", turn, pulls)
				}
				want := (len(ids) + 19 + 15) / 16
				f.eventually("only the last turn's blocks are kept", func() bool { return f.kept() == want })
				answer := idsOf(t, f.post(context.Background(), f.alone.URL(), path, body(ids, `,"return_token_ids":true`)))
				ids = append(append(ids, answer...), words(30+turn)...)
			}
			if f.turns("kept") != 4 || f.turns("pulled") != 3 {
				t.Errorf("%v turns kept, %v pulled", f.turns("kept"), f.turns("pulled"))
			}
			if s := f.decode[0].State(); s.StaleReads+f.decode[1].State().StaleReads+f.prefill[0].State().StaleReads > 0 {
				t.Error("an engine read memory that no request held")
			}
			f.allForgotten()
		})
	}
}

// A client that requests token ids gets the same ids as from one engine.
func TestTurnLeavesAskedIDs(t *testing.T) {
	f := turnFleet(t, nil, nil)
	for path, body := range map[string]string{
		"/v1/completions": completionOf(words(40), `,"return_token_ids":true`),
		chatPath:          strings.Replace(chat(long, 9, false), "{", `{"return_token_ids":true,`, 1),
	} {
		a := f.try(path, body)
		f.right(a, path, body)
		if !strings.Contains(a.body, `"prompt_token_ids":[`) || strings.Contains(a.body, "remote_block_ids") {
			t.Errorf("%s", a.body)
		}
	}
	f.allForgotten()
}

// chatTurn returns a turn of a chat.
func chatTurn(id string, messages ...string) string {
	list := []map[string]string{}
	for i, m := range messages {
		list = append(list, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": m})
	}
	raw, _ := json.Marshal(list)
	return fmt.Sprintf(`{"model":"sim","session_id":%q,"messages":%s,"max_tokens":20,"ignore_eos":true}`, id, raw)
}

// In a chat in text, the engines' own rendering of the next turn proves that it
// begins with decode's tokens.
func TestTurnOfAChat(t *testing.T) {
	f := turnFleet(t, nil, nil)
	first := chatTurn("c", long)
	a := f.try(chatPath, first)
	f.right(a, chatPath, first)
	f.emptyPrefill()
	second := chatTurn("c", long, a.text, "go on")
	f.right(f.try(chatPath, second), chatPath, second)
	if f.turns("pulled") != 1 {
		t.Errorf("%v pulled, %v were not a prefix", f.turns("pulled"), f.unusedTurns("not_a_prefix"))
	}
	f.allForgotten()
}

// The next turn of a chat begins with other tokens than decode has, because the
// client has changed earlier messages or the template renders an answer
// differently. Nothing is pulled, the kept KV is freed, and the text is right.
func TestTurnThatIsRewritten(t *testing.T) {
	f := turnFleet(t, nil, nil)
	first := chatTurn("c", long)
	a := f.try(chatPath, first)
	f.right(a, chatPath, first)
	f.eventually("it is kept", func() bool { return f.kept() > 0 })
	f.emptyPrefill()
	second := chatTurn("c", "changed "+long, a.text, "go on")
	b := f.try(chatPath, second)
	f.right(b, chatPath, second)
	if f.turns("pulled") != 0 || f.unusedTurns("not_a_prefix") != 1 {
		t.Errorf("%v pulled, %v were not a prefix", f.turns("pulled"), f.unusedTurns("not_a_prefix"))
	}
	f.eventually("the first turn's blocks are free", func() bool { return f.metric("pdproxy_kv_cleanups_total", `how="forget_turn"`) == 1 })
	f.allForgotten()
}

// The token ids are equal, but the kept KV belongs to another model, salt or
// picture, or this is unknown. Nothing is pulled.
func TestTurnOfOthers(t *testing.T) {
	ids := words(100)
	for _, tt := range []struct{ name, first, second, path string }{
		{"another salt", "", `,"cache_salt":"s"`, "/v1/completions"},
		{"cut by the engine", "", `,"truncate_prompt_tokens":150`, "/v1/completions"},
		{"features", `,"features":{}`, `,"features":{}`, "/inference/v1/generate"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := turnFleet(t, nil, nil)
			body := completionOf
			if tt.path != "/v1/completions" {
				body = generateOf
			}
			f.right(f.try(tt.path, body(ids, tt.first)), tt.path, body(ids, tt.first))
			answer := idsOf(t, f.post(context.Background(), f.alone.URL(), tt.path, body(ids, `,"return_token_ids":true`)))
			next := append(append(slices.Clone(ids), answer...), words(20)...)
			f.right(f.try(tt.path, body(next, tt.second)), tt.path, body(next, tt.second))
			if f.turns("pulled") != 0 {
				t.Error("pulled")
			}
			f.allForgotten()
		})
	}
}

// If an engine names more blocks than its tokens need, prefill would count from
// the wrong end. Nothing is pulled.
func TestTurnOfTooManyBlocks(t *testing.T) {
	f := turnFleet(t, func(_ string, c *enginesim.Config) { c.Nixl.Lookahead = true }, nil)
	ids := words(109) // together with 19 tokens of the answer they fill their blocks
	f.right(f.try("/v1/completions", completionOf(ids, `,"min_tokens":20`)), "/v1/completions", completionOf(ids, ""))
	f.eventually("it is freed", func() bool { return f.kept() == 0 })
	if f.unusedTurns("kv_blocks") != 1 {
		t.Errorf("%v", f.unusedTurns("kv_blocks"))
	}
}

// When decode no longer has the kept KV, prefill's policy decides. The request
// is answered, prefill is not charged with a failure, and nothing is pulled a
// second time.
func TestTurnWhoseDecodeFails(t *testing.T) {
	for _, recompute := range []bool{false, true} {
		t.Run(fmt.Sprint("recompute ", recompute), func(t *testing.T) {
			f := turnFleet(t, func(role string, c *enginesim.Config) {
				c.Nixl.Recompute, c.HandshakeTimeout = recompute, 200*time.Millisecond
			}, func(c *config.Config) { c.Circuit.Failures = 1 })
			ids := words(100)
			f.right(f.try("/v1/completions", completionOf(ids, "")), "/v1/completions", completionOf(ids, ""))
			f.eventually("it is kept", func() bool { return f.kept() > 0 })
			answer := idsOf(t, f.post(context.Background(), f.alone.URL(), "/v1/completions", completionOf(ids, `,"return_token_ids":true`)))
			next := completionOf(append(append(ids, answer...), words(20)...), "")
			f.emptyPrefill()
			f.prefill[0].SetFault("1:load", 0, "")
			a := f.try("/v1/completions", next)
			f.prefill[0].SetFault("", 0, "")
			f.right(a, "/v1/completions", next)
			if f.turns("pulled") != 1 {
				t.Errorf("%v pulled", f.turns("pulled"))
			}
			if failed := f.unusedTurns("pull_failed"); (failed == 1) == recompute {
				t.Errorf("%v failed", failed)
			}
			f.right(f.try("/v1/completions", next), "/v1/completions", next) // prefill's circuit is closed
			if !recompute {
				f.allForgotten()
			} else { // only the timeout frees the blocks of the failed load
				f.drain()
			}
		})
	}
}

// secondTurn returns the second turn of a conversation whose first turn is kept.
func (f *fleet) secondTurn() (body string) {
	ids := words(100)
	f.right(f.try("/v1/completions", completionOf(ids, "")), "/v1/completions", completionOf(ids, ""))
	f.eventually("it is kept", func() bool { return f.kept() > 0 })
	answer := idsOf(f.t, f.post(context.Background(), f.alone.URL(), "/v1/completions", completionOf(ids, `,"return_token_ids":true`)))
	return completionOf(append(append(ids, answer...), words(20)...), "")
}

// After a client leaves during the prefill leg, before or after a pull, nothing
// remains.
func TestTurnWhoseClientLeaves(t *testing.T) {
	for _, phase := range []string{"head", "prefill"} {
		t.Run(phase, func(t *testing.T) {
			f := turnFleet(t, nil, nil)
			next := f.secondTurn()
			f.emptyPrefill()
			f.prefill[0].SetFault("", 0, phase)
			ctx, leave := context.WithCancel(context.Background())
			gone := make(chan answer, 1)
			go func() { gone <- f.post(ctx, f.url, "/v1/completions", next) }()
			f.eventually("it is pulled", func() bool { return f.turns("pulled") == 1 })
			if phase == "prefill" {
				f.eventually("prefill works", func() bool { return f.busy(f.prefill) })
			}
			leave()
			<-gone
			f.eventually("the proxy has noticed", func() bool { return f.metric("pdproxy_leases_open") == 0 })
			f.prefill[0].SetFault("", 0, "")
			f.settled()
		})
	}
}

// If prefill dies during the leg, another prefill computes the prompt and makes
// decode free the KV that was not pulled.
func TestTurnWhosePrefillDies(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{
		prefill: 2, decode: 1, workers: manyWorkers,
		engine: func(role string, _ int, c *enginesim.Config) { keepTurns(role, c) },
		config: func(c *config.Config) {
			for i := range c.Engines {
				c.Engines[i].Bidirectional = true
			}
		},
	})
	next := f.secondTurn()
	for _, p := range f.prefill {
		p.SetFault("", 0, "head")
	}
	got := make(chan answer, 1)
	go func() { got <- f.try("/v1/completions", next) }()
	f.eventually("it is pulled", func() bool { return f.turns("pulled") == 1 })
	var open []struct{ Prefill string }
	f.admin("/v1/exchanges", &open)
	dies, other := f.prefill[0], f.prefill[1]
	if len(open) != 1 {
		t.Fatalf("%d exchanges are open", len(open))
	}
	if open[0].Prefill == "p1" {
		dies, other = other, dies
	}
	other.SetFault("", 0, "")
	dies.Kill()
	f.right(<-got, "/v1/completions", next)
	if f.turns("pulled") != 1 {
		t.Errorf("pulled %v times", f.turns("pulled"))
	}
	last := (len(words(120)) + 20 + 19 + 15) / 16
	f.eventually("only the last turn is kept", func() bool { return f.kept() == last })
	f.allForgotten()
}

// The proxy does not ask for kept KV of a restarted decode engine, or after its
// time is over.
func TestTurnComesTooLate(t *testing.T) {
	t.Run("time", func(t *testing.T) {
		f := turnFleet(t, func(_ string, c *enginesim.Config) { c.Nixl.KeepFor = 2 * time.Second }, func(c *config.Config) {
			for i := range c.Engines {
				c.Engines[i].DecoderKVBlocksTTL = config.Duration(30*time.Second + time.Millisecond)
			}
		})
		body := `{"model":"sim","session_id":"c","prompt":"` + long + `","max_tokens":20,"ignore_eos":true}`
		f.right(f.try("/v1/completions", body), "/v1/completions", body)
		const kept = "pdproxy_turn_kv_kept_seconds_count"
		f.eventually("the time of the KV is over", func() bool { // in a fleet, perhaps before the coordinator has the turn
			return f.metric(kept, `result="expired"`)+f.metric(kept, `result="freed"`) == 1
		})
		f.right(f.try("/v1/completions", body), "/v1/completions", body)
		if n := f.turns("pulled"); n != 0 {
			t.Errorf("%v pulled", n)
		}
	})
	t.Run("restart", func(t *testing.T) {
		f := turnFleet(t, nil, nil)
		ids := words(100)
		a := f.try("/v1/completions", completionOf(ids, ""))
		f.right(a, "/v1/completions", completionOf(ids, ""))
		name := a.header.Get("X-Pdproxy-Decode")
		n := int(name[1] - '0')
		f.decode[n].Kill()
		f.eventually("its death is known", func() bool { return f.engineState(name) != "ready" })
		f.awaitWorkers()
		answer := idsOf(t, f.post(context.Background(), f.alone.URL(), "/v1/completions", completionOf(ids, `,"return_token_ids":true`)))
		next := completionOf(append(append(ids, answer...), words(20)...), "")
		f.right(f.try("/v1/completions", next), "/v1/completions", next)
		if f.unusedTurns("engine_gone") != 1 || f.turns("pulled") != 0 {
			t.Errorf("%v turns whose engine had left, %v pulled", f.unusedTurns("engine_gone"), f.turns("pulled"))
		}
		f.allForgotten()
	})
}

// A prefill that is not bidirectional never receives block ids: it would wait
// for the blocks forever.
func TestTurnWithoutPrefill(t *testing.T) {
	f := turnFleet(t, func(role string, c *enginesim.Config) {
		c.Nixl.Bidirectional, c.Nixl.KeepFor = role == enginesim.RoleDecode, 300*time.Millisecond
	}, func(c *config.Config) { c.Engines[0].Bidirectional = false })
	ids := words(100)
	f.right(f.try("/v1/completions", completionOf(ids, "")), "/v1/completions", completionOf(ids, ""))
	answer := idsOf(t, f.post(context.Background(), f.alone.URL(), "/v1/completions", completionOf(ids, `,"return_token_ids":true`)))
	next := completionOf(append(append(ids, answer...), words(20)...), "")
	f.right(f.try("/v1/completions", next), "/v1/completions", next)
	if f.turns("pulled") != 0 {
		t.Error("pulled")
	}
}

// In a fleet the coordinator knows the kept KV. When it ends, the KV is freed.
// Without a coordinator nothing is kept, and the next one starts with none.
func TestTurnWithoutCoordinator(t *testing.T) {
	t.Setenv(modeVar, modeFleet)
	f := turnFleet(t, nil, nil)
	for _, w := range f.workers {
		f.eventually("the worker could do without its coordinator", w.healthy)
	}
	next := f.secondTurn()
	if err := f.front.end(); err != nil {
		t.Error(err)
	}
	f.eventually("the kept KV is free", func() bool { return f.kept() == 0 })
	f.right(f.try("/v1/completions", next), "/v1/completions", next)
	f.eventually("nothing is kept", func() bool { return f.kept() == 0 })
	refused := 0.0
	for _, w := range f.workers {
		n, err := w.admin.Metric("pdproxy_fallbacks_total", `what="turn_kv"`, `reason="coordinator"`)
		if err != nil {
			t.Fatal(err)
		}
		refused += n
	}
	if refused != 1 {
		t.Errorf("got %v refused turns, want 1", refused)
	}

	f.startCoordinator()
	f.waitReady()
	f.eventually("all workers are with the next coordinator", func() bool { return f.metric("pdproxy_fleet_workers") == manyWorkers })
	next = f.secondTurn()
	f.emptyPrefill()
	f.right(f.try("/v1/completions", next), "/v1/completions", next)
	if f.turns("pulled") != 1 {
		t.Errorf("%v pulled", f.turns("pulled"))
	}
	f.allForgotten()
}

// A coordinator that ends frees the kept KV even if an earlier clean-up hangs:
// the others do not wait for it.
func TestTurnsWhileACleanUpHangs(t *testing.T) {
	t.Setenv(modeVar, modeFleet)
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{
		prefill: 2, decode: 1,
		engine: func(role string, n int, c *enginesim.Config) {
			keepTurns(role, c)
			slow(enginesim.RoleDecode, 4000)(role, n, c)
		},
		config: func(c *config.Config) {
			for i := range c.Engines {
				c.Engines[i].Bidirectional = true
			}
			// Each prefill frees a few turns. Clean-ups that hang leave room
			// for the others.
			c.Policy.Place, c.Timeouts.Cleanup = "round_robin", config.Duration(time.Second)
		},
	})
	turn := func(n, tokens int, more string) string {
		return strings.Replace(completionOf(append([]int{'A' + n}, words(100)...), more), `"max_tokens":20`, fmt.Sprint(`"max_tokens":`, tokens), 1)
	}
	blocks := map[string]int{} // kept blocks, by the prefill that frees them
	keep := func(a answer, n, tokens int, more string) (prefill string) {
		f.right(a, "/v1/completions", turn(n, tokens, more))
		prefill = a.header.Get("X-Pdproxy-Prefill")
		blocks[prefill] += (101 + tokens - 1 + 15) / 16
		return prefill
	}
	for n := range 2 {
		keep(f.try("/v1/completions", turn(n, 20, "")), n, 20, "")
	}
	f.eventually("decode is idle", func() bool { return f.decode[0].State().RequestsRunning == 0 })

	// The coordinator frees one turn of a conversation when another turn
	// replaces it that began earlier than the first was kept.
	const session = `,"session_id":"c"`
	long := make(chan answer, 1)
	go func() { long <- f.try("/v1/completions", turn(20, 1000, session)) }()
	f.eventually("decode answers the long request", func() bool { return f.decode[0].State().RequestsRunning > 0 })
	hangs := keep(f.try("/v1/completions", turn(21, 20, session)), 21, 20, session)
	f.prefill[hangs[1]-'0'].SetFault("", 0, "head")
	if len(long) > 0 {
		t.Fatal("the long request ended too early")
	}
	keep(<-long, 20, 1000, session)
	if all := blocks["p0"] + blocks["p1"]; len(blocks) != 2 || f.kept() != all {
		t.Fatalf("decode engines retain %d blocks, want %v", f.kept(), blocks)
	}
	if err := f.front.end(); err != nil {
		t.Error(err)
	}
	f.drained = true
	f.eventually("decode keeps only the KV that the hanging engine should free", func() bool { return f.kept() == blocks[hangs] })
}

// Kept KV remains after the worker that served the turn has ended.
func TestTurnOfAKilledWorker(t *testing.T) {
	t.Setenv(modeVar, modeFleet)
	f := turnFleet(t, nil, nil)
	victim, ids := f.workers[manyWorkers-1], words(100)
	f.right(f.post(context.Background(), victim.URL(), "/v1/completions", completionOf(ids, "")), "/v1/completions", completionOf(ids, ""))
	f.eventually("it is kept", func() bool { return f.kept() > 0 })
	victim.strike()
	_ = victim.end() // its error counts the cut requests
	f.workers = f.workers[:manyWorkers-1]
	f.oneEntry()
	f.emptyPrefill()
	answer := idsOf(t, f.post(context.Background(), f.alone.URL(), "/v1/completions", completionOf(ids, `,"return_token_ids":true`)))
	next := completionOf(append(append(ids, answer...), words(20)...), "")
	f.right(f.try("/v1/completions", next), "/v1/completions", next)
	if f.turns("pulled") != 1 {
		t.Errorf("%v pulled", f.turns("pulled"))
	}
	f.allForgotten()
}

// Many conversations run at once, and their turns come through any worker. Each
// turn's KV is pulled at most once, and in the end only the last turns' KV is
// kept.
func TestTurnsOfManyConversations(t *testing.T) {
	f := turnFleet(t, nil, nil)
	const conversations, turns = 6, 4
	var all sync.WaitGroup
	var want atomic.Int64
	for n := range conversations {
		all.Go(func() {
			session := fmt.Sprintf(`,"session_id":"c%d"`, n)
			ids := append([]int{'A' + n}, words(60+16*n)...)
			for turn := range turns {
				body := completionOf(ids, session)
				f.right(f.try("/v1/completions", body), "/v1/completions", body)
				if turn == turns-1 {
					want.Add(int64(len(ids)+19+15) / 16)
				}
				answer := idsOf(t, f.post(context.Background(), f.alone.URL(), "/v1/completions", completionOf(ids, `,"return_token_ids":true`)))
				ids = append(append(ids, answer...), words(20+turn)...)
			}
		})
	}
	all.Wait()
	if kept, pulled := f.turns("kept"), f.turns("pulled"); kept != conversations*turns || pulled != conversations*(turns-1) {
		t.Errorf("%v turns kept, %v pulled", kept, pulled)
	}
	f.eventually("only the last turns' blocks are kept", func() bool { return f.kept() == int(want.Load()) })
	for _, e := range f.engines() {
		if s := e.State(); s.StaleReads > 0 {
			t.Errorf("%s got a request for memory that no request held", e.Addr())
		}
	}
	f.allForgotten()
}
