package poolobjects

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/kube"
	"github.com/pdproxy/pdproxy/proxy/models"
)

// server is a fake API server with the objects of the namespace llm, by their path. Its watches
// report nothing: a change becomes known by the next listing.
type server struct {
	mu      sync.Mutex
	away    bool
	objects map[string]map[string]any // by the path of the object
	missing []string                  // prefixes of paths that the server does not have
	writes  []string                  // path and body of each write
	version int
}

// RoundTrip implements http.RoundTripper.
func (s *server) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away {
		return nil, io.ErrUnexpectedEOF
	}
	if r.URL.Query().Has("watch") {
		silent, end := io.Pipe()
		over := time.AfterFunc(5*time.Minute, func() { end.Close() }) // the time that the client wants
		context.AfterFunc(r.Context(), func() {
			over.Stop()
			end.CloseWithError(r.Context().Err())
		})
		return &http.Response{StatusCode: 200, Header: http.Header{}, Body: silent, Request: r}, nil
	}
	status, body := s.answer(r)
	return &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
}

func (s *server) answer(r *http.Request) (int, string) {
	path := r.URL.Path
	say := func(v any) (int, string) {
		text, _ := json.Marshal(v)
		return 200, string(text)
	}
	switch {
	case slices.ContainsFunc(s.missing, func(prefix string) bool { return strings.HasPrefix(path, prefix) }):
		return 404, "404 page not found"
	case path == "/apis":
		return 200, `{"kind":"APIGroupList"}`
	case r.Method == http.MethodPatch:
		return s.patch(r, strings.TrimSuffix(path, "/status"))
	case s.objects[path] != nil:
		return say(s.objects[path])
	case strings.HasPrefix(path, "/api/"): // a Service
		return 404, `{"message":"not found"}`
	}
	items := []any{}
	for _, at := range slices.Sorted(maps.Keys(s.objects)) {
		if strings.HasPrefix(at, path+"/") {
			items = append(items, s.objects[at])
		}
	}
	return say(map[string]any{"metadata": map[string]any{"resourceVersion": strconv.Itoa(s.version)}, "items": items})
}

// patch changes the status of an object.
func (s *server) patch(r *http.Request, path string) (int, string) {
	body, _ := io.ReadAll(r.Body)
	var sent struct {
		Metadata struct{ ResourceVersion string }
		Status   map[string]any
	}
	o := s.objects[path]
	if err := json.Unmarshal(body, &sent); err != nil || o == nil || r.URL.Path == path || r.Header.Get("Content-Type") != "application/merge-patch+json" {
		return 400, "{}"
	}
	metadata := o["metadata"].(map[string]any)
	if metadata["resourceVersion"] != sent.Metadata.ResourceVersion {
		return 409, `{"message":"modified"}`
	}
	s.version++
	metadata["resourceVersion"] = strconv.Itoa(s.version)
	o["status"] = sent.Status
	s.writes = append(s.writes, path+" "+string(body))
	return 200, "{}"
}

const (
	newObjectives = "/apis/llm-d.ai/v1alpha2/namespaces/llm/inferenceobjectives/"
	oldObjectives = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/llm/inferenceobjectives/"
	newRewrites   = "/apis/llm-d.ai/v1alpha2/namespaces/llm/inferencemodelrewrites/"
	poolsPath     = "/apis/inference.networking.k8s.io/v1/namespaces/llm/inferencepools/"
	servicesPath  = "/api/v1/namespaces/llm/services/"
)

// put makes or replaces an object. spec is JSON; age orders the objects of a kind.
func (s *server) put(t *testing.T, path string, age int, spec string) {
	t.Helper()
	var o map[string]any
	name := path[strings.LastIndexByte(path, '/')+1:]
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	text := fmt.Sprintf(`{"metadata":{"name":%q,"namespace":"llm","uid":%q,"generation":1,"resourceVersion":"%d","creationTimestamp":"2026-01-01T00:00:%02dZ"},"spec":%s}`,
		name, path, s.version, 59-age, spec)
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		t.Fatal(err, text)
	}
	s.objects[path] = o
}

// edit calls do while the server answers nothing.
func (s *server) edit(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
}

// follow runs a follower of the pool vllm.
type follow struct {
	s    *server
	log  *testbed.Log
	mu   sync.Mutex
	last *Objects
	n    map[string]string
}

