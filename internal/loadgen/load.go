// Package load sends requests to an OpenAI endpoint and measures a client's view: time to
// first token, the time between events, throughput, and the share of requests within
// limits. It requests streams, because only streams show these times.
//
// arrivals.go decides when requests are sent, workload.go and trace.go decide their prompts,
// body.go writes them. client.go sends one request, stream.go reads its answer, and sample.go holds
// its measurements, which are also the lines of a file. result.go summarizes the measurements,
// compare.go compares two runs, report.go writes the report.
package loadgen

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/internal/replay"
)

// The supported endpoints.
const (
	APIChat        = "chat"
	APICompletions = "completions"
	APIResponses   = "responses"
)

// Config describes the load. Equal configurations make equal requests, except for the
// answers that a conversation repeats.
type Config struct {
	// URL is the endpoint without the route: http://host:port, or OpenAI's base URL, which
	// ends in /v1.
	URL string
	// API is one of the API constants.
	API string
	// Model is the model in the requests; "" means the first of GET /v1/models.
	Model string
	// Key is sent as a bearer token, "" for none.
	Key string
	// WarmUp is the number of requests that are sent and not measured before the others: the first
	// requests of a server include the opening of connections and the compilation that engines do
	// on demand.
	WarmUp int
	// Requests is the number of measured requests; at least 1. With a trace, 0 means all
	// requests of the trace.
	Requests int
	// Ended is called after each measured request, one call at a time; nil: not called.
	Ended func(failed bool)
	// Concurrency is the number of open requests if Rate is 0 and Trace is nil; at least 1.
	Concurrency int
	// MaxOpen, if it is not 0, bounds the open conversations of a run with arrival times.
	// The time that a request waits for its turn counts.
	MaxOpen int
	// Rate, if it is not 0, is the number of requests per second, at random
	// times, independent of the number of open ones.
	Rate float64
	// Turns is the number of requests of one conversation. Each has the earlier prompts
	// and answers before its own words. 0 means 1.
	Turns int
	// Think is the mean time between the end of an answer and the next turn.
	Think time.Duration
	// TurnWords is the length of the second and further prompts of a conversation.
	TurnWords int
	// PromptWords is the length of a prompt; the tokenizer of the model determines the
	// number of tokens of a word. Shared is the number of words with which all prompts
	// begin.
	PromptWords, Shared int
	// MaxTokens is the limit of an answer. With IgnoreEOS every answer has
	// exactly that many tokens; engines support that option, OpenAI does not.
	MaxTokens int
	IgnoreEOS bool
	// Trace, if it is not nil, determines the prompts, the lengths of answers and the times
	// of arrival, in place of all the settings from Rate to MaxTokens. BlockTokens is
	// the number of tokens of its blocks, Speed divides its times; 0 means 1.
	Trace       *replay.Trace
	BlockTokens int
	Speed       float64
	// TokenIDs are the ids that prompts of a trace consist of, if API is APICompletions.
	TokenIDs IDRange
	// Limits are those of a good request.
	Limits Limits
	// Label is the name of the run in its result.
	Label string
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
	work   workload
	began  time.Time

	mu      sync.Mutex
	samples []Sample
	skipped int // turns that were not sent, because an earlier turn failed
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
	r.work = newWorkload(&r.c)
	r.closed(ctx, c.WarmUp, func(n int) { r.warm(ctx, n) })
	r.began = time.Now()
	if arrivals := r.work.arrivals(); arrivals != nil {
		r.open(ctx, arrivals)
	} else {
		r.closed(ctx, r.work.conversations(), func(n int) { r.conversation(ctx, n, time.Now()) })
	}
	return summarize(&r.c, r.samples, r.skipped, time.Since(r.began)), nil
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
