package clients

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
)

// prompt has letters of two to four bytes, quotes and line ends: a proxy that
// re-encodes bodies would change it.
const prompt = "Tell me of the sea, the \"☕ 🙂\" and\n\tgüne水 \\ at the shore; then of the wind, the harbour and its ships."

// goCase is OpenAI's Go client with the proxy and with one engine alone as
// servers.
type goCase struct {
	*front
	connector      string
	proxied, alone openai.Client
}

func newGoClient(url string, opts ...option.RequestOption) openai.Client {
	return openai.NewClient(append([]option.RequestOption{
		option.WithBaseURL(url + "/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0),
	}, opts...)...)
}

func TestOpenAIGo(t *testing.T) {
	for _, connector := range connectors {
		t.Run(connector, func(t *testing.T) {
			t.Parallel()
			f := startDemo(t, connector)
			c := &goCase{front: f, connector: connector, proxied: newGoClient(f.URL), alone: newGoClient(f.Alone)}
			t.Run("models", c.models)
			t.Run("translation", c.translation)
			t.Run("completion", c.completion)
			t.Run("chat", c.chat)
			t.Run("completion stream", c.completionStream)
			t.Run("chat stream", c.chatStream)
			t.Run("several choices", c.choices)
			t.Run("prompt list", c.promptList)
			t.Run("responses", c.responses)
			t.Run("responses over a WebSocket", c.socket)
			t.Run("errors", c.errors)
			t.Run("cancel stream", c.cancelStream)
			t.Run("cancel unary", c.cancelUnary)
			t.Run("nothing left", c.waitIdle)
		})
	}
}

func completionParams(maxTokens int64) openai.CompletionNewParams {
	return openai.CompletionNewParams{
		Model:     "sim",
		Prompt:    openai.CompletionNewParamsPromptUnion{OfString: openai.String(prompt)},
		MaxTokens: openai.Int(maxTokens),
	}
}

func chatParams(maxTokens int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model: "sim",
		Messages: []openai.ChatCompletionMessageParamUnion{
			openai.SystemMessage("You answer in riddles."),
			openai.UserMessage("Who are you?"),
			openai.AssistantMessage("One who asks."),
			openai.UserMessage(prompt),
		},
		MaxTokens: openai.Int(maxTokens),
	}
}

func (c *goCase) models(t *testing.T) {
	page, err := c.proxied.Models.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Data) != 1 || page.Data[0].ID != "sim" {
		t.Errorf("models: %s", page.RawJSON())
	}
}

func (c *goCase) translation(t *testing.T) {
	sound := strings.Repeat("RIFF\r\n--\x00\r\n\r\n", 9000)
	create := func(client openai.Client) (string, error) {
		got, err := client.Audio.Translations.New(t.Context(), openai.AudioTranslationNewParams{
			Model: "sim", File: openai.File(strings.NewReader(sound), `a "b".wav`, "audio/wav"),
		})
		if err != nil {
			return "", err
		}
		return got.Text, nil
	}
	got, err := create(c.proxied)
	if c.connector != "vllm-nixl" { // the other engines have no such route
		var refused *openai.Error
		if !errors.As(err, &refused) || refused.StatusCode != 501 || refused.Code != "not_implemented" {
			t.Errorf("got %q, %v", got, err)
		}
		return
	}
	want, aloneErr := create(c.alone)
	if err != nil || aloneErr != nil || got != want || !strings.Contains(got, fmt.Sprintf("a sound of %d bytes", len(sound))) {
		t.Errorf("got %q, %v, want %q, %v", got, err, want, aloneErr)
	}
}

