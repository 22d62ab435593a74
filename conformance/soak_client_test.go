package conformance

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// soakCase is one request with a right answer.
type soakCase struct {
	path string
	body string // without the member stream
	once sync.Once
	want reply // of one engine alone, unary
}

// makeCorpus draws the requests. Prompts share prefixes, so that engines find a
// part of them in their caches. With several, some ask for two choices.
func makeCorpus(rng *rand.Rand, several bool) []*soakCase {
	var texts []string
	for _, n := range []int{0, 0, 15, 60, 120, 250} {
		texts = append(texts, prose(rng, n))
	}
	ids := make([]int, 500)
	for i := range ids {
		ids[i] = 1000 + rng.IntN(1024)
	}
	corpus := make([]*soakCase, 600)
	for i := range corpus {
		text := texts[rng.IntN(len(texts))] + prose(rng, 1+rng.IntN(12))
		if rng.IntN(10) == 0 {
			text += fmt.Sprintf("<eos%d>", 1+rng.IntN(20))
		}
		quoted, _ := json.Marshal(text)
		members := []string{fmt.Sprintf(`"max_tokens":%d`, 1+rng.IntN(60))}
		if rng.IntN(20) > 0 {
			members = append(members, `"model":"sim"`)
		}
		if rng.IntN(4) == 0 {
			members = append(members, fmt.Sprintf(`"seed":%d,"temperature":0.5`, rng.IntN(9)))
		}
		if rng.IntN(4) == 0 {
			members = append(members, `"ignore_eos":true`)
		}
		if rng.IntN(8) == 0 {
			members = append(members, `"stop":["xar","é b"]`)
		}
		if several && rng.IntN(15) == 0 {
			members = append(members, `"n":2`)
		}
		path := "/v1/completions"
		switch rng.IntN(4) {
		case 0:
			members = append(members, `"prompt":`+string(quoted))
		case 1:
			list, _ := json.Marshal(append(slices.Clone(ids[:rng.IntN(len(ids))]), rng.IntN(256)))
			members = append(members, `"prompt":`+string(list))
		case 2:
			path = chatPath
			members = append(members, `"messages":[{"role":"system","content":"be brief"},{"role":"user","content":`+string(quoted)+`}]`)
		default:
			path = chatPath
			members = append(members, `"messages":[{"role":"user","content":`+string(quoted)+`}]`)
		}
		rng.Shuffle(len(members), func(i, j int) { members[i], members[j] = members[j], members[i] })
		corpus[i] = &soakCase{path: path, body: "{" + strings.Join(members, ",") + "}"}
	}
	return corpus
}

// prose returns n words, some of them hard to quote.
func prose(rng *rand.Rand, n int) string {
	words := strings.Fields(`tide comes in and the goes out again while "gulls" cry on c:\quay über 水面 ☕ <b>&amp;</b> 'til noon`)
	var b strings.Builder
	for range n {
		b.WriteString(words[rng.IntN(len(words))])
		b.WriteByte(' ')
	}
	return b.String()
}

// badRequests are rejected by every engine.
var badRequests = [][2]string{
	{chatPath, `{"model":"sim","messages":[{"role":"user","content":"cut off`},
	{chatPath, `{"model":"sim","max_tokens":5}`},
	{chatPath, `{"model":"nobody","messages":[{"role":"user","content":"who"}]}`},
	{chatPath, `{"model":"sim","messages":[{"role":"user","content":"none"}],"max_tokens":-1}`},
	{"/v1/completions", `{"model":"sim","prompt":"warm","temperature":"very"}`},
	{"/v1/completions", `{"model":"sim","prompt":[99999999],"max_tokens":4,"stream":true}`},
	{"/v1/completions", `[]`},
}

// When a client leaves.
const (
	leaveNever = "never"
	leaveTimer = "timer" // after a random time
	leaveHead  = "head"  // when the answer begins
	leaveEvent = "event" // after some events
)

// asked is one request of the soak.
type asked struct {
	id     string
	c      *soakCase
	bad    *[2]string // in place of c
	path   string
	body   string
	stream bool
	h2c    bool
	leave  string
	after  time.Duration // leaveTimer
	events int           // leaveEvent
	closes bool          // leaves by closing the body and not the request
}

// draw generates a request.
func (s *soak) draw(rng *rand.Rand) asked {
	q := asked{id: fmt.Sprintf("soak-%d", s.serial.Add(1)), h2c: rng.IntN(3) == 0, stream: rng.IntN(3) > 0, leave: leaveNever}
	if rng.IntN(25) == 0 {
		q.bad = &badRequests[rng.IntN(len(badRequests))]
	}
	q.c = s.corpus[rng.IntN(len(s.corpus))]
	q.path, q.body = q.c.path, q.c.body
	if q.stream {
		q.body = `{"stream":true,` + q.body[1:]
		if rng.IntN(3) == 0 {
			q.body = `{"stream_options":{"include_usage":true},` + q.body[1:]
		}
	}
	q.after, q.events, q.closes = upTo(rng, 400*time.Millisecond), 1+rng.IntN(8), rng.IntN(2) == 0
	if rng.IntN(4) == 0 {
		q.leave = []string{leaveTimer, leaveTimer, leaveHead, leaveEvent}[rng.IntN(4)]
	}
	return q
}

