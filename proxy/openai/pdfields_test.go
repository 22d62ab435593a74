package openai

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestRefusedPDNames: the package rejects PD members whose spelling or form engines may
// read differently. The error names the member.
func TestRefusedPDNames(t *testing.T) {
	for _, tt := range []struct{ member, param string }{
		{`"KV_TRANSFER_PARAMS":{}`, "KV_TRANSFER_PARAMS"},
		{`"kv_transfer_Params":{}`, "kv_transfer_Params"},
		{`"\u004bv_transfer_params":{}`, "Kv_transfer_params"},
		{`"\u212av_transfer_params":{}`, "\u212av_transfer_params"},
		{`"Bootstrap_Host":"x"`, "Bootstrap_Host"},
		{`"RID":"x"`, "RID"},
		{`"disaggregated_param\u017f":{}`, "disaggregated_param\u017f"},
		{`"Vllm_Xargs":{}`, "Vllm_Xargs"},
		{`"Sampling_Params":{}`, "Sampling_Params"},
		{`"vllm_xargs":"{\"kv_transfer_params\":1}"`, "vllm_xargs"},
		{`"vllm_xargs":[["kv_transfer_params",{}]]`, "vllm_xargs"},
		{`"extra_args":[]`, "extra_args"},
		{`"Model":"m"`, ""},
		{`"vllm_xargs":7`, ""},
		{`"vllm_xargs":null`, ""},
		{`"KV_TRANSFER_PARAMS":null`, "KV_TRANSFER_PARAMS"},
		{`"\u212av_transfer_params":null`, "\u212av_transfer_params"},
		{`"Vllm_Xargs":null`, "Vllm_Xargs"},
		{`"kv_transfer_params":null`, ""},
		{`"Kv":1,"rids":2,"\u00e9":3`, ""},
	} {
		for _, path := range []string{"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate", "/inference/v1/generate", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/rerank", "/score", "/classify", "/pooling", "/v1/messages/count_tokens"} {
			api, _ := APIFor(path)
			err := ParseRequest(api, []byte(`{"model":"m","prompt":"x","messages":[{"role":"user"}],"input":"x","text":"x","token_ids":[1],"tokens":[1],`+tt.member+`}`), new(Request))
			var refusal *Error
			switch errors.As(err, &refusal); {
			case tt.param == "" && err != nil && refusal.Param != "prompt":
				t.Errorf("%s %s: %v", path, tt.member, err)
			case tt.param != "" && (err == nil || refusal.Status != 400 || refusal.Param != tt.param || !strings.Contains(refusal.Message, tt.param)):
				t.Errorf("%s %s: %+v", path, tt.member, refusal)
			}
		}
	}
	for _, member := range []string{`"extra_args":["kv_transfer_params"]`, `"vllm_xargs":"x"`} {
		err := ParseRequest(VLLMGenerate, []byte(`{"token_ids":[1],"sampling_params":{`+member+`}}`), new(Request))
		var refusal *Error
		if !errors.As(err, &refusal) || !strings.HasPrefix(refusal.Param, "sampling_params.") {
			t.Errorf("%s: %v", member, err)
		}
	}
}

// wanted returns the expected result of the cut, computed with encoding/json: a body
// without PD fields, at any depth of the members that may contain transfer parameters.
func wanted(t *testing.T, body []byte) map[string]any {
	t.Helper()
	whole := decode(t, body)
	for key, value := range whole {
		if PDField(key) {
			delete(whole, key)
		} else if slices.Contains(pdContainers[:], key) {
			strip(value)
		}
	}
	return whole
}

func strip(value any) {
	switch v := value.(type) {
	case []any:
		for _, e := range v {
			strip(e)
		}
	case map[string]any:
		for key, e := range v {
			if strings.EqualFold(key, "kv_transfer_params") || strings.EqualFold(key, "ec_transfer_params") {
				delete(v, key)
			} else {
				strip(e)
			}
		}
	}
}

