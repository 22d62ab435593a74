package sidecar

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

// destinationHeader is the header in which an endpoint picker of the Gateway API's
// inference extension returns its choice: host:port, or several with commas, best first.
const destinationHeader = "X-Gateway-Destination-Endpoint"

// maxPick bounds a picker's answer, in bytes.
const maxPick = 64 << 10

// picker is the client of an external endpoint picker, which chooses the decode engine.
// Safe for concurrent use.
type picker struct {
	url     string
	timeout time.Duration
	client  *http.Client
}

func newPicker(url string, timeout time.Duration) *picker {
	return &picker{url: url, timeout: timeout, client: &http.Client{
		Transport:     &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: 30 * time.Second, DisableCompression: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// pickRequest is the request to the picker. Of the prompt it has only the length.
type pickRequest struct {
	RequestID    string   `json:"request_id"`
	Model        string   `json:"model"`
	Phase        string   `json:"phase"`
	PromptTokens int64    `json:"prompt_tokens"`
	MaxTokens    int64    `json:"max_tokens"` // -1: the client set no limit
	Stream       bool     `json:"stream"`
	Prefill      string   `json:"prefill"`    // host:port of the engine that computes the prompt
	Candidates   []string `json:"candidates"` // host:port of engines that could decode
}

// pickAnswer is the body of the picker's answer, for pickers that do not use the header.
type pickAnswer struct {
	Endpoint  string   `json:"endpoint"`
	Endpoints []string `json:"endpoints"`
}

// ask returns the addresses that the picker names, best first, or the reason why there
// are none. The reason is a label of pdproxy_fallbacks_total.
func (p *picker) ask(ctx context.Context, q *pickRequest) (endpoints []string, reason string) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	body, _ := json.Marshal(q) // strings and numbers never fail
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url, bytes.NewReader(body))
	if err != nil {
		return nil, "failed"
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", q.RequestID)
	resp, err := p.client.Do(req)
	if err != nil {
		return nil, pickFailure(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxPick))
	switch {
	case err != nil:
		return nil, pickFailure(err)
	case resp.StatusCode != http.StatusOK:
		return nil, "status"
	}
	if line := resp.Header.Get(destinationHeader); line != "" {
		return strings.Split(line, ","), ""
	}
	var a pickAnswer
	if json.Unmarshal(answer, &a) != nil {
		return nil, "nonsense"
	}
	if a.Endpoint != "" {
		return []string{a.Endpoint}, ""
	}
	if len(a.Endpoints) == 0 {
		return nil, "nonsense"
	}
	return a.Endpoints, ""
}

func pickFailure(err error) string {
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return "timeout"
	}
	return "failed"
}
