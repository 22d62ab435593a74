package clients

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// engineState is the part of GET /sim/state that the tests read.
type engineState struct {
	Running  int   `json:"requests_running"`
	Waiting  int   `json:"requests_waiting"`
	Used     int   `json:"blocks_used"`
	Pinned   int   `json:"blocks_pinned"`
	Requests int64 `json:"requests"`
	Aborted  int64 `json:"aborted"`
	Output   int64 `json:"output_tokens"`
}

// get requests an operators' endpoint.
func (f *front) get(url string) (*http.Response, error) {
	r, err := http.NewRequest("GET", url, nil)
	if err != nil {
		return nil, err
	}
	if f.token != "" {
		r.Header.Set("Authorization", "Bearer "+f.token)
	}
	resp, err := http.DefaultClient.Do(r)
	if err == nil && resp.StatusCode != 200 {
		resp.Body.Close()
		err = fmt.Errorf("GET %s: status %d", url, resp.StatusCode)
	}
	return resp, err
}

func (f *front) getJSON(url string, v any) error {
	resp, err := f.get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(v)
}

// metric sums the samples of a metric whose labels contain label.
func (f *front) metric(t *testing.T, name, label string) float64 {
	t.Helper()
	v, err := f.readMetric(name, label)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (f *front) readMetric(name, label string) (float64, error) {
	resp, err := f.get(f.Admin + "/metrics")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	sum, found := 0.0, false
	for sc := bufio.NewScanner(resp.Body); sc.Scan(); {
		key, value, _ := strings.Cut(sc.Text(), " ")
		base, labels, _ := strings.Cut(key, "{")
		if base != name {
			continue
		}
		found = true
		if strings.Contains(labels, label) {
			v, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, err
			}
			sum += v
		}
	}
	if !found && label == "" {
		return 0, fmt.Errorf("no metric %s", name)
	}
	return sum, nil
}

// engines adds up the states that all engines report.
func (f *front) engines(t *testing.T) engineState {
	t.Helper()
	sum, err := f.readEngines()
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

func (f *front) readEngines() (sum engineState, err error) {
	var rows []struct {
		URL string `json:"url"`
	}
	if err := f.getJSON(f.Admin+"/v1/engines", &rows); err != nil {
		return sum, err
	}
	for _, row := range rows {
		var s engineState
		if err := f.getJSON(row.URL+"/sim/state", &s); err != nil {
			return sum, err
		}
		sum.Running += s.Running
		sum.Waiting += s.Waiting
		sum.Used += s.Used
		sum.Pinned += s.Pinned
		sum.Requests += s.Requests
		sum.Aborted += s.Aborted
		sum.Output += s.Output
	}
	return sum, nil
}

// waitBusy returns when n sequences run or wait on the engines.
func (f *front) waitBusy(t *testing.T, n int) {
	t.Helper()
	eventually(t, "engines busy", func() error {
		s, err := f.readEngines()
		if err == nil && s.Running+s.Waiting < n {
			err = fmt.Errorf("%d of %d sequences", s.Running+s.Waiting, n)
		}
		return err
	})
}

// waitIdle returns when nothing of any exchange remains: no row, no load and no
// lease at the proxy, no sequence and no held block on the engines.
func (f *front) waitIdle(t *testing.T) {
	t.Helper()
	eventually(t, "idle after the exchange", f.idle)
}

func (f *front) idle() error {
	var rows []struct {
		Name  string `json:"name"`
		Ranks []struct {
			Requests int `json:"requests"`
			Tokens   int `json:"tokens"`
		} `json:"ranks"`
	}
	if err := f.getJSON(f.Admin+"/v1/engines", &rows); err != nil {
		return err
	}
	for _, row := range rows {
		for _, r := range row.Ranks {
			if r.Requests != 0 || r.Tokens != 0 {
				return fmt.Errorf("engine %s: the proxy counts %d requests, %d tokens", row.Name, r.Requests, r.Tokens)
			}
		}
	}
	leases, err := f.readMetric("pdproxy_leases_open", "")
	if err != nil {
		return err
	}
	if leases != 0 {
		return fmt.Errorf("%v leases open", leases)
	}
	var open []any
	if err := f.getJSON(f.Admin+"/v1/exchanges", &open); err != nil {
		return err
	}
	if len(open) != 0 {
		return fmt.Errorf("%d exchanges open", len(open))
	}
	s, err := f.readEngines()
	if err != nil {
		return err
	}
	if s.Running+s.Waiting+s.Used+s.Pinned != 0 {
		return fmt.Errorf("engines: %+v", s)
	}
	return nil
}
