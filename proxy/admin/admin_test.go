package admin

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// noWorkers makes Handler add the routes of a coordinator.
type noWorkers struct{ Workers }

// TestIndex: GET / lists the endpoints, and each of them exists.
func TestIndex(t *testing.T) {
	mux := Handler(Options{
		Workers: noWorkers{}, Gatherer: prometheus.NewRegistry(), Ready: func(http.ResponseWriter, *http.Request) {}, Log: slog.New(slog.DiscardHandler),
	}).(*http.ServeMux)
	answer := httptest.NewRecorder()
	mux.ServeHTTP(answer, httptest.NewRequest("GET", "/", nil))
	var list struct {
		Endpoints []struct{ Endpoint, Does string }
	}
	if err := json.Unmarshal(answer.Body.Bytes(), &list); err != nil || answer.Code != 200 || len(list.Endpoints) != len(endpoints) {
		t.Fatalf("%d %s, %v", answer.Code, answer.Body, err)
	}
	for _, e := range list.Endpoints {
		method, path, _ := strings.Cut(e.Endpoint, " ")
		path = strings.NewReplacer("{name}", "x", "{id}", "x").Replace(path)
		if _, pattern := mux.Handler(httptest.NewRequest(method, path, nil)); pattern != e.Endpoint {
			t.Errorf("%s is served by %q", e.Endpoint, pattern)
		}
	}
}

// TestBadEngine: the message for a refused engine names the keys of the object that was
// sent, not those of a file.
func TestBadEngine(t *testing.T) {
	_, err := config.EngineFromJSON([]byte(`{"nam":"x","url":"http://h","role":"both"}`))
	got := badEngine(err)
	if got.Status != 400 || got.Param != "nam" || !strings.Contains(got.Message, "nam: unknown key, did you mean name?") ||
		!strings.Contains(got.Message, "name: is required") || strings.Contains(got.Message, "config:") || strings.Contains(got.Message, "engine[0]") {
		t.Errorf("%+v", got)
	}
	_, err = config.EngineFromJSON([]byte(`[1]`))
	if got := badEngine(err); !strings.HasPrefix(got.Message, "invalid JSON: want one object") || got.Param != "" {
		t.Errorf("%+v", got)
	}
}
