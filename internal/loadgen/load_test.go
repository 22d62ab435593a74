package loadgen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// server is an endpoint in the test's simulated time: each answer has its first
// text after a second, and four more at intervals of 100 ms.
type server struct {
	mu      sync.Mutex
	asked   []string // bodies of the requests
	at      []time.Duration
	began   time.Time
	now     int
	most    int // the most that were open at the same time
	answers func(n int) (status int, events []string)
}

const (
	chunk     = `data: {"choices":[{"delta":{"content":"tide"}}]}`
	usageLine = `data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":10,"prompt_tokens_details":{"cached_tokens":3}}}`
	done      = "data: [DONE]"
)

// good are the events of a complete answer.
func good() []string {
	return []string{`data: {"choices":[{"delta":{"role":"assistant","content":""}}]}`, ": ping", chunk, chunk, chunk, chunk, chunk, usageLine, done}
}

func (s *server) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Path == "/v1/models" {
		return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(`{"data":[{"id":"sim"},{"id":"b"}]}`))}, nil
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	n := len(s.asked)
	s.asked, s.at = append(s.asked, r.URL.Path+" "+string(body)), append(s.at, time.Since(s.began))
	s.now++
	s.most = max(s.most, s.now)
	s.mu.Unlock()
	status, events := s.answers(n)
	if status == 0 {
		return nil, errors.New("connection refused")
	}
	pr, pw := io.Pipe()
	stop := context.AfterFunc(r.Context(), func() { pw.CloseWithError(r.Context().Err()) })
	leave := sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.now--
	})
	go func() {
		defer stop()
		defer leave()
		for i, e := range events {
			wait := time.Duration(0)
			switch {
			case e == "":
				wait = time.Hour // stuck
			case e == chunk && i == 2:
				wait = time.Second
			case e == chunk:
				wait = 100 * time.Millisecond
			case e == done:
				leave()
			}
			select {
			case <-time.After(wait):
			case <-r.Context().Done():
				return
			}
			if _, err := io.WriteString(pw, e+"\n\n"); err != nil {
				return
			}
		}
		pw.Close()
	}()
	return &http.Response{StatusCode: status, Body: pr}, nil
}

func config(s *server) Config {
	return Config{URL: "http://h/", API: APIChat, Requests: 10, Concurrency: 2, PromptWords: 20, Shared: 5, MaxTokens: 10, Timeout: time.Minute, Seed: 1, Transport: s}
}

func measure(t *testing.T, s *server, c Config) *Result {
	t.Helper()
	s.began = time.Now()
	r, err := Run(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	return r
}

func TestTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(int) (int, []string) { return 200, good() }}
		r := measure(t, s, config(s))
		flat := func(ms float64) Spread { return Spread{Mean: ms, P50: ms, P90: ms, P95: ms, P99: ms, Max: ms} }
		if r.TTFT != flat(1000) || r.ITL != flat(100) || r.Total != flat(1400) {
			t.Errorf("got %+v", r)
		}
		if r.Requests != 10 || r.Failed != 0 || r.Seconds != 7 || r.Throughput != 10./7 || r.OutputThroughput != 100./7 || s.most != 2 {
			t.Errorf("got %+v, %d at a time", r, s.most)
		}
		if r.PromptTokens != 70 || r.CachedTokens != 30 || r.OutputTokens != 100 {
			t.Errorf("got %+v", r)
		}
	})
}

// Thoughts of reasoning models and parts of tool calls are text too: the first token is one
// of them.
func TestDeltas(t *testing.T) {
	for name, delta := range map[string]string{
		"reasoning": `"reasoning":"so"`, "reasoning_content": `"reasoning_content":"so","content":null`, "content": `"content":"so","reasoning":null`,
		"tool call": `"content":null,"tool_calls":[{"index":0,"function":{"arguments":"{"}}]`, "function call": `"function_call":{"arguments":"{"}`,
		"refusal": `"refusal":"no"`,
	} {
		synctest.Test(t, func(t *testing.T) {
			text := `data: {"choices":[{"delta":{` + delta + `}}]}`
			s := &server{answers: func(int) (int, []string) {
				return 200, []string{`data: {"choices":[{"delta":{"role":"assistant","content":"","reasoning":null,"tool_calls":[]}}]}`, text, text, chunk, chunk, done}
			}}
			c := config(s)
			c.Requests = 1
			r := measure(t, s, c)
			// In the simulated stream only the chunks after the deltas take time.
			if r.OutputTokens != 4 || r.TTFT.Max != 0 || r.ITL.Max != 100 || r.Total.Max != 200 {
				t.Errorf("%s: %+v", name, r)
			}
		})
	}
}

