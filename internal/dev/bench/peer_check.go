package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// check is the comparison of the requests and answers that a peer relays with the expected ones.
type check struct {
	Peer  string `json:"peer"`
	Works bool   `json:"works"`
	Error string `json:"error,omitempty"` // why the peer could not be checked, or where an answer differs
	// Answers: the client gets the engine's bytes.
	Answers string `json:"answers,omitempty"`
	// Legs: both legs of each request reached their engines.
	Legs string `json:"legs,omitempty"`
	// Request: what the engine gets of the client's body.
	Request string `json:"request,omitempty"`
}

// exact is a body that a decoder and encoder changes: a number above 2^53, an
// escape, blanks, an unknown field.
const exact = `{ "model": "` + benchModel + `", "prompt": "caf\u00e9 hello", "max_tokens": 3, "stream": false, "x_number": 12345678901234567890123 }`

func (s *peerSuite) checkAll(ctx context.Context) error {
	all, err := startStubs(ctx, s.self, s.dir, s.loadCore, "-record")
	if err != nil {
		return err
	}
	defer all.stop()
	for _, p := range s.chosen(func(p *peer) bool { return p.start != nil }) {
		c := s.checkPeer(ctx, p, all.of(p.Work))
		if ctx.Err() != nil {
			return ctx.Err()
		}
		fmt.Fprintf(s.log, "check  %-28s works=%t answers=%q legs=%q request=%q %s\n", c.Peer, c.Works, c.Answers, c.Legs, c.Request, c.Error)
		s.result.Checks = replace(s.result.Checks, c, func(o check) bool { return o.Peer == c.Peer })
	}
	return nil
}

// replace puts v in the place of the element it replaces, or at the end.
func replace[T any](list []T, v T, same func(T) bool) []T {
	for i := range list {
		if same(list[i]) {
			list[i] = v
			return list
		}
	}
	return append(list, v)
}

func (s *peerSuite) checkPeer(ctx context.Context, p *peer, st *stub) check {
	c := check{Peer: p.Name}
	fail := func(err error) check { c.Error = err.Error(); return c }
	if why := s.missing(p); why != "" {
		c.Error = notInstalled + why
		return c
	}
	r, err := s.start(ctx, p, st.scene(p.Work, 1), fmt.Sprint(s.core), s.loadCore)
	if err != nil {
		return fail(err)
	}
	defer r.stop()
	if p.Work == workDynamo {
		return s.checkDynamo(ctx, r, c)
	}
	sent, gotPrefill, gotDecode := 0, 0, 0
	if _, err := takeRequests(ctx, st); err != nil {
		return fail(err)
	}
	for _, size := range []int{200, 2 << 10, 32 << 10} {
		for _, events := range []int{0, 5} {
			body := requestBody(size, events, 0)
			want, err := post(ctx, "http://"+st.engines[0]+requestPath, "", engineBody(body, p.Work))
			if err != nil {
				return fail(err)
			}
			if _, err = takeRequests(ctx, st); err != nil {
				return fail(err)
			}
			got, err := r.post(ctx, requestPath, body)
			if err != nil {
				return fail(fmt.Errorf("%d bytes, %d events: %w", size, events, err))
			}
			if got.status != http.StatusOK || !bytes.Equal(unstamped(got.body), unstamped(want.body)) {
				other, ok := otherMembers(got.body, want.body)
				if got.status != http.StatusOK || events > 0 || !ok {
					return fail(fmt.Errorf("%d bytes, %d events: answer %d of %d bytes differs from the engine's (%d bytes): %.120q",
						size, events, got.status, len(got.body), len(want.body), firstDifference(got.body, want.body)))
				}
				c.Answers = "streams: the engine's bytes; unary answers: encoded anew" + other
			}
			list, err := takeRequests(ctx, st)
			if err != nil {
				return fail(err)
			}
			sent++
			for _, q := range list {
				if !q.joined(p.Work) {
					return fail(fmt.Errorf("a leg came without what joins it with the other leg: %.200s", q.Body))
				}
				if q.Prefill {
					gotPrefill++
				} else {
					gotDecode++
				}
			}
		}
	}
	if c.Answers == "" {
		c.Answers = "the engine's bytes"
	}
	switch {
	case legs(p.Work) && (gotPrefill < sent || gotDecode < sent):
		return fail(fmt.Errorf("%d requests had %d prefill and %d decode legs", sent, gotPrefill, gotDecode))
	case legs(p.Work):
		c.Legs = fmt.Sprintf("%d requests: %d prefill, %d decode", sent, gotPrefill, gotDecode)
	}
	c.Works = true
	if _, err := r.post(ctx, requestPath, []byte(exact)); err != nil {
		return fail(err)
	}
	list, err := takeRequests(ctx, st)
	if err != nil || len(list) == 0 {
		return fail(fmt.Errorf("no request reached the engine: %w", err))
	}
	c.Request = changes(list[len(list)-1].Body)
	return c
}

