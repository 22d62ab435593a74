package discovery

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"reflect"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine/registrations"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// storageCase is a test of a store of cluster blue.
type storageCase struct {
	*testing.T
	s     *Storage
	token string
}

// storageRequest has the Host and the Content-Type of a worker's request.
func storageRequest(method, path, body string) *http.Request {
	r := httptest.NewRequest(method, path, strings.NewReader(body))
	r.Host = "192.0.2.9:8333"
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	return r
}

// ask sends one request as the workers' client does. It returns status and body.
func (c storageCase) ask(method, path, body string) string {
	c.Helper()
	r := storageRequest(method, path, body)
	if c.token != "" {
		r.Header.Set("Authorization", "Bearer "+c.token)
	}
	w := httptest.NewRecorder()
	c.s.routes().ServeHTTP(w, r)
	return fmt.Sprint(w.Code, " ", strings.TrimSpace(w.Body.String()))
}

func (c storageCase) want(method, path, body, want string) {
	c.Helper()
	if got := c.ask(method, path, body); got != want {
		c.Errorf("%s %s %s\n got %s\nwant %s", method, path, body, got, want)
	}
}

// names lists the engines that the store reports.
func (c storageCase) names() string {
	var names []string
	for _, e := range c.s.workers() {
		names = append(names, e.Role+" "+e.Name)
	}
	return strings.Join(names, ", ")
}

const (
	yes, no  = `200 {"result":true}`, `400 {"result":false}`
	blueKey  = "/trtllm-disagg/blue/workers/"
	contextW = "CONTEXT-10.1.0.1:7001-1763690000123-4711-042"
)

// setBody is the StorageItem of a worker.
func setBody(key, worker string, ttl int) string {
	return fmt.Sprintf(`{"key":%q,"value":%q,"expire_time":-1,"ttl":%d,"overwrite_if_exists":false}`, key, worker, ttl)
}

func workerJSON(id, host string, port, role int) string {
	return fmt.Sprintf(`{"worker_id": %q, "host": %q, "port": %d, "role": %d}`, id, host, port, role)
}

// The store answers the five routes as HttpClusterStorageServer does.
func TestStorageRoutes(t *testing.T) {
	c := storageCase{T: t, s: newStorage("blue", "", nil)}
	key := url.QueryEscape(blueKey + contextW)
	value := workerJSON(contextW, "10.1.0.1", 7001, 0)
	quoted := fmt.Sprintf("%q", value)
	c.want("GET", "/get_prefix?key_prefix="+url.QueryEscape(blueKey)+"&keys_only=0", "", `400 {"result":{}}`)
	c.want("GET", "/get?key="+key, "", `400 {"result":null}`)
	c.want("GET", "/expire?key="+key+"&ttl=10", "", no)
	c.want("DELETE", "/delete?key="+key, "", no)
	c.want("POST", "/set", setBody(blueKey+contextW, value, 10), yes)
	c.want("POST", "/set", setBody(blueKey+contextW, value, 10), no)
	c.want("POST", "/set", strings.Replace(setBody(blueKey+contextW, value, 10), "false", "true", 1), yes)
	c.want("GET", "/get?key="+key, "", `200 {"result":`+quoted+`}`)
	c.want("GET", "/expire?key="+key+"&ttl=10", "", yes)
	c.want("GET", "/get_prefix?key_prefix="+url.QueryEscape("/trtllm-disagg/")+"&keys_only=0", "", `200 {"result":{"`+blueKey+contextW+`":`+quoted+`}}`)
	c.want("GET", "/get_prefix?key_prefix="+url.QueryEscape("/trtllm-disagg/")+"&keys_only=1", "", `200 {"result":{"`+blueKey+contextW+`":""}}`)
	c.want("GET", "/get_prefix?key_prefix=", "", `200 {"result":{"`+blueKey+contextW+`":`+quoted+`}}`)
	if got := c.names(); got != "prefill "+contextW {
		t.Errorf("engines %s", got)
	}
	c.want("DELETE", "/delete?key="+key, "", yes)
	if got := c.names(); got != "" {
		t.Errorf("engines %s", got)
	}
	for path, body := range map[string]string{
		"POST /set": `{"key":"a"}`, "POST /set ": `{"key":1,"value":"b"}`, "POST /set  ": `[`, "GET /get": "", "GET /expire?key=a": "",
		"GET /expire?ttl=1": "", "GET /expire?key=a&ttl=x": "", "GET /get_prefix": "", "GET /get_prefix?key_prefix=a&keys_only=2": "", "DELETE /delete": "",
	} {
		method, path, _ := strings.Cut(strings.TrimSpace(path), " ")
		c.want(method, path, body, `422 {"detail":"malformed request"}`)
	}
	if got := c.ask("POST", "/expire?key=a&ttl=1", ""); !strings.HasPrefix(got, "405") {
		t.Error(got)
	}
	if got := c.ask("GET", "/health", ""); !strings.HasPrefix(got, "404") {
		t.Error(got)
	}
	c.want("POST", "/set", setBody("k", strings.Repeat("x", maxRecord), 1), no)
	c.want("POST", "/set", setBody("k", strings.Repeat("x", 3*maxRecord), 1), `422 {"detail":"malformed request"}`)
	c.want("POST", "/set", `{"key":"empty","value":"","ttl":null}`, yes)
	c.want("GET", "/get?key=empty", "", `400 {"result":""}`)
}

