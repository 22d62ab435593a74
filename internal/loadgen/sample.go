package loadgen

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"
)

// Sample holds the measurements of one request. It is also one line of the file that WriteSamples
// writes. All times are in milliseconds. Times of the answer count from the time at which the
// request was due. Late is the part of these times before the request was sent.
type Sample struct {
	Run          string `json:"run,omitempty"` // label of the run
	Request      int    `json:"request"`       // number
	Conversation int    `json:"conversation"`
	Turn         int    `json:"turn"`
	// ID is the X-Request-Id of the answer. It finds the request in the proxy's log and in
	// pdproxy explain.
	ID        string    `json:"request_id,omitempty"`
	Scheduled float64   `json:"scheduled_ms"` // since the run began
	Late      float64   `json:"late_ms"`
	First     float64   `json:"ttft_ms,omitempty"` // until the first event that the model wrote
	Total     float64   `json:"e2e_ms"`            // until the end of the answer
	Gaps      []float64 `json:"itl_ms,omitempty"`  // between events that the model wrote
	Prompt    int       `json:"prompt_tokens"`
	Cached    int       `json:"cached_tokens"`
	Output    int       `json:"output_tokens"`
	Failure   string    `json:"failure,omitempty"` // reason why the answer is wrong
}

// perToken returns the mean time of the tokens after the first, in ms. ok is false if
// there are none.
func (s *Sample) perToken() (ms float64, ok bool) {
	if len(s.Gaps) == 0 || s.Output < 2 {
		return 0, false
	}
	for _, gap := range s.Gaps {
		ms += gap
	}
	return ms / float64(s.Output-1), true
}

// millis returns a time in milliseconds, rounded to microseconds.
func millis(d time.Duration) float64 { return float64(d.Round(time.Microsecond).Microseconds()) / 1000 }

// WriteSamples writes the samples of a run, one JSON object a line.
func (r *Result) WriteSamples(w io.Writer) error {
	e := json.NewEncoder(w)
	for i := range r.Samples {
		if err := e.Encode(&r.Samples[i]); err != nil {
			return err
		}
	}
	return nil
}

// ReadRuns reads the file of one or more runs. It returns them in the order of their first
// lines. An error names the line. The duration of a run is the time from the first due
// request to the last end of an answer.
func ReadRuns(r io.Reader, limits Limits) ([]*Result, error) {
	samples := make(map[string][]Sample)
	var order []string
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 64<<20)
	for n := 1; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var s Sample
		if err := json.Unmarshal(lines.Bytes(), &s); err != nil {
			return nil, fmt.Errorf("read results: line %d: %w", n, err)
		}
		if !s.valid() {
			return nil, fmt.Errorf("read results: line %d is not a line of pdproxy bench --output", n)
		}
		if _, ok := samples[s.Run]; !ok {
			order = append(order, s.Run)
		}
		samples[s.Run] = append(samples[s.Run], s)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read results: %w", err)
	}
	if len(order) == 0 {
		return nil, errors.New("read results: no requests")
	}
	var runs []*Result
	for _, label := range order {
		from, to := math.Inf(1), 0.0
		for _, s := range samples[label] {
			from, to = min(from, s.Scheduled), max(to, s.Scheduled+s.Total)
		}
		took := time.Duration((to - from) * float64(time.Millisecond))
		runs = append(runs, summarize(&Config{Label: label, Limits: limits}, samples[label], 0, took))
	}
	return runs, nil
}

// valid reports whether a line has the times of a request.
func (s *Sample) valid() bool {
	return (s.Total > 0 || s.Total == 0 && s.Failure != "") && s.Scheduled >= 0 && s.First >= 0 && s.First <= s.Total && s.Output >= 0
}