// reply is the answer as an OpenAI client reads it.
type reply struct {
	status     int
	header     http.Header
	raw        []byte // the first bytes of the body
	choices    []choice
	prompt     int // of usage, if there is one
	completion int
	events     int
	failed     bool   // an error event was received
	done       bool   // [DONE] was received
	left       bool   // the client has left
	malformed  string // the part that no client can read
	err        error  // the connection broke
	took       time.Duration
}

// choice is one of the texts of an answer.
type choice struct{ text, finish string }

// ask sends a request, reads the answer and checks it.
func (s *soak) ask(q asked) (reply, string) {
	if q.bad != nil {
		q.path, q.body, q.c = q.bad[0], q.bad[1], nil
	}
	start := time.Now()
	r := s.send(q)
	r.took = time.Since(start)
	s.tally.took(r.took)
	var kind, problem string
	if q.c == nil {
		kind, problem = judgeBad(r)
	} else {
		q.c.once.Do(func() { q.c.want = s.alone(q.c) })
		kind, problem = judge(q, r)
	}
	if problem != "" {
		s.problem(q, r, problem)
		kind = "problem"
	}
	s.tally.add(kind)
	if q.c != nil && !r.left {
		s.tally.add("wanted")
	}
	return r, kind
}

// alone asks the engine that is not behind the proxy.
func (s *soak) alone(c *soakCase) reply {
	body := c.body
	if !strings.Contains(body, `"model"`) {
		body = `{"model":"sim",` + body[1:]
	}
	q := asked{id: fmt.Sprintf("alone-%d", s.serial.Add(1)), path: c.path, body: body, leave: leaveNever}
	r := s.sendTo(s.fleet.alone.URL(), s.clients[0], q)
	if r.status != 200 || r.err != nil || r.malformed != "" {
		s.problem(q, r, "one engine alone does not answer")
	}
	return r
}

// errLeft is the cause of a request whose client leaves.
var errLeft = errors.New("the client leaves")

func (s *soak) send(q asked) reply {
	client := s.clients[0]
	if q.h2c {
		client = s.clients[1]
	}
	return s.sendTo(s.url, client, q)
}

func (s *soak) sendTo(base string, client *http.Client, q asked) (r reply) {
	ctx, cancel := context.WithTimeout(context.Background(), soakBound)
	defer cancel()
	ctx, leave := context.WithCancelCause(ctx)
	defer leave(nil)
	if q.leave == leaveTimer {
		t := time.AfterFunc(q.after, func() { leave(errLeft) })
		defer t.Stop()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+q.path, strings.NewReader(q.body))
	if err != nil {
		return reply{err: err}
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", q.id)
	if strings.Contains(q.body, `"seed":`) { // the continuation of a sampled answer is another sample
		req.Header.Set("X-Pdproxy-Continue", "off")
	}
	resp, err := client.Do(req)
	if err != nil {
		return reply{err: err, left: context.Cause(ctx) == errLeft}
	}
	defer resp.Body.Close()
	r.status, r.header = resp.StatusCode, resp.Header
	if q.leave == leaveHead {
		r.left = true
		return r
	}
	kept := &keeper{r: resp.Body}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		r.readStream(bufio.NewReader(kept), func() bool {
			if q.leave != leaveEvent || r.events < q.events {
				return false
			}
			r.left = true
			if !q.closes {
				leave(errLeft)
			}
			return true
		})
	} else {
		var data []byte
		if data, r.err = io.ReadAll(kept); r.err == nil && r.status == 200 {
			r.readObject(data)
		}
	}
	r.raw = kept.kept
	r.left = r.left || r.err != nil && context.Cause(ctx) == errLeft
	return r
}

// keeper stores the data that is read through it.
type keeper struct {
	r    io.Reader
	kept []byte
}

func (k *keeper) Read(p []byte) (int, error) {
	n, err := k.r.Read(p)
	k.kept = append(k.kept, p[:n]...)
	return n, err
}

// object holds the members of an answer or event that a client needs, of either
// API.
type object struct {
	Error   json.RawMessage
	Object  string
	Message string
	Choices []struct {
		Index        int
		Text         string
		Message      struct{ Content string }
		Delta        struct{ Content string }
		FinishReason string `json:"finish_reason"`
	}
	Usage struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
	}
}

// readObject adds one answer or event.
func (r *reply) readObject(data []byte) {
	var o object
	if err := json.Unmarshal(data, &o); err != nil {
		r.malformed = fmt.Sprintf("%v in %q", err, data)
		return
	}
	if len(o.Error) > 0 && string(o.Error) != "null" || o.Object == "error" {
		r.failed = true
		return
	}
	for _, c := range o.Choices {
		for c.Index >= len(r.choices) {
			r.choices = append(r.choices, choice{})
		}
		to := &r.choices[c.Index]
		to.text += c.Text + c.Message.Content + c.Delta.Content
		if c.FinishReason != "" {
			to.finish = c.FinishReason
		}
	}
	if o.Usage.Prompt > 0 {
		r.prompt, r.completion = o.Usage.Prompt, o.Usage.Completion
	}
}

