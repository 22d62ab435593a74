package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/sglang"
)

// routes are the short names of paths.
var routes = map[string]string{
	"chat": core.RouteChat, "completions": core.RouteCompletions, "responses": core.RouteResponses,
	"messages": core.RouteMessages, "tokens": core.RouteTokens, "generate": sglang.RouteGenerate,
}

// request sends a request: [NAME = or &] ENGINE [get or put] ROUTE [[HEADERS]] [BODY] [=> ANSWER].
// It returns the answer, which is nil after "&", and the line's expectation.
func (r *runner) request(word, rest string) (_ *exchange, want string) {
	r.t.Helper()
	rest, want, _ = strings.Cut(rest, " => ")
	name, mark := "", ""
	if strings.HasPrefix(rest, "= ") || strings.HasPrefix(rest, "& ") {
		name, mark = word, rest[:1]
		word, rest, _ = strings.Cut(rest[2:], " ")
	}
	host, bootstrap := strings.CutSuffix(word, ":boot")
	url := r.engine(host).URL()
	if bootstrap {
		url = fmt.Sprintf("http://127.0.0.1:%d", r.engine(host).BootstrapPort())
	}
	method := http.MethodPost
	path, rest, _ := strings.Cut(rest, " ")
	if path == "get" || path == "put" {
		method = strings.ToUpper(path)
		path, rest, _ = strings.Cut(rest, " ")
	}
	if route, ok := routes[path]; ok {
		path = route
	}
	var header []string
	body := r.expand(strings.TrimLeft(rest, " "))
	if list, after, ok := strings.Cut(body, "] "); ok && strings.HasPrefix(list, "[") && strings.Contains(list, ": ") {
		body = r.expand(after)
		for pair := range strings.SplitSeq(list[1:], "; ") {
			key, value, _ := strings.Cut(pair, ": ")
			header = append(header, key, value)
		}
	}
	x := &exchange{done: make(chan struct{})}
	ctx, leave := context.WithCancel(r.t.Context())
	x.leave = leave
	r.t.Cleanup(leave)
	url += r.expand(path)
	start := time.Now()
	go func() {
		defer close(x.done)
		x.answer, x.err = send(ctx, method, url, body, header...)
		x.took = time.Since(start)
	}()
	if name != "" {
		r.answers[name] = x
	}
	if mark == "&" {
		return nil, ""
	}
	<-x.done
	return x, want
}

// wait returns an answer when it is complete.
func (r *runner) wait(name string) *exchange {
	r.t.Helper()
	x := r.answers[name]
	if x == nil {
		r.fatalf("there is no answer %q", name)
	}
	<-x.done
	return x
}

// expect reports the problems of an answer.
func (r *runner) expect(x *exchange, want string) {
	r.t.Helper()
	list, wrong := r.problems(x, want)
	for _, problem := range list {
		r.errorf("%s", problem)
	}
	if wrong && *update {
		r.f.fixes[r.at] = render(x)
	} else if wrong {
		r.errorf("answered\n%s", render(x))
	}
}

// problems compares an answer with the line's expectation and with the lines that follow.
// Without any of them the status must be 200. wrong reports that the whole answer differs.
func (r *runner) problems(x *exchange, want string) (list []string, wrong bool) {
	r.t.Helper()
	got := render(x)
	var whole []string
	if want != "" {
		whole = []string{want}
	}
	unchecked := want == ""
	for _, line := range r.f.lines[r.at+1:] {
		line = strings.TrimLeft(line, "\t")
		if !isAnswer(line) {
			break
		}
		unchecked = false
		mark, text, _ := strings.Cut(line, " ")
		text = r.expand(text)
		switch mark {
		case "<":
			whole = append(whole, text)
		case "+":
			if least, err := time.ParseDuration(text); err != nil || x.took < least {
				list = append(list, fmt.Sprintf("took %v, want at least %s, %v", x.took, text, err))
			}
		case "H":
			name, value, _ := strings.Cut(text, ": ")
			if header := x.header.Get(name); !matches(value, header) {
				list = append(list, fmt.Sprintf("%s is %q", name, header))
			}
		default:
			if strings.Contains(got, text) != (mark == "~") {
				list = append(list, fmt.Sprintf("%s %s: answered %s", mark, text, got))
			}
		}
	}
	if unchecked && !strings.HasPrefix(got, "200") {
		list = append(list, "answered "+got)
	}
	if len(whole) == 0 {
		return list, false
	}
	return list, !matches(r.expand(strings.Join(whole, "\n")), got)
}

// matches compares a text with a pattern in which "…" is any text.
func matches(pattern, text string) bool {
	return regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(pattern), "…", "(?s:.*)") + "$").MatchString(text)
}

