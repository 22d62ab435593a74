package epp

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// smallPool starts a pool with two engines that are programs of the test, and an Envoy. serve gets all
// requests but those of the picker's probes.
func smallPool(t *testing.T, p *pool, g *gateway, serve http.HandlerFunc) {
	t.Helper()
	p.Name = "small"
	for pod := range 2 {
		e := endpoint{fmt.Sprintf("127.0.9.%d", pod+1), portOf(free(t))}
		p.Endpoints = append(p.Endpoints, e)
		servePod(t, e, serve)
	}
	p.start(t)
	g.Name, g.Pools = "gateway", []*pool{p}
	startGateways(t, g.Pools, g)
}

// servePod starts an engine that serves HTTP/1.1 and cleartext HTTP/2.
func servePod(t *testing.T, e endpoint, serve http.HandlerFunc) {
	t.Helper()
	l, err := net.Listen("tcp", e.String())
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Protocols: new(http.Protocols), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.UserAgent(), "pdproxy"), r.URL.Path == "/v1/models", r.URL.Path == "/metrics", strings.HasPrefix(r.URL.Path, "/v1/loads"), r.URL.Path == "/kv_event_sources":
			fmt.Fprint(w, `{"data":[{"id":"sim"}]}`)
		default:
			serve(w, r)
		}
	})}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() { // ends with Close
		defer close(done)
		_ = s.Serve(l) // http.ErrServerClosed
	}()
	t.Cleanup(func() {
		s.Close()
		<-done
	})
}

// request sends a request to the pool "small".
func (g *gateway) request(t *testing.T, method, uri, kind, body string) (status int, text string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, g.url()+uri, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Host = "small"
	if kind != "" {
		r.Header.Set("Content-Type", kind)
	}
	resp, err := clients["H1"].Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// TestPaths: engines get the path and the query that the client has sent, also of paths that are no
// endpoint of the picker.
func TestPaths(t *testing.T) {
	var g gateway
	smallPool(t, &pool{}, &g, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body) // a short body fails the comparison
		fmt.Fprintf(w, "%s %s %s %s", r.Method, r.RequestURI, r.Header.Get("Content-Type"), b)
	})
	const completion = `{"model":"sim","prompt":"x"}`
	for _, tt := range []struct{ method, uri, kind, body string }{
		{"POST", "/v1/completions?b=2&a=%2F", "application/json", completion},
		{"POST", "/llama/v1/completions?x=1", "application/json", completion},
		{"GET", "/foo?b=2&a=%2F", "", ""},
		{"GET", "/tokenize", "", ""},
		{"DELETE", "/v1/files/a%20b", "", ""},
		{"POST", "/v1/conversations", "application/json", `{"items":[]}`},
		{"PUT", "/v1/files?purpose=batch", "application/octet-stream", strings.Repeat("\x00\xff", 100_000)},
	} {
		want := fmt.Sprintf("%s %s %s %s", tt.method, tt.uri, tt.kind, tt.body)
		if status, got := g.request(t, tt.method, tt.uri, tt.kind, tt.body); status != 200 || got != want {
			t.Errorf("%d, the engine got %.200q, want %.200q", status, got, want)
		}
	}
	for _, uri := range []string{"/sleep?level=1", "/v1/completions%0A", "/reset_prefix_cache"} {
		if status, got := g.request(t, "POST", uri, "application/json", completion); status != 404 || !strings.Contains(got, "not_found") {
			t.Errorf("%s: %d %s", uri, status, got)
		}
	}
}

// TestMetadata: Envoy has the cost of an answer when the answer has ended, and its rate limit filter
// counts the tokens.
func TestMetadata(t *testing.T) {
	limits := newLimits(t)
	g := gateway{Log: filepath.Join(t.TempDir(), "access.log"), Limits: limits.port}
	smallPool(t, &pool{lines: "epp.metadata = \"pdproxy\"\n"}, &g, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body) // a short body fails the comparison
		if strings.Contains(string(b), `"stream":true`) {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":30,\"completion_tokens\":12}}\n\ndata: [DONE]\n\n")
			return
		}
		fmt.Fprint(w, `{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":5}}`)
	})
	for n, stream := range []bool{false, true} {
		if status, text := g.request(t, "POST", "/v1/completions", "application/json", fmt.Sprintf(`{"model":"sim","prompt":"x","stream":%t}`, stream)); status != 200 {
			t.Fatalf("%d %s", status, text)
		}
		want := []string{" 7 5 12", " 30 12 42"}[n]
		until(t, "the access log has the tokens", func() bool {
			text, _ := os.ReadFile(g.Log) // it comes later
			lines := strings.Split(strings.TrimSpace(string(text)), "\n")
			return len(lines) == n+1 && strings.HasPrefix(lines[n], "sim 127.0.9.") && strings.HasSuffix(lines[n], want)
		})
		if got := limits.next(t); !strings.HasSuffix(want, fmt.Sprint(" ", got)) {
			t.Errorf("the rate limit service counts %d tokens, want%s", got, want)
		}
	}
}

// TestMetadataEvicted: Envoy has the known cost of a request that the picker ends, and its rate limit filter
// counts it: before the first byte with the reply of the picker, and later with the last event, or with the
// reply if Envoy cuts the answer.
func TestMetadataEvicted(t *testing.T) {
	t.Run("duplex", func(t *testing.T) { metadataEvicted(t, false) })
	t.Run("streamed", func(t *testing.T) { metadataEvicted(t, true) })
}

