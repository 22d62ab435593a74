package enginesim

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/trtllm"
)

// trtID is a legal disagg id beyond 2^53.
const trtID = int64(1)<<61 + 12345

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

// TestTRTLLMSignature checks the signature's vector, with the escapes of ASCII JSON.
func TestTRTLLMSignature(t *testing.T) {
	e := newBare(t, Config{Connector: ConnectorTRTLLM, TRTLLM: TRTLLMConfig{AuthKey: "unit-test-key"}})
	vector := &trtllm.TRTParams{Raw: core.Fields{"encoded_opaque_state": json.RawMessage(`"b3BhcXVl"`)}}
	for last, ok := range map[string]bool{"9": true, "8": false} {
		signed := &core.Request{Header: http.Header{trtllm.HeaderDisaggAuth: {"sha256=5bb964e820fe330f8c1966e5d34147af5cfe779851c5575643c8fa08651b86f" + last}}}
		if err := e.Proto.(*trtllm.TRTLLM).CheckAuth(signed, vector); (err == nil) != ok {
			t.Errorf("signature that ends with %s: %v", last, err)
		}
	}
	if got := string(trtllm.AsciiJSON([]byte(`"é😀a"`))); got != `"\u00e9\ud83d\ude00a"` {
		t.Errorf("ascii %s", got)
	}
}

// TestTRTLLMFutureFields: no float64 can represent the integer that stands for later releases.
func TestTRTLLMFutureFields(t *testing.T) {
	if epoch, _ := trtllm.FutureFields(trtID); epoch < 1<<53 || epoch%2 == 0 {
		t.Errorf("epoch %d is exact as a float", epoch)
	}
}

// TestTRTLLMContextState: the opaque state names the context worker and the request.
func TestTRTLLMContextState(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorTRTLLM, Role: RolePrefill, TRTLLM: TRTLLMConfig{KVTransferTimeout: time.Millisecond}})
	a := post(t, e.URL()+core.RouteCompletions, completion("x", fmt.Sprintf(`"disaggregated_params":{"request_type":"context_only","disagg_request_id":%d}`, trtID)))
	state, _ := a.field(t, "choices", 0, "disaggregated_params", "encoded_opaque_state").(string)
	if want := (trtllm.TRTState{Engine: e.UUID, Addr: e.Ranks[0].Side.Listener.Addr().String(), Request: trtID}).Encode(); state != want {
		t.Errorf("state %q, want %q", state, want)
	}
}

// TestTRTLLMClock: the clock of a worker's metrics increases.
func TestTRTLLMClock(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorTRTLLM})
	clock := get(t, e.URL()+"/steady_clock_offset")
	var received, sent float64
	if n, err := fmt.Sscanf(string(clock.body), `{"receive_ts":%g,"transmit_ts":%g}`, &received, &sent); n != 2 || sent < received || received < 1e5 {
		t.Errorf("clock %s, %v", clock.body, err)
	}
}

// TestTRTLLMEventQueue: without a reader the oldest events are dropped, by
// number and by tokens. Workers before hash_algo omit that field.
func TestTRTLLMEventQueue(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorTRTLLM, TRTLLM: TRTLLMConfig{Wire: TRTLLMWireG1}})
	q := e.Proto.(*trtllm.TRTLLM).Events
	for range trtllm.TRTEventBuffer {
		q.Publish(0, []core.KVEvent{{Kind: core.KVRemoved, Names: []core.BlockName{{1}}}})
	}
	var list []struct {
		ID   int64  `json:"event_id"`
		Algo string `json:"hash_algo"`
	}
	if err := json.Unmarshal(post(t, e.URL()+"/kv_cache_events", "").body, &list); err != nil || len(list) != trtllm.TRTEventBuffer || list[0].ID != 1 || list[0].Algo != "" {
		t.Errorf("%d events, %v", len(list), err)
	}
	big := core.KVEvent{Kind: core.KVStored, Names: []core.BlockName{{2}}, Root: true, Tokens: make([]core.Token, trtllm.TRTEventTokens/2+1), Size: trtllm.TRTEventTokens/2 + 1}
	q.Publish(0, []core.KVEvent{big, big})
	if len(q.Queue) != 1 || q.Tokens != big.Size {
		t.Errorf("%d events of %d tokens", len(q.Queue), q.Tokens)
	}
}

// FuzzTRTLLMParse: any body gives a 400 or a request.
func FuzzTRTLLMParse(f *testing.F) {
	epoch, layout := trtllm.FutureFields(trtID)
	state := trtllm.TRTState{Engine: "e", Addr: "a", Request: trtID}.Encode()
	for _, body := range []string{
		`{"model":"m","prompt":[1000],"disaggregated_params":` + fmt.Sprintf(`{"request_type":"generation_only","disagg_request_id":%d,"first_gen_tokens":[1000],"encoded_opaque_state":%q,"kv_epoch":%d,"kv_layout":%s,"ctx_usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}}`, trtID, state, epoch, layout),
		`{"model":"m","messages":[{"role":"user","content":"x"}],"prompt_token_ids_b64":"6AMAAA==","disaggregated_params":{"request_type":"context_only","return_prompt_token_ids_b64":true}}`,
		`{"model":"m","prompt":"x","disaggregated_params":{"request_type":7,"ctx_usage":[]}}`,
		`{"model":"m","prompt":[[1],[2]],"n":2,"conversation_params":{"conversation_id":null}}`,
		`{"model":null,"stream_options":5}`, `null`, `{"model":"m","prompt":"","disaggregated_params":{}}`,
	} {
		for wire := TRTLLMWireG1; wire <= TRTLLMWireG3; wire++ {
			f.Add(body, true, wire)
			f.Add(body, false, wire)
		}
	}
	engines := map[int]*Engine{}
	for wire := TRTLLMWireG1; wire <= TRTLLMWireG3; wire++ {
		e, err := New(Config{Connector: ConnectorTRTLLM, KVBlocks: 64, TRTLLM: TRTLLMConfig{Wire: wire, AuthKey: map[int]string{TRTLLMWireG3: "k"}[wire]}})
		if err != nil {
			f.Fatal(err)
		}
		engines[wire] = e
	}
	f.Fuzz(func(t *testing.T, body string, chat bool, wire int) {
		e, route := engines[wire], core.RouteCompletions
		if e == nil {
			e = engines[TRTLLMWireG2]
		}
		if chat {
			route = core.RouteChat
		}
		req, refusal := e.Proto.Parse(route, http.Header{}, []byte(body))
		if refusal != nil {
			if refusal.Status != http.StatusBadRequest {
				t.Fatalf("refused with %d", refusal.Status)
			}
			if _, err := core.EncodeJSON(e.Proto.ErrorBody(refusal)); err != nil {
				t.Fatal(err)
			}
			return
		}
		q := req.Ext.(*trtllm.TRTRequest)
		if q.Is(trtllm.TypeGeneration) && (q.Params.Key() == nil || q.Params.State == nil) {
			t.Fatal("a generation without the address of its context was accepted")
		}
	})
}

// FuzzTRTLLMState: an opaque state is read as it was written, or rejected.
func FuzzTRTLLMState(f *testing.F) {
	f.Add(trtllm.TRTState{Engine: "e", Addr: "127.0.0.1:1", Rank: 3, Request: trtID}.Encode())
	f.Add("AAECAw==")
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		st, err := trtllm.DecodeTRTState(text)
		if err != nil {
			return
		}
		again, err := trtllm.DecodeTRTState(st.Encode())
		if err != nil || *again != *st {
			t.Fatalf("%+v became %+v, %v", st, again, err)
		}
	})
}
