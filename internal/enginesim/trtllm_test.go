package enginesim

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/trtllm"
)

// trtID is a legal disagg id beyond 2^53.
const trtID = int64(1)<<61 + 12345

// trtPair starts a context and a generation worker with one config.
func trtPair(t *testing.T, cfg TRTLLMConfig) (*Engine, *Engine) {
	t.Helper()
	c := Config{Connector: ConnectorTRTLLM, TRTLLM: cfg}
	ctx, gen := c, c
	ctx.Role, gen.Role = RolePrefill, RoleDecode
	return startEngine(t, ctx), startEngine(t, gen)
}

// withFields adds fields to a JSON object.
func withFields(body, extra string) string { return strings.TrimSuffix(body, "}") + "," + extra + "}" }

// contextLeg posts a context leg and returns its answer, which must be pending.
func contextLeg(t *testing.T, e *Engine, route, body string, id int64) answer {
	t.Helper()
	a := post(t, e.URL()+route, withFields(body, fmt.Sprintf(`"disaggregated_params":{"request_type":"context_only","disagg_request_id":%d,"schedule_style":0}`, id)))
	if a.status != http.StatusOK {
		t.Fatalf("context answered %d %s", a.status, a.body)
	}
	return a
}

// generationBody is the generation leg's body: the client's, with the context's
// params and token ids. edit may change the params.
func generationBody(t *testing.T, body string, ctx answer, edit func(params map[string]json.RawMessage)) string {
	t.Helper()
	var answer struct {
		IDs     json.RawMessage `json:"prompt_token_ids"`
		Packed  json.RawMessage `json:"prompt_token_ids_b64"`
		Usage   json.RawMessage `json:"usage"`
		Choices []struct {
			Params map[string]json.RawMessage `json:"disaggregated_params"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(ctx.body, &answer); err != nil {
		t.Fatal(err)
	}
	params := answer.Choices[0].Params
	params["request_type"] = json.RawMessage(`"generation_only"`)
	if _, ok := params["ctx_usage"]; ok {
		params["ctx_usage"] = answer.Usage
	}
	if edit != nil {
		edit(params)
	}
	var client map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &client); err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(params)
	if err != nil {
		t.Fatal(err)
	}
	client["disaggregated_params"] = raw
	switch {
	case client["prompt"] != nil:
		client["prompt"] = answer.IDs
	case answer.Packed != nil && string(answer.Packed) != "null":
		client["prompt_token_ids_b64"] = answer.Packed
	default:
		client["prompt_token_ids"] = answer.IDs
	}
	raw, err = json.Marshal(client)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestTRTLLMTextEqualsBoth(t *testing.T) {
	for wire := TRTLLMWireG1; wire <= TRTLLMWireG3; wire++ {
		ctx, gen := trtPair(t, TRTLLMConfig{Wire: wire})
		one := startEngine(t, Config{Connector: ConnectorTRTLLM, TRTLLM: TRTLLMConfig{Wire: wire}})
		tests := []struct{ name, route, body string }{
			{"completion", core.RouteCompletions, completion(words(1, 40), `"max_tokens":9`)},
			{"without limit", core.RouteCompletions, completion(words(2, 17), "")},
			{"one token", core.RouteCompletions, completion(words(3, 17), `"max_tokens":1`)},
			{"exactly one block", core.RouteCompletions, completion(words(4, 16), `"max_tokens":40`)},
			{"stream", core.RouteCompletions, completion(words(5, 33), `"max_tokens":9,"stream":true`)},
			{"chat", core.RouteChat, `{"model":"sim","messages":[{"role":"user","content":"hello there"}],"max_tokens":12,"seed":7}`},
			{"chat stream", core.RouteChat, `{"model":"sim","messages":[{"role":"user","content":"flow"}],"max_completion_tokens":12,"stream":true}`},
			{"second token ends it", core.RouteCompletions, completion("<eos2>", `"max_tokens":12`)},
			{"stop string", core.RouteCompletions, completion(words(6, 20), `"max_tokens":60,"stop":["ba"]`)},
		}
		for i, tt := range tests {
			t.Run(fmt.Sprintf("G%d %s", wire, tt.name), func(t *testing.T) {
				text := func(a answer) string {
					t.Helper()
					if a.status != http.StatusOK {
						t.Fatalf("got status %d: %s", a.status, a.body)
					}
					if strings.Contains(tt.body, `"stream":true`) {
						return joined(t, a)
					}
					return a.text(t)
				}
				want := text(post(t, one.URL()+tt.route, tt.body))
				params := `"disaggregated_params":{"request_type":"context_only"}`
				if wire >= TRTLLMWireG2 {
					params = fmt.Sprintf(`"disaggregated_params":{"request_type":"CONTEXT_only","disagg_request_id":%d}`, trtID+int64(i))
				}
				leg := strings.Replace(tt.body, `,"stream":true`, "", 1)
				ca := post(t, ctx.URL()+tt.route, withFields(leg, params))
				if ca.status != http.StatusOK {
					t.Fatalf("context answered %d %s", ca.status, ca.body)
				}
				finish := "length"
				if wire == TRTLLMWireG1 && tt.name != "one token" {
					finish = "not_finished"
				}
				if got := ca.field(t, "choices", 0, "finish_reason"); got != finish {
					t.Errorf("context finished %v, want %s", got, finish)
				}
				if !strings.HasPrefix(want, ca.text(t)) {
					t.Errorf("context's token %q does not begin %q", ca.text(t), want)
				}
				if ctx.State().BlocksPinned == 0 {
					t.Error("the context holds nothing")
				}
				ga := post(t, gen.URL()+tt.route, generationBody(t, tt.body, ca, nil))
				if got := text(ga); got != want {
					t.Errorf("generation answered %q, one worker %q", got, want)
				}
				if s := ctx.State(); s.BlocksPinned != 0 || s.BlocksUsed != 0 {
					t.Errorf("state of the context after the fetch: %+v", s)
				}
			})
		}
	}
}

// TestTRTLLMContextForm compares an unary context answer with the expected form.
func TestTRTLLMContextForm(t *testing.T) {
	ctx, _ := trtPair(t, TRTLLMConfig{KVTransferTimeout: time.Millisecond})
	epoch, layout := trtllm.FutureFields(trtID)
	if epoch < 1<<53 || epoch%2 == 0 {
		t.Errorf("epoch %d is exact as a float", epoch)
	}
	state := trtllm.TRTState{Engine: ctx.UUID, Addr: ctx.Ranks[0].Side.Listener.Addr().String(), Request: trtID}.Encode()
	params := func(extra string) string {
		return fmt.Sprintf(`{"request_type":"context_only","first_gen_tokens":[1234],"first_gen_log_probs":null,"first_gen_logits":null,"ctx_request_id":%d,"encoded_opaque_state":"%s","draft_tokens":null,`+
			`"disagg_request_id":%d,"ctx_dp_rank":0,"ctx_info_endpoint":null,"schedule_style":0,"ctx_usage":null,"return_prompt_token_ids_b64":%s,"kv_epoch":%d,"kv_layout":%s}`, trtID, state, trtID, extra, epoch, layout)
	}
	tests := []struct{ name, route, body, params, want string }{
		{"completion", core.RouteCompletions, `{"model":"m","prompt":[1000,65],"max_tokens":9}`, "",
			`{"id":"cmpl-ID","object":"text_completion","created":0,"model":"m","choices":[{"index":0,"text":"T","token_ids":null,"logprobs":null,"context_logits":null,"finish_reason":"length","stop_reason":null,"disaggregated_params":` +
				params("false") + `,"avg_decoded_tokens_per_iter":null}],"usage":{"prompt_tokens":2,"total_tokens":3,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}},"prompt_token_ids":[1000,65]}`},
		{"chat, packed ids", core.RouteChat, `{"model":"m","messages":[],"prompt_token_ids":[1000,65]}`, `,"return_prompt_token_ids_b64":true`,
			`{"id":"chatcmpl-ID","object":"chat.completion","created":0,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"T","reasoning_content":"","reasoning":null,"tool_calls":[]},"logprobs":null,"finish_reason":"length","stop_reason":null,"mm_embedding_handle":null,"disaggregated_params":` +
				params("true") + `,"avg_decoded_tokens_per_iter":null}],"usage":{"prompt_tokens":2,"total_tokens":3,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}},"prompt_token_ids":null,"prompt_token_ids_b64":"6AMAAEEAAAA="}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a := post(t, ctx.URL()+tt.route, withFields(tt.body, fmt.Sprintf(`"disaggregated_params":{"request_type":"context_only","disagg_request_id":%d%s}`, trtID, tt.params)))
			got := strings.ReplaceAll(string(a.body), strings.Split(strings.SplitN(string(a.body), `"first_gen_tokens":[`, 2)[1], "]")[0]+`],"first`, `1234],"first`)
			got = strings.ReplaceAll(hide(got), `"ctx_request_id":1,`, fmt.Sprintf(`"ctx_request_id":%d,`, trtID))
			if got != tt.want {
				t.Errorf("answered\n%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

// TestTRTLLMUsage: a generation reports the counts of its context.
func TestTRTLLMUsage(t *testing.T) {
	ctx, gen := trtPair(t, TRTLLMConfig{})
	body := completion(words(1, 40), `"max_tokens":5`)
	post(t, ctx.URL()+core.RouteCompletions, body) // now two blocks are cached
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprint(stream), func(t *testing.T) {
			ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
			client := body
			if stream {
				client = withFields(body, `"stream":true,"stream_options":{}`)
			}
			ga := post(t, gen.URL()+core.RouteCompletions, generationBody(t, client, ca, nil))
			want := `"usage":{"prompt_tokens":40,"total_tokens":45,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":32}}`
			if !strings.Contains(string(ga.body), want) {
				t.Errorf("answered %s, want %s", ga.body, want)
			}
		})
	}
	t.Run("invented", func(t *testing.T) {
		ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
		ga := post(t, gen.URL()+core.RouteCompletions, generationBody(t, body, ca, func(p map[string]json.RawMessage) {
			p["ctx_usage"] = json.RawMessage(`{"prompt_tokens":7}`)
		}))
		if got := ga.field(t, "usage", "total_tokens"); got != json.Number("12") {
			t.Errorf("total is %v", got)
		}
	})
}