func metadataEvicted(t *testing.T, streamed bool) {
	limits := newLimits(t)
	g := gateway{Log: filepath.Join(t.TempDir(), "access.log"), Limits: limits.port, Streamed: streamed}
	reached := make(chan bool, 1)
	keys := strings.Replace(evicting, "limits.max_exchanges = 2", "limits.max_exchanges = 1", 1) + "epp.metadata = \"pdproxy\"\n" + evicted
	smallPool(t, &pool{lines: keys}, &g, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body) // a short body fails the comparison
		if strings.Contains(string(b), "urgent") {
			fmt.Fprint(w, `{"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"prompt_tokens":7,"completion_tokens":5}}`)
			return
		}
		if strings.Contains(string(b), "begins") {
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
			http.NewResponseController(w).Flush()
		}
		reached <- true
		<-r.Context().Done()
	})
	last := (*ending).told
	if streamed {
		last = (*ending).cut
	}
	for prompt, want := range map[string]struct {
		is   func(*ending) bool
		cost string
	}{"silent": {(*ending).refused, " 101 0 101"}, "begins": {last, " 101 1 102"}} {
		_ = os.Truncate(g.Log, 0)
		low := make(chan *ending, 1)
		begun := make(chan bool, 1)
		go func() {
			resp, err := g.send(t.Context(), fmt.Sprintf(`{"model":"sim","prompt":%q,"stream":true}`, prompt+strings.Repeat("x", 400-len(prompt))), "batch")
			if err != nil {
				low <- &ending{err: err}
				return
			}
			defer resp.Body.Close()
			begun <- true
			text, err := io.ReadAll(resp.Body)
			low <- &ending{resp.StatusCode, resp.Header, string(text), err}
		}()
		<-reached
		if prompt == "begins" {
			<-begun
		}
		resp, err := g.send(t.Context(), `{"model":"sim","prompt":"urgent"}`, "interactive")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if e := <-low; !want.is(e) {
			t.Errorf("%s: the evicted request got %d %s, %v", prompt, e.status, e.text, e.err)
		}
		until(t, "the access log has the tokens of both", func() bool {
			text, _ := os.ReadFile(g.Log) // it comes later
			return strings.Contains(string(text), want.cost+"\n") && strings.Contains(string(text), " 7 5 12\n")
		})
		if got := limits.next(t) + limits.next(t); want.cost != fmt.Sprintf(" 101 %d %d", got-113, got-12) {
			t.Errorf("%s: the rate limit service counts %d tokens of both", prompt, got)
		}
	}
}

// send sends a request of that class to the pool "small".
func (g *gateway) send(ctx context.Context, body, class string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, "POST", g.url()+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Host = "small"
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Priority", class)
	return clients["H1"].Do(r)
}

// TestStoppedPicker: no request fails while one of two pickers ends, and that one ends when Envoy has
// moved to the other.
func TestStoppedPicker(t *testing.T) {
	second, g := &pool{}, gateway{}
	p := &pool{}
	for pod := range 2 {
		e := endpoint{fmt.Sprintf("127.0.9.%d", pod+1), portOf(free(t))}
		p.Endpoints = append(p.Endpoints, e)
		servePod(t, e, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			for range 5 {
				fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
				http.NewResponseController(w).Flush()
				time.Sleep(5 * time.Millisecond)
			}
			fmt.Fprint(w, "data: [DONE]\n\n")
		})
	}
	p.Name, second.Name = "small", "second"
	p.lines = "epp.drain_quiet = \"2s\"\n"
	second.Endpoints, second.lines = p.Endpoints, p.lines
	p.start(t)
	second.start(t)
	p.Second = second.Picker
	g.Name, g.Pools = "gateway", []*pool{p}
	startGateways(t, g.Pools, &g)

	var sent, failed atomic.Int64
	var wg sync.WaitGroup
	over := make(chan struct{})
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				r, _ := http.NewRequest("POST", g.url()+"/v1/completions", strings.NewReader(`{"model":"sim","prompt":"x","stream":true}`)) // no error: the URL is fine
				r.Host = "small"
				r.Header.Set("Content-Type", "application/json")
				resp, err := clients["H1"].Do(r)
				if err == nil {
					var end string
					for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
						if lines.Text() != "" {
							end = lines.Text()
						}
					}
					resp.Body.Close()
					if resp.StatusCode != 200 || end != "data: [DONE]" {
						err = fmt.Errorf("%d, the end is %q", resp.StatusCode, end)
					}
				}
				if sent.Add(1); err != nil {
					failed.Add(1)
					t.Error(err)
				}
			}
		})
	}
	both := func(name string, n int64) {
		until(t, name, func() bool { return sent.Load() > n })
	}
	both("the pickers serve", 50)
	p.process.stop(t, syscall.SIGTERM)
	both("the other picker serves", sent.Load()+50)
	close(over)
	wg.Wait()
	t.Logf("%d of %d requests failed", failed.Load(), sent.Load())
	if !strings.Contains(p.process.log.String(), "draining") {
		t.Errorf("the picker has not drained")
	}
}