func newFollow(t *testing.T, status bool) *follow {
	t.Helper()
	f := &follow{s: &server{objects: map[string]map[string]any{}}, log: &testbed.Log{}, n: map[string]string{}}
	cfg := config.Default()
	cfg.EPP.Pool, cfg.EPP.Status = "vllm.llm", status
	follower, err := newOver(kube.Over(f.s), Options{
		Config: &cfg, Log: slog.New(slog.NewTextHandler(f.log, nil)), Writes: func() bool { return true },
		Apply: func(o *Objects) { f.mu.Lock(); f.last = o; f.mu.Unlock() },
		Count: func(kind string, valid, invalid int) {
			f.mu.Lock()
			f.n[kind] = fmt.Sprint(valid, " ", invalid)
			f.mu.Unlock()
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); follower.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return f
}

// now returns the objects in force after the next listings.
func (f *follow) now() *Objects {
	time.Sleep(11 * time.Minute)
	synctest.Wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last
}

// TestObjectsComeAndGo: objects of the pool are in force while they exist, and stay while the server
// is away.
func TestObjectsComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFollow(t, false)
		const ref = `"poolRef":{"name":"vllm"`
		f.s.put(t, newObjectives+"high", 0, `{`+ref+`,"group":"inference.networking.k8s.io"},"priority":10}`)
		f.s.put(t, newObjectives+"plain", 0, `{`+ref+`}}`)
		f.s.put(t, newObjectives+"other-pool", 0, `{"poolRef":{"name":"other"},"priority":1}`)
		f.s.put(t, newObjectives+"other-group", 0, `{`+ref+`,"group":"x"},"priority":1}`)
		f.s.put(t, oldObjectives+"ignored", 0, `{`+ref+`},"priority":1}`)
		f.s.put(t, newRewrites+"young", 0, `{`+ref+`},"rules":[{"matches":[{"model":{"value":"a"}}],"targets":[{"modelRewrite":"late"}]}]}`)
		f.s.put(t, newRewrites+"old", 9, `{`+ref+`},"rules":[{"matches":[{"model":{"value":"a","type":"Exact"}},{"model":{"value":"b"}}],"targets":[{"modelRewrite":"x","weight":3},{"modelRewrite":"y","weight":1}]},{"targets":[{"modelRewrite":"z"}]}]}`)
		targets := []models.RewriteTarget{{Model: "x", Weight: 3}, {Model: "y", Weight: 1}}
		want := &Objects{Priorities: map[string]int{"high": 10, "plain": 0}, Rewrites: []models.Rewrite{
			{Name: "a", Targets: targets}, {Name: "b", Targets: targets}, {Any: true, Targets: []models.RewriteTarget{{Model: "z", Weight: 1}}},
			{Name: "a", Targets: []models.RewriteTarget{{Model: "late", Weight: 1}}},
		}}
		if got := f.now(); !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
		if f.n[kindObjective] != "2 0" || f.n[kindRewrite] != "2 0" {
			t.Errorf("counted %v", f.n)
		}
		f.s.edit(func() { f.s.away = true; clear(f.s.objects) })
		if got := f.now(); !reflect.DeepEqual(got, want) {
			t.Errorf("while the server is away: %+v", got)
		}
		if text := f.log.String(); !strings.Contains(text, "the known objects stay in force") {
			t.Errorf("logged: %s", text)
		}
		f.s.edit(func() { f.s.away = false })
		if got := f.now(); len(got.Priorities) != 0 || len(got.Rewrites) != 0 {
			t.Errorf("after the end of the objects: %+v", got)
		}
		f.s.edit(func() { f.s.missing = []string{"/apis/llm-d.ai/"} })
		f.s.put(t, oldObjectives+"earlier", 0, `{`+ref+`},"priority":2}`)
		if got := f.now(); !reflect.DeepEqual(got.Priorities, map[string]int{"earlier": 2}) {
			t.Errorf("of the earlier group: %+v", got)
		}
		f.s.edit(func() { f.s.missing = []string{"/apis/llm-d.ai/", "/apis/inference.networking.x-k8s.io/"} })
		if got := f.now(); len(got.Priorities) != 0 {
			t.Errorf("of a server without the resources: %+v", got)
		}
		if len(f.s.writes) != 0 {
			t.Errorf("written: %q", f.s.writes)
		}
	})
}