// TestTRTLLMEarlyEnd: when the first token ends the answer, nothing is held.
func TestTRTLLMEarlyEnd(t *testing.T) {
	ctx, _ := trtPair(t, TRTLLMConfig{})
	one := startEngine(t, Config{Connector: ConnectorTRTLLM})
	first := post(t, one.URL()+core.RouteCompletions, completion("go", `"max_tokens":1`)).text(t)
	for name, body := range map[string]string{
		"eos":  completion("<eos1>", `"max_tokens":9`),
		"stop": completion("go", `"max_tokens":9,"stop":"`+strings.TrimSpace(first)+`"`),
	} {
		t.Run(name, func(t *testing.T) {
			a := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
			if a.field(t, "choices", 0, "finish_reason") != "stop" {
				t.Errorf("answered %s", a.body)
			}
			for _, name := range []string{"ctx_request_id", "disagg_request_id", "encoded_opaque_state"} {
				if v := a.field(t, "choices", 0, "disaggregated_params", name); v != nil {
					t.Errorf("%s is %v", name, v)
				}
			}
			if s := ctx.State(); s.BlocksPinned != 0 || s.BlocksUsed != 0 {
				t.Errorf("the context holds %+v", s)
			}
		})
	}
	// An answer of one token by the client's limit is not an early end.
	a := contextLeg(t, ctx, core.RouteCompletions, completion("go", `"max_tokens":1`), trtID)
	if a.field(t, "choices", 0, "finish_reason") != "length" || ctx.State().BlocksPinned != 1 {
		t.Errorf("max_tokens 1: %s", a.body)
	}
	if a := post(t, ctx.URL()+core.RouteCompletions, completion("<eos1>", `"max_tokens":9,"ignore_eos":true,"disaggregated_params":{"request_type":"context_only"}`)); a.field(t, "choices", 0, "finish_reason") != "length" {
		t.Errorf("ignore_eos: %s", a.body)
	}
	releaseContexts(t, ctx)
}

