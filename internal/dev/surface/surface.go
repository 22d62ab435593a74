// Package surface reads a running proxy's admin endpoints, as a dashboard would.
package surface

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// Admin is the admin endpoint of a proxy. It is safe for concurrent use.
type Admin struct {
	Client *http.Client
	URL    string // without a slash at its end
}

// Get reads an endpoint that answers JSON.
func (a Admin) Get(path string, into any) error {
	resp, err := a.get(path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		return fmt.Errorf("get %s: %w", path, err)
	}
	return nil
}

// get reads an endpoint without compression, which would take a test more time than the answer.
func (a Admin) get(path string) (*http.Response, error) {
	req, err := http.NewRequest(http.MethodGet, a.URL+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept-Encoding", "identity")
	return a.Client.Do(req)
}

// Metric sums the series of a metric whose labels contain all of the texts; 0
// when there is none.
func (a Admin) Metric(name string, labels ...string) (float64, error) {
	resp, err := a.get("/metrics")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	return sum(resp.Body, name, labels)
}

// sum adds up series in Prometheus' text format.
func sum(r io.Reader, name string, labels []string) (total float64, err error) {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), name)
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		for _, l := range labels {
			ok = ok && strings.Contains(rest, l)
		}
		if !ok {
			continue
		}
		value, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil {
			return 0, fmt.Errorf("read metric %s: %w", name, err)
		}
		total += value
	}
	return total, lines.Err()
}
