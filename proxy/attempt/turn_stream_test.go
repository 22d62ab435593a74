package attempt_test

import (
	"bufio"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// tokenEvent is an event of a completion by vLLM 0.33, with other members of the choice.
func tokenEvent(finish, more string) string {
	return `data: {"id":"1","choices":[{"index":0,"text":"x","finish_reason":` + finish + more + `}],"kv_transfer_params":null}` + "\n\n"
}

// ending returns the last event of a completion, with kv_transfer_params.
func ending(ids, params string) string {
	return strings.Replace(tokenEvent(`"length"`, `,"token_ids":`+ids), `"kv_transfer_params":null`, params, 1)
}

const promptIDs = `,"prompt_token_ids":[1,2,3],"token_ids":[9]`

// streamTurn sends one turn of a conversation, as a stream.
func (k *keeping) streamTurn(prompt string) world.Answer {
	return k.Post(world.CompletionsPath, fmt.Sprintf(`{"model":"m","session_id":"c","prompt":%s,"max_tokens":5,"stream":true}`, prompt))
}

// TestStreamedTurns: what decode's stream says of the KV that it retains, and who frees the KV. The KV is
// that of three tokens.
func TestStreamedTurns(t *testing.T) {
	params := func(old, now string) string { return strings.Replace(retainedKV, old, now, 1) }
	blocks := func(n int) string { return "[[" + strings.Repeat("1,", n-1) + "1]]" }
	first, last := tokenEvent("null", promptIDs), ending("[8]", retainedKV)
	for _, tt := range []struct {
		name   string
		events []string
		reason string // why it is not kept; "": it is, or decode retains none
		kept   bool
		freed  bool
	}{
		{"a stream", []string{first, last}, "", true, false},
		{"one read", []string{first + last + usageEvent(3, 2)}, "", true, false},
		{"one event", []string{ending(`[9],"prompt_token_ids":[1,2,3]`, retainedKV)}, "", true, false},
		{"spaces", []string{first, strings.Replace(last, `s":{`, `s" : {`, 1)}, "", true, false},
		{"named twice", []string{first, last, ending("[]", params(`"r"`, `"other"`))}, "", true, false},
		{"a text that looks like it", []string{first, tokenEvent("null", `,"token_ids":[8],"x":"\"kv_transfer_params\":{"`)}, "", false, false},
		{"none", []string{first, ending("[8]", `"kv_transfer_params":null`)}, "", false, false},
		{"those of a prefill", []string{first, ending("[8]", params(`"do_remote_decode":true`, `"do_remote_decode":false`))}, "", false, false},
		{"no blocks", []string{first, ending("[8]", params("[[1]]", "[[]]"))}, "", false, false},
		{"no object", []string{first, ending("[8]", `"kv_transfer_params":["d.test",[[1]]]`)}, "", false, false},
		{"another type", []string{first, ending("[8]", params(`"remote_port":1`, `"remote_port":{}`))}, "incomplete_kv_params", false, false},
		{"no request", []string{first, ending("[8]", params(`"remote_request_id":"r",`, ""))}, "incomplete_kv_params", false, false},
		{"no number of tokens", []string{first, ending("[8]", params(`"remote_num_tokens":3`, `"remote_num_tokens":-3`))}, "incomplete_kv_params", false, false},
		{"a foreign host", []string{first, ending("[8]", params("d.test", "127.0.0.1"))}, "foreign_host", false, false},
		{"a huge list of blocks", []string{first, ending("[8]", params("[[1]]", blocks(200_000)))}, "kv_blocks", false, true},
		{"two groups", []string{first, ending("[8]", params("[[1]]", "[[1],[2]]"))}, "kv_groups", false, true},
		{"more tokens than ids", []string{first, ending("[8]", params(`tokens":3`, `tokens":6`))}, "kv_ahead", false, true},
		{"no ids of the prompt", []string{tokenEvent("null", `,"token_ids":[9]`), last}, "no_token_ids", false, true},
		{"ids that are no numbers", []string{first, ending(`["8"]`, retainedKV)}, "no_token_ids", false, true},
		{"hidden ids", []string{tokenEvent("null", `,"prompt_token_ids":[1,2,3],"token_ids":null`), ending("null", params(`tokens":3`, `tokens":4`))}, "kv_ahead", false, true},
	} {
		for _, mode := range []string{config.ContinueOn, config.ContinueOff} {
			world.Run(t, tt.name+", continue "+mode, func(t *testing.T) {
				k := newKeeping(t, 0)
				cfg := *k.Config
				cfg.Retry.Continue = mode
				k.Reload(&cfg, nil)
				k.stream = func(c *world.Conn) {
					if !strings.Contains(c.Leg.Body, `"return_token_ids":true`) {
						t.Errorf("decode got no request for ids: %s", c.Leg.Body)
					}
					c.Stream(append(tt.events, world.Done)...)
				}
				a := k.streamTurn("[1,2,3]")
				if a.Status != 200 || !strings.HasSuffix(a.Body, world.Done) || strings.Contains(a.Body, "d.test") || strings.Contains(a.Body, "[[1") ||
					strings.Contains(a.Body, `token_ids":[`) && !strings.Contains(tt.name, "no numbers") {
					t.Errorf("the client got %d: %.600s", a.Status, a.Body)
				}
				if got := strings.Count(a.Body, `"kv_transfer_params":null`) + strings.Count(a.Body, `"kv_transfer_params" : null`); got != strings.Count(strings.Join(tt.events, ""), `"choices":[{`) {
					t.Errorf("%d events have null: %.600s", got, a.Body)
				}
				if n := k.Metric("pdproxy_turn_kv_total", "kept"); n != btof(tt.kept) || len(k.freed()) != int(btof(tt.freed)) {
					t.Errorf("%v turns kept, %d freed", n, len(k.freed()))
				}
				if n := k.Metric("pdproxy_fallbacks_total", "turn_kv", tt.reason); tt.reason != "" && n != 1 {
					t.Errorf("%v fallbacks", n)
				}
				if n := k.Memory.Used(); n != 0 {
					t.Errorf("%d bytes are counted", n)
				}
				k.streamTurn("[1,2,3,9,7]")
				if k.pulls != tt.kept {
					t.Errorf("the next turn pulls: %v", k.pulls)
				}
			})
		}
	}
}

// TestStreamedTurnIsNotWritten: the last event of a stream cannot be written to the client. Its next turn
// cannot come, and decode frees the KV.
func TestStreamedTurnIsNotWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKeeping(t, 0)
		got := make(chan struct{})
		k.stream = func(c *world.Conn) {
			c.Send(world.StreamHead)
			c.Chunks(tokenEvent("null", promptIDs))
			<-got
			c.Chunks(ending("[8]", retainedKV))
			c.Hold()
		}
		conn, err := k.Public.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		world.WriteRequest(t, conn, `{"model":"m","prompt":[1,2,3],"stream":true}`)
		for lines := bufio.NewScanner(conn); lines.Scan() && !strings.HasPrefix(lines.Text(), "data: "); {
		}
		close(got)
		time.Sleep(10 * time.Minute)
		if n := k.Metric("pdproxy_turn_kv_total", "kept"); n != 1 || len(k.freed()) != 1 {
			t.Errorf("%v turns kept, %d freed", n, len(k.freed()))
		}
		for result, want := range map[string]float64{"recalled": 1, "returned": 0} {
			if n := k.Metric("pdproxy_turn_kv_kept_seconds", result); n != want {
				t.Errorf("%v turns are counted as %s, want %v", n, result, want)
			}
		}
	})
}