// releaseContexts frees contexts that a test leaves behind, as their timeout
// would.
func releaseContexts(t *testing.T, e *Engine) {
	t.Helper()
	for _, r := range e.Ranks {
		r.UnpinAll()
	}
}

func TestTRTLLMHandoffIsChecked(t *testing.T) {
	ctx, gen := trtPair(t, TRTLLMConfig{KVTransferTimeout: 150 * time.Millisecond})
	one := startEngine(t, Config{Connector: ConnectorTRTLLM})
	body := completion(words(1, 40), `"max_tokens":5`)
	want := post(t, one.URL()+core.RouteCompletions, body).text(t)
	type params = map[string]json.RawMessage
	set := func(name, value string) func(params) {
		return func(p params) { p[name] = json.RawMessage(value) }
	}
	drop := func(name string) func(params) { return func(p params) { delete(p, name) } }
	tests := []struct {
		name    string
		edit    func(params)
		status  int
		message string
	}{
		{"as it came", nil, 200, ""},
		{"without the legacy id", drop("ctx_request_id"), 200, ""},
		{"without usage", drop("ctx_usage"), 200, ""},
		{"conversation", set("conversation_id", `"c"`), 200, ""},
		{"no opaque state", drop("encoded_opaque_state"), 400, "needs encoded_opaque_state"},
		{"state is not base64", set("encoded_opaque_state", `"%%%"`), 400, "decode opaque state"},
		{"state is spoilt", set("encoded_opaque_state", `"AAECAwQFBgc="`), 400, "decode opaque state: corrupted"},
		{"no ids", func(p params) { delete(p, "ctx_request_id"); delete(p, "disagg_request_id") }, 400, "needs disagg_request_id"},
		{"no first token", drop("first_gen_tokens"), 400, "needs first_gen_tokens"},
		{"future field dropped", drop("kv_layout"), 400, "kv_layout is not what the context worker returned"},
		{"future integer dropped", drop("kv_epoch"), 400, "kv_epoch is not what the context worker returned"},
		{"future integer through a float", func(p params) {
			v, _ := strconv.ParseFloat(string(p["kv_epoch"]), 64)
			p["kv_epoch"] = fmt.Appendf(nil, "%.0f", v)
		}, 400, "kv_epoch is not"},
		{"unknown field", set("is_first_turn", `true`), 400, "Extra inputs are not permitted"},
		{"unknown usage field", set("ctx_usage", `{"prompt_tokens":1,"cost":2}`), 400, "Extra inputs are not permitted"},
		{"unknown type", set("request_type", `"decode"`), 400, "Unknown request type: decode"},
		{"no type", drop("request_type"), 400, "Field required"},
		{"local id", set("disagg_request_id", `1099511627775`), 400, "is not in [1099511627776, 9223372036854775807)"},
		{"id beyond the range", set("disagg_request_id", `9223372036854775807`), 400, "is not in"},
		{"another id", set("disagg_request_id", fmt.Sprint(trtID+1)), 500, "timed out after 0.1 s"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
			ga := post(t, gen.URL()+core.RouteCompletions, generationBody(t, body, ca, tt.edit))
			if ga.status != tt.status || !strings.Contains(string(ga.body), tt.message) {
				t.Errorf("answered %d %s, want %d %s", ga.status, ga.body, tt.status, tt.message)
			}
			if ga.status == http.StatusOK && ga.text(t) != want {
				t.Errorf("got text %q, want %q", ga.text(t), want)
			}
			eventually(t, "the context freed", func() bool { return ctx.State().BlocksUsed == 0 && gen.State().BlocksUsed == 0 })
		})
	}
	t.Run("tokens replayed", func(t *testing.T) {
		ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
		ga := post(t, gen.URL()+core.RouteCompletions, generationBody(t, body, ca, set("first_gen_tokens", `[1000]`)))
		if text := ga.text(t); !strings.HasPrefix(text, core.WordText(0)) || text == want {
			t.Errorf("got text %q, want the token of the leg at its beginning", text)
		}
	})
	t.Run("text prompt", func(t *testing.T) {
		ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
		var g map[string]json.RawMessage
		json.Unmarshal([]byte(generationBody(t, body, ca, nil)), &g)
		raw, _ := json.Marshal(words(1, 40))
		g["prompt"] = raw
		text, _ := json.Marshal(g)
		if a := post(t, gen.URL()+core.RouteCompletions, string(text)); a.status != http.StatusBadRequest {
			t.Errorf("answered %d %s", a.status, a.body)
		}
		g["prompt"] = json.RawMessage(`[1000,1001]`)
		text, _ = json.Marshal(g)
		if a := post(t, gen.URL()+core.RouteCompletions, string(text)); a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), "the context has 40 prompt tokens, the generation 2") {
			t.Errorf("answered %d %s", a.status, a.body)
		}
	})
	t.Run("fetched once", func(t *testing.T) {
		ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
		g := generationBody(t, body, ca, nil)
		if a := post(t, gen.URL()+core.RouteCompletions, g); a.status != http.StatusOK {
			t.Fatalf("answered %d %s", a.status, a.body)
		}
		if a := post(t, gen.URL()+core.RouteCompletions, g); a.status != http.StatusInternalServerError {
			t.Errorf("a second generation answered %d %s", a.status, a.body)
		}
	})
	t.Run("stream of a wrong id", func(t *testing.T) {
		ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
		a, err := try(t.Context(), gen.URL()+core.RouteCompletions, generationBody(t, withFields(body, `"stream":true`), ca, set("disagg_request_id", fmt.Sprint(trtID+1))))
		if a.status != http.StatusOK || err == nil || len(a.body) != 0 {
			t.Errorf("answered %d %q, %v; want a 200 that is cut", a.status, a.body, err)
		}
	})
	eventually(t, "all contexts freed", func() bool { return ctx.State().BlocksUsed == 0 })
}

