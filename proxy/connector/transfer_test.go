package connector

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// own returns parameters that a prefill engine at 10.0.0.5 answers. Members in more
// replace those of the same name.
func own(more string) string {
	members := []string{
		`"do_remote_prefill":true`, `"do_remote_decode":false`, `"remote_block_ids":[[12,13]]`, `"remote_engine_id":"e"`,
		`"remote_request_id":"r"`, `"remote_host":"10.0.0.5"`, `"remote_port":5600`, `"tp_size":1`,
	}
	list := []string{more}
	for _, m := range members {
		if name, _, _ := strings.Cut(m, ":"); !strings.Contains(","+more, ","+name+":") {
			list = append(list, m)
		}
	}
	if more == "" {
		list = list[1:]
	}
	return "{" + strings.Join(list, ",") + "}"
}

// withParams returns an answer of prefill with transfer parameters.
func withParams(params string) []byte {
	return []byte(`{"id":"x","choices":[{"index":0,"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":1},"kv_transfer_params":` + params + `}`)
}

// TestParamTypes: parameters with other types than an engine's make a bad answer, for
// every connector. Those of each generation of engines do not.
func TestParamTypes(t *testing.T) {
	bad := []string{
		`"do_remote_prefill":1`, `"do_remote_prefill":"yes"`, `"do_remote_prefill":[0]`, `"do_remote_prefill":{}`, `"do_remote_prefill":null`, `"do_remote_prefill":"true"`,
		`"do_remote_decode":0`, `"do_remote_decode":[]`,
		`"remote_block_ids":[true]`, `"remote_block_ids":[{}]`, `"remote_block_ids":[[[1]]]`, `"remote_block_ids":[1,[2]]`, `"remote_block_ids":[1.5]`, `"remote_block_ids":[-1]`,
		`"remote_block_ids":[1e3]`, `"remote_block_ids":{}`, `"remote_block_ids":7`, `"remote_block_ids":"1"`, `"remote_block_ids":true`, `"remote_block_ids":[[null]]`,
		`"remote_engine_id":7`, `"remote_engine_id":["e"]`, `"remote_request_id":{}`,
		`"remote_host":["10.0.0.5"]`, `"remote_host":167772165`, `"remote_host":{}`, `"remote_host":true`,
		`"remote_port":"5600"`, `"remote_port":0`, `"remote_port":-1`, `"remote_port":65536`, `"remote_port":5600.0`, `"remote_port":[5600]`, `"remote_port":true`,
		`"tp_size":"1"`, `"tp_size":1.5`, `"tp_size":-1`, `"tp_size":[]`, `"pp_size":true`, `"remote_num_tokens":"1"`, `"remote_prefill_cached_tokens":-5`, `"remote_blocks_expiry_time":"x"`,
		`"remote_blocks_expiry_time":[]`, `"transfer_mode":1`, `"\u0064o_remote_prefill":1`, `"x":[{"do_remote_prefill":1}]`, `"x":{"remote_port":"1"}`,
		`"remote_handshake_port":"x"`, `"remote_handshake_port":"0"`, `"remote_notify_port":70000`, `"transfer_id":1`, `"remote_dp_rank_override":"x"`,
	}
	good := []string{
		"", `"remote_block_ids":[1,2]`, `"remote_block_ids":[[1],[]]`, `"remote_block_ids":[ [ 1 , 2 ] ,[ ] ]`, `"remote_block_ids":["DUMMY\"_ID"]`,
		`"remote_blocks_expiry_time":1.5e9`, `"remote_blocks_expiry_time":null`, `"remote_num_tokens":41`, `"dcp_size":1,"pp_size":1`, `"transfer_mode":"pull"`,
		`"remote_agent_epoch":17,"remote_regions":[[1,2.5,null,{"a":true}]]`, `"num_lmcache_extra_cached_tokens":3`, `"first_token_ids":[1]`,
		`"first_tok":7`, `"remote_port":65535`,
	}
	for _, c := range All() {
		if c.Name() == "none" || c.Name() == "sglang" || c.Name() == "trtllm" {
			continue // their answers have no such parameters
		}
		for i, more := range append(bad, good...) {
			a := pair(t, "/v1/completions", `{"prompt":"x"}`)
			a.Prefill.Spec.EngineID = "e"
			h, err := c.ReadPrefill(a, withParams(own(more)))
			if i < len(bad) && (!errors.Is(err, ErrBadReply) || len(h.Params) > 0) {
				t.Errorf("%s, %s: c.ReadPrefill(a, withParams(own(more))) = %v", c.Name(), more, err)
			}
			if i >= len(bad) && errors.Is(err, ErrBadReply) && strings.Contains(err.Error(), "type") {
				t.Errorf("%s, %s: %v", c.Name(), more, err)
			}
		}
	}
}