func checkCut(t *testing.T, api API, body []byte) {
	var r Request
	if ParseRequest(api, body, &r) != nil {
		return
	}
	cuts := CutPD(make([]Edit, 0, PDCuts), &r)
	if r.WithoutPD && len(cuts) > 0 {
		t.Fatalf("%.300s\nis said to have no PD fields, but %q is cut", body, cuts[0].Key)
	}
	out := r.Append(nil, cuts...)
	if got, want := decode(t, out), wanted(t, body); !reflect.DeepEqual(got, want) {
		t.Fatalf("%.300s\nbecame %.300s\nwant %.300v", body, out, want)
	}
	if err := new(Object).Parse(out); err != nil {
		t.Fatalf("%.300s\nbecame %.300s: %v", body, out, err)
	}
}

// FuzzCut builds bodies with a raw key at each place where engines look for it, beside
// any number of other members and at any depth. It compares the result of the cut with
// encoding/json.
func FuzzCut(f *testing.F) {
	for _, key := range []string{
		`kv_transfer_params`, `ec_transfer_params`, `\u006bv_transfer_params`, `kv\u005ftransfer\u005fparams`, `KV_TRANSFER_PARAMS`, `\u212av_transfer_param\u017f`,
		`kv_transfer_param`, `bootstrap_host`, `vllm_xargs`, `extra_args`, `\`, ``, `kv_transfer_params\"`,
	} {
		f.Add(key, uint8(0), uint16(0), uint8(0))
		f.Add(key, uint8(1), uint16(4097), uint8(3))
		f.Add(key, uint8(2), uint16(9000), uint8(200))
		f.Add(key, uint8(3), uint16(33), uint8(1))
	}
	f.Fuzz(func(t *testing.T, key string, place uint8, pad uint16, depth uint8) {
		inner := `{"` + key + `":{"remote_host":"CLIENT"},"` + key + `x":1}`
		for d := range depth {
			if d%2 == 0 {
				inner = `[1, ` + inner + `]`
			} else {
				inner = `{ "a" : ` + inner + ` , "b":2}`
			}
		}
		var b strings.Builder
		b.WriteString(`{`)
		for i := range pad % 10000 {
			fmt.Fprintf(&b, `"p%d":%d,`, i, i)
		}
		b.WriteString(`"` + key + `":"CLIENT","n":` + inner + `}`)
		held := b.String()
		places := []string{
			`"vllm_xargs":` + held, `"extra_args":` + held, `"sampling_params":` + held,
			`"sampling_params":{"extra_args":` + held + `}`, `"sampling_params":{"vllm_xargs":` + held + `,"max_tokens":1}`, `"` + key + `":` + held,
		}
		body := []byte(`{"model":"m","prompt":"x","token_ids":[1],"messages":[{"role":"user","content":"x"}],` + places[int(place)%len(places)] + `}`)
		checkCut(t, []API{Completions, Chat, Responses, Messages, VLLMGenerate, Tokenize}[int(place)/len(places)%6], body)
	})
}

// spellings returns a body with n members. Their names are spellings of
// kv_transfer_params in different letter cases.
func spellings(n int, value string) []byte {
	b := []byte(`{"model":"m","prompt":"x","messages":[{"role":"user"}]`)
	for i := 1; n > 0; i++ {
		if i>>2&1 == 1 { // the underscore has no case, so the name repeats
			continue
		}
		key := []byte("kv_transfer_params")
		for at := range 10 {
			if i>>at&1 == 1 {
				key[at] -= 'a' - 'A'
			}
		}
		b = fmt.Appendf(b, `,%q:%s`, key, value)
		n--
	}
	return append(b, '}')
}

// TestManySpellings: many spellings of one name need no more edits than there is room
// for, also in a request whose names were not checked.
func TestManySpellings(t *testing.T) {
	for _, value := range []string{"null", "{}"} {
		body := spellings(4*PDCuts, value)
		var r Request
		var refusal *Error
		if err := ParseRequest(Completions, body, &r); !errors.As(err, &refusal) || refusal.Code != CodeInvalidName {
			t.Errorf("%s: %v, want a refusal of the name", value, err)
		}
		if err := r.Parse(body); err != nil {
			t.Fatal(err)
		}
		if cuts := CutPD(make([]Edit, 0, PDCuts), &r); len(cuts) > PDCuts {
			t.Errorf("%s: %d edits", value, len(cuts))
		}
	}
}