// TestTRTLLMPinned: only the fetch and the timeout free a context.
func TestTRTLLMPinned(t *testing.T) {
	ctx, gen := trtPair(t, TRTLLMConfig{KVTransferTimeout: 200 * time.Millisecond})
	body := completion(words(1, 40), `"max_tokens":5`)
	ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
	http.DefaultClient.CloseIdleConnections() // closing the connection does nothing
	eventually(t, "connections closed", func() bool { return ctx.State().ConnectionsOpen == 0 })
	if s := ctx.State(); s.BlocksPinned != 3 || s.BlocksUsed != 3 || s.RequestsRunning != 0 || s.Aborted != 0 {
		t.Errorf("state after the end of the connection: %+v", s)
	}
	eventually(t, "the time-out", func() bool { return ctx.State().BlocksPinned == 0 })
	if s := ctx.State(); s.LeasesExpired != 1 || s.BlocksUsed != 0 {
		t.Errorf("state after the time-out: %+v", s)
	}
	if a := post(t, gen.URL()+core.RouteCompletions, generationBody(t, body, ca, nil)); a.status != http.StatusInternalServerError {
		t.Errorf("a late generation answered %d %s", a.status, a.body)
	}
}

// TestTRTLLMClientLeaves: during prefill the worker notices at its next poll.
func TestTRTLLMClientLeaves(t *testing.T) {
	const poll = 50 * time.Millisecond
	ctx, gen := trtPair(t, TRTLLMConfig{DisconnectPoll: poll})
	for name, e := range map[string]*Engine{"context": ctx, "plain": gen} {
		t.Run(name, func(t *testing.T) {
			e.SetFault("", 0, core.HangPrefill)
			defer e.SetFault("", 0, "")
			extra := `"max_tokens":5`
			if name == "context" {
				extra += fmt.Sprintf(`,"disaggregated_params":{"request_type":"context_only","disagg_request_id":%d}`, trtID)
			}
			answered, leave := postAside(t, e.URL()+core.RouteCompletions, completion(words(1, 40), extra))
			eventually(t, "computing", func() bool { return e.State().RequestsRunning == 1 })
			leave()
			<-answered
			eventually(t, "the abort", func() bool { return e.State().RequestsRunning == 0 })
			if s := e.State(); s.Aborted != 1 || s.BlocksUsed != 0 || s.BlocksPinned != 0 {
				t.Errorf("state after the abort: %+v", s)
			}
		})
	}
	t.Run("generation", func(t *testing.T) {
		gen.SetFault("", 0, core.HangDecode)
		defer gen.SetFault("", 0, "")
		body := completion(words(2, 40), `"max_tokens":5`)
		ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
		answered, leave := postAside(t, gen.URL()+core.RouteCompletions, generationBody(t, body, ca, nil))
		eventually(t, "decoding", func() bool { return gen.State().RequestsRunning == 1 })
		leave()
		<-answered
		eventually(t, "the abort", func() bool { return gen.State().BlocksUsed == 0 })
	})
}

