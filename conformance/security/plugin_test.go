package security

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

var buildBomb = sync.OnceValues(func() (string, error) {
	module := filepath.Join(buildDir, "bomb.wasm")
	if out, err := exec.Command(pdproxy, "plugin", "build", "testdata/bomb", "-o", module).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return module, nil
})

// TestHostilePlugin runs a filter that tries to make its host hold more than its limits,
// in each way against a separate proxy.
func TestHostilePlugin(t *testing.T) {
	t.Parallel()
	module, err := buildBomb()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		what   string
		times  int   // requests with the bomb
		growth int64 // MiB: the guest's own 64 MiB in each of a few instances, and as much in the host
	}{
		{"call", times(8, 50), 400},
		{"headers", 1, 400},
		{"property", 4, 400},
		{"metric", 2, 400},
		{"manymetrics", 2, 400},
		{"collide", 2, 200},
		{"log", 4, 400},
	} {
		t.Run(tt.what, func(t *testing.T) {
			e, sink := newFakeEngine(t), deafSink(t)
			p := startProxy(t, setup{memory: 6, sections: e.section("both", "none") + fmt.Sprintf(
				"[[upstream]]\nname = \"sink\"\nurl = \"http://%s\"\n[[plugin]]\nname = \"bomb\"\npath = %q\nphase = \"filter\"\nfail = \"open\"\n", sink, module)})
			p.serves("before the bomb")
			c := p.client(1, hostile)
			defer c.close()
			p.wantGrowth(tt.what, tt.growth, func() {
				for range tt.times {
					if !p.alive() {
						return // stop says so
					}
					c.post(chatPath, chat("bomb", false), "x-bomb", tt.what) // may be refused, must end
				}
			})
			if !p.alive() {
				t.Fatal("the proxy is dead")
			}
			wantMetrics(t, p)
			p.serves("after the bomb")
		})
	}
}

// wantMetrics asserts that the metrics are whole, valid and of a moderate size.
func wantMetrics(t *testing.T, p *proxyProcess) {
	t.Helper()
	resp, err := p.admin.Client.Get(p.admin.URL + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	const most = 8 << 20
	counted := &countingReader{Reader: io.LimitReader(resp.Body, most+1)}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(counted)
	switch {
	case resp.StatusCode != http.StatusOK:
		t.Errorf("/metrics answers %d", resp.StatusCode)
	case counted.n > most:
		t.Errorf("/metrics has more than %d bytes", most)
	case err != nil:
		t.Errorf("/metrics cannot be parsed: %.300v", err)
	case families["go_goroutines"] == nil || families["pdproxy_leases_open"] == nil:
		t.Error("/metrics lacks the proxy's own metrics")
	}
}

type countingReader struct {
	io.Reader
	n int
}

func (r *countingReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.n += n
	return n, err
}

// deafSink returns the address of a server that accepts connections and never
// reads.
func deafSink(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var held holder
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			held.add(func() { c.Close() })
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
		held.release()
	})
	return l.Addr().String()
}

// TestPluginBudgetEnds: the bytes of a plugin's calls are free again when the
// calls have ended.
func TestPluginBudgetEnds(t *testing.T) {
	t.Parallel()
	module, err := buildBomb()
	if err != nil {
		t.Fatal(err)
	}
	e := newFakeEngine(t)
	sink := testbed.FreeAddr(t) // refuses: every call fails at once
	p := startProxy(t, setup{sections: e.section("both", "none") + fmt.Sprintf(
		"[[upstream]]\nname = \"sink\"\nurl = \"http://%s\"\n[[plugin]]\nname = \"bomb\"\npath = %q\nphase = \"filter\"\nfail = \"open\"\n", sink, module)})
	c := p.client(1, hostile)
	defer c.close()
	for range 6 {
		c.post(chatPath, chat("bomb", false), "x-bomb", "call")
		time.Sleep(50 * time.Millisecond) // the calls end after the request, and no metric counts them
	}
	p.serves("after calls that failed")
	c.close()
	p.nothingLeft()
}