// readStream reads a stream event by event, until enough returns true.
func (r *reply) readStream(b *bufio.Reader, enough func() bool) {
	var event []byte
	for {
		line, err := b.ReadBytes('\n')
		if err != nil {
			if err != io.EOF {
				r.err = err
			} else if len(event)+len(line) > 0 {
				r.malformed = fmt.Sprintf("half an event at the end: %q", append(event, line...))
			}
			return
		}
		if len(line) > 1 {
			event = append(event, line...)
			continue
		}
		r.readEvent(event)
		event = event[:0]
		if r.malformed != "" || enough() {
			return
		}
	}
}

// readEvent adds one event: one data line, or a comment.
func (r *reply) readEvent(event []byte) {
	if bytes.HasPrefix(event, []byte(":")) {
		return
	}
	r.events++
	data, ok := bytes.CutPrefix(event, []byte("data: "))
	data, whole := bytes.CutSuffix(data, []byte("\n"))
	switch {
	case !ok || !whole || bytes.ContainsRune(data, '\n'):
		r.malformed = fmt.Sprintf("event %q", event)
	case r.done:
		r.malformed = fmt.Sprintf("behind [DONE]: %q", event)
	case string(data) == "[DONE]":
		r.done = true
	case r.failed:
		r.malformed = fmt.Sprintf("behind an error event: %q", event)
	default:
		r.readObject(data)
	}
}

// judge returns the kind of end of a request with a right answer, or the
// problem with that end.
func judge(q asked, r reply) (kind, problem string) {
	want := &q.c.want
	if r.malformed != "" {
		return "", "malformed answer: " + r.malformed
	}
	if r.status == 200 && q.stream && !r.begins(want) {
		return "", "the text is not a beginning of the right one"
	}
	switch {
	case r.left:
		return "left: " + q.leave, ""
	case errors.Is(r.err, context.DeadlineExceeded):
		return "", "no end"
	case r.err != nil:
		return "", "the connection broke"
	case r.status != 200:
		return judgeError(r, 429, 502, 503, 504)
	case q.stream && r.failed:
		return "error event", ""
	case q.stream && !r.done:
		return "", "the stream is silently short"
	case r.failed:
		return "", "an error with status 200"
	case !slices.Equal(r.choices, want.choices):
		return "", "wrong answer"
	case r.prompt > 0 && (r.prompt != want.prompt || r.completion != want.completion):
		return "", fmt.Sprintf("usage %d+%d, alone %d+%d", r.prompt, r.completion, want.prompt, want.completion)
	}
	return "right", ""
}

// begins reports whether each text so far is a prefix of the right one.
func (r *reply) begins(want *reply) bool {
	for i, c := range r.choices {
		if i >= len(want.choices) || !strings.HasPrefix(want.choices[i].text, c.text) {
			return false
		}
	}
	return true
}

// judgeBad returns the kind of end of a request that must be rejected.
func judgeBad(r reply) (kind, problem string) {
	switch {
	case r.left:
		return "left", ""
	case r.err != nil:
		return "", "the connection broke"
	case r.status/100 == 2 && !r.failed:
		return "", "a bad request was answered"
	case r.status == 200:
		return "bad request: error event", ""
	}
	kind, problem = judgeError(r, 400, 404, 422, 429, 502, 503, 504)
	return "bad request: " + kind, problem
}

// legMessage matches the phase and the reason in the proxy's message about a
// failed leg.
var legMessage = regexp.MustCompile(`^the (\w+) leg on engine .*\((\w+)\)$`)

// judgeError checks the status of an error answer, and that a client can read it.
func judgeError(r reply, statuses ...int) (kind, problem string) {
	var e struct {
		object
		Error struct{ Message, Type, Code any }
	}
	err := json.Unmarshal(r.raw, &e)
	switch {
	case !slices.Contains(statuses, r.status):
		return "", fmt.Sprintf("status %d", r.status)
	case r.header.Get("X-Request-Id") == "":
		return "", "an error without request id"
	case r.status == 503 && r.header.Get("Retry-After") == "":
		return "", "503 without Retry-After"
	case r.status/100 == 4: // an engine's own error in its own form
	case err != nil, e.Error.Message == nil, e.Error.Type == nil, e.Error.Code == nil:
		return "", "an error that is not OpenAI's"
	}
	kind = fmt.Sprintf("status %d %v", r.status, e.Error.Code)
	message, _ := e.Error.Message.(string)
	if leg := legMessage.FindStringSubmatch(message); leg != nil {
		kind += ": " + leg[1] + " " + leg[2]
	}
	return kind, ""
}
