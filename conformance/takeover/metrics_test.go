package takeover

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// started finds the start of the process that answers, of the coordinator in a fleet.
var started = regexp.MustCompile(`(?m)^process_start_time_seconds(?:\{process="coordinator"\})? (\S+)$`)

// scraper reads metrics.listen as a Prometheus server does: with one client that keeps its
// connection.
type scraper struct {
	client *http.Client
	addr   string
}

func newScraper(addr string) *scraper {
	return &scraper{&http.Client{Transport: &http.Transport{}, Timeout: patience}, addr}
}

// scrape returns the start of the process that answers.
func (s *scraper) scrape() (string, error) {
	resp, err := s.client.Get("http://" + s.addr + "/metrics")
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", err
	}
	start := started.FindSubmatch(body)
	if resp.StatusCode != http.StatusOK || start == nil {
		return "", fmt.Errorf("status %d: %.200s", resp.StatusCode, body)
	}
	return string(start[1]), nil
}

// watchMetrics scrapes until stop, and fails the test if a scrape fails.
func (w *world) watchMetrics() (stop func()) {
	s, done := newScraper(w.metrics), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer s.client.CloseIdleConnections()
		for {
			if _, err := s.scrape(); err != nil {
				w.t.Errorf("a scrape during a takeover: %v", err)
			}
			select {
			case <-done:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	return func() {
		close(done)
		wg.Wait()
	}
}

// awaitMetrics waits until another process than that of the given start serves
// metrics.listen. It returns the start of the process.
func (w *world) awaitMetrics(before string) (start string) {
	w.t.Helper()
	s := newScraper(w.metrics)
	defer s.client.CloseIdleConnections()
	w.eventually("the new process does not serve metrics.listen", func() bool {
		var err error
		start, err = s.scrape()
		return err == nil && start != before
	})
	return start
}

// TestMetricsAddressChanges: a reload leaves metrics.listen as it is. A successor serves the
// address of its configuration, and the old one is closed.
func TestMetricsAddressChanges(t *testing.T) {
	for _, workers := range []int{0, 2} {
		t.Run(fmt.Sprintf("workers %d", workers), func(t *testing.T) {
			w := newWorld(t, false, workers)
			w.run()
			pid := w.successor(0, func() {})
			w.awaitReady()
			first := w.awaitMetrics("")
			old := newScraper(w.metrics)
			w.metrics = testbed.FreeAddr(t)
			text, err := os.ReadFile(w.config)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(w.config, []byte(strings.ReplaceAll(string(text), old.addr, w.metrics)), 0o600); err != nil {
				t.Fatal(err)
			}
			reload := func() { syscall.Kill(pid, syscall.SIGHUP) }
			reload()
			w.eventually("the log does not name the key", func() bool { return strings.Contains(w.logged(), "metrics.listen") })
			if start, err := old.scrape(); err != nil || start != first {
				t.Errorf("after a reload: process of %s, %v", start, err)
			}
			next := func() { syscall.Kill(pid, syscall.SIGUSR2) }
			next()
			w.successor(pid, next)
			w.awaitMetrics(first)
			w.eventually("the old address is still served", func() bool {
				old.client.CloseIdleConnections()
				_, err := old.scrape()
				return err != nil
			})
		})
	}
}
