package conformance

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// twoModels starts a fleet with one pair of engines for each of the models sim and sim2.
func twoModels(t *testing.T, connector string, names ...config.Model) *fleet {
	return startFleet(t, connector, fleetOptions{
		engine: func(role string, n int, c *enginesim.Config) {
			if n == 1 {
				c.Model = "sim2"
			}
		},
		config: func(c *config.Config) { c.Models = names },
	})
}

// modelOf returns the model that an answer names, also in its events.
func modelOf(a answer) string {
	_, rest, _ := strings.Cut(a.body, `"model":`)
	var name string
	_ = json.NewDecoder(strings.NewReader(rest)).Decode(&name) // "" for an answer without a model
	return name
}

// TestModelNames: requests for an alias get the answer of its model through both legs, and
// each process of a fleet sends a conversation of a split to the same model.
func TestModelNames(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := twoModels(t, connector, config.Model{Name: "chat", AliasOf: "sim"}, config.Model{Name: "both", Split: map[string]float64{"sim": 1, "sim2": 1}})
		for i := range 4 { // all workers in turn
			body := chat(fmt.Sprint("alias ", i), 5, i%2 == 0)
			f.right(f.try(chatPath, strings.Replace(body, `"sim"`, `"chat"`, 1)), chatPath, body)
		}
		chosen := map[string]int{}
		for i := range 12 {
			body, model := strings.Replace(chat(fmt.Sprint("conversation ", i), 3, false), `"sim"`, `"both"`, 1), ""
			for range 4 {
				a := f.try(chatPath, body)
				if a.status != 200 || model != "" && modelOf(a) != model {
					t.Fatalf("conversation %d: got %d from %q after %q: %s", i, a.status, modelOf(a), model, a.body)
				}
				model = modelOf(a)
			}
			chosen[model]++
		}
		if chosen["sim"] == 0 || chosen["sim2"] == 0 || len(chosen) != 2 {
			t.Errorf("conversations by model: %v", chosen)
		}
		if n := f.metric("pdproxy_model_choices_total", `requested="both"`, `model="sim2"`); n != float64(4*chosen["sim2"]) {
			t.Errorf("got %v choices of sim2, want %d", n, 4*chosen["sim2"])
		}
		if list := f.get("/v1/models"); !strings.Contains(list, `"id":"chat"`) || !strings.Contains(list, `"id":"both"`) {
			t.Errorf("got %s", list)
		}
		next := f.cfg
		next.Models = []config.Model{{Name: "chat", AliasOf: "sim2"}}
		if err := f.reload(&next); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			if a := f.try(chatPath, strings.Replace(chat("later", 3, false), `"sim"`, `"chat"`, 1)); modelOf(a) != "sim2" {
				t.Errorf("after the reload: got %d %s", a.status, a.body)
			}
		}
	})
}

// TestFallbackModel: when the engines of a model die, requests get whole answers of
// the fallback, from the first one on, and nothing of them stays on any engine.
func TestFallbackModel(t *testing.T) {
	eachConnector(t, func(t *testing.T, connector string) {
		f := twoModels(t, connector, config.Model{Name: "sim", Fallback: []string{"sim2"}})
		for i := range 4 {
			body := chat(fmt.Sprint("before ", i), 5, i%2 == 0)
			f.right(f.try(chatPath, body), chatPath, body)
		}
		f.prefill[0].Kill()
		f.decode[0].Kill()
		for i := range 8 {
			a := f.try(chatPath, chat(fmt.Sprint("after ", i), 5, i%2 == 0))
			if a.status != 200 || a.errors > 0 || a.text == "" || modelOf(a) != "sim2" {
				t.Fatalf("request %d: got %d with %d error events from %q: %s", i, a.status, a.errors, modelOf(a), a.body)
			}
		}
		if n := f.metric("pdproxy_fallbacks_total", `what="model"`); n != 8 {
			t.Errorf("got %v fallbacks, want 8", n)
		}
	})
}
