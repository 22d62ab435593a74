package discovery

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/kube"
)

// recorded returns a recorded answer of kube-apiserver v1.34.4.
func recorded(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "kubernetes", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// kubeWire answers requests from a script and records them. It repeats the last entry of
// the script.
type kubeWire struct {
	mu     sync.Mutex
	lists  []func() (int, io.Reader)
	watchs []func() (int, io.Reader)
	asked  []string // "list" or "watch", with the version
	last   *url.URL
}

func says(status int, text string) func() (int, io.Reader) {
	return func() (int, io.Reader) { return status, strings.NewReader(text) }
}

// stays returns an answer with a text. The answer stays open until the client closes it.
func stays(text string) func() (int, io.Reader) {
	return func() (int, io.Reader) {
		r, w := io.Pipe()
		go func() { _, _ = io.WriteString(w, text) }() // blocks until the reader is closed
		return 200, r
	}
}

// watchLasts is the longest time of one watch.
const watchLasts = 5*time.Minute + 15*time.Second

// off is a server that does not answer.
func off() (int, io.Reader) { return 0, nil }

func (w *kubeWire) RoundTrip(r *http.Request) (*http.Response, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	script, kind := &w.lists, "list"
	if r.URL.Query().Get("watch") == "true" {
		script, kind = &w.watchs, "watch "+r.URL.Query().Get("resourceVersion")
	}
	w.asked, w.last = append(w.asked, kind), r.URL
	status, body := (*script)[0]()
	if len(*script) > 1 {
		*script = (*script)[1:]
	}
	if status == 0 {
		return nil, errors.New("connection refused")
	}
	answer := &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(body), Request: r}
	if c, ok := body.(io.ReadCloser); ok {
		stop := context.AfterFunc(r.Context(), func() { c.(*io.PipeReader).CloseWithError(r.Context().Err()) })
		answer.Body = closing{c, stop}
	}
	return answer, nil
}

type closing struct {
	io.ReadCloser
	stop func() bool
}

func (c closing) Close() error { c.stop(); return c.ReadCloser.Close() }

// requests returns the requests since the last call.
func (w *kubeWire) requests() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	defer func() { w.asked = nil }()
	return w.asked
}

// follow runs a source over a wire. lists returns the names in the last list.
func follow(t *testing.T, w *kubeWire, l *logs) (names func() []string) {
	t.Helper()
	s, err := newKubernetesOver(kube.Over(w), config.DiscoveryKubernetes{Engines: []config.Engine{patternAt("http://prefill.llm")}}, l.logger())
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var last []string
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Run(ctx, func(list []config.Engine) {
			mu.Lock()
			defer mu.Unlock()
			last = []string{}
			for _, e := range list {
				last = append(last, e.Name)
			}
		})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return func() []string {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		return last
	}
}

// The test uses recorded answers of a real API server: an endpoint terminates, its slice
// moves to another Service, bookmarks give the version, and the old history no longer
// exists.
func TestRecordedWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stream := strings.SplitAfter(recorded(t, "watch.jsonl"), "\n")
		w := &kubeWire{
			lists:  []func() (int, io.Reader){says(200, recorded(t, "list.json")), says(200, recorded(t, "list.json")), says(200, recorded(t, "empty.json"))},
			watchs: []func() (int, io.Reader){stays(""), stays(stream[0]), says(200, strings.Join(stream[1:], "")), says(200, recorded(t, "gone.jsonl")), stays("")},
		}
		l := &logs{}
		names := follow(t, w, l)
		if got := names(); !slices.Equal(got, []string{"p@10.0.0.6", "p@prefill-0"}) {
			t.Errorf("listed: %v", got)
		}
		w.mu.Lock()
		if q := w.last.Query(); w.last.Path != "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices" || q.Get("labelSelector") != "kubernetes.io/service-name=prefill" ||
			q.Get("allowWatchBookmarks") != "true" || q.Get("timeoutSeconds") != "300" {
			t.Errorf("request %s", w.last)
		}
		w.mu.Unlock()
		time.Sleep(watchLasts + listAgain) // the watch was silent for too long, so a listing follows
		if got := names(); len(got) != 0 {
			t.Errorf("engines after the termination: %v", got)
		}
		if got := w.requests(); !slices.Equal(got, []string{"list", "watch 206", "list", "watch 206"}) {
			t.Errorf("requests %v", got)
		}
		time.Sleep(watchLasts + listAgain)
		if got := names(); !slices.Equal(got, []string{}) {
			t.Errorf("engines after the end: %v", got)
		}
		time.Sleep(3 * listAgain)
		if got := w.requests(); !slices.Equal(got, []string{"list", "watch 222", "watch 209", "list", "watch 222"}) {
			t.Errorf("requests %v", got)
		}
	})
}

