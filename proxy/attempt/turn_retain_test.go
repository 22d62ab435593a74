package attempt_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// TestRetainPolicy: the policy decides how long decode keeps the KV of a turn. It gets the gaps of the
// earlier turns.
func TestRetainPolicy(t *testing.T) {
	retain := func(d time.Duration, asked *[]abi.RetainFacts) func(*proxy.Options) {
		return func(o *proxy.Options) {
			o.Retain = func(f *abi.RetainFacts) (abi.RetainDecision, string, bool) {
				*asked = append(*asked, *f)
				return abi.RetainDecision{Millis: uint32(d.Milliseconds()), Likelihood: abi.FullLikelihood / 4}, "test", true
			}
		}
	}
	noted := func(t *testing.T, k *keeping, text string) {
		t.Helper()
		k.Settled()
		rows := k.Ended()
		for _, row := range rows {
			if e, _ := k.Explain(row.RequestID); slices.ContainsFunc(e.Notes, func(note string) bool { return strings.Contains(note, text) }) {
				return
			}
		}
		t.Errorf("no explanation has the note %q", text)
	}
	kept := func(t *testing.T, k *keeping, want map[string]float64) {
		t.Helper()
		for _, result := range []string{"returned", "unusable", "replaced", "expired", "evicted", "freed", "drained"} {
			if n := k.Metric("pdproxy_turn_kv_kept_seconds", result); n != want[result] {
				t.Errorf("result %s: %v, want %v", result, n, want[result])
			}
		}
	}
	world.Run(t, "the time has ended", func(t *testing.T) {
		var asked []abi.RetainFacts
		k := newKeeping(t, 0, retain(5*time.Second, &asked))
		k.sendTurn("[1,2,3]")
		time.Sleep(4 * time.Second)
		if n := len(k.freed()); n != 0 {
			t.Errorf("%d turns are freed too early", n)
		}
		time.Sleep(2 * time.Second)
		if n := len(k.freed()); n != 1 {
			t.Errorf("%d freed turns, want 1", n)
		}
		noted(t, k, "decode keeps the KV of this turn for 5s: test expects the next turn with a likelihood of 0.25")
		k.sendTurn("[1,2,3,9,7]")
		if len(asked) != 2 || k.pulls || asked[1].All.Turns != 1 || asked[1].Conversation.P50 != 6144 || asked[1].Tokens != 3 || asked[1].MostMillis != 450_000 {
			t.Errorf("pulled %v; facts %+v", k.pulls, asked)
		}
		kept(t, k, map[string]float64{"expired": 1})
		if n := k.Metric("pdproxy_fallbacks_total", "turn_kv", "expired"); n != 1 {
			t.Errorf("%v turns came too late, want 1", n)
		}
	})
	world.Run(t, "the turn comes in time", func(t *testing.T) {
		var asked []abi.RetainFacts
		k := newKeeping(t, 0, retain(5*time.Second, &asked))
		k.sendTurn("[1,2,3]")
		time.Sleep(2 * time.Second)
		k.sendTurn("[1,2,3,9,7]")
		if !k.pulls {
			t.Error("prefill does not pull the KV")
		}
		noted(t, k, "prefill pulls the KV of the previous turn from d, which ended 2s ago")
		kept(t, k, map[string]float64{"returned": 1})
	})
	world.Run(t, "nothing is kept", func(t *testing.T) {
		var asked []abi.RetainFacts
		k := newKeeping(t, 0, retain(0, &asked))
		k.sendTurn("[1,2,3]")
		if n := len(k.freed()); n != 1 {
			t.Errorf("%d freed turns, want 1", n)
		}
		kept(t, k, map[string]float64{"freed": 1})
	})
	world.Run(t, "a stream ends with a call of a tool", func(t *testing.T) {
		var asked []abi.RetainFacts
		k := newKeeping(t, 0, retain(5*time.Second, &asked))
		k.stream = func(c *world.Conn) {
			c.Stream(`data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"prompt_token_ids":[1,2,3]}`+"\n\n",
				`data: {"id":"1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"c","type":"function","function":{"name":"read","arguments":"{}"}}]},"token_ids":[9],"finish_reason":null}],"kv_transfer_params":null}`+"\n\n",
				`data: {"id":"1","choices":[{"index":0,"delta":{},"token_ids":[8],"finish_reason":"tool_calls"}],`+retainedKV+"}\n\n", world.Done)
		}
		for range 2 {
			a := k.Post(chatPath, `{"model":"m","session_id":"c","messages":[{"role":"user","content":"x"}],"stream":true}`)
			if a.Status != 200 || !strings.Contains(a.Body, `"name":"read"`) {
				t.Fatalf("got status %d: %s", a.Status, a.Body)
			}
		}
		if len(asked) != 2 || !asked[0].ToolCall || asked[0].Tools.Turns != 0 || asked[1].Tools.Turns != 1 {
			t.Errorf("facts %+v", asked)
		}
	})
	world.Run(t, "the memory of decode is short", func(t *testing.T) {
		var asked []abi.RetainFacts
		k := newKeeping(t, 0, retain(time.Minute, &asked))
		k.sendTurn("[1,2,3]")
		d := k.Registry.Snapshot().Instance("d")
		d.Load[0].Report(load.Report{At: time.Now(), Every: time.Second, Usage: 0.97, Capacity: 100}, load.Mark{})
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if n := len(k.freed()); n != 1 {
			t.Errorf("%d freed turns, want 1", n)
		}
		kept(t, k, map[string]float64{"evicted": 1})
	})
}
