package conformance

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

const (
	brokenGreedy  = `{"model":"sim","prompt":"tell me","max_tokens":20,"temperature":0,"stream":true}`
	brokenSampled = `{"model":"sim","prompt":"tell me","max_tokens":20,"temperature":1,"stream":true}`
	brokenChat    = `{"model":"sim","messages":[{"role":"user","content":"tell"}],"max_tokens":20,"stream":true`
)

// TestStreamsNotContinued: the streams that no engine continues, and why. What the client has is a
// prefix of the right text, then comes an error event with the reason.
func TestStreamsNotContinued(t *testing.T) {
	toolCall := `{"model":"sim","messages":[{"role":"user","content":"<tool 3> tell"}],"tools":[{"type":"function","function":{"name":"echo"}}],"stream":true}`
	thinking := `{"model":"sim","messages":[{"role":"user","content":"<reason 9> tell"}],"max_tokens":30,"stream":true}`
	change := func(stream, event int, old, now string) func(*breaker) {
		return func(b *breaker) {
			b.change = func(n int, e string) string {
				b.mu.Lock()
				defer b.mu.Unlock()
				if b.streams == stream && n == event {
					return strings.Replace(e, old, now, 1)
				}
				return e
			}
		}
	}
	detokenize := func(answer func(w http.ResponseWriter, r *http.Request)) func(*breaker) {
		return func(b *breaker) {
			b.answer = func(w http.ResponseWriter, r *http.Request) bool {
				if r.URL.Path == "/detokenize" {
					answer(w, r)
					return true
				}
				return false
			}
		}
	}
	at9 := []breakage{{9, cutOff}}
	for name, c := range map[string]struct {
		path, body string
		config     func(*config.Config)
		plan       []breakage
		setup      func(*breaker)
		reason     string // "": the error event has none
	}{
		"off":                    {completionPath, brokenGreedy, func(c *config.Config) { c.Retry.Continue = config.ContinueOff }, at9, nil, ""},
		"off for the model":      {completionPath, brokenGreedy, func(c *config.Config) { c.Models = []config.Model{{Name: "sim", Continue: config.ContinueOff}} }, at9, nil, ""},
		"drain without a drain":  {completionPath, brokenGreedy, func(c *config.Config) { c.Retry.Continue = config.ContinueDrain }, at9, nil, "off"},
		"several prompts":        {completionPath, strings.Replace(brokenGreedy, `"tell me"`, `["tell me","tell me"]`, 1), nil, []breakage{{1, cutOff}}, nil, "sequences"}, // the order of two texts is not fixed
		"penalty":                {completionPath, strings.Replace(brokenGreedy, "{", `{"presence_penalty":1,`, 1), nil, at9, nil, "sampling"},
		"guided":                 {chatPath, brokenChat + `,"response_format":{"type":"json_object"}}`, nil, at9, nil, "guided"},
		"a call of a tool":       {chatPath, toolCall, nil, []breakage{{6, cutOff}}, nil, "tool_calls"},
		"reasoning":              {chatPath, thinking, nil, []breakage{{5, cutOff}}, nil, "reasoning"},
		"too long":               {completionPath, brokenGreedy, func(c *config.Config) { c.Retry.ContinueTokens = 8 }, at9, nil, "too_long"},
		"no budget":              {completionPath, brokenGreedy, func(c *config.Config) { c.Retry.Budget, c.Retry.MinBudget = 0, 0 }, []breakage{{9, cutOff}, {4, cutOff}}, nil, "budget"},
		"too many breaks":        {completionPath, brokenGreedy, nil, []breakage{{9, cutOff}, {2, cutOff}, {2, cutOff}, {2, cutOff}}, nil, "attempts"},
		"other ids":              {completionPath, brokenGreedy, nil, at9, change(2, 0, `"prompt_token_ids":[`, `"prompt_token_ids":[7,`), "prompt"},
		"no ids of the prompt":   {completionPath, brokenGreedy, nil, at9, change(2, 0, `"prompt_token_ids":[`, `"other":[`), "prompt"},
		"other text":             {completionPath, brokenGreedy, nil, at9, change(2, 0, `"text":"`, `"text":"x`), "seam"},
		"no ids in events":       {completionPath, brokenGreedy, nil, at9, change(1, 0, `"prompt_token_ids":[`, `"other":[`), "no_ids"},
		"decoding fails":         {completionPath, brokenGreedy, nil, at9, detokenize(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) }), "seam"},
		"decoding gives garbage": {completionPath, brokenGreedy, nil, at9, detokenize(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"prompt":7}`) }), "seam"},
		"decoding gives no text": {completionPath, brokenGreedy, nil, at9, detokenize(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) }), "seam"},
		"decoding gives another": {completionPath, brokenGreedy, nil, at9, detokenize(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"prompt":"x"}`) }), "seam"},
		"decoding never answers": {completionPath, brokenGreedy, nil, at9, detokenize(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }), "no_engine"},
		"every new leg is refused": {completionPath, brokenGreedy, nil, at9, func(b *breaker) {
			b.answer = func(w http.ResponseWriter, r *http.Request) bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				if r.URL.Path == completionPath && b.streams > 0 {
					w.WriteHeader(500)
					return true
				}
				return false
			}
		}, "no_engine"},
		"the new engine refuses the request": {completionPath, brokenGreedy, nil, at9, func(b *breaker) {
			b.answer = func(w http.ResponseWriter, r *http.Request) bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				if r.URL.Path == completionPath && b.streams > 0 {
					w.WriteHeader(400)
					io.WriteString(w, `{"error":{"message":"no"}}`)
					return true
				}
				return false
			}
		}, "no_engine"},
		"the new answer is no stream": {completionPath, brokenGreedy, nil, at9, func(b *breaker) {
			b.answer = func(w http.ResponseWriter, r *http.Request) bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				if r.URL.Path == completionPath && b.streams > 0 {
					w.Header().Set("Content-Type", "application/json")
					io.WriteString(w, `{"choices":[{"text":"x","finish_reason":"stop"}]}`)
					return true
				}
				return false
			}
		}, "no_engine"},
	} {
		t.Run(name, func(t *testing.T) {
			f, b := startBroken(t, enginesim.ConnectorNone, false, fleetOptions{config: c.config})
			want := f.post(context.Background(), f.alone.URL(), c.path, c.body)
			b.plan(c.plan...)
			if c.setup != nil {
				b.mu.Lock()
				c.setup(b)
				b.mu.Unlock()
			}
			a := f.try(c.path, c.body)
			if a.status != 200 || a.err != nil || a.errors != 1 || !strings.HasPrefix(want.text, a.text) || a.text == want.text && c.reason != "tool_calls" {
				t.Fatalf("got %q, %d errors, %v, want the begin of %q: %s", a.text, a.errors, a.err, want.text, a.body)
			}
			if strings.Contains(a.body, `not_continued`) != (c.reason != "") || !strings.Contains(a.body, `"not_continued":"`+c.reason+`"`) && c.reason != "" {
				t.Errorf("want the reason %q: %s", c.reason, a.body[strings.LastIndex(a.body, `data: {"error"`):])
			}
			if n := f.metric("pdproxy_broken_streams_total"); n != 1 {
				t.Errorf("%v broken streams are counted", n)
			}
			if n := f.metric("pdproxy_continuations_total", fmt.Sprintf("result=%q", c.reason)); c.reason != "" && n != 1 {
				t.Errorf("%v are counted by the reason", n)
			}
			var e struct {
				Outcome       string
				Continuations []struct{ Result string }
			}
			f.admin("/v1/explain/"+a.header.Get("X-Request-Id"), &e)
			last := ""
			if n := len(e.Continuations); n > 0 {
				last = e.Continuations[n-1].Result
			}
			if e.Outcome != "broken" || last != c.reason {
				t.Errorf("the explanation is %+v", e)
			}
		})
	}
}