func (c *goCase) completion(t *testing.T) {
	got, err := c.proxied.Completions.New(t.Context(), completionParams(16))
	if err != nil {
		t.Fatal(err)
	}
	want, err := c.alone.Completions.New(t.Context(), completionParams(16))
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Choices) != 1 || got.Choices[0].Text == "" || got.Choices[0].Text != want.Choices[0].Text {
		t.Errorf("choices %+v, one engine alone %+v", got.Choices, want.Choices)
	}
	checkUsage(t, got.Usage, want.Usage, 16)
	if got.Choices[0].FinishReason != "length" || got.ID == "" || got.Model != "sim" {
		t.Errorf("answer: %s", got.RawJSON())
	}
}

func (c *goCase) chat(t *testing.T) {
	got, err := c.proxied.Chat.Completions.New(t.Context(), chatParams(16))
	if err != nil {
		t.Fatal(err)
	}
	want, err := c.alone.Chat.Completions.New(t.Context(), chatParams(16))
	if err != nil {
		t.Fatal(err)
	}
	text := got.Choices[0].Message.Content
	if text == "" || text != want.Choices[0].Message.Content {
		t.Errorf("got text %q, want %q as from one engine alone", text, want.Choices[0].Message.Content)
	}
	checkUsage(t, got.Usage, want.Usage, 16)
	if got.Choices[0].FinishReason != "length" || got.Choices[0].Message.Role != "assistant" || got.ID == "" {
		t.Errorf("answer: %s", got.RawJSON())
	}
}

func checkUsage(t *testing.T, got, want openai.CompletionUsage, completion int64) {
	t.Helper()
	if got.PromptTokens != want.PromptTokens || got.CompletionTokens != completion ||
		got.TotalTokens != got.PromptTokens+got.CompletionTokens || got.PromptTokens == 0 {
		t.Errorf("usage: %s, one engine alone %s", got.RawJSON(), want.RawJSON())
	}
}

func (c *goCase) completionStream(t *testing.T) {
	want, err := c.alone.Completions.New(t.Context(), completionParams(24))
	if err != nil {
		t.Fatal(err)
	}
	stream := c.proxied.Completions.NewStreaming(t.Context(), completionParams(24))
	defer stream.Close()
	var text strings.Builder
	events, finish := 0, ""
	for stream.Next() {
		events++
		for _, choice := range stream.Current().Choices {
			text.WriteString(choice.Text)
			finish += string(choice.FinishReason)
		}
	}
	if stream.Err() != nil {
		t.Fatal(stream.Err())
	}
	if text.String() != want.Choices[0].Text || finish != "length" || events < 24 {
		t.Errorf("%d events, finish %q, text %q, want %q as from one engine alone", events, finish, text.String(), want.Choices[0].Text)
	}
}

func (c *goCase) chatStream(t *testing.T) {
	want, err := c.alone.Chat.Completions.New(t.Context(), chatParams(24))
	if err != nil {
		t.Fatal(err)
	}
	for _, withUsage := range []bool{true, false} {
		params := chatParams(24)
		if withUsage {
			params.StreamOptions.IncludeUsage = openai.Bool(true)
		}
		stream := c.proxied.Chat.Completions.NewStreaming(t.Context(), params)
		var acc openai.ChatCompletionAccumulator
		for stream.Next() {
			if !acc.AddChunk(stream.Current()) {
				t.Fatalf("chunk does not fit: %s", stream.Current().RawJSON())
			}
		}
		if stream.Err() != nil {
			t.Fatal(stream.Err())
		}
		if len(acc.Choices) != 1 || acc.Choices[0].Message.Content != want.Choices[0].Message.Content || acc.Choices[0].FinishReason != "length" {
			t.Errorf("choices %+v, one engine alone %+v", acc.Choices, want.Choices)
		}
		switch {
		case withUsage && (acc.Usage.PromptTokens != want.Usage.PromptTokens || acc.Usage.CompletionTokens != 24 || acc.Usage.TotalTokens != want.Usage.TotalTokens):
			t.Errorf("usage %+v, one engine alone %+v", acc.Usage, want.Usage)
		case !withUsage && acc.Usage.TotalTokens != 0:
			t.Errorf("usage %+v in a stream without include_usage", acc.Usage)
		}
	}
}

