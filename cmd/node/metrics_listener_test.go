package node

import (
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestMetricsListener: metrics.listen serves GET /metrics without a token and nothing else,
// and refuses web pages.
func TestMetricsListener(t *testing.T) {
	n := servingNode(t, func(c *config.Config) { c.Metrics.Listen = "127.0.0.1:0" })
	for _, tt := range []struct {
		method, path, host, origin string
		status                     int
	}{
		{"GET", "/metrics", "", "", 200},
		{"GET", "/metrics", "localhost", "", 200},
		{"GET", "/metrics", "evil.test", "", 403}, // DNS rebinding
		{"GET", "/metrics", "", "http://evil.test", 403},
		{"HEAD", "/metrics", "", "", 200},
		{"GET", "/metrics?for=coordinator", "", "", 200}, // the wire format is for coordinators, at the admin address
		{"POST", "/metrics", "", "", 405},
		{"GET", "/", "", "", 404},
		{"GET", "/healthz", "", "", 404},
		{"GET", "/v1/engines", "", "", 404},
		{"POST", "/v1/drain", "", "", 404},
		{"GET", "/metrics/", "", "", 404},
	} {
		req, err := http.NewRequest(tt.method, "http://"+n.MetricsAddr().String()+tt.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if req.Host = tt.host; tt.host == "" {
			req.Host = n.MetricsAddr().String()
		}
		if tt.origin != "" {
			req.Header.Set("Origin", tt.origin)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != tt.status {
			t.Errorf("%+v: status %d, %v: %.200s", tt, resp.StatusCode, err, body)
		}
		if allow := resp.Header.Get("Allow"); tt.status == 405 && allow != "GET, HEAD" {
			t.Errorf("%+v: Allow: %s", tt, allow)
		}
		if kind := resp.Header.Get("Content-Type"); tt.status == 200 && !strings.HasPrefix(kind, "text/plain; version=0.0.4") {
			t.Errorf("%+v: Content-Type: %s", tt, kind)
		}
		if shown := strings.Contains(string(body), `pdproxy_build_info{goversion="`); shown != (tt.status == 200 && tt.method == "GET") {
			t.Errorf("%+v: metrics shown: %v", tt, shown)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

// TestScrapeOutlivesItsListener: when a successor takes over metrics.listen, a scrape that
// runs gets its whole answer. run returns after that.
func TestScrapeOutlivesItsListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	entered, proceed, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	m := &metricsListener{listener: l, log: slog.New(slog.DiscardHandler), server: &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(entered)
		<-proceed
		_, _ = io.WriteString(w, "up 1\n") // the client reports an error
	})}}
	go func() {
		defer close(ended)
		m.run(t.Context())
	}()
	go func() {
		<-entered
		m.retire()
		if c, err := net.Dial("tcp", l.Addr().String()); err == nil {
			c.Close()
			t.Error("the address still accepts connections")
		}
		close(proceed)
	}()
	client := &http.Client{Transport: &http.Transport{}}
	resp, err := client.Get("http://" + l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if string(body) != "up 1\n" || err != nil {
		t.Errorf("got %q, %v", body, err)
	}
	client.CloseIdleConnections()
	<-ended
}

// TestRoleGauges: a configured model has gauges before its engines are ready.
func TestRoleGauges(t *testing.T) {
	n := servingNode(t, func(c *config.Config) {
		c.Metrics.Listen = "127.0.0.1:0"
		for _, role := range []string{"prefill", "decode"} {
			e := config.DefaultEngine()
			e.Name, e.URL, e.Role, e.Connector, e.Model = role, "http://127.0.0.1:1", role, "vllm-nixl", "llama"
			c.Engines = append(c.Engines, e)
		}
	})
	resp, err := http.Get("http://" + n.MetricsAddr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		`pdproxy_role_engines_ready{model="llama",role="prefill"} 0`, `pdproxy_role_engines_ready{model="llama",role="decode"} 0`,
		`pdproxy_role_saturation_seconds{model="llama",role="prefill"} 0`, `pdproxy_role_requests_waiting{model="llama",role="decode"} 0`,
	} {
		if !strings.Contains(string(body), line+"\n") {
			t.Errorf("no line %s", line)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}