// TestInvalidObjects: an invalid object changes nothing, is counted and logged once, and its status
// says why. The others stay in force.
func TestInvalidObjects(t *testing.T) {
	rule := func(text string) string { return `{"poolRef":{"name":"vllm"},"rules":[` + text + `]}` }
	for name, tt := range map[string]struct{ path, spec, why string }{
		"priority":           {newObjectives, `{"poolRef":{"name":"vllm"},"priority":1000001}`, "spec.priority is 1000001"},
		"no rules":           {newRewrites, rule(``), "spec.rules is empty"},
		"no targets":         {newRewrites, rule(`{}`), "targets has 0 entries"},
		"many targets":       {newRewrites, rule(`{"targets":[` + strings.Repeat(`{"modelRewrite":"m"},`, config.MaxSplit) + `{"modelRewrite":"m"}]}`), "targets has 17 entries"},
		"some weights":       {newRewrites, rule(`{"targets":[{"modelRewrite":"a","weight":1},{"modelRewrite":"b"}]}`), "either all targets have a weight"},
		"weight 0":           {newRewrites, rule(`{"targets":[{"modelRewrite":"a","weight":0}]}`), "targets[0].weight is 0"},
		"too heavy":          {newRewrites, rule(`{"targets":[{"modelRewrite":"a","weight":1000001}]}`), "targets[0].weight"},
		"no model":           {newRewrites, rule(`{"targets":[{}]}`), "targets[0].modelRewrite is empty"},
		"a remote":           {newRewrites, rule(`{"targets":[{"modelRewrite":"remote:x"}]}`), "must not begin with"},
		"match of nothing":   {newRewrites, rule(`{"matches":[{}],"targets":[{"modelRewrite":"a"}]}`), "matches[0].model is missing"},
		"match by prefix":    {newRewrites, rule(`{"matches":[{"model":{"type":"Prefix","value":"a"}}],"targets":[{"modelRewrite":"a"}]}`), "is not Exact"},
		"match of no name":   {newRewrites, rule(`{"matches":[{"model":{"value":""}}],"targets":[{"modelRewrite":"a"}]}`), "value is empty"},
		"the second rule":    {newRewrites, rule(`{"targets":[{"modelRewrite":"a"}]},{"targets":[]}`), "spec.rules[1]: targets has 0"},
		"a control in names": {newRewrites, rule(`{"targets":[{"modelRewrite":"a\nb"}]}`), "invalid name"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFollow(t, true)
				f.s.put(t, tt.path+"bad", 0, tt.spec)
				f.s.put(t, newObjectives+"good", 9, `{"poolRef":{"name":"vllm"},"priority":-1}`)
				if got := f.now(); !reflect.DeepEqual(got.Priorities, map[string]int{"good": -1}) || len(got.Rewrites) != 0 {
					t.Errorf("in force: %+v", got)
				}
				kind := kindRewrite
				if tt.path == newObjectives {
					kind = kindObjective
				}
				if !strings.HasSuffix(f.n[kind], " 1") {
					t.Errorf("counted %v", f.n)
				}
				if text := f.log.String(); strings.Count(text, "so it changes nothing") != 1 {
					t.Errorf("logged: %s", text)
				}
				status, _ := json.Marshal(f.s.objects[tt.path+"bad"]["status"])
				why, _ := json.Marshal(tt.why)
				if !strings.Contains(string(status), strings.Trim(string(why), `"`)) || !strings.Contains(string(status), `"reason":"Invalid","status":"False","type":"Accepted"`) {
					t.Errorf("the status is %s", status)
				}
				good, _ := json.Marshal(f.s.objects[newObjectives+"good"]["status"])
				if !strings.Contains(string(good), `"observedGeneration":1,"reason":"Accepted","status":"True","type":"Accepted"`) || len(f.s.writes) != 2 {
					t.Errorf("the status of the other is %s after %d writes", good, len(f.s.writes))
				}
				f.s.put(t, tt.path+"bad", 0, `{"poolRef":{"name":"other"}}`)
				if f.now(); !strings.HasSuffix(f.n[kind], " 0") {
					t.Errorf("counted %v", f.n)
				}
			})
		})
	}
}

// TestManyPriorities: the oldest objects have the priorities that fit.
func TestManyPriorities(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFollow(t, false)
		for i := range config.MaxBands + 1 {
			f.s.put(t, newObjectives+fmt.Sprint("o", i), 20-i, fmt.Sprintf(`{"poolRef":{"name":"vllm"},"priority":%d}`, i))
		}
		f.s.put(t, newObjectives+"same", 0, `{"poolRef":{"name":"vllm"},"priority":3}`)
		got := f.now().Priorities
		if _, found := got[fmt.Sprint("o", config.MaxBands)]; found || len(got) != config.MaxBands+1 || got["same"] != 3 || f.n[kindObjective] != "9 1" {
			t.Errorf("got %v, counted %v", got, f.n)
		}
	})
}