// choices requests two choices. Engines that answer such a request alone do so; sglang's
// cannot, and the error says that.
func (c *goCase) choices(t *testing.T) {
	params := completionParams(8)
	params.N = openai.Int(2)
	got, err := c.proxied.Completions.New(t.Context(), params)
	if c.connector == "sglang" {
		checkError(t, err, 400, "n", "")
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	want, err := c.alone.Completions.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	checkTexts(t, got, want)
}

func (c *goCase) promptList(t *testing.T) {
	params := completionParams(8)
	params.Prompt = openai.CompletionNewParamsPromptUnion{OfArrayOfStrings: []string{"The harbour", prompt}}
	got, err := c.proxied.Completions.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	want, err := c.alone.Completions.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	checkTexts(t, got, want)
}

func checkTexts(t *testing.T, got, want *openai.Completion) {
	t.Helper()
	texts := func(c *openai.Completion) (texts []string) {
		for _, choice := range c.Choices {
			texts = append(texts, choice.Text)
		}
		return texts
	}
	if g, w := texts(got), texts(want); len(g) != 2 || !slices.Equal(g, w) {
		t.Errorf("texts %q, want %q as from one engine alone", g, w)
	}
}

// responses uses the newer API.
func (c *goCase) responses(t *testing.T) {
	params := responses.ResponseNewParams{
		Model:           "sim",
		Input:           responses.ResponseNewParamsInputUnion{OfString: openai.String(prompt)},
		MaxOutputTokens: openai.Int(16),
	}
	got, err := c.proxied.Responses.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	want, err := c.alone.Responses.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	if got.OutputText() == "" || got.OutputText() != want.OutputText() {
		t.Errorf("got text %q, want %q as from one engine alone", got.OutputText(), want.OutputText())
	}
	stream := c.proxied.Responses.NewStreaming(t.Context(), params)
	defer stream.Close()
	var text strings.Builder
	last := ""
	for stream.Next() {
		last = stream.Current().Type
		if last == "response.output_text.delta" {
			text.WriteString(stream.Current().Delta)
		}
	}
	if stream.Err() != nil || text.String() != want.OutputText() {
		t.Errorf("stream: text %q, want %q as from one engine alone, error %v", text.String(), want.OutputText(), stream.Err())
	}
	if last != "response.completed" && last != "response.incomplete" {
		t.Errorf("the stream ends with %q", last)
	}
}

// socket asks for two responses over one WebSocket, and for one that gets an error.
func (c *goCase) socket(t *testing.T) {
	conn, err := c.proxied.Beta.Responses.Connect(t.Context(), openai.BetaResponseConnectionOptions{})
	if err != nil {
		t.Fatal(err)
	}
	message := func(model string) json.RawMessage {
		input, _ := json.Marshal(prompt)
		return json.RawMessage(fmt.Sprintf(`{"type":"response.create","model":%q,"input":%s,"max_output_tokens":16}`, model, input))
	}
	// ask returns the text and the type of the last event.
	ask := func(model string) (text, last string) {
		t.Helper()
		if err := conn.SendRaw(t.Context(), message(model)); err != nil {
			t.Fatal(err)
		}
		for {
			raw, err := conn.RecvRaw(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			var event struct{ Type, Delta string }
			if err := json.Unmarshal(raw, &event); err != nil {
				t.Fatal(err)
			}
			switch event.Type {
			case "response.output_text.delta":
				text += event.Delta
			case "response.completed", "response.incomplete", "error":
				return text, event.Type
			}
		}
	}
	if _, last := ask("nobody"); last != "error" {
		t.Errorf("unknown model: got %s", last)
	}
	want, err := c.alone.Responses.New(t.Context(), responses.ResponseNewParams{
		Model: "sim", Input: responses.ResponseNewParamsInputUnion{OfString: openai.String(prompt)}, MaxOutputTokens: openai.Int(16),
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if text, last := ask("sim"); text != want.OutputText() || last == "error" {
			t.Errorf("got %q, %s, want %q as from one engine alone", text, last, want.OutputText())
		}
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
}

func (c *goCase) errors(t *testing.T) {
	completion := func(change func(*openai.CompletionNewParams)) error {
		p := completionParams(4)
		change(&p)
		_, err := c.proxied.Completions.New(t.Context(), p)
		return err
	}
	tests := []struct {
		name        string
		err         error
		status      int
		param, code string
	}{
		{"bad field", completion(func(p *openai.CompletionNewParams) { p.MaxTokens = openai.Int(-1) }), 400, "max_tokens", ""},
		{"wrong type", completion(func(p *openai.CompletionNewParams) { p.SetExtraFields(map[string]any{"stream": "yes"}) }), 400, "stream", ""},
		{"unknown model", completion(func(p *openai.CompletionNewParams) { p.Model = "nobody" }), 404, "model", "model_not_found"},
		{"unknown model of a stream", func() error {
			p := chatParams(4)
			p.Model = "nobody"
			s := c.proxied.Chat.Completions.NewStreaming(t.Context(), p)
			for s.Next() {
			}
			return s.Err()
		}(), 404, "model", "model_not_found"},
		{"no such endpoint", c.proxied.Get(t.Context(), "nothing", nil, nil), 404, "", "not_found"},
		{"wrong method", c.proxied.Get(t.Context(), "completions", nil, nil), 405, "", "method_not_allowed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { checkError(t, tt.err, tt.status, tt.param, tt.code) })
	}
}

// checkError expects an error that the client can read; code "" accepts any.
func checkError(t *testing.T, err error, status int, param, code string) {
	t.Helper()
	var e *openai.Error
	if !errors.As(err, &e) {
		t.Fatalf("got error %v, want status %d", err, status)
	}
	if e.StatusCode != status || e.Param != param || code != "" && e.Code != code || e.Message == "" || e.Type == "" {
		t.Errorf("got status %d, error %s; want status %d, param %q, code %q", e.StatusCode, e.RawJSON(), status, param, code)
	}
	if e.Response.Header.Get("X-Request-Id") == "" {
		t.Error("no x-request-id")
	}
}

// cancelStream cancels in the middle of a stream with hundreds of tokens left:
// the events arrived before the answer was complete, and nothing continues
// afterwards.
func (c *goCase) cancelStream(t *testing.T) {
	c.waitIdle(t)
	aborted, cancelled := c.engines(t).Aborted, c.metric(t, "pdproxy_exchanges_total", `outcome="cancelled"`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream := c.proxied.Chat.Completions.NewStreaming(ctx, chatParams(1000))
	defer stream.Close()
	for range 4 {
		if !stream.Next() {
			t.Fatal("the stream ended: ", stream.Err())
		}
	}
	if n := c.engines(t).Running; n != 1 {
		t.Errorf("%d sequences run in the middle of one stream", n)
	}
	cancel()
	for stream.Next() {
	}
	if !errors.Is(stream.Err(), context.Canceled) {
		t.Errorf("got error %v", stream.Err())
	}
	c.waitIdle(t)
	if n := c.engines(t).Aborted - aborted; n != 1 {
		t.Errorf("got %d sequences aborted on the engines, want 1", n)
	}
	if n := c.metric(t, "pdproxy_exchanges_total", `outcome="cancelled"`) - cancelled; n != 1 {
		t.Errorf("got %v exchanges counted as cancelled, want 1", n)
	}
}

// cancelUnary cancels while prefill computes a long prompt.
func (c *goCase) cancelUnary(t *testing.T) {
	c.waitIdle(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		p := completionParams(16)
		p.Prompt.OfString = openai.String(strings.Repeat("of ships and harbours ", 5000))
		_, err := c.proxied.Completions.New(ctx, p)
		done <- err
	}()
	c.waitBusy(t, 1)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v", err)
	}
	c.waitIdle(t)
}
