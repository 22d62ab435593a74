package kube

import (
	"encoding/pem"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Inside a cluster, the pod's environment and service account contain the configuration.
// After a renewal of the token, the next request uses the new token.
func TestInCluster(t *testing.T) {
	var got []string // protocol and token of each request
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = append(got, r.Proto+" "+r.Header.Get("Authorization"))
		if len(got) == 3 {
			http.Redirect(w, r, "/elsewhere", http.StatusFound)
			return
		}
		_, _ = io.WriteString(w, `{"metadata":{"resourceVersion":"1"}}`)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	account := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(account, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("token", "first\n")
	put("namespace", "llm\n")
	put("ca.crt", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	host, port, err := net.SplitHostPort(server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
	api, err := newClient(config.DiscoveryKubernetes{}, account, func(name string) string { return env[name] })
	if err != nil {
		t.Fatal(err)
	}
	if api.Namespace != "llm" {
		t.Errorf("the namespace is %q", api.Namespace)
	}
	defer api.client.Load().CloseIdleConnections()
	for _, token := range []string{"first", "second"} {
		put("token", token)
		api.Redial()
		if _, err := api.list(t.Context(), "/x", nil); err != nil {
			t.Error(err)
		}
	}
	if _, err := api.list(t.Context(), "/x", nil); err == nil || !strings.Contains(err.Error(), "status 302") {
		t.Errorf("sent elsewhere: %v", err)
	}
	put("token", "")
	if _, err := api.list(t.Context(), "/x", nil); err == nil {
		t.Error("a request was sent without a token")
	}
	if want := []string{"HTTP/2.0 Bearer first", "HTTP/2.0 Bearer second", "HTTP/2.0 Bearer second"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}

// answers is a server that answers each path with a status and a text; other paths with 404.
type answers map[string]struct {
	status int
	text   string
}

// RoundTrip implements http.RoundTripper.
func (a answers) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, found := a[r.URL.Path]
	if !found {
		answer.status, answer.text = http.StatusNotFound, "404 page not found"
	}
	return &http.Response{StatusCode: answer.status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(answer.text)), Request: r}, nil
}

// TestPaths: the first path that the server has counts. Without one there are no objects, but only
// if an API server says so.
func TestPaths(t *testing.T) {
	const listing = `{"metadata":{"resourceVersion":"7"},"items":[{"metadata":{"namespace":"llm","name":"NAME"}}]}`
	type answer = struct {
		status int
		text   string
	}
	of := func(name string) answer { return answer{200, strings.Replace(listing, "NAME", name, 1)} }
	groups := answer{200, `{"kind":"APIGroupList","groups":[]}`}
	for name, tt := range map[string]struct {
		server answers
		want   string // the object; "-": none
		err    string
	}{
		"both":                  {answers{"/new": of("a"), "/old": of("b")}, "a", ""},
		"the second":            {answers{"/old": of("b")}, "b", ""},
		"forbidden":             {answers{"/new": {403, `{"message":"no"}`}, "/old": of("b")}, "", "status 403 no"},
		"none":                  {answers{"/apis": groups}, "-", ""},
		"none, not a server":    {answers{}, "", "status 404"},
		"none, another's page":  {answers{"/apis": {200, "<html>"}}, "", "no list of API groups"},
		"none, server is ill":   {answers{"/apis": {500, ""}}, "", "status 500"},
		"the second is no list": {answers{"/old": {200, "[]"}}, "", "decode the list of /old"},
	} {
		t.Run(name, func(t *testing.T) {
			w := NewWatch(Over(tt.server), Selected{Paths: []string{"/new", "/old"}}, func(error) {}, func() {})
			err := w.List(t.Context())
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("got %v", err)
				}
				return
			}
			objects, listed := w.Now()
			got := "-"
			if len(objects) == 1 {
				got = objects[0].Metadata.Name
			}
			if err != nil || !listed || got != tt.want {
				t.Errorf("got %q, listed %v, %v", got, listed, err)
			}
		})
	}
}

// TestOneObject: single objects are read and written, and a refusal keeps its status.
func TestOneObject(t *testing.T) {
	c := Over(answers{"/a": {200, `{"metadata":{"name":"a","resourceVersion":"3"}}`}, "/taken": {409, `{"message":"changed"}`}, "/bad": {200, `{"metadata":3}`}})
	if o, err := c.Read(t.Context(), "/a"); err != nil || o.Metadata.ResourceVersion != "3" {
		t.Errorf("got %+v, %v", o, err)
	}
	if _, err := c.Write(t.Context(), http.MethodPatch, "/taken", Object{}); !Is(err, http.StatusConflict) || !strings.Contains(err.Error(), "patch /taken: status 409 changed") {
		t.Errorf("got %v", err)
	}
	if _, err := c.Read(t.Context(), "/bad"); err == nil || !strings.Contains(err.Error(), "decode /bad") {
		t.Errorf("got %v", err)
	}
	if _, err := c.Write(t.Context(), http.MethodPost, "/a", make(chan int)); err == nil {
		t.Error("a channel was written")
	}
}

// FuzzWatch: no stream of a server makes a watch fail with a panic or hold an object without a
// version.
func FuzzWatch(f *testing.F) {
	for _, name := range []string{"watch.jsonl", "gone.jsonl"} {
		text, err := os.ReadFile(filepath.Join("..", "engine", "discovery", "testdata", "kubernetes", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(text))
	}
	f.Add(`{"type":"ADDED","object":{"metadata":{"resourceVersion":"1"},"endpoints":[{"addresses":["[::1"]}],"ports":[{"port":-1}]}}`)
	f.Add(`{"type":"ADDED","object":{"metadata":{"resourceVersion":"1"},"spec":{"priority":-1,"rules":[{"matches":[{"model":{"value":"a"}}],"targets":[{"modelRewrite":"b","weight":1}]}]}}}`)
	f.Fuzz(func(t *testing.T, text string) {
		c := Over(answers{"/x": {200, text}})
		w := NewWatch(c, Selected{}, func(error) {}, func() {})
		w.objects = map[string]*Object{}
		_ = c.watch(t.Context(), "/x", nil, "1", w.take)
		objects, _ := w.Now()
		for _, o := range objects {
			if o.Metadata.ResourceVersion == "" || w.Object(o.Metadata.Namespace, o.Metadata.Name) == nil {
				t.Errorf("got %+v", o)
			}
		}
	})
}

// TestLocalIP: the address of this host toward the API server.
func TestLocalIP(t *testing.T) {
	for api, want := range map[string]string{"https://127.0.0.1:1": "127.0.0.1", "https://127.0.0.1": "127.0.0.1", "https://host.invalid": ""} {
		client, err := newClient(config.DiscoveryKubernetes{API: api}, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		ip, err := client.LocalIP()
		if (err != nil) != (want == "") || want != "" && ip.String() != want {
			t.Errorf("%s: got %v, %v, want %q", api, ip, err, want)
		}
	}
}