// TestPoolStatus: the picker has one entry in the status of the pool, whose parent is its Service.
// The entries of gateways stay. A controller that removes the entry is not fought.
func TestPoolStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFollow(t, true)
		const gateway = `{"conditions":[{"type":"Accepted"}],"controllerName":"example.net/gateway","parentRef":{"kind":"Gateway","name":"inference"}}`
		spec := func(ref string) string {
			return `{"selector":{"matchLabels":{"app":"vllm"}},"targetPorts":[{"number":8000}]` + ref + `}`
		}
		f.s.put(t, poolsPath+"vllm", 0, spec(`,"endpointPickerRef":{"name":"picker","port":{"number":9002}}`))
		f.s.put(t, poolsPath+"other", 0, spec(`,"endpointPickerRef":{"name":"picker","port":{"number":9002}}`))
		var entry any
		if err := json.Unmarshal([]byte(gateway), &entry); err != nil {
			t.Fatal(err)
		}
		f.s.edit(func() { f.s.objects[poolsPath+"vllm"]["status"] = map[string]any{"parents": []any{entry}} })
		status := func() string {
			f.now()
			text, _ := json.Marshal(f.s.objects[poolsPath+"vllm"]["status"])
			return string(text)
		}
		got := status()
		for _, want := range []string{gateway, `"controllerName":"pdproxy/endpoint-picker"`, `"parentRef":{"group":"","kind":"Service","name":"picker"}`,
			`"reason":"Accepted","status":"True","type":"Accepted"`, `"reason":"InvalidExtensionRef","status":"False","type":"ResolvedRefs"`} {
			if !strings.Contains(got, want) {
				t.Errorf("the status has no %s:\n%s", want, got)
			}
		}
		f.s.put(t, servicesPath+"picker", 0, `{}`)
		if got := status(); !strings.Contains(got, gateway) || strings.Count(got, controllerName) != 1 || !strings.Contains(got, `"reason":"ResolvedRefs","status":"True"`) {
			t.Errorf("after the Service exists: %s", got)
		}
		if n := len(f.s.writes); n != 2 {
			t.Errorf("%d writes: %q", n, f.s.writes)
		}
		f.s.edit(func() {
			o := f.s.objects[poolsPath+"vllm"]
			f.s.version++
			o["metadata"].(map[string]any)["resourceVersion"], o["status"] = strconv.Itoa(f.s.version), map[string]any{"parents": []any{entry}}
		})
		if got := status(); strings.Contains(got, controllerName) || len(f.s.writes) != 2 || strings.Count(f.log.String(), "another controller replaces the status") != 1 {
			t.Errorf("after another controller: %s, %d writes, logged %s", got, len(f.s.writes), f.log)
		}
		f.s.put(t, poolsPath+"vllm", 0, spec(``)) // no picker to name
		if got := status(); got != "null" {
			t.Errorf("without a picker: %s", got)
		}
	})
}

// FuzzObjects: any object of a server is valid or has a problem, and a valid one has rules that a
// table of models accepts.
func FuzzObjects(f *testing.F) {
	f.Add(`{"spec":{"poolRef":{"name":"vllm"},"priority":-1,"rules":[{"matches":[{"model":{"value":"a"}}],"targets":[{"modelRewrite":"b","weight":1},{"modelRewrite":"c","weight":2}]}]}}`)
	f.Add(`{"spec":{"rules":[{"targets":[{"modelRewrite":"a"}]},{"matches":[{}]}]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		var o kube.Object
		if json.Unmarshal([]byte(text), &o) != nil {
			return
		}
		problems := map[*kube.Object]error{}
		list := []*kube.Object{&o}
		rules := rewritesOf(list, problems)
		if (problems[&o] == nil) != (len(rules) > 0) {
			t.Fatalf("%d rules, %v", len(rules), problems[&o])
		}
		cfg := config.Default()
		table := models.NewTable(&cfg, rules)
		for _, r := range rules {
			if route := table.Route(r.Name); route == nil || len(route.Models()) == 0 || route.Choose(1)[0] == "" {
				t.Errorf("no model for %q", r.Name)
			}
		}
		if p := prioritiesOf(list, map[*kube.Object]error{}); len(p) > 1 {
			t.Errorf("got %v", p)
		}
	})
}
