package tokens

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// asked is one request to a fakeEngine.
type asked struct{ instance, path, body string }

// fakeEngine answers by path.
type fakeEngine struct {
	mu      sync.Mutex
	asked   []asked
	answers map[string]fakeAnswer
}

type fakeAnswer struct {
	status int
	body   string
	err    error
	takes  time.Duration
}

func (f *fakeEngine) Ask(ctx context.Context, instance, path string, body []byte) (int, []byte, error) {
	f.mu.Lock()
	f.asked = append(f.asked, asked{instance, path, string(body)})
	a, ok := f.answers[instance+path]
	if !ok {
		a, ok = f.answers[path]
	}
	f.mu.Unlock()
	if !ok {
		return 404, []byte(`{"detail":"Not Found"}`), nil
	}
	select {
	case <-time.After(a.takes):
	case <-ctx.Done():
		return 0, nil, ctx.Err()
	}
	return a.status, []byte(a.body), a.err
}

func request(t testing.TB, api openai.API, body string) *openai.Request {
	t.Helper()
	var r openai.Request
	if err := openai.ParseRequest(api, []byte(body), &r); err != nil {
		t.Fatal(err)
	}
	return &r
}

const (
	chatBody = `{"model":"m","messages":[{"role":"user","content":"hé\u0021"}],"stream":true}`
	textBody = `{"model":"m","prompt":"hi"}`
)

func TestSourcesAreTriedInOrder(t *testing.T) {
	f := &fakeEngine{answers: map[string]fakeAnswer{"/tokenize": {200, `{"count":2,"max_model_len":9,"tokens":[5,6]}`, nil, 0}}}
	local := map[string]Encoder{"": encoderFunc(func(string, bool) ([]uint32, error) { return []uint32{9}, nil })}
	vllm := []Instance{{"a", VLLM}}
	for _, tt := range []struct {
		name   string
		order  []Source
		prompt Prompt
		want   []uint32
		source Source
		reason Reason
	}{
		{"ids beside the prompt", nil, Prompt{Request: request(t, openai.Chat, chatBody), IDs: []uint32{1}}, []uint32{1}, Client, OK},
		{"ids as the prompt", nil, Prompt{Request: request(t, openai.Completions, `{"prompt":[3, 4]}`), Instances: vllm}, []uint32{3, 4}, Client, OK},
		{"a list of one", nil, Prompt{Request: request(t, openai.Completions, `{"prompt":[[3,4]]}`)}, []uint32{3, 4}, Client, OK},
		{"a list of two", nil, Prompt{Request: request(t, openai.Completions, `{"prompt":[[3],[4]]}`), Instances: vllm}, nil, None, Unsupported},
		{"negative ids", nil, Prompt{Request: request(t, openai.Completions, `{"prompt":[-3]}`), Instances: vllm}, nil, None, Unsupported},
		{"engine", nil, Prompt{Request: request(t, openai.Completions, textBody), Instances: vllm}, []uint32{5, 6}, Engine, OK},
		{"local first", []Source{Local, Engine}, Prompt{Request: request(t, openai.Completions, textBody), Instances: vllm}, []uint32{9}, Local, OK},
		{"local cannot do messages", []Source{Local}, Prompt{Request: request(t, openai.Chat, chatBody)}, nil, None, Unsupported},
		{"local stands in", nil, Prompt{Request: request(t, openai.Completions, textBody), Instances: []Instance{{"a", NoTokenizer}}}, []uint32{9}, Local, OK},
		{"nothing configured", []Source{}, Prompt{Request: request(t, openai.Completions, textBody), Instances: vllm}, nil, None, Unsupported},
		{"no engine", []Source{Engine}, Prompt{Request: request(t, openai.Completions, textBody)}, nil, None, NoEngine},
		{"responses", []Source{Engine}, Prompt{Request: request(t, openai.Responses, `{"input":"hi"}`), Instances: vllm}, nil, None, Unsupported},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.prompt.Model = "m"
			got := New(Options{Order: tt.order, Asker: f, Local: local}).Tokens(t.Context(), tt.prompt)
			if !slices.Equal(got.IDs, tt.want) || got.Source != tt.source || got.Reason != tt.reason {
				t.Errorf("got %+v", got)
			}
		})
	}
}

type encoderFunc func(text string, special bool) ([]uint32, error)

func (f encoderFunc) Append(dst []uint32, text string, special bool) ([]uint32, error) {
	ids, err := f(text, special)
	return append(dst, ids...), err
}