// TestTRTLLMGenerationWaits: a generation whose context does not arrive holds
// its blocks as pinned until the timeout, or until its client leaves.
func TestTRTLLMGenerationWaits(t *testing.T) {
	ctx, gen := trtPair(t, TRTLLMConfig{DisconnectPoll: 10 * time.Millisecond})
	body := completion(words(1, 40), `"max_tokens":5`)
	ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
	answered, leave := postAside(t, gen.URL()+core.RouteCompletions, generationBody(t, body, ca, func(p map[string]json.RawMessage) {
		p["disagg_request_id"] = json.RawMessage(fmt.Sprint(trtID + 9))
	}))
	eventually(t, "pinned blocks", func() bool {
		s := gen.State()
		return s.BlocksPinned == 3 && s.RequestsWaiting == 1 && s.RequestsRunning == 0
	})
	leave()
	<-answered
	eventually(t, "free blocks", func() bool { return gen.State().BlocksUsed == 0 })
	releaseContexts(t, ctx)
}

// TestTRTLLMContextDies: if a context worker ends, the generation that needs its KV waits
// until its time-out.
func TestTRTLLMContextDies(t *testing.T) {
	ctx, gen := trtPair(t, TRTLLMConfig{KVTransferTimeout: 200 * time.Millisecond})
	body := completion(words(1, 40), `"max_tokens":5`)
	ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
	ctx.Kill()
	if a := post(t, gen.URL()+core.RouteCompletions, generationBody(t, body, ca, nil)); a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), "timed out") {
		t.Errorf("answered %d %s", a.status, a.body)
	}
}