// TestStreamsContinued: further ways to go on.
func TestStreamsContinued(t *testing.T) {
	log := filepath.Join(t.TempDir(), "access.log")
	f, b := startBroken(t, enginesim.ConnectorNone, false, fleetOptions{config: func(c *config.Config) {
		c.Health.Interval, c.Health.Timeout, c.Health.SuspectInterval = config.Duration(50*time.Millisecond), config.Duration(100*time.Millisecond), config.Duration(20*time.Millisecond)
		c.Server.AccessLog = log
	}})
	f.base.descriptors++ // of the access log
	continued := func(t *testing.T, path, body string) answer {
		t.Helper()
		g := *f
		g.t = t
		before := f.metric("pdproxy_continuations_total", `result="continued"`)
		a := g.try(path, body)
		g.right(a, path, body)
		if !a.done || f.metric("pdproxy_continuations_total", `result="continued"`) == before {
			t.Errorf("not continued: %s", a.body)
		}
		return a
	}
	t.Run("twice", func(t *testing.T) {
		b.plan(breakage{9, cutOff}, breakage{4, midEvent})
		a := continued(t, completionPath, brokenGreedy)
		var e struct {
			Outcome       string
			Legs          []struct{ Engine string }
			Continuations []struct {
				Tokens         int
				Result, Decode string
				GapMS          *float64 `json:"gap_ms"`
			}
		}
		f.admin("/v1/explain/"+a.header.Get("X-Request-Id"), &e)
		if e.Outcome != "ok" || len(e.Legs) != 3 || len(e.Continuations) != 2 {
			t.Fatalf("the explanation is %+v", e)
		}
		for i, tokens := range []int{8, 11} { // one is generated again, to see the same text
			if c := e.Continuations[i]; c.Tokens != tokens || c.Result != "continued" || c.Decode != e.Legs[i+1].Engine || c.GapMS == nil {
				t.Errorf("seam %d: %+v", i, c)
			}
		}
		f.eventually("the access log has the continuations", func() bool {
			raw, _ := os.ReadFile(log)
			return strings.Contains(string(raw), `"continuations":["continued","continued"]`)
		})
	})
	t.Run("again before the first new event", func(t *testing.T) {
		b.plan(breakage{9, cutOff}, breakage{1, cutOff}, breakage{1, cutOff})
		continued(t, completionPath, brokenGreedy)
	})
	t.Run("after reasoning", func(t *testing.T) {
		b.plan(breakage{20, cutOff})
		continued(t, chatPath, `{"model":"sim","messages":[{"role":"user","content":"<reason 5> tell"}],"max_tokens":30,"temperature":0,"stream":true}`)
	})
	t.Run("behind the finish reason", func(t *testing.T) {
		b.plan(breakage{20, cutOff}, breakage{21, cutOff})
		body := strings.Replace(brokenSampled, "{", `{"stream_options":{"include_usage":true},`, 1)
		a, want := f.try(completionPath, body), readStream(t, []byte(f.post(context.Background(), f.alone.URL(), completionPath, body).body))
		got := readStream(t, []byte(a.body))
		last := f.try(completionPath, body) // it breaks off behind the usage
		if !last.done || strings.Count(last.body, `"usage"`) != strings.Count(a.body, `"usage"`) {
			t.Errorf("got %s", last.body)
		}
		if got.id, want.id = "", ""; !a.done || fmt.Sprint(got) != fmt.Sprint(want) || f.metric("pdproxy_continuations_total", `result="completed"`) != 2 {
			t.Errorf("got %+v, want %+v", got, want)
		}
	})
	t.Run("the client wants the ids", func(t *testing.T) {
		body := strings.Replace(brokenGreedy, "{", `{"return_token_ids":true,`, 1)
		want := readStream(t, []byte(f.post(context.Background(), f.alone.URL(), completionPath, body).body))
		b.plan(breakage{9, cutOff})
		a := continued(t, completionPath, body)
		if got := readStream(t, []byte(a.body)); got.ids != want.ids || strings.Count(a.body, `"prompt_token_ids":[`) != 1 {
			t.Errorf("%d events with ids, want %d: %s", got.ids, want.ids, a.body)
		}
	})
	t.Run("a long stop string", func(t *testing.T) {
		b.plan(breakage{100, cutOff})
		body := strings.Replace(brokenGreedy, `"max_tokens":20`, `"max_tokens":150,"stop":["`+strings.Repeat("z", 150)+`"]`, 1)
		continued(t, completionPath, body)
	})
	t.Run("one engine does not decode", func(t *testing.T) {
		var asked int
		b.mu.Lock()
		b.answer = func(w http.ResponseWriter, r *http.Request) bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			if r.URL.Path != "/detokenize" {
				return false
			}
			if asked++; asked == 1 {
				w.WriteHeader(500)
			}
			return asked == 1
		}
		b.mu.Unlock()
		b.plan(breakage{9, cutOff})
		continued(t, completionPath, brokenGreedy)
		b.mu.Lock()
		b.answer = nil
		b.mu.Unlock()
	})
	t.Run("the client declines", func(t *testing.T) {
		b.plan(breakage{9, cutOff})
		a := f.post(context.Background(), f.url, completionPath, brokenGreedy, "X-Pdproxy-Continue", "off")
		if a.errors != 1 || !strings.Contains(a.body, `"not_continued":"off"`) {
			t.Errorf("got %s", a.body)
		}
	})
	t.Run("the client leaves at the seam", func(t *testing.T) {
		ctx, leave := context.WithCancel(context.Background())
		b.mu.Lock()
		b.answer = func(_ http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path != "/detokenize" {
				return false
			}
			leave()
			<-r.Context().Done()
			return true
		}
		b.mu.Unlock()
		b.plan(breakage{9, cutOff})
		if a := f.post(ctx, f.url, completionPath, brokenGreedy); a.err == nil {
			t.Errorf("got %+v", a)
		}
		f.settled()
		f.eventually("the client's leave is counted", func() bool { return f.metric("pdproxy_exchanges_total", `outcome="cancelled"`) == 1 })
		b.mu.Lock()
		b.answer = nil
		b.mu.Unlock()
	})
	t.Run("the engine stops answering", func(t *testing.T) {
		b.plan()
		b.mu.Lock()
		b.change = func(n int, e string) string {
			b.mu.Lock()
			defer b.mu.Unlock()
			if n == 9 && b.streams == 1 {
				b.frozen[b.served].Store(true)
			}
			return e
		}
		b.mu.Unlock()
		began := time.Now()
		a := continued(t, completionPath, brokenGreedy)
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("it took %v: %+v", took, a)
		}
		b.mu.Lock()
		b.change = nil
		b.mu.Unlock()
		for i := range b.servers {
			b.frozen[i].Store(false)
		}
	})
}