func TestLocalGetsTheTextAndItsSpecialTokens(t *testing.T) {
	for _, tt := range []struct {
		name, body string
		dialect    Dialect
		want       bool
	}{
		{"default", `{"prompt":"a\nb"}`, VLLM, true},
		{"off", `{"prompt":"a\nb","add_special_tokens":false}`, VLLM, false},
		{"sglang does not listen", `{"prompt":["a\nb"],"add_special_tokens":false}`, SGLang, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var text string
			var special bool
			tk := New(Options{Local: map[string]Encoder{"m": encoderFunc(func(s string, b bool) ([]uint32, error) {
				text, special = s, b
				return []uint32{1}, nil
			})}})
			tk.Tokens(t.Context(), Prompt{Request: request(t, openai.Completions, tt.body), Model: "m", Instances: []Instance{{"a", tt.dialect}}})
			if text != "a\nb" || special != tt.want {
				t.Errorf("encoded %q with special %t", text, special)
			}
		})
	}
}

func TestLocalDoesNotEncodeLongPrompts(t *testing.T) {
	tk := New(Options{LocalBytes: 10, Local: map[string]Encoder{"": encoderFunc(func(string, bool) ([]uint32, error) { return []uint32{1}, nil })}})
	for prompt, want := range map[string]int{"12345678": 1, "123456789": 0} {
		r := tk.Tokens(t.Context(), Prompt{Request: request(t, openai.Completions, `{"prompt":"`+prompt+`"}`)})
		if len(r.IDs) != want {
			t.Errorf("%d bytes: %+v", len(prompt), r)
		}
	}
}

func TestEngineTroubleEndsInTextMode(t *testing.T) {
	const secret = "hé"
	for _, tt := range []struct {
		name   string
		answer fakeAnswer
		reason Reason
		asks   int
	}{
		{"late", fakeAnswer{takes: time.Second}, TimedOut, 1},
		{"refused", fakeAnswer{status: 400, body: `{"error":{"message":"` + secret + `"}}`}, Refused, 1},
		{"unknown model", fakeAnswer{status: 404, body: `{"error":{"message":"no such model"}}`}, Refused, 1},
		{"broken", fakeAnswer{status: 500}, Failed, 2},
		{"transport", fakeAnswer{err: errors.New("connection reset")}, Failed, 2},
		{"not json", fakeAnswer{status: 200, body: secret}, BadAnswer, 2},
		{"no ids", fakeAnswer{status: 200, body: `{}`}, BadAnswer, 4},
		{"no endpoint at all", fakeAnswer{status: 404, body: `{"detail":"Not Found"}`}, Unsupported, 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeEngine{answers: map[string]fakeAnswer{"/v1/chat/completions/render": tt.answer, "/tokenize": tt.answer}}
				tk := New(Options{Asker: f})
				start := time.Now()
				got := tk.Tokens(t.Context(), Prompt{Request: request(t, openai.Chat, chatBody), Instances: []Instance{{"a", VLLM}, {"b", VLLM}}})
				if got.IDs != nil || got.Reason != tt.reason || len(f.asked) != tt.asks {
					t.Errorf("got %+v after %d questions, want %v after %d", got, len(f.asked), tt.reason, tt.asks)
				}
				if took := time.Since(start); took > 250*time.Millisecond {
					t.Errorf("blocked for %v", took)
				}
				if got.Err == nil || strings.Contains(got.Err.Error(), secret) {
					t.Errorf("got error %v", got.Err)
				}
			})
		})
	}
}

func TestAnotherInstanceAnswersForABrokenOne(t *testing.T) {
	f := &fakeEngine{answers: map[string]fakeAnswer{
		"a/tokenize": {status: 503}, "b/tokenize": {status: 200, body: `{"tokens":[1],"count":1}`}}}
	tk := New(Options{Asker: f, CacheTokens: -1})
	for range 4 {
		got := tk.Tokens(t.Context(), Prompt{Request: request(t, openai.Completions, textBody), Instances: []Instance{{"a", VLLM}, {"b", VLLM}}})
		if got.Source != Engine || got.Instance != "b" {
			t.Fatalf("got %+v", got)
		}
	}
}

func TestAnOlderEngineIsAskedInItsOwnForm(t *testing.T) {
	f := &fakeEngine{answers: map[string]fakeAnswer{"/tokenize": {200, `{"tokens":[1,2],"count":2}`, nil, 0}}}
	tk := New(Options{Asker: f, CacheTokens: -1})
	for range 2 {
		got := tk.Tokens(t.Context(), Prompt{Request: request(t, openai.Chat, chatBody), Instances: []Instance{{"a", VLLM}}})
		if !slices.Equal(got.IDs, []uint32{1, 2}) {
			t.Fatalf("got %+v", got)
		}
	}
	var paths []string
	for _, a := range f.asked {
		paths = append(paths, a.path)
	}
	// The client requests the missing route only once.
	if want := []string{"/v1/chat/completions/render", "/tokenize", "/tokenize"}; !slices.Equal(paths, want) {
		t.Errorf("requests %q, want %q", paths, want)
	}
	got := tk.Tokens(t.Context(), Prompt{
		Request:   request(t, openai.Chat, `{"messages":[{"role":"user","content":"x"}],"reasoning_effort":"low"}`),
		Instances: []Instance{{"a", VLLM}}})
	if got.IDs != nil || len(f.asked) != 3 {
		t.Errorf("/tokenize got a request that it cannot express: %+v", got)
	}
}