// Discovery changes nothing if the server does not answer, forbids the request or sends
// garbage.
func TestKubernetesTrouble(t *testing.T) {
	for name, tt := range map[string]struct {
		list, watch func() (int, io.Reader)
		logged      string
	}{
		"away":              {off, off, "connection refused"},
		"forbidden":         {says(403, recorded(t, "forbidden.json")), says(403, recorded(t, "forbidden.json")), "status 403 endpointslices.discovery.k8s.io is forbidden"},
		"unauthorized":      {says(401, `{"kind":"Status","message":"Unauthorized","code":401}`), off, "status 401 Unauthorized"},
		"another's page":    {says(502, "<html>"), off, "status 502"},
		"sent elsewhere":    {says(302, ""), off, "status 302"},
		"half a list":       {says(200, recorded(t, "list.json")[:700]), off, "unexpected EOF"},
		"not a list":        {says(200, `{"items":[]}`), off, "no resourceVersion"},
		"half an event":     {off, says(200, `{"type":"DELETED","object":{"meta`), "unexpected EOF"},
		"event of nothing":  {off, says(200, `{"type":"DELETED"}`), "decode an object"},
		"event unversioned": {off, says(200, `{"type":"DELETED","object":{"metadata":{"name":"prefill-abc","namespace":"llm"}}}`), "no resourceVersion"},
		"unknown event":     {off, says(200, `{"type":"EXPLODED","object":{}}`), "unknown event"},
		"error event":       {off, says(200, `{"type":"ERROR","object":{"kind":"Status","message":"etcd is ill","code":500}}`), "status 500 etcd is ill"},
		"endless event":     {off, func() (int, io.Reader) { return 200, io.MultiReader(strings.NewReader(`"`), endless{}) }, "unexpected EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				first := says(200, recorded(t, "list.json"))
				w := &kubeWire{lists: []func() (int, io.Reader){first, tt.list}, watchs: []func() (int, io.Reader){tt.watch}}
				l := &logs{}
				names := follow(t, w, l)
				time.Sleep(10 * time.Second)
				if got := names(); !slices.Equal(got, []string{"p@10.0.0.6", "p@prefill-0"}) {
					t.Errorf("remaining engines: %v", got)
				}
				text := l.take()
				if !strings.Contains(text, tt.logged) || strings.Contains(text, "Bearer") {
					t.Errorf("logged: %s", text)
				}
				if n := len(w.requests()); n > 25 {
					t.Errorf("got %d requests in ten seconds", n)
				}
				w.mu.Lock()
				w.lists, w.watchs = []func() (int, io.Reader){says(200, recorded(t, "empty.json"))}, []func() (int, io.Reader){stays("")}
				w.mu.Unlock()
				time.Sleep(2 * listAgain)
				if got := names(); len(got) != 0 {
					t.Errorf("engines after the recovery of the server: %v", got)
				}
				if text := l.take(); !strings.Contains(text, "works again") {
					t.Errorf("logged: %s", text)
				}
			})
		})
	}
}

// endless is a string without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

// A watch that ends regularly is resumed at its last version. From time to time a new
// listing is made.
func TestWatchIsResumed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bookmark := `{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"300"}}}`
		over := make(chan struct{})
		t.Cleanup(func() { close(over) })
		minutes := func() (int, io.Reader) {
			r, w := io.Pipe()
			go func() {
				_, _ = io.WriteString(w, bookmark)
				select {
				case <-time.After(4 * time.Minute):
				case <-over:
				}
				w.Close()
			}()
			return 200, r
		}
		w := &kubeWire{lists: []func() (int, io.Reader){says(200, recorded(t, "list.json"))}, watchs: []func() (int, io.Reader){minutes}}
		names := follow(t, w, &logs{})
		names()
		time.Sleep(14 * time.Minute)
		names()
		if got := w.requests(); !slices.Equal(got, []string{"list", "watch 206", "watch 300", "watch 300", "list", "watch 206"}) {
			t.Errorf("requests %v", got)
		}
	})
}