// TestHostsHaveTheirType: the known members about hosts are those whose names say so. So
// their names need no scan for each answer.
func TestHostsHaveTheirType(t *testing.T) {
	for key, kind := range paramTypes {
		if aboutHosts(key) != (kind == paramHost || kind == paramHosts) {
			t.Errorf("%s has type %d", key, kind)
		}
	}
}

// TestParamHosts: decode gets no parameters that name, at any depth, a host or a port
// at which prefill is not known to be.
func TestParamHosts(t *testing.T) {
	for _, tt := range []struct {
		more    string
		foreign bool
	}{
		{"", false},
		{`"remote_host":"10.6.6.6"`, true},
		{`"remote_host":"evil"`, true},
		{`"remote_host":"localhost"`, true},
		{`"remote_hosts":["10.0.0.5"]`, false},
		{`"remote_hosts":["10.0.0.5","10.6.6.6"]`, true},
		{`"x":{"remote_host":"10.6.6.6"}`, true},
		{`"x":[[{"Remote_Host":"evil"}]]`, true},
		{`"x":"10.6.6.6:22"`, true},
		{`"x":"tcp://evil:1/y"`, true},
		{`"x":"tcp://10.0.0.5@evil:1"`, true},
		{`"x":"tcp://10.0.0.5:1/y"`, false},
		{`"x":"fd00::6"`, true},
		{`"peer_addr":167772165`, true},
		{`"\u0068ost":"evil"`, true},
		{`"remote_bootstrap_addr":"http://10.6.6.6:8998"`, true},
		{`"remote_bootstrap_addr":"http://10.0.0.5:8998"`, false},
		{`"remote_port":5601`, true},
		{`"remote_port":22`, true},
		{`"x":{"remote_port":22}`, true},
		{`"remote_port":22,"remote_block_ids":[]`, true},
		{`"remote_host":"10.6.6.6","remote_block_ids":[],"do_remote_prefill":false`, true},
		{`"about":"version 1.2.3"`, false},
	} {
		a := pair(t, "/v1/completions", `{"prompt":"x"}`)
		a.Prefill = place(config.Engine{SideChannel: "10.0.0.5:5600"}, "10.0.0.5", 0, engine.Facts{})
		h, err := nixl{}.ReadPrefill(a, withParams(own(tt.more)))
		if err != nil {
			t.Errorf("%s: nixl{}.ReadPrefill = %v, want nil", tt.more, err)
		}
		if (len(h.Params) == 0) != tt.foreign || tt.foreign && h.Fallback != ForeignHost && h.Fallback != "no_kv_blocks" {
			t.Errorf("%s: %q, %s", tt.more, h.Fallback, h.Params)
		}
		if Sound(a.Prefill.Instance, a.Decode.Instance, []byte(own(tt.more))) == tt.foreign {
			t.Errorf("%s: Sound and ReadPrefill disagree", tt.more)
		}
	}
}

