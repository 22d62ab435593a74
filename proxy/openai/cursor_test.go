package openai

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

// Shortened answers: a context answer of TensorRT-LLM and a prefill answer of vLLM.
const (
	contextAnswer = `{"id":"cmpl-a1","choices":[{"index":0,"text":" {\"x\"]","finish_reason":"length","disaggregated_params":{"ctx_request_id":2072360727809029,"encoded_opaque_state":"AAECAw=="}}],"usage":{"prompt_tokens":4}}`
	prefillAnswer = "{\n \"choices\" : [ ] , \"kv_transfer_params\" : { \"remote_block_ids\" : [[12,13],[]] , \"remote_blocks_expiry_time\":null}, \"x\\u005fy\" : -1.5e3\n}"
)

func TestLookup(t *testing.T) {
	for _, tt := range []struct {
		body, path, want string
		ok               bool
	}{
		{contextAnswer, "choices/0/disaggregated_params/ctx_request_id", "2072360727809029", true},
		{contextAnswer, "choices/0/disaggregated_params", `{"ctx_request_id":2072360727809029,"encoded_opaque_state":"AAECAw=="}`, true},
		{contextAnswer, "choices/0/text", `" {\"x\"]"`, true},
		{contextAnswer, "choices/1", "", false},
		{contextAnswer, "choices/-1", "", false},
		{contextAnswer, "choices/first", "", false},
		{contextAnswer, "id/x", "", false},
		{contextAnswer, "usage/cached", "", false},
		{prefillAnswer, "kv_transfer_params", `{ "remote_block_ids" : [[12,13],[]] , "remote_blocks_expiry_time":null}`, true},
		{prefillAnswer, "kv_transfer_params/remote_block_ids/0/1", "13", true},
		{prefillAnswer, "kv_transfer_params/remote_block_ids/1/0", "", false},
		{prefillAnswer, "kv_transfer_params/remote_blocks_expiry_time", "null", true},
		{prefillAnswer, "x_y", "-1.5e3", true},
		{`{"x\u0079":1}`, "x\\u0079", "", false},
		{` [ 1 , "two" ] `, "1", `"two"`, true},
		{` "text" `, "", `"text"`, true},
		{`{}`, "a", "", false},
	} {
		var path []string
		if tt.path != "" {
			path = strings.Split(tt.path, "/")
		}
		got, ok, err := Lookup([]byte(tt.body), path...)
		if err != nil || string(got) != tt.want || ok != tt.ok {
			t.Errorf("%s in %s = %s, %v, %v; want %s", tt.path, tt.body, got, ok, err, tt.want)
		}
	}
}

func TestLookupRefuses(t *testing.T) {
	for body, offset := range map[string]int{
		``:                    0,
		`{"a":1`:              6,
		`{"a":1}}`:            7,
		`{"a":NaN}`:           5,
		`{"a":1,"b":1,"a":2}`: 13,
		"{\"a\":\"\xff\"}":    6,
		`<html>502</html>`:    0,
	} {
		_, ok, err := Lookup([]byte(body), "a")
		var e *SyntaxError
		if !errors.As(err, &e) || ok || e.Offset != offset || e.Problem == "" || !strings.Contains(err.Error(), "invalid JSON") {
			t.Errorf("%s: %v, want an error at %d", body, err, offset)
		}
	}
}

func TestElements(t *testing.T) {
	list := func(raw string) (got []string) {
		seq, err := Elements([]byte(raw))
		if err != nil {
			t.Fatal(err)
		}
		for v := range seq {
			got = append(got, string(v))
		}
		return got
	}
	want := []string{"1", `"a,]"`, `[2,[3]]`, `{"b":[4]}`, "null", "-5.0"}
	if got := list(` [ 1,"a,]" , [2,[3]],{"b":[4]},null, -5.0 ] `); !slices.Equal(got, want) {
		t.Errorf("elements %q", got)
	}
	if got := list(`[]`); got != nil {
		t.Errorf("elements %q", got)
	}
	seq, _ := Elements([]byte(`[1,2]`))
	for range seq {
		break
	}
	for _, raw := range []string{``, `{}`, `"a"`, `[1,]`, `[1]x`, `[1 2]`} {
		if _, err := Elements([]byte(raw)); err == nil {
			t.Errorf("%s is accepted as an array", raw)
		}
	}
}

// FuzzWalk: the walk without checks must end for any bytes, and must find the same values
// as the scan in a scanned body.
func FuzzWalk(f *testing.F) {
	addSeeds(f)
	for _, s := range []string{contextAnswer, prefillAnswer, `{"a`, `{"a":"\`, `[[[`, `}`, `{"a":}`, `["\\\"`, `[,]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		Find(b)
		Find(b, "a")
		Find(b, "a", "0", "a")
		Find(b, "0")
		ParseUsage(b)
		var o Object
		if o.Parse(b) != nil {
			return
		}
		for key, want := range o.Members {
			if got, ok := Find(b, key); !ok || string(got) != string(want) {
				t.Fatalf("Find(%q) = %s, %v; want %s", key, got, ok, want)
			}
		}
	})
}
