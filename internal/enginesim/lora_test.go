package enginesim

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
)

// TestLoRA: adapters are models. A rank runs at most MaxLoRAs adapters: a request of another
// adapter waits, and one of the base model does not. The metric has a sample for each combination
// of adapters, and none before the first request.
func TestLoRA(t *testing.T) {
	e := startAsConfigured(t, Config{Model: "tiny", DecodeUsPerToken: 10_000, LoRA: LoRAConfig{Modules: []string{"sql", "chat"}}})
	get := func(path string) string {
		r, err := http.Get(e.URL() + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		return string(b)
	}
	if cards := get("/v1/models"); !strings.Contains(cards, `"id":"sql"`) || !strings.Contains(cards, `"parent":"tiny"`) {
		t.Errorf("models %s", cards)
	}
	if strings.Contains(get("/metrics"), "lora_requests_info{") {
		t.Error("adapters before the first request")
	}
	ask := func(ctx context.Context, model, more string) (*http.Response, error) {
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+"/v1/completions",
			strings.NewReader(`{"model":"`+model+`","prompt":"a","ignore_eos":true,`+more+`}`))
		req.Header.Set("Content-Type", "application/json")
		return http.DefaultClient.Do(req)
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	held, err := ask(ctx, "sql", `"max_tokens":60000,"stream":true`)
	if err != nil {
		t.Fatal(err)
	}
	go func() { // an engine whose stream nobody reads makes no further step
		defer held.Body.Close()
		_, _ = io.Copy(io.Discard, held.Body)
	}()
	// The engine sends the head of the answer before the scheduler runs the request.
	eventually(t, "sql runs", func() bool { return strings.Contains(get("/metrics"), `running_lora_adapters="sql"`) })
	answered := make(chan int, 1)
	go func() {
		status := 0
		if r, err := ask(t.Context(), "chat", `"max_tokens":1`); err == nil {
			status = r.StatusCode
			r.Body.Close()
		}
		answered <- status
	}()
	const full = `max_lora="1",running_lora_adapters="sql",waiting_lora_adapters="chat"`
	eventually(t, "chat waits for sql", func() bool { return strings.Contains(get("/metrics"), full) })
	for _, model := range []string{"sql", "tiny"} {
		r, err := ask(t.Context(), model, `"max_tokens":1`)
		if err != nil || r.StatusCode != 200 {
			t.Fatalf("%s: %v, %v", model, r, err)
		}
		r.Body.Close()
	}
	select {
	case status := <-answered:
		t.Fatalf("chat ran beside sql: status %d", status)
	default:
	}
	leave()
	if status := <-answered; status != 200 {
		t.Errorf("chat got status %d after the end of sql", status)
	}
	idle := `max_lora="1",running_lora_adapters="",waiting_lora_adapters=""`
	eventually(t, "no adapter is there", func() bool { return strings.Contains(get("/metrics"), idle) })
	if !strings.Contains(get("/metrics"), full) {
		t.Error("the earlier combination is gone")
	}
	if _, err := New(Config{Connector: ConnectorSGLang, LoRA: LoRAConfig{Modules: []string{"sql"}}}); err == nil {
		t.Error("sglang has adapters")
	}
}