func TestEqualPromptsAreAskedOnce(t *testing.T) {
	f := &fakeEngine{answers: map[string]fakeAnswer{"/tokenize": {200, `{"tokens":[7],"count":1}`, nil, 0}}}
	tk := New(Options{Asker: f})
	ask := func(body, model, instance string) Result {
		return tk.Tokens(t.Context(), Prompt{Request: request(t, openai.Completions, body), Model: model, Instances: []Instance{{instance, VLLM}}})
	}
	if r := ask(`{"prompt":"x","max_tokens":1}`, "m", "a"); r.Cached {
		t.Error("the cache has the first prompt")
	}
	if r := ask(`{"prompt":"x","max_tokens":2}`, "m", "b"); !r.Cached || !slices.Equal(r.IDs, []uint32{7}) {
		t.Errorf("not cached: %+v", r)
	}
	for _, r := range []Result{
		ask(`{"prompt":"x"}`, "other", "a"),
		ask(`{"prompt":"y"}`, "m", "a"),
		ask(`{"prompt":"x","add_special_tokens":false}`, "m", "a"),
	} {
		if r.Cached {
			t.Errorf("cached: %+v", r)
		}
	}
	tk.Forget("b")
	if r := ask(`{"prompt":"x"}`, "m", "a"); r.Cached {
		t.Error("cached after a restart")
	}
}

func TestQuestionsAtOnceAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeEngine{answers: map[string]fakeAnswer{"/tokenize": {200, `{"tokens":[7]}`, nil, 100 * time.Millisecond}}}
		tk := New(Options{Asker: f, Concurrency: 3, CacheTokens: -1})
		var wg sync.WaitGroup
		results := make([]Result, 8)
		for i := range results {
			wg.Go(func() {
				results[i] = tk.Tokens(t.Context(), Prompt{Request: request(t, openai.Completions, textBody), Instances: []Instance{{"a", VLLM}}})
			})
		}
		wg.Wait()
		busy := 0
		for _, r := range results {
			if r.Reason == Busy {
				busy++
			}
		}
		if busy != 5 {
			t.Errorf("got %d rejected requests, want 5", busy)
		}
	})
}

func TestALateEngineIsPaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeEngine{answers: map[string]fakeAnswer{"/v1/tokenize": {200, `{"tokens":[7]}`, nil, time.Minute}}}
		tk := New(Options{Asker: f, CacheTokens: -1})
		ask := func() Result {
			return tk.Tokens(t.Context(), Prompt{Request: request(t, openai.Completions, textBody), Instances: []Instance{{"a", SGLang}}})
		}
		for range maxFaults {
			if r := ask(); r.Reason != TimedOut {
				t.Fatalf("got %+v", r)
			}
		}
		start := time.Now()
		if r := ask(); r.Reason != NoEngine || time.Since(start) != 0 {
			t.Errorf("a paused engine cost %v: %+v", time.Since(start), r)
		}
		tk.cache = cache{limit: 1 << 20}
		q, _ := tk.question(sglangPrompt, Prompt{Request: request(t, openai.Completions, textBody)})
		tk.cache.put(q.key, []uint32{8})
		if r := ask(); !r.Cached {
			t.Errorf("the cache was not looked at: %+v", r)
		}
		tk.cache.clear()
		time.Sleep(faultPause)
		f.answers["/v1/tokenize"] = fakeAnswer{200, `{"tokens":[7]}`, nil, 0}
		if r := ask(); !slices.Equal(r.IDs, []uint32{7}) {
			t.Errorf("no request after the pause: %+v", r)
		}
	})
}

func TestAClientThatLeavesIsNotTheEnginesFault(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeEngine{answers: map[string]fakeAnswer{"/tokenize": {200, `{"tokens":[7]}`, nil, 100 * time.Millisecond}}}
		tk := New(Options{Asker: f})
		p := Prompt{Request: request(t, openai.Completions, textBody), Instances: []Instance{{"a", VLLM}}}
		for range maxFaults {
			gone, leave := context.WithCancel(t.Context())
			time.AfterFunc(time.Millisecond, leave)
			if r := tk.Tokens(gone, p); r.Reason != Canceled {
				t.Errorf("got %+v", r)
			}
		}
		if r := tk.Tokens(t.Context(), p); len(r.IDs) == 0 {
			t.Errorf("paused: %+v", r)
		}
	})
}

func TestParseSource(t *testing.T) {
	for _, s := range []Source{Client, Engine, Local} {
		if got, ok := ParseSource(s.String()); !ok || got != s {
			t.Errorf("%v parsed as %v", s, got)
		}
	}
	if _, ok := ParseSource("none"); ok {
		t.Error("none is a source")
	}
}
