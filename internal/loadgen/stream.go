package loadgen

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"time"
)

// answer is the answer to one request, while it is read.
type answer struct {
	began time.Time // times count from here

	first      time.Duration // until the first event that the model wrote; 0 if there was none
	gaps       []float64     // between such events, in ms
	prompt     int           // tokens, according to the answer
	cached     int
	completion int // the number of such events, if the answer does not report it

	keep bool
	text strings.Builder // the text of the model, if keep is true
}

// event holds the parts of one chunk of a stream that are read. A chunk of chat or
// completions has choices; an event of the responses API has a type.
type event struct {
	Choices []struct {
		Text  string
		Delta delta
	}
	Usage *usage
	Error json.RawMessage

	Type     string
	Delta    json.RawMessage // text, in most events that have it
	Response *struct {
		Usage *usage
	}
}

// delta is the text that a chunk adds to a chat answer.
type delta struct {
	Content string
	Refusal string
	// Thoughts of reasoning models. vLLM names them reasoning since 0.12
	// (entrypoints/openai/engine/protocol.py, DeltaMessage); SGLang and older
	// releases of vLLM name them reasoning_content.
	Reasoning        string
	ReasoningContent string            `json:"reasoning_content"`
	ToolCalls        []json.RawMessage `json:"tool_calls"`
	// The older form of a tool call.
	FunctionCall json.RawMessage `json:"function_call"`
}

// usage has the names of chat and completions, and those of responses.
type usage struct {
	Prompt     int           `json:"prompt_tokens"`
	Completion int           `json:"completion_tokens"`
	Details    *usageDetails `json:"prompt_tokens_details"`

	Input        int           `json:"input_tokens"`
	Output       int           `json:"output_tokens"`
	InputDetails *usageDetails `json:"input_tokens_details"`
}

type usageDetails struct {
	Cached int `json:"cached_tokens"`
}

// maxLine bounds one line of a stream, in bytes.
const maxLine = 1 << 20

// read reads the events of a stream.
func (a *answer) read(body io.Reader) error {
	var last time.Time
	written := 0
	err := ReadEvents(body, make([]byte, 0, 16<<10), func(data []byte) (end bool, err error) {
		now := time.Now()
		var e event
		if err := json.Unmarshal(data, &e); err != nil || e.failed() {
			return false, errInStream
		}
		a.count(&e)
		if e.written() {
			if written++; written == 1 {
				a.first = now.Sub(a.began)
			} else {
				a.gaps = append(a.gaps, millis(now.Sub(last)))
			}
			last = now
			if a.keep {
				a.text.WriteString(e.said())
			}
		}
		return e.Type == "response.completed" || e.Type == "response.incomplete", nil
	})
	if err == nil && a.completion == 0 {
		a.completion = written
	}
	return err
}

// ReadEvents calls each with the data of each event of a stream, up to [DONE] or to the event for
// which each returns end. A stream that ends before is an error. buffer is a buffer for the lines,
// and its contents are lost; longer lines get a new one. ReadEvents may have read more of the body
// than these events.
func ReadEvents(body io.Reader, buffer []byte, each func(data []byte) (end bool, err error)) error {
	lines := bufio.NewScanner(body)
	lines.Buffer(buffer, maxLine)
	for lines.Scan() {
		data, isData := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !isData {
			continue
		}
		if data = bytes.TrimSpace(data); string(data) == "[DONE]" {
			return nil
		}
		if end, err := each(data); end || err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return errCut
}

// present reports whether a member is there and not null.
func present(v json.RawMessage) bool { return len(v) > 0 && string(v) != "null" }

// failed reports whether an event reports that the answer failed.
func (e *event) failed() bool {
	return present(e.Error) || e.Type == "error" || e.Type == "response.failed"
}

// written reports whether an event has something that the model wrote: text, thoughts, a
// refusal, or a part of a tool call.
func (e *event) written() bool {
	if strings.HasPrefix(e.Type, "response.") {
		return strings.HasSuffix(e.Type, ".delta") && present(e.Delta) && string(e.Delta) != `""`
	}
	for i := range e.Choices {
		c := &e.Choices[i]
		if d := &c.Delta; c.Text != "" || d.Content != "" || d.Refusal != "" || d.Reasoning != "" || d.ReasoningContent != "" ||
			len(d.ToolCalls) > 0 || present(d.FunctionCall) {
			return true
		}
	}
	return false
}

// said returns the text of the answer in an event, without thoughts and tool calls.
func (e *event) said() (text string) {
	if e.Type == "response.output_text.delta" {
		_ = json.Unmarshal(e.Delta, &text) // anything else than text is none
		return text
	}
	for i := range e.Choices {
		text += e.Choices[i].Text + e.Choices[i].Delta.Content
	}
	return text
}

// count copies the token counts of an event.
func (a *answer) count(e *event) {
	u := e.Usage
	if e.Response != nil {
		u = e.Response.Usage
	}
	if u == nil {
		return
	}
	a.prompt, a.completion = u.Prompt+u.Input, u.Completion+u.Output
	for _, d := range []*usageDetails{u.Details, u.InputDetails} {
		if d != nil {
			a.cached = d.Cached
		}
	}
}