// TestTRTLLMDuplicateID: the newer context of a live id replaces the older one,
// whose generation then gets the wrong KV.
func TestTRTLLMDuplicateID(t *testing.T) {
	ctx, gen := trtPair(t, TRTLLMConfig{})
	right, wrong := completion(words(1, 40), `"max_tokens":5`), completion(words(2, 40), `"max_tokens":5`)
	want := post(t, gen.URL()+core.RouteCompletions, right).text(t)
	ca := contextLeg(t, ctx, core.RouteCompletions, right, trtID)
	contextLeg(t, ctx, core.RouteCompletions, wrong, trtID)
	if s := ctx.State(); s.DuplicateIDs != 1 || s.BlocksPinned != 3 {
		t.Errorf("ctx.State() = %+v", s)
	}
	// The generation worker has answered the right prompt itself. It fetches
	// only the missing blocks, and these are wrong.
	if ga := post(t, gen.URL()+core.RouteCompletions, generationBody(t, right, ca, nil)); ga.text(t) == want {
		t.Error("the right text from the wrong KV")
	}
}

func TestTRTLLMGenerationFirst(t *testing.T) {
	ctx, gen := trtPair(t, TRTLLMConfig{})
	one := startEngine(t, Config{Connector: ConnectorTRTLLM})
	info := get(t, ctx.URL()+"/server_info")
	endpoint := info.field(t, "disaggregated_params", "ctx_info_endpoint", 0).(string)
	for i, body := range []string{
		completion(words(1, 40), `"max_tokens":6`),
		completion(words(1, 40), `"max_tokens":6,"stream":true`),
		completion("<eos1>", `"max_tokens":6`),
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			text := func(a answer) string {
				if strings.HasPrefix(string(a.body), "data: ") {
					return joined(t, a)
				}
				return a.text(t)
			}
			want := text(post(t, one.URL()+core.RouteCompletions, body))
			id := trtID + int64(i)
			legs := map[*Engine]string{
				ctx: withFields(strings.Replace(body, `,"stream":true`, "", 1), fmt.Sprintf(`"disaggregated_params":{"request_type":"context_only","disagg_request_id":%d,"schedule_style":1}`, id)),
				gen: withFields(body, fmt.Sprintf(`"disaggregated_params":{"request_type":"generation_only","ctx_request_id":%d,"disagg_request_id":%[1]d,"schedule_style":1,"ctx_dp_rank":0,"ctx_info_endpoint":%q}`, id, endpoint)),
			}
			// The context leg waits for the generation leg.
			ca, _ := postAside(t, ctx.URL()+core.RouteCompletions, legs[ctx])
			eventually(t, "the context waiting", func() bool { return ctx.State().RequestsWaiting == 1 })
			ga := post(t, gen.URL()+core.RouteCompletions, legs[gen])
			if got := text(ga); got != want {
				t.Errorf("generation answered %q, one worker %q", got, want)
			}
			if a := <-ca; a.status != http.StatusOK {
				t.Errorf("context answered %d %s", a.status, a.body)
			}
			if s := ctx.State(); s.BlocksUsed != 0 {
				t.Errorf("the context holds %+v", s)
			}
		})
	}
	bad := post(t, gen.URL()+core.RouteCompletions, completion("x", fmt.Sprintf(`"disaggregated_params":{"request_type":"generation_only","disagg_request_id":%d,"schedule_style":1}`, trtID)))
	if bad.status != http.StatusBadRequest {
		t.Errorf("without the worker's endpoint: %d %s", bad.status, bad.body)
	}
}

