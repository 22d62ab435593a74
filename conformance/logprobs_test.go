package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// Only prefill has the log probabilities of the prompt. The answer contains
// them as one engine alone would: unary, streamed, and for lists of prompts.
func TestPromptLogprobs(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{})
	ask := func(prompt, more string, stream bool) string {
		return fmt.Sprintf(`{%s,"return_logprob":true,%s"sampling_params":{"max_new_tokens":5,"ignore_eos":true},"stream":%t}`, prompt, more, stream)
	}
	for name, body := range map[string]string{
		"answer only":    ask(`"text":"once upon a time"`, ``, false),
		"whole":          ask(`"text":"once upon a time"`, `"logprob_start_len":0,"top_logprobs_num":2,"return_text_in_logprobs":true,`, false),
		"tail":           ask(`"input_ids":[65,66,67,68,69]`, `"logprob_start_len":3,`, false),
		"stream":         ask(`"text":`+quoted(long), `"logprob_start_len":0,"top_logprobs_num":1,`, true),
		"batch":          ask(`"text":["one","and two"]`, `"logprob_start_len":[0,1],`, false),
		"batch stream":   ask(`"input_ids":[[65,66,67],[68,69]]`, `"logprob_start_len":0,`, true),
		"one of a batch": strings.Replace(ask(`"text":["one","and two"]`, `"logprob_start_len":0,`, false), `"return_logprob":true`, `"return_logprob":[false,true]`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			g := *f
			g.t = t
			got, want := g.try("/generate", body), g.post(context.Background(), g.alone.URL(), "/generate", body)
			if got.status != 200 || got.errors > 0 || got.header.Get("X-Pdproxy-Prefill") == "" {
				t.Fatalf("got status %d, header %v: %s", got.status, got.header, got.body)
			}
			g1, w1 := logprobsOf(t, got), logprobsOf(t, want)
			if g1 != w1 || !strings.Contains(w1, `"input_token_logprobs"`) {
				t.Errorf("got\n%s\nalone\n%s", g1, w1)
			}
		})
	}
	// A failed prefill is noticed before any part of decode's answer is sent.
	f.prefill[0].SetFault("1:500", 0, "")
	body := ask(`"text":"who"`, `"logprob_start_len":0,`, true)
	before := f.metric("pdproxy_retries_total")
	f.eventually("a leg is tried again", func() bool {
		if a := f.try("/generate", body); a.status != 200 || !a.done || !strings.Contains(a.body, `"input_token_logprobs":[[null`) {
			t.Fatalf("got status %d: %s", a.status, a.body)
		}
		return f.metric("pdproxy_retries_total") > before
	})
	f.prefill[0].SetFault("", 0, "")
}

// logprobsOf returns the log probabilities of an answer, one line for each of
// its sequences.
func logprobsOf(t *testing.T, a answer) string {
	t.Helper()
	lines := map[int]string{}
	note := func(index int, raw []byte) {
		var o struct {
			Text string
			Meta map[string]json.RawMessage `json:"meta_info"`
		}
		if err := json.Unmarshal(raw, &o); err != nil {
			t.Fatalf("json.Unmarshal(raw, &o) = %v, %s", err, raw)
		}
		for key := range o.Meta {
			if !strings.Contains(key, "logprobs") {
				delete(o.Meta, key)
			}
		}
		line, _ := json.Marshal(o.Meta)
		lines[index] = o.Text + string(line)
	}
	if !strings.HasPrefix(a.body, "data: ") {
		var list []json.RawMessage
		if json.Unmarshal([]byte(a.body), &list) != nil {
			list = []json.RawMessage{json.RawMessage(a.body)}
		}
		for i, raw := range list {
			note(i, raw)
		}
		return fmt.Sprint(lines)
	}
	for event := range strings.SplitSeq(a.body, "\n\n") {
		data := strings.TrimPrefix(event, "data: ")
		if data == "" || data == "[DONE]" {
			continue
		}
		var at struct{ Index int }
		json.Unmarshal([]byte(data), &at)
		note(at.Index, []byte(data))
	}
	return fmt.Sprint(lines)
}