// Requests of the warm-up are sent before, with prompts of their own, and are not measured.
func TestWarmUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(n int) (int, []string) {
			if n == 0 {
				return 503, nil
			}
			return 200, good()
		}}
		c := config(s)
		c.WarmUp, c.Requests, c.Shared, c.URL = 3, 4, 0, "http://h/v1/"
		ended := 0
		c.Ended = func(failed bool) { ended++ }
		r := measure(t, s, c)
		if r.Requests != 4 || r.Failed != 0 || r.Seconds != 2.8 || ended != 4 || len(s.asked) != 7 {
			t.Errorf("%+v, %d requests, %d reported", r, len(s.asked), ended)
		}
		seen := map[string]bool{}
		for _, text := range s.asked {
			seen[text] = true
		}
		if len(seen) != 7 {
			t.Errorf("%d different requests", len(seen))
		}
	})
}

func TestRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(int) (int, []string) { return 200, good() }}
		c := config(s)
		c.Requests, c.IgnoreEOS, c.Concurrency = 2, true, 1
		measure(t, s, c)
		var prompts []string
		for _, text := range s.asked {
			route, body, _ := strings.Cut(text, " ")
			var b struct {
				Model         string
				MaxTokens     int  `json:"max_tokens"`
				IgnoreEOS     bool `json:"ignore_eos"`
				Stream        bool
				StreamOptions struct {
					Usage bool `json:"include_usage"`
				} `json:"stream_options"`
				Messages []struct{ Role, Content string }
			}
			if err := json.Unmarshal([]byte(body), &b); err != nil {
				t.Fatal(err)
			}
			if route != "/v1/chat/completions" || b.Model != "sim" || b.MaxTokens != 10 || !b.IgnoreEOS || !b.Stream || !b.StreamOptions.Usage || len(b.Messages) != 1 {
				t.Errorf("request %s", text)
			}
			prompts = append(prompts, b.Messages[0].Content)
		}
		one, two := strings.Fields(prompts[0]), strings.Fields(prompts[1])
		if len(one) != 20 || fmt.Sprint(one[:5]) != fmt.Sprint(two[:5]) || fmt.Sprint(one[5:]) == fmt.Sprint(two[5:]) {
			t.Errorf("prompts are %q", prompts)
		}
		before := s.asked
		s.asked = nil
		measure(t, s, c)
		if fmt.Sprint(before) != fmt.Sprint(s.asked) {
			t.Error("the same run sent other requests")
		}
		c.API, c.Requests = APICompletions, 1
		s.asked = nil
		if measure(t, s, c); !strings.HasPrefix(s.asked[0], `/v1/completions {`) || !strings.Contains(s.asked[0], `"prompt":"`) {
			t.Errorf("request %s", s.asked)
		}
	})
}

func TestRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(int) (int, []string) { return 200, good() }}
		c := config(s)
		c.Requests, c.Rate = 2000, 100
		r := measure(t, s, c)
		last := s.at[len(s.at)-1]
		if r.Requests != 2000 || last < 18*time.Second || last > 22*time.Second || s.most < 100 {
			t.Errorf("%d requests, the last after %v, %d at a time", r.Requests, last, s.most)
		}
	})
}

func TestFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kinds := []struct {
			status int
			events []string
		}{
			{0, nil}, {503, nil}, {503, nil}, {429, nil}, {200, good()[:5]}, {200, []string{chunk, `data: {"error":{"message":"x"}}`}},
			{200, []string{"data: nonsense"}}, {200, []string{chunk, ""}}, {200, good()}, {200, []string{chunk, done}},
		}
		s := &server{answers: func(n int) (int, []string) { return kinds[n].status, kinds[n].events }}
		r := measure(t, s, config(s))
		want := map[string]int{"connection failed": 1, "status 503": 2, "status 429": 1, "stream cut off": 1, "error in the stream": 2, "time-out": 1}
		if r.Requests != 10 || r.Failed != 8 || !maps.Equal(r.Failures, want) {
			t.Errorf("got %+v", r)
		}
		if r.OutputTokens != 11 { // one answer does not report it
			t.Errorf("%d tokens", r.OutputTokens)
		}
	})
}

// A run that is ended returns its measurements so far. Open requests are not
// failures.
func TestEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{answers: func(int) (int, []string) { return 200, good() }}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		r, err := Run(ctx, config(s))
		if err != nil || r.Requests != 2 || r.Failed != 0 {
			t.Errorf("got %+v %v", r, err)
		}
		synctest.Wait()
	})
}

func TestSpread(t *testing.T) {
	var times []float64
	for n := range 200 {
		times = append(times, float64(200-n))
	}
	if got, want := NewSpread(times), (Spread{Mean: 100.5, P50: 100, P90: 180, P95: 190, P99: 198, Max: 200}); got.P50 != want.P50 || got.P90 != want.P90 || got.P95 != want.P95 || got.P99 != want.P99 || got.Max != want.Max || got.Mean < 100.49 || got.Mean > 100.51 {
		t.Errorf("got %+v", got)
	}
	if NewSpread(nil) != (Spread{}) {
		t.Error("of nothing")
	}
}