// TestStorageWorkers: only keys of the cluster's workers become engines.
func TestStorageWorkers(t *testing.T) {
	c := storageCase{T: t, s: newStorage("blue", "", nil)}
	for id, value := range map[string]string{
		contextW:                   workerJSON(contextW, "10.1.0.1", 7001, 0),
		"GENERATION-h:1-1-1-001":   workerJSON("g", "h", 1, 1),
		"MM_ENCODER-h:2-1-1-001":   workerJSON("e", "h", 2, 2),
		"GENERATION-h:3-1-1-001":   `{"host":`,
		"GENERATION-any:4-1-1-001": workerJSON("a", "0.0.0.0", 4, 1),
	} {
		c.want("POST", "/set", setBody(blueKey+id, value, 10), yes)
	}
	c.want("POST", "/set", setBody("/trtllm-disagg/green/workers/CONTEXT-h:9-1-1-001", workerJSON("x", "h", 9, 0), 10), yes)
	if got, want := c.names(), "prefill "+contextW+", decode GENERATION-any:4-1-1-001, decode GENERATION-h:1-1-1-001"; got != want {
		t.Errorf("engines %s, want %s", got, want)
	}
	if e := c.s.workers()[1]; e.URL != "http://192.0.2.1:4" { // httptest's peer
		t.Errorf("a worker that listens everywhere is at %s", e.URL)
	}
	// A worker that restarts at the same address has a second key. The younger key
	// counts until it is removed.
	again := strings.Replace(contextW, "0123", "0999", 1)
	c.want("POST", "/set", setBody(blueKey+again, workerJSON(again, "10.1.0.1", 7001, 0), 10), yes)
	if got := c.names(); !strings.Contains(got, again) || strings.Contains(got, contextW) {
		t.Errorf("engines %s", got)
	}
	for n := range maxKeys {
		c.s.set(fmt.Sprint("/other/", n), "x", 0, false, "")
	}
	c.want("POST", "/set", setBody("/one/more", "x", 10), no)
}

