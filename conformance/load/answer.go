package load

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"
)

// sample is the result of one request.
type sample struct {
	began      time.Time
	failure    string          // reason why the answer is wrong; "" for a good one
	total      time.Duration   // until the end of the answer
	first      time.Duration   // until the first text; 0 if there was none
	gaps       []time.Duration // between events with text
	prompt     int             // tokens, according to the answer
	cached     int
	completion int // number of events with text, if the answer does not report it
}

// event holds the parts of one chunk of a stream that are read.
type event struct {
	Choices []struct {
		Text  string
		Delta struct {
			Content string
			// Thoughts of reasoning models. vLLM names them reasoning since 0.12
			// (entrypoints/openai/engine/protocol.py, DeltaMessage); SGLang and older
			// releases of vLLM name them reasoning_content.
			Reasoning        string
			ReasoningContent string            `json:"reasoning_content"`
			ToolCalls        []json.RawMessage `json:"tool_calls"`
		}
	}
	Usage *struct {
		Prompt     int `json:"prompt_tokens"`
		Completion int `json:"completion_tokens"`
		Details    *struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
	Error json.RawMessage
}

// maxLine bounds one line of a stream, in bytes.
const maxLine = 1 << 20

// The errors of an answer other than a wrong status.
var (
	errInStream = errors.New("error in the stream")
	errCut      = errors.New("stream cut off")
)

// statusError is a status other than 200.
type statusError int

func (e statusError) Error() string { return fmt.Sprintf("status %d", int(e)) }

// ask sends request n and reads the answer.
func (r *run) ask(ctx context.Context, n int) sample {
	s := sample{began: time.Now()}
	err := r.exchange(ctx, n, &s)
	s.total = time.Since(s.began)
	s.failure = reason(err)
	return s
}

// reason returns a short reason for an error, "" for nil.
func reason(err error) string {
	var status statusError
	var timeout interface{ Timeout() bool }
	switch {
	case err == nil:
		return ""
	case errors.Is(err, errInStream), errors.Is(err, errCut), errors.As(err, &status):
		return err.Error()
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return "time-out"
	default:
		return "connection failed"
	}
}

func (r *run) exchange(ctx context.Context, n int, s *sample) error {
	route, body, err := r.body(n)
	if err != nil {
		return err
	}
	req, err := r.request(ctx, http.MethodPost, route, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		err = s.read(resp.Body)
	} else {
		err = statusError(resp.StatusCode)
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxLine)) // so that the connection can be reused
	return err
}

// read reads the events of a stream.
func (s *sample) read(body io.Reader) error {
	var last time.Time
	texts := 0
	lines := bufio.NewScanner(body)
	lines.Buffer(make([]byte, 0, 16<<10), maxLine)
	for lines.Scan() {
		data, isData := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !isData {
			continue
		}
		now := time.Now()
		if data = bytes.TrimSpace(data); string(data) == "[DONE]" {
			if s.completion == 0 {
				s.completion = texts
			}
			return nil
		}
		var e event
		if err := json.Unmarshal(data, &e); err != nil || len(e.Error) > 0 && string(e.Error) != "null" {
			return errInStream
		}
		s.count(&e)
		if !e.text() {
			continue
		}
		if texts++; texts == 1 {
			s.first = now.Sub(s.began)
		} else {
			s.gaps = append(s.gaps, now.Sub(last))
		}
		last = now
	}
	if err := lines.Err(); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return errCut
}

// text reports whether an event has something that the model wrote: text, thoughts, or a
// part of a tool call.
func (e *event) text() bool {
	for _, c := range e.Choices {
		if d := &c.Delta; c.Text != "" || d.Content != "" || d.Reasoning != "" || d.ReasoningContent != "" || len(d.ToolCalls) > 0 {
			return true
		}
	}
	return false
}

// count copies the token counts of an event.
func (s *sample) count(e *event) {
	if e.Usage == nil {
		return
	}
	s.prompt, s.completion = e.Usage.Prompt, e.Usage.Completion
	if e.Usage.Details != nil {
		s.cached = e.Usage.Details.Cached
	}
}
