package admin

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// broken is a response whose connection has gone.
type broken struct{ *httptest.ResponseRecorder }

func (broken) Write([]byte) (int, error) {
	return 0, &net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE}
}

// failing is a collector whose metrics cannot be read.
type failing struct{ desc *prometheus.Desc }

func (f failing) Describe(ch chan<- *prometheus.Desc) { ch <- f.desc }
func (f failing) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.NewInvalidMetric(f.desc, errors.New("cannot be read"))
}

// TestScrapeLog: a scraper that leaves causes no line in the log. A problem of a metric causes
// one line, however often the metrics are read, and the other metrics are answered.
func TestScrapeLog(t *testing.T) {
	var out bytes.Buffer
	reg := prometheus.NewRegistry()
	for i := range 50 {
		reg.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: fmt.Sprint("gauge_", i), Help: "A gauge."}))
	}
	h := Metrics(reg, slog.New(slog.NewTextHandler(&out, nil)))
	for _, coding := range []string{"", "gzip"} {
		r := httptest.NewRequest("GET", "/metrics", nil)
		r.Header.Set("Accept-Encoding", coding)
		h.ServeHTTP(broken{httptest.NewRecorder()}, r)
	}
	if out.Len() > 0 {
		t.Errorf("a scraper that left caused %.300s", out.String())
	}
	reg.MustRegister(failing{prometheus.NewDesc("failing", "Fails.", nil, nil)})
	for range 3 {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		if w.Code != 200 || !strings.Contains(w.Body.String(), "gauge_49") {
			t.Errorf("status %d, %d bytes", w.Code, w.Body.Len())
		}
	}
	if n := strings.Count(out.String(), "cannot be read"); n != 1 {
		t.Errorf("the problem was logged %d times", n)
	}
}