// TestStorageExpires: a key expires unless a heartbeat comes. The time for which the
// proxy itself stood still does not count.
func TestStorageExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := storageCase{T: t, s: newStorage("blue", "", nil)}
		key, value := blueKey+contextW, workerJSON(contextW, "10.1.0.1", 7001, 0)
		run := func(d time.Duration) {
			for range int(d / sweepEvery) {
				time.Sleep(sweepEvery)
				c.s.sweep(time.Now())
			}
		}
		c.want("POST", "/set", setBody(key, value, 10), yes)
		for range 5 {
			run(5 * time.Second)
			c.want("GET", "/expire?key="+url.QueryEscape(key)+"&ttl=10", "", yes)
		}
		run(10 * time.Second)
		if got := c.names(); got == "" {
			t.Error("the worker was removed within its time")
		}
		time.Sleep(time.Minute) // the proxy stands still and reads no heartbeats
		c.s.sweep(time.Now())
		if got := c.names(); got == "" {
			t.Error("the worker was removed although the proxy itself stood still")
		}
		run(2 * time.Second)
		if got := c.names(); got != "" {
			t.Errorf("engines %s", got)
		}
		c.want("GET", "/expire?key="+url.QueryEscape(key)+"&ttl=10", "", no) // after this answer a worker registers again
		c.want("POST", "/set", setBody(key, value, 10), yes)
		c.want("POST", "/set", setBody("/for/ever", "x", -1), yes)
		time.Sleep(10*time.Second + 1) // expired, but not removed by a sweep yet
		c.want("GET", "/get?key="+url.QueryEscape(key), "", `400 {"result":null}`)
		c.want("POST", "/set", setBody(key, value, 10), yes)
		run(time.Hour)
		c.want("GET", "/get?key=/for/ever", "", `200 {"result":"x"}`)
	})
}

// A store restores the keys of another store with their ends of time, their order
// of age, and the addresses from which the workers registered.
func TestStorageRestored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first := storageCase{T: t, s: newStorage("blue", "", nil)}
		again, anywhere := strings.Replace(contextW, "0123", "0999", 1), "GENERATION-any:4-1-1-001"
		key := url.QueryEscape(blueKey + contextW)
		first.want("POST", "/set", setBody(blueKey+again, workerJSON(again, "10.1.0.1", 7001, 0), 10), yes)
		first.want("POST", "/set", setBody(blueKey+contextW, workerJSON(contextW, "10.1.0.1", 7001, 0), 10), yes) // the younger worker
		first.want("POST", "/set", setBody(blueKey+anywhere, workerJSON("a", "0.0.0.0", 4, 1), 10), yes)
		first.want("POST", "/set", setBody("/for/ever", "x", -1), yes)
		time.Sleep(6 * time.Second)
		first.want("GET", "/expire?key="+key+"&ttl=20", "", yes)

		c := storageCase{T: t, s: newStorage("blue", "", nil)}
		c.want("POST", "/set", setBody("/other", "x", -1), yes) // the restore removes this key
		c.s.restore(first.s.entries())
		if !reflect.DeepEqual(c.s.workers(), first.s.workers()) || c.names() != "prefill "+contextW+", decode "+anywhere {
			t.Errorf("%s, were %s", c.names(), first.names())
		}
		c.want("GET", "/get?key=/other", "", `400 {"result":null}`)
		c.want("GET", "/get?key=/for/ever", "", `200 {"result":"x"}`)
		c.want("POST", "/set", setBody(blueKey+contextW, "x", 10), no)
		c.want("DELETE", "/delete?key="+key, "", yes)
		if got := c.names(); got != "prefill "+again+", decode "+anywhere {
			t.Errorf("engines %s", got)
		}
		c.s.restore(first.s.entries())
		for range 5 {
			time.Sleep(sweepEvery)
			c.s.sweep(time.Now())
		}
		if got := c.names(); got != "prefill "+contextW { // 11 s have passed; the 20 s of this worker began 5 s ago
			t.Errorf("engines %s", got)
		}
		third := strings.Replace(contextW, "0123", "0001", 1)
		c.want("POST", "/set", setBody(blueKey+third, workerJSON(third, "10.1.0.1", 7001, 0), 10), yes)
		if got := c.names(); got != "prefill "+third {
			t.Errorf("engines %s", got)
		}
		time.Sleep(10 * time.Second)
		c.want("GET", "/get?key="+key, "", `200 {"result":`+fmt.Sprintf("%q", workerJSON(contextW, "10.1.0.1", 7001, 0))+`}`)
		time.Sleep(6 * time.Second)
		c.want("GET", "/get?key="+key, "", `400 {"result":null}`)
		c.want("GET", "/get?key=/for/ever", "", `200 {"result":"x"}`)
	})
}