// TestTrustedHosts: an engine of the configuration file may name its own host. It may
// not name another port than the configured one, or decode's host.
func TestTrustedHosts(t *testing.T) {
	for more, trusted := range map[string]bool{
		"": true, `"remote_host":"10.6.6.6"`: true, `"remote_host":"rdma0.far"`: true, `"remote_host":"localhost"`: false,
		`"remote_host":"127.0.0.1"`: false, `"remote_host":"10.6.6.6","remote_port":22`: false,
	} {
		a := pair(t, "/v1/completions", `{"prompt":"x"}`)
		a.Prefill = place(config.Engine{SideChannel: "10.0.0.5:5600"}, "10.0.0.5", 0, engine.Facts{})
		a.Prefill.Source = engine.SourceStatic
		h, err := nixl{}.ReadPrefill(a, withParams(own(more)))
		if err != nil || (len(h.Params) > 0) != trusted {
			t.Errorf("%s: nixl{}.ReadPrefill = %v, %q, %s", more, err, h.Fallback, h.Params)
		}
	}
}

// TestMoRIIOHosts: prefill's registered address replaces the address in its answer;
// other foreign hosts make a bad answer.
func TestMoRIIOHosts(t *testing.T) {
	for _, tt := range []struct {
		more string
		bad  bool
	}{
		{`"remote_host":"10.6.6.6"`, false},
		{`"remote_engine_id":"evil:6301"`, false},
		{`"remote_handshake_port":22`, false},
		{`"remote_notify_port":"22"`, false},
		{`"remote_engine_id":"10.0.0.5:22"`, false},
		{`"remote_hosts":["10.6.6.6"]`, true},
		{`"x":{"host":"evil"}`, true},
	} {
		a := pair(t, "/v1/completions", `{"prompt":"x"}`)
		at := config.KVAddress{Host: "10.0.0.5", Handshake: 6301, Notify: 61005}
		a.Prefill = place(config.Engine{Ranks: 1}, "10.0.0.5", 0, engine.Facts{KVAddress: at})
		c := moriio{read: true}
		h, err := c.ReadPrefill(a, withParams(own(tt.more)))
		if errors.Is(err, ErrBadReply) != tt.bad {
			t.Errorf("%s: c.ReadPrefill(a, withParams(own(tt.more))) = %v", tt.more, err)
		}
		if err != nil {
			continue
		}
		leg, err := c.Decode(a, &h, nil)
		if err != nil {
			t.Errorf("%s: c.Decode(a, &h, nil) = %v, want nil", tt.more, err)
		}
		for _, word := range []string{"10.6.6.6", "evil", ":22", `"22"`} {
			if strings.Contains(string(leg.Body), word) {
				t.Errorf("%s: decode is sent %s", tt.more, leg.Body)
			}
		}
	}
}

// TestTRTLLMTypes is the same for disaggregated_params, in both orders of the legs.
func TestTRTLLMTypes(t *testing.T) {
	answer := func(more, tokens string) []byte {
		if more != "" {
			more = "," + more
		}
		return []byte(`{"choices":[{"index":0,"text":"x","finish_reason":"length","disaggregated_params":{"request_type":"context_only",` +
			`"ctx_request_id":7,"disagg_request_id":2072360727809029` + more + `}}],"prompt_token_ids":` + tokens + `}`)
	}
	for _, tt := range []struct {
		more, tokens  string
		bad, fallback bool
	}{
		{"", "[1,2]", false, false},
		{`"first_gen_tokens":[1],"draft_tokens":null,"ctx_dp_rank":0,"schedule_style":0,"ctx_usage":{"prompt_tokens":1},"resolved_thinking":true`, "[1]", false, false},
		{`"ctx_info_endpoint":"tcp://10.0.0.5:1"`, "[1]", false, false},
		{`"ctx_info_endpoint":"tcp://10.6.6.6:1"`, "[1]", false, true},
		{`"context_control_endpoint":"http://10.6.6.6:1"`, "[1]", false, true},
		{`"x":{"host":"evil"}`, "[1]", false, true},
		{`"ctx_info_endpoint":{"a":"tcp://10.6.6.6:1"}`, "[1]", true, false},
		{`"ctx_info_endpoint":7`, "[1]", true, false},
		{`"first_gen_tokens":["x"]`, "[1]", true, false},
		{`"first_gen_tokens":{}`, "[1]", true, false},
		{`"encoded_opaque_state":7`, "[1]", true, false},
		{`"ctx_dp_rank":"0"`, "[1]", true, false},
		{`"ctx_usage":[]`, "[1]", true, false},
		{`"schedule_style":{}`, "[1]", true, false},
		{"", `"hello"`, true, false},
		{"", `["hello"]`, true, false},
		{"", `{"kv_transfer_params":1}`, true, false},
		{"", `[1,{}]`, true, false},
	} {
		for _, flow := range []abi.Flow{abi.FlowPrefillFirst, abi.FlowDecodeFirst} {
			a := pair(t, "/v1/completions", `{"prompt":"x"}`)
			a.ID, a.Flow = 2072360727809029, flow
			h, err := trtllm{}.ReadPrefill(a, answer(tt.more, tt.tokens))
			bad := tt.bad && (flow == abi.FlowPrefillFirst || tt.more != "") // decode has the prompt already
			if errors.Is(err, ErrBadReply) != bad {
				t.Errorf("%s %s, flow %v: %v", tt.more, tt.tokens, flow, err)
			}
			if fallback := flow == abi.FlowPrefillFirst && tt.fallback; (h.Fallback == ForeignHost) != fallback {
				t.Errorf("%s %s, flow %v: fallback %q", tt.more, tt.tokens, flow, h.Fallback)
			}
		}
	}
}