func TestTRTLLMFaults(t *testing.T) {
	ctx, gen := trtPair(t, TRTLLMConfig{})
	body := completion(words(1, 20), `"max_tokens":5`)
	ctx.SetFault("1:no-params", 0, "")
	a := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
	if v := a.field(t, "choices", 0, "disaggregated_params"); v != nil || ctx.State().BlocksUsed != 0 {
		t.Errorf("no-params: %v, %+v", v, ctx.State())
	}
	ctx.SetFault("1:sse-error", 0, "")
	a, err := try(t.Context(), ctx.URL()+core.RouteCompletions, withFields(body, `"stream":true`))
	if a.status != http.StatusOK || err == nil || !strings.Contains(string(a.body), `"text"`) || strings.Contains(string(a.body), "DONE") {
		t.Errorf("sse-error: %d %s, %v; want a stream that is cut", a.status, a.body, err)
	}
	ctx.SetFault("", 0, "")
	gen.SetFault("1:load", 0, "")
	ca := contextLeg(t, ctx, core.RouteCompletions, body, trtID)
	if a := post(t, gen.URL()+core.RouteCompletions, generationBody(t, body, ca, nil)); a.status != http.StatusInternalServerError {
		t.Errorf("load: %d %s", a.status, a.body)
	}
}

// TestTRTLLMConcurrent: after many simultaneous pairs nothing is held.
func TestTRTLLMConcurrent(t *testing.T) {
	ctx, gen := trtPair(t, TRTLLMConfig{})
	one := startEngine(t, Config{Connector: ConnectorTRTLLM})
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			body := completion(words(i, 20+i), `"max_tokens":7`)
			want, err := try(context.Background(), one.URL()+core.RouteCompletions, body)
			if err != nil {
				t.Error(err)
				return
			}
			ca, err := try(context.Background(), ctx.URL()+core.RouteCompletions, withFields(body, fmt.Sprintf(`"disaggregated_params":{"request_type":"context_only","disagg_request_id":%d}`, trtID+int64(i))))
			if err != nil || ca.status != http.StatusOK {
				t.Error(ca.status, err)
				return
			}
			ga, err := try(context.Background(), gen.URL()+core.RouteCompletions, generationBody(t, body, ca, nil))
			if err != nil || ga.status != http.StatusOK || !bytes.Contains(ga.body, []byte(want.field(t, "choices", 0, "text").(string))) {
				t.Errorf("generation answered %d %s, %v", ga.status, ga.body, err)
			}
		})
	}
	wg.Wait()
	for _, e := range []*Engine{ctx, gen} {
		eventually(t, "nothing held", func() bool { s := e.State(); return s.BlocksUsed == 0 && s.BlocksPinned == 0 })
	}
	if s := ctx.State(); s.LeasesExpired != 0 || s.Transfers != 16 {
		t.Errorf("ctx.State() = %+v", s)
	}
}

func TestTRTLLMPackedIDs(t *testing.T) {
	f := core.Fields{"x": fmt.Appendf(nil, "%q", trtllm.PackIDs([]core.Token{1, 1 << 24, 65}))}
	ids, err := trtllm.ParsePackedIDs(f, "x")
	if err != nil || fmt.Sprint(ids) != "[1 16777216 65]" {
		t.Errorf("ids %v, %v", ids, err)
	}
	for _, bad := range []string{`"AAA"`, `"AAAAAAA="`, `5`} {
		if _, err := trtllm.ParsePackedIDs(core.Fields{"x": json.RawMessage(bad)}, "x"); err == nil {
			t.Errorf("%s was read", bad)
		}
	}
	if _, err := base64.StdEncoding.DecodeString(trtllm.TRTState{}.Encode()); err != nil {
		t.Error(err)
	}
}
