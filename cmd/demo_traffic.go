package cmd

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"time"
)

// demoUsers is the number of users of demo --traffic. Each has one request open at a time.
const demoUsers = 6

// demoTurns is the number of turns after which a user begins a new conversation.
const demoTurns = 6

// driveTraffic sends the requests of demoUsers conversations until ctx ends. All
// conversations begin with the same instructions, and each turn repeats the turns before it.
// So the engines find parts of the prompts in their caches.
func driveTraffic(ctx context.Context, url string) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: demoUsers}}
	defer client.CloseIdleConnections()
	var users sync.WaitGroup
	for user := range demoUsers {
		users.Go(func() {
			c := demoUser{random: rand.New(rand.NewPCG(1, uint64(user)))}
			for wait(ctx, time.Duration(200+c.random.IntN(1500))*time.Millisecond) {
				c.next()
				c.send(ctx, client, url)
			}
		})
	}
	users.Wait()
}

// wait returns false if ctx ends before d has passed.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

type demoMessage struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// demoUser is a user with the present conversation.
type demoUser struct {
	random   *rand.Rand
	messages []demoMessage
	turns    int
}

// next adds the question of a turn.
func (c *demoUser) next() {
	if c.turns++; c.turns > demoTurns || c.messages == nil {
		c.messages, c.turns = []demoMessage{{"system", strings.Repeat("You are a patient guide to the sea. Answer in short sentences. ", 12)}}, 1
	}
	var question strings.Builder
	for range 20 + c.random.IntN(150) {
		fmt.Fprintf(&question, "%s ", [...]string{"tell", "me", "of", "the", "sea", "and", "its", "waves", "tides", "salt", "wind", "ships"}[c.random.IntN(12)])
	}
	c.messages = append(c.messages, demoMessage{"user", question.String()})
}

// send sends the conversation and reads the whole answer. The next turn repeats a short answer in
// its place: the text of a simulator has no meaning. An error needs no report, because the page
// shows what fails.
func (c *demoUser) send(ctx context.Context, client *http.Client, url string) {
	body, err := json.Marshal(map[string]any{
		"model": "sim", "stream": true, "stream_options": map[string]bool{"include_usage": true},
		"max_tokens": 16 + c.random.IntN(100), "messages": c.messages,
	})
	if err != nil {
		return // strings and numbers have no encoding error
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(string(body)))
	if err != nil {
		return // the proxy's own URL is valid
	}
	r.Header.Set("Content-Type", "application/json")
	answer, err := client.Do(r)
	if err != nil {
		return
	}
	defer answer.Body.Close()
	_, _ = io.Copy(io.Discard, answer.Body) // see above
	c.messages = append(c.messages, demoMessage{"assistant", "The sea is wide."})
}
