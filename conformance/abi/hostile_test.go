package abi

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// scrape reads /metrics with Prometheus' own parser.
func (n *node) scrape() (families int, size int64) {
	n.t.Helper()
	resp, err := n.client.Get(n.node.AdminURL() + "/metrics")
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	body := &counted{Reader: resp.Body}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	read, err := parser.TextToMetricFamilies(body)
	if err != nil || resp.StatusCode != http.StatusOK || read["pdproxy_exchanges_total"] == nil {
		n.t.Fatalf("/metrics: status %d, %d families, %v", resp.StatusCode, len(read), err)
	}
	return len(read), body.n
}

// TestMetricsSurviveAHostilePlugin: long names, colliding names and too many
// names are rejected with a status, also after reloads, and /metrics remains
// valid.
func TestMetricsSurviveAHostilePlugin(t *testing.T) {
	define := "request_headers: call proxy_define_metric "
	script := "[s]\n" +
		define + "2 \"h\" out\n" + define + "0 \"h_count\" out\n" + define + "0 \"h_sum\" out\n" + define + "1 \"h_bucket\" out\n" +
		define + "0 \"c_count\" out\n" + define + "2 \"c\" out\n" + define + "0 \"a.b\" out\n" + define + "0 \"a_b\" out\n" +
		define + "0 fill:201 out\n" + define + "0 fill:16777216 out\n" + define + "0 fill:200 out\ndelete: say gone\n"
	other := "[s]\n" + define + "0 \"h_count\" out\n" + define + "1 \"a.b\" out\n" + define + "0 \"a-b\" out\ndelete: say gone\n"
	n := start(t, options{plugins: []config.Plugin{scripted(t, "bomb", script), scripted(t, "other", other)}})
	n.fine(n.post("s"))
	got := strings.Join(with(n.deleted("s"), "request_headers proxy_define_metric"), " ")
	// bomb: h, c_count, a.b and the name of 200 bytes; other: nothing.
	if ok := strings.Count(got, "=0 "); ok != 4 || strings.Count(got, "=2 0") != 10 {
		t.Errorf("got %d defined metrics, want 4: %q", ok, got)
	}
	n.scrape()

	// Versions that define other names each time.
	for version := range 4 {
		many := "[s]\n"
		for i := range 400 {
			many += fmt.Sprintf("request_headers: quiet proxy_define_metric 0 \"v%d_%d\" out\n", version, i)
		}
		if err := n.reload(func(c *config.Config) { c.Plugins = []config.Plugin{scripted(t, "bomb", many)} }); err != nil {
			t.Fatal(err)
		}
		n.fine(n.post("s"))
	}
	if families, size := n.scrape(); families > 1100 || size > 1<<20 {
		t.Errorf("/metrics has %d families in %d bytes", families, size)
	}
}

// counted counts the bytes that are read.
type counted struct {
	io.Reader
	n int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += int64(n)
	return n, err
}

// TestHostMemory: the memory that the proxy holds for a plugin has one limit
// over all requests and reloads. The guest gets an error status, the requests
// are served, and the rejection is counted.
func TestHostMemory(t *testing.T) {
	side := startSide(t)
	release := make(chan struct{})
	side.script(func(http.ResponseWriter, *http.Request) { <-release })
	defer close(release)
	p := scripted(t, "bomb", "[s]\n"+strings.Repeat(`request_headers: call proxy_http_call "side" {:method=POST,:path=/,:authority=a} fill:300000 {} 60000 out`+"\n", 4)+"delete: say gone\n")
	p.HostMemory = 1 << 20
	n := start(t, options{plugins: []config.Plugin{p}, config: func(c *config.Config) {
		c.Upstreams = []config.Upstream{{Name: "side", URL: side.URL}}
	}})
	n.fine(n.post("s"))
	got := strings.Join(with(n.deleted("s"), "request_headers proxy_http_call"), " ")
	if strings.Count(got, "=0 ") != 3 || strings.Count(got, "=10 ") != 1 {
		t.Errorf("calls: %q", got)
	}
	if v := n.metric("pdproxy_policy_failures_total", `policy="bomb"`, `hook="host"`, `reason="host_memory"`); v != 1 {
		t.Errorf("got %v counted refusals", v)
	}
	if err := n.reload(func(c *config.Config) { c.Plugins[0].RootID = "again" }); err != nil {
		t.Fatal(err)
	}
	n.fine(n.post("s"))
	if v := n.metric("pdproxy_policy_failures_total", `policy="bomb"`, `hook="host"`, `reason="host_memory"`); v < 2 {
		t.Errorf("%v refusals are counted: the new version has a budget of its own", v)
	}
	if row := n.row("bomb"); row["state"] != "active" {
		t.Errorf("refusals parked the plugin: %v", row)
	}
}