// If a server ends every watch at once, the source does not send requests in a tight
// loop.
func TestWatchEndsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &kubeWire{lists: []func() (int, io.Reader){says(200, recorded(t, "list.json"))}, watchs: []func() (int, io.Reader){says(200, "")}}
		names := follow(t, w, &logs{})
		time.Sleep(time.Minute)
		names()
		if n := len(w.requests()); n > 70 {
			t.Errorf("%d requests in a minute", n)
		}
	})
}

func TestKubernetesFiles(t *testing.T) {
	dir := t.TempDir()
	broken := filepath.Join(dir, "broken")
	if err := os.WriteFile(broken, []byte("a\nb\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	engine := []config.Engine{patternAt("http://prefill")}
	for key, cfg := range map[string]config.DiscoveryKubernetes{
		"discovery.kubernetes.api":           {Engines: engine},
		"discovery.kubernetes.token_file":    {API: "https://h:1", TokenFile: broken, Namespace: "llm", Engines: engine},
		"discovery.kubernetes.ca":            {API: "https://h:1", CA: broken, Namespace: "llm", Engines: engine},
		"discovery.kubernetes.engine[0].url": {API: "https://h:1", Engines: engine},
		"":                                   {API: "https://h:1", Namespace: "llm", Engines: engine},
	} {
		t.Run(key, func(t *testing.T) {
			t.Setenv("KUBERNETES_SERVICE_HOST", "")
			_, err := New(config.Discovery{Kubernetes: cfg}, Options{Registry: newFakeRegistry()})
			var p config.Problems
			if key == "" && err != nil || key != "" && (!errors.As(err, &p) || p[0].Key != key) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestKubernetesNamespaces(t *testing.T) {
	s := newKube(t, config.DiscoveryKubernetes{Namespace: "llm", Pods: "app in (a,b)", Engines: []config.Engine{
		patternAt("http://a:1"), patternAt("http://b.other.svc:1"), patternAt("http://c.llm.svc.cluster.local:1"),
	}}, nil)
	var got []string
	for _, w := range s.watches {
		got = append(got, w.Paths[0]+" "+w.Labels)
	}
	want := []string{
		"/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices kubernetes.io/service-name=a", "/api/v1/namespaces/llm/pods app in (a,b)",
		"/apis/discovery.k8s.io/v1/namespaces/other/endpointslices kubernetes.io/service-name=b", "/api/v1/namespaces/other/pods app in (a,b)",
		"/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices kubernetes.io/service-name=c",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

// FuzzKubeList: for any listing of a server, the resulting engines are valid.
func FuzzKubeList(f *testing.F) {
	f.Add(recorded(f, "list.json"))
	f.Add(`{"metadata":{"resourceVersion":"1"},"items":[{"metadata":{"name":"a"},"endpoints":[{"addresses":["10.0.0.1","::1"]}],"ports":[{"port":70000}]},{"metadata":{"name":"a"}}]}`)
	f.Add(`{"metadata":{},"items":null}`)
	f.Add(`{"metadata":{"resourceVersion":"1"},"items":[` + strings.Replace(poolOf(poolLabels, poolPort), `"vllm"`, `"p"`, 1) + `,` + runningPod("a", "10.0.0.5", poolLabels, "True", "") + `]}`)
	f.Fuzz(func(t *testing.T, text string) {
		u := &url.URL{Scheme: "http", Host: "p.llm"}
		wire := &kubeWire{lists: []func() (int, io.Reader){says(200, text)}}
		w := kube.NewWatch(kube.Over(wire), kube.Selected{Paths: []string{"/x"}}, func(error) {}, func() {})
		p := kubePattern{engine: patternAt(u.String()), url: u}
		k, pool := &kubeService{kubePattern: p, slices: w}, &kubePool{kubePattern: p, name: "p", namespace: "llm", pools: w, pods: w}
		err := w.List(t.Context())
		if _, listed := w.Now(); listed == (err != nil) {
			t.Errorf("listed: %v, though the error is %v", listed, err)
		}
		check := func(e config.Engine, err error) {
			if err == nil && e.Check() != nil {
				t.Errorf("got an unexpected engine: %+v", e)
			}
		}
		k.engines(check)
		pool.engines(check)
	})
}
