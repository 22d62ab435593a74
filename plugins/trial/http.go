package trial

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/abi/host"
	"github.com/pdproxy/pdproxy/plugins/budget"
	"github.com/pdproxy/pdproxy/plugins/filter"
	"github.com/pdproxy/pdproxy/plugins/shared"
)

// httpFrame is a frame for filters: a request of a client, and the proxy's
// answer to it.
type httpFrame struct {
	frameHead
	Request  httpRequest  `json:"request"`
	Response httpResponse `json:"response"`
}

type httpRequest struct {
	Method  string            `json:"method"`
	Path    string            `json:"path"` // with query
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"`
}

type httpResponse struct {
	Status  int               `json:"status"`
	Headers map[string]string `json:"headers"`
	Body    string            `json:"body"`
}

// httpDecision is the result of a filter for a frame. Names of headers are in
// lower case; lines of one name are joined.
type httpDecision struct {
	Request  *httpRequest `json:"request"` // as the proxy received it; null if the request did not arrive
	Response httpResponse `json:"response"`
}

// String returns the decision in one line.
func (d *httpDecision) String() string {
	request := "did not reach the proxy"
	if d.Request != nil {
		request = fmt.Sprintf("%s %s, %d bytes", d.Request.Method, d.Request.Path, len(d.Request.Body))
	}
	return fmt.Sprintf("request: %s; answer: %d, %d bytes", request, d.Response.Status, len(d.Response.Body))
}

const httpHook = "http"

func readHTTP(text []byte) (Frame, error) {
	j := httpFrame{Request: httpRequest{Method: http.MethodPost, Path: "/v1/completions"}, Response: httpResponse{Status: http.StatusOK}}
	if err := strictly(text, &j); err != nil {
		return Frame{}, err
	}
	if _, err := http.NewRequest(j.Request.Method, "http://proxy"+j.Request.Path, nil); err != nil {
		return Frame{}, err
	}
	if j.Response.Status < 200 || j.Response.Status > 599 {
		return Frame{}, fmt.Errorf("response.status: %d", j.Response.Status)
	}
	return Frame{frameHead: j.frameHead, http: &j}, nil
}

// streamTrial runs requests through a filter.
type streamTrial struct {
	plugin *filter.Plugin
	chain  filter.Chain
	meter  meter
}

func newStreamTrial(ctx context.Context, wasm []byte, o *Options) (*streamTrial, error) {
	t := &streamTrial{}
	t.plugin = filter.New(
		filter.Spec{
			Name: "trial", Wasm: wasm, VMs: 1, Config: o.Config, Timeout: o.Timeout, Upstreams: []string{"*"}, Load: o.load(),
		},
		filter.Deps{
			Shared: new(shared.Store), Budget: budget.New(1<<30, time.Hour, 0), Upstreams: o.Upstreams,
			Metrics: new(shared.LocalMetrics), Meter: &t.meter, Log: o.Log,
		})
	if err := t.plugin.Start(ctx); err != nil {
		return nil, err
	}
	t.chain.Set([]*filter.Plugin{t.plugin}, filter.Limits{})
	return t, nil
}

// close waits for the guest's callbacks after the end of the streams.
func (t *streamTrial) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), host.StartBudget)
	defer cancel()
	return t.plugin.Close(ctx)
}

// frame passes one request through the filter. Its time is the time in the
// guest's callbacks.
func (t *streamTrial) frame(ctx context.Context, f *httpFrame, repeat int, r *Result) error {
	var spent time.Duration
	for range repeat {
		info := new(abi.StreamInfo)
		req, err := f.Request.make(abi.WithStreamInfo(ctx, info))
		if err != nil {
			return err
		}
		var d httpDecision
		client := &answer{header: http.Header{}}
		t.meter.reset()
		cut := t.serve(client, req, f, &d)
		var failure string
		spent, failure = spent+t.meter.spent(), t.meter.failure()
		d.Response = httpResponse{Status: client.status, Headers: joined(client.header), Body: client.body.String()}
		r.Decision, r.Notes = &d, info.Notes()
		switch {
		case failure != "":
			return errors.New(failure)
		case cut:
			return errors.New("the stream was cut")
		}
	}
	r.US = float64(spent.Nanoseconds()) / 1000 / float64(repeat)
	return nil
}

// serve runs the chain around a handler that gives the frame's answer.
func (t *streamTrial) serve(w http.ResponseWriter, req *http.Request, f *httpFrame, d *httpDecision) (cut bool) {
	defer func() {
		if v := recover(); v != nil {
			if v != http.ErrAbortHandler {
				panic(v)
			}
			cut = true
		}
	}()
	t.chain.Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // ends early when a filter answers instead
		d.Request = &httpRequest{Method: r.Method, Path: r.URL.RequestURI(), Headers: joined(r.Header), Body: string(body)}
		for name, value := range f.Response.Headers {
			w.Header().Set(name, value)
		}
		w.WriteHeader(f.Response.Status)
		_, _ = io.WriteString(w, f.Response.Body)
	})).ServeHTTP(w, req)
	return false
}

func (j *httpRequest) make(ctx context.Context) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, j.Method, "http://proxy"+j.Path, strings.NewReader(j.Body))
	if err != nil {
		return nil, err
	}
	for name, value := range j.Headers {
		req.Header.Set(name, value)
	}
	req.URL.Scheme, req.URL.Host = "", "" // as a server receives it
	req.RequestURI, req.RemoteAddr = j.Path, "192.0.2.1:1234"
	return req, nil
}

func joined(h http.Header) map[string]string {
	lines := make(map[string]string, len(h))
	for name, values := range h {
		lines[strings.ToLower(name)] = strings.Join(values, ", ")
	}
	return lines
}

// answer is the client's end of a stream.
type answer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (a *answer) Header() http.Header { return a.header }

func (a *answer) WriteHeader(status int) {
	if a.status == 0 && status >= 200 {
		a.status = status
	}
}

func (a *answer) Write(p []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(p)
}

// Flush does nothing, because written data is available at once.
func (a *answer) Flush() {}

// meter sums up the calls of one frame. The guest's last callbacks of a stream
// run in the background, so they may count for the next frame.
type meter struct {
	mu     sync.Mutex
	sum    time.Duration // guarded by mu
	failed string        // guarded by mu
}

// Observe implements filter.Meter.
func (m *meter) Observe(_ host.Callback, d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sum += d
}

// Fail implements filter.Meter.
func (m *meter) Fail(c host.Callback, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed == "" {
		m.failed = fmt.Sprintf("call %s: %s", c, reason)
	}
}

func (m *meter) reset() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sum, m.failed = 0, ""
}

func (m *meter) spent() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.sum
}

func (m *meter) failure() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.failed
}