// checkDynamo can compare nothing with an engine's bytes: the mocker has no HTTP
// address.
func (s *peerSuite) checkDynamo(ctx context.Context, r *running, c check) check {
	got, err := r.post(ctx, requestPath, requestBody(2<<10, 0, 0))
	if err == nil && (got.status != http.StatusOK || !json.Valid(got.body)) {
		err = fmt.Errorf("answer %d: %.200s", got.status, got.body)
	}
	if err != nil {
		c.Error = err.Error()
		return c
	}
	c.Works, c.Answers, c.Request = true, "not comparable: its engines have no HTTP address", "tokenized by the frontend"
	c.Legs = "both: the frontend serves only once a prefill and a decode mocker have registered"
	return c
}

// engineBody is the body that makes an engine answer as it does behind a proxy of
// that work.
func engineBody(body []byte, work string) []byte {
	if work != workVLLM && work != workSGLang {
		return body
	}
	return append(body[:len(body)-1:len(body)-1], `,"kv_transfer_params":{"do_remote_prefill":true}}`...)
}

// joined reports whether a leg has the parameters that connect it with the other leg.
func (q *recorded) joined(work string) bool {
	switch {
	case work == workSGLang:
		return strings.Contains(q.Body, `"bootstrap_room"`)
	case work == workVLLM && q.Prefill:
		return hasTrue([]byte(q.Body), `"do_remote_decode"`)
	}
	return work != workVLLM || hasTrue([]byte(q.Body), `"do_remote_prefill"`)
}

func takeRequests(ctx context.Context, st *stub) (list []recorded, err error) {
	err = getJSON(ctx, "http://"+st.engines[0]+requestsPath, &list)
	return list, err
}

var stamps = regexp.MustCompile(`"t":[0-9]{19}`)

// unstamped returns an answer without its timestamps.
func unstamped(body []byte) []byte { return stamps.ReplaceAll(body, []byte(`"t":0`)) }

// otherMembers names the members of two JSON objects that differ. ok is false if one is none, or
// if the text differs.
func otherMembers(a, b []byte) (text string, ok bool) {
	var x, y map[string]any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil || !reflect.DeepEqual(x["choices"], y["choices"]) {
		return "", false
	}
	for _, key := range sortedKeys(x) {
		if !reflect.DeepEqual(x[key], y[key]) {
			text += ", other " + key
		}
	}
	return text, true
}

func firstDifference(a, b []byte) []byte {
	i := 0
	for i < min(len(a), len(b)) && a[i] == b[i] {
		i++
	}
	return a[min(i, len(a)):]
}

// changes describes how the body that reached the engine differs from exact.
func changes(got string) string {
	if got == exact {
		return "as sent"
	}
	var c []string
	for part, change := range map[string]string{`\u00e9`: "escapes decoded", "12345678901234567890123": "large numbers rounded", `"model": "`: "blanks removed"} {
		if !strings.Contains(got, part) {
			c = append(c, change)
		}
	}
	var had, has map[string]json.RawMessage
	if json.Unmarshal([]byte(exact), &had) == nil && json.Unmarshal([]byte(got), &has) == nil {
		var added []string
		for _, key := range sortedKeys(has) {
			_, known := had[key]
			if !known && !strings.HasPrefix(key, "bootstrap_") && key != "kv_transfer_params" {
				added = append(added, key)
			}
		}
		if added != nil {
			c = append(c, "adds "+strings.Join(added, ", "))
		}
		for _, key := range sortedKeys(had) {
			if _, kept := has[key]; !kept {
				c = append(c, "drops "+key)
			}
		}
	}
	if len(c) == 0 {
		return "as sent, but for the members of the transfer"
	}
	slices.Sort(c)
	return strings.Join(c, "; ")
}
