package cmd

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"
)

// chaosUsers is the number of users of demo --chaos. Each has one stream open at a time.
const chaosUsers = 8

// chaosAnswer is what a client reads of an answer.
type chaosAnswer struct {
	text, role, finish string // of all events, one after the other
	tokens             int    // of the answer, as reported
	failed             string // why the answer is not complete; "": it is
}

// user sends one stream after the other until ctx ends. The last one ends too, unless requests ends.
func (c *chaos) user(ctx, requests context.Context, user int) {
	random := rand.New(rand.NewPCG(2, uint64(user)))
	for turn := 0; wait(ctx, time.Duration(random.IntN(500))*time.Millisecond); turn++ {
		path, body := chaosRequest(random, c.chats && user%2 == 0)
		want := make(chan chaosAnswer, 1)
		go func() { want <- ask(requests, c.alone+path, "", body, func() {}) }()
		c.send(requests, fmt.Sprintf("chaos-%d-%d", user, turn), path, body, want)
	}
}

// chaosRequest returns a greedy request for a long stream.
func chaosRequest(random *rand.Rand, chat bool) (path, body string) {
	var question strings.Builder
	for range 20 + random.IntN(100) {
		fmt.Fprintf(&question, "%s ", [...]string{"tell", "me", "of", "the", "sea", "and", "its", "waves", "tides", "salt", "wind", "ships"}[random.IntN(12)])
	}
	path, prompt := "/v1/completions", `"prompt":"`+question.String()+`"`
	if chat {
		path, prompt = "/v1/chat/completions", `"messages":[{"role":"user","content":"`+question.String()+`"}]`
	}
	return path, fmt.Sprintf(`{"model":"sim","stream":true,"stream_options":{"include_usage":true},"temperature":0,"max_tokens":%d,%s}`, 150+random.IntN(150), prompt)
}

// send sends a stream to the proxy and compares the answer with that of one engine alone.
func (c *chaos) send(ctx context.Context, id, path, body string, want <-chan chaosAnswer) {
	s := new(chaosStream)
	c.mu.Lock()
	c.open[id] = s
	c.mu.Unlock()
	got := ask(ctx, c.url+path, id, body, func() {
		now := time.Now()
		c.mu.Lock()
		defer c.mu.Unlock()
		if !s.last.IsZero() {
			s.gap = max(s.gap, now.Sub(s.last))
		}
		s.last = now
	})
	c.mu.Lock()
	s.ended, s.failed = true, got.failed
	delete(c.open, id)
	c.mu.Unlock()
	right := got == <-want
	if ctx.Err() != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sum.Streams++
	switch {
	case got.failed != "":
		c.sum.Ended[got.failed]++
	case !right:
		c.sum.Wrong++
	}
}

// ask sends a request for a stream and reads the answer. event is called for each event.
func ask(ctx context.Context, url, id, body string, event func()) (a chaosAnswer) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return chaosAnswer{failed: err.Error()}
	}
	r.Header.Set("Content-Type", "application/json")
	if id != "" {
		r.Header.Set("X-Request-Id", id)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return chaosAnswer{failed: "no answer"}
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		_, _ = io.Copy(io.Discard, resp.Body) // the status says enough
		return chaosAnswer{failed: fmt.Sprintf("status %d", resp.StatusCode)}
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		switch data, ok := strings.CutPrefix(lines.Text(), "data: "); {
		case !ok:
		case data == "[DONE]":
			return a
		default:
			event()
			if !a.add(data) {
				return a
			}
		}
	}
	a.failed = "cut off"
	return a
}

// add adds an event of a stream. It returns false if the answer has failed.
func (a *chaosAnswer) add(data string) bool {
	var e struct {
		Choices []struct {
			Text         string
			Delta        struct{ Role, Content string }
			FinishReason string `json:"finish_reason"`
		}
		Usage *struct {
			CompletionTokens int `json:"completion_tokens"`
		}
		Error *struct {
			NotContinued string `json:"not_continued"`
		}
	}
	if err := json.Unmarshal([]byte(data), &e); err != nil {
		a.failed = "not JSON"
		return false
	}
	if e.Error != nil {
		a.failed = cmp.Or(e.Error.NotContinued, "error event")
		return false
	}
	for _, choice := range e.Choices {
		a.text += choice.Text + choice.Delta.Content
		a.role += choice.Delta.Role
		a.finish += choice.FinishReason
	}
	if e.Usage != nil {
		a.tokens += e.Usage.CompletionTokens
	}
	return true
}