// volatile are the parts of answers that differ from run to run.
var volatile = []struct {
	re   *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`), "UUID"},
	{regexp.MustCompile(`[0-9a-f]{32}`), "ID"},
	{regexp.MustCompile(`-[0-9a-f]{16}"`), `-ID"`},
	{regexp.MustCompile(`-[0-9a-f]{8}"`), `-HEX"`},
	{regexp.MustCompile(`"ts_tic":[0-9.]+`), `"ts_tic":0`},
	{regexp.MustCompile(`"encoded_opaque_state":"[^"]*"`), `"encoded_opaque_state":"STATE"`},
	{regexp.MustCompile(`"(created|created_at|ctx_request_id)":\d+`), `"$1":0`},
	{regexp.MustCompile(`"(timestamp|e2e_latency)":[0-9.e+-]+`), `"$1":0`},
}

// render writes an answer as a table shows it: the status and the body, in which the
// empty lines between events are left out. NONE is no answer, CUT the early end of one.
func render(x *exchange) string {
	switch {
	case x.shown != "":
		return x.shown
	case x.status == 0 && errors.Is(x.err, syscall.ECONNRESET):
		return "NONE reset"
	case x.status == 0 && errors.Is(x.err, io.EOF):
		return "NONE closed"
	case x.status == 0:
		return "NONE"
	}
	body := strings.TrimRight(strings.ReplaceAll(string(x.body), "\n\n", "\n"), "\n")
	for _, v := range volatile {
		body = v.re.ReplaceAllString(body, v.with)
	}
	if x.err != nil {
		body = strings.TrimLeft(body+"\nCUT", "\n")
	}
	return strings.TrimRight(fmt.Sprintf("%d %s", x.status, body), " ")
}

// text returns the texts of an answer of any route, whole or streamed, in the order of
// the choices and divided by "|". A stream must be complete.
func (a answer) text(t *testing.T) string {
	t.Helper()
	body := string(a.body)
	if a.status != http.StatusOK {
		t.Fatalf("got status %d: %s", a.status, body)
	}
	c := &choices{texts: map[int]string{}, ended: map[int]bool{}}
	if !strings.HasPrefix(body, "data: ") && !strings.HasPrefix(body, "event: ") {
		c.add(t, body)
		return c.String()
	}
	last := ""
	for event := range strings.SplitSeq(strings.TrimSuffix(body, "\n\n"), "\n\n") {
		name, data, _ := strings.Cut(event, "data: ")
		if strings.HasPrefix(event, ":") {
			continue
		}
		if last = name + data; data != "[DONE]" {
			if strings.HasPrefix(data, `{"text":`) { // SGLang's native events are cumulative
				clear(c.texts)
			}
			c.add(t, data)
		}
	}
	name, _, _ := strings.Cut(last, "\n")
	if !slices.Contains([]string{"[DONE]", "event: response.completed", "event: response.incomplete", "event: response.failed", "event: message_stop"}, name) {
		t.Errorf("stream ends with %q", last)
	}
	return c.String()
}

// choices collects the texts of an answer by choice.
type choices struct {
	texts map[int]string
	ended map[int]bool
}

func (c *choices) String() string {
	var list []string
	for _, i := range slices.Sorted(maps.Keys(c.texts)) {
		list = append(list, c.texts[i])
	}
	return strings.Join(list, "|")
}

// add reads one JSON value of an answer.
func (c *choices) add(t *testing.T, raw string) {
	t.Helper()
	var v struct {
		Type, Text string
		Delta      json.RawMessage
		Output     []struct{ Content []struct{ Text string } }
		Content    []struct{ Text string }
		Choices    []struct {
			Index          int
			Text           string
			Message, Delta struct{ Content string }
			TokenIDs       []core.Token `json:"token_ids"`
			Finish         *string      `json:"finish_reason"`
		}
		Error any
	}
	var list []json.RawMessage
	if json.Unmarshal([]byte(raw), &list) == nil { // SGLang's answer to a batch
		for i, item := range list {
			one := &choices{texts: map[int]string{}, ended: map[int]bool{}}
			one.add(t, string(item))
			c.texts[i] = one.String()
		}
		return
	}
	if err := json.Unmarshal([]byte(raw), &v); err != nil || v.Error != nil {
		t.Fatalf("answer %q: %v", raw, err)
	}
	for _, choice := range v.Choices {
		if c.ended[choice.Index] {
			t.Errorf("choice %d continues after its end", choice.Index)
		}
		c.ended[choice.Index] = choice.Finish != nil && *choice.Finish != "not_finished"
		c.texts[choice.Index] += choice.Text + choice.Message.Content + choice.Delta.Content + core.Detokenize(choice.TokenIDs)
	}
	text := ""
	if v.Type == "" {
		text = v.Text
	}
	for _, part := range v.Content {
		text += part.Text
	}
	for _, o := range v.Output {
		for _, part := range o.Content {
			text += part.Text
		}
	}
	var delta struct{ Text string }
	switch v.Type {
	case "response.output_text.delta":
		json.Unmarshal(v.Delta, &delta.Text)
	case "content_block_delta":
		json.Unmarshal(v.Delta, &delta)
	}
	if text += delta.Text; text != "" {
		c.texts[0] += text
	}
}