// TestDrainedStreamContinued: with "drain", a stream of an engine that drains goes on elsewhere.
func TestDrainedStreamContinued(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorNone, enginesim.ConnectorVLLMNixl} {
		t.Run(connector, func(t *testing.T) {
			f, b := startBroken(t, connector, connector != enginesim.ConnectorNone, fleetOptions{config: func(c *config.Config) { c.Retry.Continue = config.ContinueDrain }})
			b.mu.Lock()
			b.change = func(n int, e string) string {
				b.mu.Lock()
				name := b.names[b.served]
				b.mu.Unlock()
				if n == 8 {
					next := f.cfg
					next.Engines = slices.DeleteFunc(slices.Clone(next.Engines), func(e config.Engine) bool { return e.Name == name })
					if err := f.reload(&next); err != nil {
						t.Errorf("reload: %v", err)
					}
					b.mu.Lock()
					b.change = nil
					b.mu.Unlock()
				}
				return e
			}
			b.mu.Unlock()
			b.plan(breakage{9, cutOff})
			a := f.try(completionPath, brokenGreedy)
			f.right(a, completionPath, brokenGreedy)
			if !a.done || f.metric("pdproxy_continuations_total", `result="continued"`) != 1 {
				t.Errorf("not continued: %s", a.body)
			}
		})
	}
}
