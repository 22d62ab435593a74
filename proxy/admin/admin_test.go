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
	"github.com/pdproxy/pdproxy/proxy/engine"
)

// noWorkers makes Handler add the routes of a coordinator.
type noWorkers struct{ Workers }

// testRoutes returns the routes of a process.
func testRoutes(w Workers) routes {
	return Handler(Options{
		Workers: w, Gatherer: prometheus.NewRegistry(), Ready: func(http.ResponseWriter, *http.Request) {}, Log: slog.New(slog.DiscardHandler),
	}).(routes)
}

// TestNoRoute: a request without a route gets an error in OpenAI's shape, and Allow if
// the path has other methods.
func TestNoRoute(t *testing.T) {
	for _, tt := range []struct {
		method, path string
		status       int
		code, allow  string
	}{
		{"GET", "/engines", 404, "not_found", ""},
		{"POST", "/nothing", 404, "not_found", ""},
		{"DELETE", "/", 405, "method_not_allowed", "GET, HEAD"},
		{"GET", "/v1/engines/", 404, "not_found", ""},
		{"GET", "//nothing", 404, "not_found", ""},
		{"GET", "/nothing/../" + strings.Repeat("x", 1000), 404, "not_found", ""},
		{"GET", "/v1/workers", 404, "not_found", ""}, // of a coordinator only
		{"GET", "/dashboard/nothing.js", 404, "not_found", ""},
		{"GET", "/dashboard/", 404, "not_found", ""},
		{"PUT", "/v1/engines", 405, "method_not_allowed", "GET, HEAD, POST"},
		{"GET", "/v1/drain", 405, "method_not_allowed", "POST"},
		{"GET", "/v1/engines/x", 405, "method_not_allowed", "DELETE"},
		{"GET", "/v1/engines/x/drain", 405, "method_not_allowed", "DELETE, POST"},
		{"OPTIONS", "/metrics", 405, "method_not_allowed", "GET, HEAD"},
		{"POST", "/dashboard/app.js", 405, "method_not_allowed", "GET, HEAD"},
	} {
		answer := httptest.NewRecorder()
		testRoutes(nil).ServeHTTP(answer, httptest.NewRequest(tt.method, tt.path, nil))
		var body struct {
			Error struct{ Message, Type, Code string }
		}
		err := json.Unmarshal(answer.Body.Bytes(), &body)
		if answer.Code != tt.status || err != nil || body.Error.Code != tt.code || body.Error.Message == "" || body.Error.Type == "" || len(body.Error.Message) > 400 {
			t.Errorf("%s %s: %d %s, %v", tt.method, tt.path, answer.Code, answer.Body, err)
		}
		if got := answer.Header(); got.Get("Allow") != tt.allow || got.Get("Content-Type") != "application/json" {
			t.Errorf("%s %s: %v, want Allow %q", tt.method, tt.path, got, tt.allow)
		}
	}
}

// TestIndex: GET / lists the endpoints, and each of them exists.
func TestIndex(t *testing.T) {
	mux := testRoutes(noWorkers{})
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

// TestDrainRefused: the drain of an unknown engine, or with a bad parameter, is an error.
func TestDrainRefused(t *testing.T) {
	mux := Handler(Options{
		Registry: engine.New(engine.Options{}), Gatherer: prometheus.NewRegistry(), Ready: func(http.ResponseWriter, *http.Request) {}, Log: slog.New(slog.DiscardHandler),
	})
	for _, tt := range []struct {
		method, path string
		status       int
		code, param  string
	}{
		{"POST", "/v1/engines/x/drain", 404, "unknown_engine", "name"},
		{"POST", "/v1/engines/x/drain?move=true", 404, "unknown_engine", "name"},
		{"POST", "/v1/engines/x/drain?move=1", 400, "bad_value", "move"},
		{"DELETE", "/v1/engines/x/drain", 404, "unknown_engine", "name"},
		{"DELETE", "/v1/engines/x?drain=-1s", 400, "bad_value", "drain"},
	} {
		answer := httptest.NewRecorder()
		mux.ServeHTTP(answer, httptest.NewRequest(tt.method, tt.path, nil))
		var body struct{ Error struct{ Code, Param string } }
		if err := json.Unmarshal(answer.Body.Bytes(), &body); err != nil || answer.Code != tt.status || body.Error.Code != tt.code || body.Error.Param != tt.param {
			t.Errorf("%s %s: %d %s, %v", tt.method, tt.path, answer.Code, answer.Body, err)
		}
	}
}