// TestSGLangReason: a finish reason is a string, however an abort is escaped.
func TestSGLangReason(t *testing.T) {
	for reason, good := range map[string]bool{
		`"length"`: true, `"stop"`: true, `"abort"`: false, `"\u0061bort"`: false, `true`: false, `1`: false, `["abort"]`: false, `{"type":"abort"}`: false,
	} {
		a := pair(t, "/v1/completions", `{"prompt":"x"}`)
		if _, err := (sglang{}).ReadPrefill(a, fmt.Appendf(nil, `{"choices":[{"finish_reason":%s}]}`, reason)); (err == nil) != good {
			t.Errorf("%s: (sglang{}).ReadPrefill = %v", reason, err)
		}
	}
}

// FuzzParams compares the check of arbitrary parameters with encoding/json: parameters
// that may go to decode name no other host, and have flags and blocks of the right
// types.
func FuzzParams(f *testing.F) {
	for _, more := range []string{
		"", `"remote_block_ids":[1,2]`, `"x":[{"remote_host":"10.6.6.6"}]`, `"do_remote_prefill":1`, `"remote_port":"1"`, `"\u0068ost":"10.6.6.6"`, `"a":[[],{}],"b":"x\"y"`,
	} {
		f.Add([]byte(own(more)))
	}
	f.Fuzz(func(t *testing.T, params []byte) {
		a := pair(t, "/v1/completions", `{"prompt":"x"}`)
		h, err := nixl{}.ReadPrefill(a, withParams(string(params)))
		if err != nil || len(h.Params) == 0 {
			return
		}
		var got map[string]any
		if err := json.Unmarshal(h.Params, &got); err != nil {
			t.Fatal(err)
		}
		inspect(t, "", got)
	})
}

func inspect(t *testing.T, key string, value any) {
	switch v := value.(type) {
	case string:
		if key == "remote_host" && v != "" && v != "10.0.0.5" || v == "10.6.6.6" {
			t.Errorf("decode is sent to %q by %q", v, key)
		}
	case float64:
		if key == "remote_port" && (v < 1 || v > 65535 || v != float64(int(v))) {
			t.Errorf("port %v", v)
		}
	case []any:
		for _, e := range v {
			inspect(t, key, e)
		}
	case map[string]any:
		for k, e := range v {
			inspect(t, k, e)
		}
	}
	switch _, ok := value.(bool); {
	case key == "do_remote_prefill" && !ok, key == "remote_block_ids" && ok, key == "remote_host" && ok:
		t.Errorf("%s is %v", key, value)
	}
}