// A successor takes over the keys of its predecessor when the predecessor leaves,
// and not before. Requests during the change are answered too.
func TestStorageSuccessor(t *testing.T) {
	dir := privatedirtest.Open(t)
	start := func(l net.Listener) (s *Storage, lists chan []config.Engine) {
		log := slog.New(slog.DiscardHandler)
		s, err := ListenStorage(StorageOptions{
			Cluster: config.DiscoveryTRTLLM{ClusterURI: "http://127.0.0.1:0", ClusterName: "blue"}, Listener: l, Registrations: registrations.New(dir, "trtllm", log), Log: log,
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		lists, done := make(chan []config.Engine, 100), make(chan struct{})
		go func() {
			defer close(done)
			s.Run(ctx, func(list []config.Engine) { lists <- list })
		}()
		t.Cleanup(func() { cancel(); <-done })
		return s, lists
	}
	first, _ := start(nil)
	uri := "http://" + first.Addr().String()
	post := func(id string) {
		t.Helper()
		resp, err := http.Post(uri+"/set", "application/json", strings.NewReader(setBody(blueKey+id, workerJSON(id, "10.1.0.1", 7001, 0), 100)))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != 200 {
			t.Fatalf("got status %d", resp.StatusCode)
		}
	}
	post(contextW)
	socket, err := takeover.FromListener("x", first.Listener())
	if err != nil {
		t.Fatal(err)
	}
	l, err := socket.Listener()
	socket.File.Close()
	if err != nil {
		t.Fatal(err)
	}
	_, lists := start(l)
	if list := <-lists; len(list) != 1 || list[0].Name != contextW {
		t.Errorf("lists = %+v", list)
	}
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for n := range 4 {
		wg.Go(func() {
			c := &http.Client{Transport: &http.Transport{DisableKeepAlives: n%2 == 0}}
			defer c.CloseIdleConnections()
			for {
				resp, err := c.Get(uri + "/expire?ttl=100&key=" + url.QueryEscape(blueKey+contextW))
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				if resp.StatusCode != 200 {
					t.Errorf("a heartbeat failed: %d", resp.StatusCode)
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	again := strings.Replace(contextW, "0123", "0999", 1)
	post(again)
	first.Release()
	if list := <-lists; len(list) != 1 || list[0].Name != again {
		t.Errorf("lists = %+v", list)
	}
	third := strings.Replace(contextW, "0123", "0001", 1)
	post(third)
	if list := <-lists; len(list) != 1 || list[0].Name != third {
		t.Errorf("lists = %+v", list)
	}
	close(stop)
	wg.Wait()
}

// The size of the stored texts is bounded.
func TestStorageIsBounded(t *testing.T) {
	s := newStorage("blue", "", nil)
	value := strings.Repeat("x", maxRecord-10)
	n := 0
	for s.set(fmt.Sprint("k", n), value, 0, false, "") {
		n++
	}
	if n < maxTexts/maxRecord || n > maxTexts/maxRecord+1 {
		t.Errorf("got %d keys", n)
	}
	if !s.set("k0", "y", 0, true, "") || !s.set("more", value[:2000], 0, false, "") || s.set("k0", value, 0, true, "") {
		t.Error("freed space is not available, or the limit is exceeded")
	}
	for key := range s.items {
		s.remove(key)
	}
	if s.texts != 0 {
		t.Errorf("%d bytes are counted for an empty store", s.texts)
	}
}

func TestStorageToken(t *testing.T) {
	s := newStorage("blue", "a-token", nil)
	for token, want := range map[string]string{"": "401", "another": "401", "a-toke": "401", "a-token": "200"} {
		c := storageCase{T: t, s: s, token: token}
		if got := c.ask("POST", "/set", setBody(fmt.Sprint("k", token), "v", 5)); !strings.HasPrefix(got, want) {
			t.Errorf("token %q: %s, want %s", token, got, want)
		}
	}
}

// TestStorageHammer: many workers register, send heartbeats and leave at once.
func TestStorageHammer(t *testing.T) {
	s := newStorage("blue", "", nil)
	var wg sync.WaitGroup
	for n := range 32 {
		wg.Go(func() {
			id := fmt.Sprintf("GENERATION-h:%d-1-1-001", n+1)
			for range 50 {
				if !s.set(blueKey+id, workerJSON(id, "h", n+1, 1), time.Minute, false, "10.0.0.9") || !s.expire(blueKey+id, time.Minute) {
					t.Error("a worker's own key was refused")
				}
				s.sweep(time.Now())
				s.workers()
				s.mu.Lock()
				s.remove(blueKey + id)
				s.mu.Unlock()
			}
		})
	}
	wg.Wait()
	if left := s.workers(); len(left) != 0 {
		t.Errorf("%d workers remain", len(left))
	}
}

func FuzzStorageSet(f *testing.F) {
	f.Add(setBody(blueKey+contextW, workerJSON(contextW, "10.1.0.1", 7001, 0), 10))
	f.Add(`{"key":"a","value":"b","ttl":-9223372036854775808}`)
	f.Add(`{"key":"` + blueKey + `","value":"{\"host\":\"h\",\"port\":65536,\"role\":1}"}`)
	f.Fuzz(func(t *testing.T, body string) {
		s := newStorage("blue", "", nil)
		w := httptest.NewRecorder()
		s.routes().ServeHTTP(w, storageRequest("POST", "/set", body))
		if w.Code != http.StatusOK && w.Code != http.StatusBadRequest && w.Code != http.StatusUnprocessableEntity {
			t.Errorf("got status %d", w.Code)
		}
		for _, e := range s.workers() {
			if err := e.Check(); err != nil {
				t.Errorf("engine %+v: %v", e, err)
			}
		}
	})
}

// readMetadata turns a worker's record at the metadata server into an engine.
func TestReadMetadata(t *testing.T) {
	for _, tt := range []struct{ key, value, want string }{
		{"trtllm/h-1234", `{"model":"/m","version":"1.1.0","timestamp":"2025-10-13T10:00:00.0","server_role":"CONTEXT","url":"http://h:8001"}`, "prefill h-1234 http://h:8001"},
		{"trtllm/x", `{"server_type":"generation","url":"http://10.0.0.1:8001/"}`, "decode x http://10.0.0.1:8001"},
		{"trtllm/a b#c", `{"server_role":"Generation","url":"http://h:1"}`, "decode a-b-c http://h:1"},
		{"trtllm/x/y", `{"server_role":"CONTEXT","url":"http://h:1"}`, ""},
		{"trtllm/", `{"server_role":"CONTEXT","url":"http://h:1"}`, ""},
		{"trtllm/x", `{"server_role":"MM_ENCODER","url":"http://h:1"}`, ""},
		{"trtllm/x", `{"url":"http://h:1"}`, ""},
		{"trtllm/x", `{"server_role":"CONTEXT","url":"http://0.0.0.0:1"}`, ""},
		{"trtllm/x", `{"server_role":"CONTEXT","url":"h:1"}`, ""},
		{"trtllm/x", `{"server_role":"CONTEXT"}`, ""},
		{"trtllm/x", `"`, ""},
	} {
		e, err := readMetadata(tt.key, []byte(tt.value))
		if got := e.Role + " " + e.Name + " " + e.URL; (err == nil) != (tt.want != "") || err == nil && (got != tt.want || e.Connector != "trtllm") {
			t.Errorf("%s %s: %s, %v; want %s", tt.key, tt.value, got, err, tt.want)
		}
	}
}
