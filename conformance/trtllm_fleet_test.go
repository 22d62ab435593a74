package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// foreignWorker is a worker of TensorRT-LLM's own fleet. Our coordinator places
// its requests, and it sends both legs itself.
type foreignWorker struct {
	base   string // base URL of the coordinator's routes
	client *http.Client
	token  string // of fleet.listen; empty: none is needed
	packed bool   // it uses MessagePack
}

// send sends one request to the coordinator.
func (w *foreignWorker) send(method, path, media string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequest(method, w.base+path, body)
	if err != nil {
		return nil, err
	}
	if media != "" {
		req.Header.Set("Content-Type", media)
	}
	if w.token != "" {
		req.Header.Set("Authorization", "Bearer "+w.token)
	}
	return w.client.Do(req)
}

// ask calls a route of the coordinator.
func (w *foreignWorker) ask(path string, body map[string]any) (answer map[string]any, err error) {
	send, media := []byte(nil), "application/json"
	if w.packed {
		media = "application/msgpack"
		send, err = msgp.AppendMapStrIntf(nil, body)
	} else {
		send, err = json.Marshal(body)
	}
	if err != nil {
		return nil, err
	}
	resp, err := w.send(http.MethodPost, path, media, bytes.NewReader(send))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return nil, err
	case resp.StatusCode != 200 || resp.Header.Get("Content-Type") != media:
		return nil, fmt.Errorf("%s: %d %s %q", path, resp.StatusCode, resp.Header.Get("Content-Type"), text)
	case w.packed:
		answer, _, err = msgp.ReadMapStrIntfBytes(text, nil)
	default:
		d := json.NewDecoder(bytes.NewReader(text))
		d.UseNumber()
		err = d.Decode(&answer)
	}
	return answer, err
}

// leg sends one leg to a server.
func (w *foreignWorker) leg(server string, body map[string]any) (answer map[string]any, err error) {
	send, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	resp, err := w.client.Post("http://"+server+"/v1/completions", "application/json", bytes.NewReader(send))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	d := json.NewDecoder(resp.Body)
	d.UseNumber()
	if err := d.Decode(&answer); err != nil || resp.StatusCode != 200 {
		return nil, fmt.Errorf("leg to %s: %d %v", server, resp.StatusCode, err)
	}
	return answer, nil
}

// complete serves one prompt on two engines, with a separate id.
func (w *foreignWorker) complete(prompt string, id int64) (text string, err error) {
	place := func(role, exclude string) (string, error) {
		body := map[string]any{"role": role, "routing_key": "conv-" + fmt.Sprint(id%3), "req_id": id}
		if exclude != "" {
			body["exclude_server"] = exclude
		}
		a, err := w.ask("/select", body)
		if err == nil && fmt.Sprint(a["req_id"]) != fmt.Sprint(id) {
			err = fmt.Errorf("the answer to id %d has id %v", id, a["req_id"])
		}
		server, _ := a["server"].(string)
		return server, err
	}
	ctx, err := place("context", "")
	if err != nil {
		return "", err
	}
	first, err := w.leg(ctx, map[string]any{"model": "sim", "prompt": prompt, "max_tokens": 8,
		"disaggregated_params": map[string]any{"request_type": "context_only", "disagg_request_id": id, "schedule_style": 0}})
	if err != nil {
		return "", err
	}
	if _, err := w.ask("/finish", map[string]any{"role": "context", "req_id": id, "success": true}); err != nil {
		return "", err
	}
	gen, err := place("generation", ctx)
	if err != nil {
		return "", err
	}
	if _, err := w.ask("/renew", map[string]any{"role": "gen", "req_id": id}); err != nil {
		return "", err
	}
	params := first["choices"].([]any)[0].(map[string]any)["disaggregated_params"].(map[string]any)
	params["request_type"] = "generation_only"
	second, err := w.leg(gen, map[string]any{"model": "sim", "prompt": first["prompt_token_ids"], "max_tokens": 8, "disaggregated_params": params})
	if err != nil {
		return "", err
	}
	text, _ = second["choices"].([]any)[0].(map[string]any)["text"].(string)
	_, err = w.ask("/finish", map[string]any{"role": "generation", "req_id": id, "success": true})
	return text, err
}

// TestTRTLLMFleetWorkers: our coordinator places the requests of TensorRT-LLM's
// own fleet workers, in both encodings and together with our own traffic. Texts
// are right, ids above 2^53 are exact, and no reservation remains.
func TestTRTLLMFleetWorkers(t *testing.T) {
	for _, packed := range []bool{false, true} {
		t.Run(fmt.Sprint("msgpack ", packed), func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorTRTLLM, fleetOptions{prefill: 2, decode: 2, config: func(c *config.Config) {
				c.Fleet.Listen = "127.0.0.1:0"
				c.Policy.Place = "conversation"
			}})
			w := &foreignWorker{base: "http://" + f.front.FleetAddr().String(), client: f.client, token: f.token, packed: packed}
			prompt := func(n int) string { return fmt.Sprintf("%d. %s", n, long) }
			var wg sync.WaitGroup
			for g := range 4 {
				wg.Go(func() {
					for n := range 5 {
						at := g*5 + n
						text, err := w.complete(prompt(at), 1<<60+int64(at)*1025)
						body := fmt.Sprintf(`{"model":"sim","prompt":%q,"max_tokens":8}`, prompt(at))
						want := f.post(context.Background(), f.alone.URL(), "/v1/completions", body)
						if err != nil || want.text == "" || text != want.text {
							t.Errorf("request %d: %q, want %q: %v", at, text, want.text, err)
						}
						if own := f.try("/v1/completions", body); own.text != want.text {
							t.Errorf("our own answer to %d: %d %q", at, own.status, own.text)
						}
					}
				})
			}
			wg.Wait()
			if _, err := w.ask("/select", map[string]any{"role": "ctx", "routing_key": nil, "req_id": int64(1) << 50}); err != nil {
				t.Fatal(err)
			}
			f.eventually("the reservation alone is open", func() bool { return f.metric("pdproxy_leases_open") == 1 })
			if _, err := w.ask("/finish", map[string]any{"role": "ctx", "req_id": int64(1) << 50, "success": false}); err != nil {
				t.Fatal(err)
			}
			resp, err := w.send(http.MethodGet, "/cluster_info", "", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			info, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if !strings.Contains(string(info), `"is_ready":true`) || !strings.Contains(string(info), f.decode[1].Addr()) {
				t.Errorf("%s", info)
			}
		})
	}
}