// TestStreamedTurnWithoutMemory: there is no room for the ids of a stream. The client gets its stream, and
// decode frees the KV.
func TestStreamedTurnWithoutMemory(t *testing.T) {
	world.Run(t, "", func(t *testing.T) {
		k := newKeeping(t, 0)
		taken := int64(0)
		k.stream = func(c *world.Conn) {
			c.Send(world.StreamHead)
			c.Chunks(tokenEvent("null", promptIDs))
			synctest.Wait()
			taken = k.Memory.Limit() - k.Memory.Used() - 8<<10
			k.Memory.Take(taken)
			for range 100 {
				c.Chunks(tokenEvent("null", `,"token_ids":[`+strings.Repeat("1,", 99)+`1]`))
			}
			c.Chunks(ending("[8]", retainedKV), world.Done)
			c.Send("0\r\n\r\n")
		}
		a := k.streamTurn("[1,2,3]")
		if a.Status != 200 || !strings.HasSuffix(a.Body, world.Done) || strings.Contains(a.Body, "token_ids") || len(k.freed()) != 1 {
			t.Errorf("got %d: %.300s; %d freed", a.Status, a.Body, len(k.freed()))
		}
		if n := k.Metric("pdproxy_fallbacks_total", "turn_kv", "memory"); n != 1 {
			t.Errorf("%v fallbacks", n)
		}
		k.Memory.Release(taken)
	})
}
