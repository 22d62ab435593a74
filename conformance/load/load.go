// Package load sends requests to an OpenAI endpoint and measures a client's view: time to
// first token, the time between events, throughput. It requests streams, because only
// streams show these times.
package load

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// The supported endpoints.
const (
	APIChat        = "chat"
	APICompletions = "completions"
)

// Config describes the load. Equal configurations make equal requests.
type Config struct {
	// URL is the endpoint without the route: http://host:port, or OpenAI's base URL, which
	// ends in /v1.
	URL string
	// API is APIChat or APICompletions.
	API string
	// Model is the model in the requests; "" means the first of GET /v1/models.
	Model string
	// Key is sent as a bearer token, "" for none.
	Key string
	// WarmUp is the number of requests that are sent and not measured before the others:
	// the first requests of a server include the opening of connections, and what engines
	// compile on demand.
	WarmUp int
	// Requests is the number of measured requests; at least 1.
	Requests int
	// Ended is called after each measured request, one call at a time; nil: not called.
	Ended func(failed bool)
	// Concurrency is the number of open requests if Rate is 0; at least 1.
	Concurrency int
	// Rate, if it is not 0, is the number of requests per second, at random
	// times, independent of the number of open ones.
	Rate float64
	// PromptWords is the length of a prompt; the tokenizer of the model determines the
	// number of tokens of a word. Shared is the number of words with which all prompts
	// begin.
	PromptWords, Shared int
	// MaxTokens is the limit of an answer. With IgnoreEOS every answer has
	// exactly that many tokens; engines support that option, OpenAI does not.
	MaxTokens int
	IgnoreEOS bool
	// Timeout bounds one request.
	Timeout time.Duration
	// Seed determines the prompts and the times.
	Seed uint64
	// Transport may be nil.
	Transport http.RoundTripper
}

// run is one measurement.
type run struct {
	c      Config
	client *http.Client
	url    string

	mu      sync.Mutex
	samples []sample
}

// Run sends the requests and returns the result. When ctx ends, the run ends
// with the measurements so far. The error is the reason why no request could be
// sent.
func Run(ctx context.Context, c Config) (*Result, error) {
	r := &run{c: c, client: &http.Client{Transport: c.Transport}, url: strings.TrimSuffix(strings.TrimRight(c.URL, "/"), "/v1")}
	if c.Transport == nil {
		r.client.Transport = &http.Transport{MaxIdleConnsPerHost: 4096, MaxIdleConns: 4096, DisableCompression: true}
		defer r.client.CloseIdleConnections()
	}
	if c.Model == "" {
		var err error
		if r.c.Model, err = r.model(ctx); err != nil {
			return nil, err
		}
	}
	r.closed(ctx, c.WarmUp, func(n int) { r.warm(ctx, n) })
	began := time.Now()
	if c.Rate > 0 {
		r.open(ctx)
	} else {
		r.closed(ctx, c.Requests, func(n int) { r.one(ctx, n) })
	}
	return summarize(r.samples, time.Since(began)), nil
}

// model returns the first served model.
func (r *run) model(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, r.c.Timeout)
	defer cancel()
	req, err := r.request(ctx, http.MethodGet, "/v1/models", nil)
	if err != nil {
		return "", err
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var list struct {
		Data []struct{ ID string }
	}
	if resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("ask for models: status %d", resp.StatusCode)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&list); err != nil {
		return "", fmt.Errorf("ask for models: %w", err)
	}
	if len(list.Data) == 0 {
		return "", errors.New("ask for models: there is none")
	}
	return list.Data[0].ID, nil
}

func (r *run) request(ctx context.Context, method, route string, body io.Reader) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, method, r.url+route, body)
	if err != nil {
		return nil, err
	}
	if r.c.Key != "" {
		req.Header.Set("Authorization", "Bearer "+r.c.Key)
	}
	return req, nil
}

// closed calls send with the numbers below requests, and keeps a constant number of calls
// open until all are made.
func (r *run) closed(ctx context.Context, requests int, send func(n int)) {
	var sent atomic.Int64
	var wg sync.WaitGroup
	for range min(max(r.c.Concurrency, 1), requests) {
		wg.Go(func() {
			for ctx.Err() == nil {
				n := int(sent.Add(1)) - 1
				if n >= requests {
					return
				}
				send(n)
			}
		})
	}
	wg.Wait()
}

// open sends requests at random times, as many independent clients do.
func (r *run) open(ctx context.Context) {
	times := rand.New(rand.NewPCG(r.c.Seed, 1))
	var wg sync.WaitGroup
	defer wg.Wait()
	next := time.Now()
	for n := range r.c.Requests {
		timer := time.NewTimer(time.Until(next))
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		wg.Go(func() { r.one(ctx, n) })
		next = next.Add(time.Duration(times.ExpFloat64() / r.c.Rate * float64(time.Second)))
	}
}

// one sends request n and records the result, unless the run was ended.
func (r *run) one(ctx context.Context, n int) {
	limit, cancel := context.WithTimeout(ctx, r.c.Timeout)
	defer cancel()
	s := r.ask(limit, n)
	if s.failure != "" && ctx.Err() != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.samples = append(r.samples, s)
	if r.c.Ended != nil {
		r.c.Ended(s.failure != "")
	}
}

// firstWarmUp is the number of the first request that is not measured. Its prompt differs
// from those of all measured requests, so that it does not bring them into a cache.
const firstWarmUp = 1 << 40

// warm sends a request that is not measured. Its failure does not matter: the measured
// requests show it.
func (r *run) warm(ctx context.Context, n int) {
	limit, cancel := context.WithTimeout(ctx, r.c.Timeout)
	defer cancel()
	r.ask(limit, firstWarmUp+n)
}

// words are short words; each is a token for most tokenizers.
var words = strings.Fields("the of and to in is that it was for on are with as his they at be this from have or by one had not but what all were when we there can an your which their said if do will each about how up out them then she many some so these would other into has more her two like him see time could no make than first been its who now people my made over did down only way find use may water long little very after called just where most know")

// text returns that many random words.
func text(b *strings.Builder, of *rand.Rand, count int) {
	for range count {
		b.WriteString(words[of.IntN(len(words))])
		b.WriteByte(' ')
	}
}

// prompt returns the prompt of request n.
func (r *run) prompt(n int) string {
	shared := min(r.c.Shared, r.c.PromptWords)
	var b strings.Builder
	text(&b, rand.New(rand.NewPCG(r.c.Seed, 2)), shared)
	text(&b, rand.New(rand.NewPCG(r.c.Seed, 3+uint64(n))), r.c.PromptWords-shared)
	return strings.TrimSpace(b.String())
}

// body returns the body of request n, and its route.
func (r *run) body(n int) (route string, body []byte, err error) {
	fields := map[string]any{
		"model": r.c.Model, "max_tokens": r.c.MaxTokens, "stream": true,
		"stream_options": map[string]bool{"include_usage": true},
	}
	if r.c.IgnoreEOS {
		fields["ignore_eos"] = true
	}
	route = "/v1/chat/completions"
	if r.c.API == APICompletions {
		route, fields["prompt"] = "/v1/completions", r.prompt(n)
	} else {
		fields["messages"] = []map[string]string{{"role": "user", "content": r.prompt(n)}}
	}
	body, err = json.Marshal(fields)
	return route, body, err
}