// FuzzCutBody is FuzzCut with any body.
func FuzzCutBody(f *testing.F) {
	for _, s := range seeds {
		f.Add([]byte(s), uint8(Tokenize))
	}
	f.Add([]byte(`{"prompt":"x","rid":"x","vllm_xargs":{"a":1,"kv_transfer_params":{}}, "sampling_params":[{"extra_args":{"ec_transfer_params":[]}}]}`), uint8(Completions))
	f.Add(spellings(PDCuts+13, "null"), uint8(Completions))
	f.Add(spellings(2*PDCuts, "{}"), uint8(Chat))
	f.Add([]byte(`{"prompt":"x","kv_transfer_params":null,"rid":null,"vllm_xargs":null,"request_id":null}`), uint8(Completions))
	f.Fuzz(func(t *testing.T, body []byte, api uint8) { checkCut(t, API(api%9)+1, body) })
}

// TestCutAllocates: a cut of a body without PD members allocates no memory.
func TestCutAllocates(t *testing.T) {
	body := []byte(`{"model":"m","prompt":"x","vllm_xargs":{"a":[1,{"b":"\u006bv"}]},"sampling_params":{"extra_args":{"c":{}}}}`)
	var r Request
	if err := ParseRequest(Completions, body, &r); err != nil {
		t.Fatal(err)
	}
	var room [PDCuts]Edit
	if n := testing.AllocsPerRun(100, func() {
		if len(CutPD(room[:0], &r)) > 0 {
			t.Error("CutPD removed a member")
		}
	}); n > 0 {
		t.Errorf("got %v allocations", n)
	}
}

// TestAppendEdited: the edits have the same result for an object with and without a list
// of its members.
func TestAppendEdited(t *testing.T) {
	for _, body := range []string{`{}`, ` { } `, `{"a":1}`, `{ "a":1 , "b":2, "c":[{}] }`, `{"\u0061":1,"b":{"a":2}}`, `{"b":1,"c":2,"a":3}`} {
		for how := range 64 {
			edits := []Edit{set("a", "[9]"), set("b", "8"), set("x\"", "7"), set("a", "6"), {Key: "c"}}
			for i := range edits {
				edits[i].Remove = how>>i&1 == 1
			}
			var o Object
			if err := o.Parse([]byte(body)); err != nil {
				t.Fatal(err)
			}
			want, got := o.Append(nil, edits...), AppendEdited(nil, []byte(body), edits...)
			if string(got) != string(want) {
				t.Errorf("%s with %v: %s, want %s", body, edits, got, want)
			}
		}
	}
}

// TestWithoutPD: only a body without any member that a cut concerns is said to have none, whatever
// the member's value is.
func TestWithoutPD(t *testing.T) {
	r := Request{WithoutPD: true}
	for _, body := range []string{
		`{"prompt":"x","rid":null}`, `{"kv_transfer_params":{},"prompt":"x"}`, `{"prompt":"x","r\u0069d":1}`,
		`{"prompt":"x","vllm_xargs":{"a":1}}`, `{"prompt":"x","extra_args":null}`, `{"sampling_params":3,"prompt":"x"}`,
	} {
		if err := ParseRequest(Completions, []byte(body), &r); err != nil || r.WithoutPD {
			t.Errorf("%s: WithoutPD is %v, error %v", body, r.WithoutPD, err)
		}
	}
	if err := ParseRequest(Completions, []byte(`{"prompt":"rid","stop":["kv_transfer_params"],"user":"\u006b"}`), &r); err != nil || !r.WithoutPD {
		t.Errorf("WithoutPD is %v, error %v", r.WithoutPD, err)
	}
}
