package proxy

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const remoteKey = "sk-remote-secret"

// withRemote starts a world with the engine a of model a, whose fallback is the endpoint
// cloud.
func withRemote(t *testing.T, a, cloud *fakeEngine, change func(*config.Config)) *world {
	cloud.remote = true
	return newWorld(t, setup{engines: []*fakeEngine{a, cloud}, config: func(c *config.Config) {
		c.Models = []config.Model{{Name: "a", Fallback: []string{"remote:cloud"}}}
		c.Remotes = []config.Remote{{Name: "cloud", URL: "http://" + cloud.host(), Model: "gpt", APIKeyFile: remoteKey}}
		if change != nil {
			change(c)
		}
	}})
}

// TestRemote: a remote serves only while the model has no engine. It gets its own key and
// name of the model, and neither PD fields nor header lines that name the client or hosts.
func TestRemote(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprint("stream ", stream), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, cloud := answering("a", "a"), answering("cloud", "")
				w := withRemote(t, a, cloud, func(c *config.Config) { c.Server.TrustPDFields = true })
				body := fmt.Sprintf(`{"model":"a","prompt":"hi","user":"u","kv_transfer_params":{"x":1},"stream":%t}`, stream)
				header := []string{"Authorization", "Bearer of-the-client", "X-Api-Key", "of-the-client", "Cookie", "c=1", "X-Forwarded-For", "10.1.1.1",
					"X-Session-ID", "s", "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Internal", "1", "Accept", "*/*"}
				w.fellBack(w.post(completionsPath, body, header...), "a", "no_engine", 0)
				w.leave()
				got := w.post(completionsPath, body, header...)
				w.fellBack(got, "cloud", "no_engine", 1)
				legs := cloud.seen()
				if len(legs) != 1 {
					t.Fatalf("the remote got %d requests", len(legs))
				}
				if want := fmt.Sprintf(`{"model":"gpt","prompt":"hi","user":"u","stream":%t}`, stream); legs[0].body != want || legs[0].path != completionsPath {
					t.Errorf("the remote got %s %s, want %s", legs[0].path, legs[0].body, want)
				}
				var names []string
				for name := range legs[0].header {
					names = append(names, name)
				}
				slices.Sort(names)
				if want := []string{"Accept", "Authorization", "Content-Length", "Content-Type"}; !slices.Equal(names, want) || legs[0].header.Get("Authorization") != "Bearer "+remoteKey {
					t.Errorf("the remote got the header %v", legs[0].header)
				}
				if n := w.metric("pdproxy_exchanges_total", "remote:cloud", "ok"); n != 1 {
					t.Errorf("got %v exchanges of the remote", n)
				}
				if got := w.get("/health"); got.status != 200 {
					t.Errorf("health: %d, but the remote serves", got.status)
				}
				w.leave(a)
				w.fellBack(w.post(completionsPath, body), "a", "no_engine", 1)
				if strings.Contains(w.logged.String(), remoteKey) {
					t.Error("the key is in the log")
				}
			})
		})
	}
}

// TestRemoteAnswerHeader: header lines of a remote that name the operator's account do not
// reach the client.
func TestRemoteAnswerHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cloud := &fakeEngine{name: "cloud", serve: func(c *engineConn, _ int) {
			c.send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nOpenai-Organization: org-1\r\nSet-Cookie: a=b\r\nX-Ratelimit-Remaining-Tokens: 5\r\nContent-Length: 13\r\n\r\n{\"model\":\"x\"}")
		}}
		w := withRemote(t, answering("a", "a"), cloud, nil)
		w.leave()
		got := w.post(completionsPath, asking("a"))
		if got.status != 200 || got.header.Get("Content-Type") != "application/json" {
			t.Errorf("got %d %v", got.status, got.header)
		}
		for _, name := range []string{"Openai-Organization", "Set-Cookie", "X-Ratelimit-Remaining-Tokens"} {
			if v := got.header.Get(name); v != "" {
				t.Errorf("the client got %s: %s", name, v)
			}
		}
	})
}

// TestRemoteFails: a failure of the remote is a clear error without the remote's text. Then
// its circuit is open, and requests do not wait for it. The trial closes the circuit.
func TestRemoteFails(t *testing.T) {
	quoting := `{"error":{"message":"Incorrect API key provided: ` + remoteKey + `"}}`
	for name, tt := range map[string]struct {
		serve  func(c *engineConn, _ int)
		status int
	}{
		"wrong key":    {func(c *engineConn, _ int) { c.json(401, quoting) }, 502},
		"no access":    {func(c *engineConn, _ int) { c.json(403, quoting) }, 502},
		"no model":     {func(c *engineConn, _ int) { c.json(404, quoting) }, 502},
		"limit":        {func(c *engineConn, _ int) { c.json(429, quoting) }, 502},
		"error":        {func(c *engineConn, _ int) { c.json(500, quoting) }, 502},
		"web page":     {func(c *engineConn, _ int) { c.json(200, "<html>"+remoteKey+"</html>") }, 502},
		"list":         {func(c *engineConn, _ int) { c.json(200, `["`+remoteKey+`"]`) }, 502},
		"empty":        {func(c *engineConn, _ int) { c.json(200, "") }, 502},
		"broken off":   {func(c *engineConn, _ int) { c.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"); c.hangUp() }, 502},
		"hangs up":     {func(c *engineConn, _ int) { c.hangUp() }, 502},
		"no HTTP":      {func(c *engineConn, _ int) { c.send("220 mail.example.com ESMTP\r\n"); c.hangUp() }, 502},
		"slow":         {func(c *engineConn, _ int) { c.hold() }, 504},
		"error event":  {func(c *engineConn, _ int) { c.stream("data: {\"error\":{\"message\":\"no\",\"code\":401}}\n\n") }, 502},
		"empty stream": {func(c *engineConn, _ int) { c.stream("") }, 502},
	} {
		for _, stream := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " ", stream), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					if !stream && strings.Contains(name, "event") || !stream && name == "empty stream" {
						return // only for streams
					}
					var works atomic.Bool
					cloud := &fakeEngine{name: "cloud", serve: func(c *engineConn, nth int) {
						if works.Load() {
							answering("cloud", "").serve(c, nth)
							return
						}
						tt.serve(c, nth)
					}}
					w := withRemote(t, answering("a", "a"), cloud, func(c *config.Config) {
						c.Circuit.Failures, c.Circuit.OpenFor = 1, config.Duration(time.Minute)
						c.Timeouts.FirstByte = config.Duration(10 * time.Second)
					})
					w.leave()
					body := fmt.Sprintf(`{"model":"a","prompt":"hi","stream":%t}`, stream)
					got := w.post(completionsPath, body)
					if got.status != tt.status || !strings.Contains(got.body, `"error"`) {
						t.Errorf("got %d %s, want %d", got.status, got.body, tt.status)
					}
					tries := len(cloud.seen())
					if again := w.post(completionsPath, body); again.status != 503 || again.header.Get("Retry-After") == "" {
						t.Errorf("with an open circuit: got %d %s", again.status, again.body)
					}
					if n := len(cloud.seen()); n != tries {
						t.Errorf("the remote got %d requests with an open circuit", n-tries)
					}
					if text := got.body + w.logged.String(); strings.Contains(text, remoteKey) {
						t.Errorf("the key is in an answer or the log: %s", text)
					}
					works.Store(true)
					time.Sleep(time.Minute)
					if later := w.post(completionsPath, body); later.status != 200 {
						t.Errorf("after open_for: got %d %s", later.status, later.body)
					}
				})
			})
		}
	}
}

// TestRemoteRefusesTheRequest: the client gets the remote's answer about the request itself.
func TestRemoteRefusesTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cloud := &fakeEngine{name: "cloud", serve: func(c *engineConn, _ int) { c.json(400, `{"error":{"message":"too long"}}`) }}
		w := withRemote(t, answering("a", "a"), cloud, func(c *config.Config) { c.Circuit.Failures = 1 })
		w.leave()
		for range 2 {
			if got := w.post(completionsPath, asking("a")); got.status != 400 || !strings.Contains(got.body, "too long") {
				t.Errorf("got %d %s", got.status, got.body)
			}
		}
		if n := len(cloud.seen()); n != 2 {
			t.Errorf("the remote got %d requests", n)
		}
	})
}

// TestRemoteIsNoModel: clients cannot name a remote, no list shows it, an engine that claims
// its name gets nothing, and it takes no routes that it does not serve.
func TestRemoteIsNoModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, cloud := answering("a", "a,remote:cloud"), answering("cloud", "")
		w := withRemote(t, a, cloud, func(c *config.Config) { c.Models = append(c.Models, config.Model{Name: "alias", AliasOf: "a"}) })
		if got := w.post(completionsPath, asking("remote:cloud")); got.status != 404 || strings.Contains(got.body, "serve a, remote") {
			t.Errorf("got %d %s", got.status, got.body)
		}
		if got := w.get("/v1/models"); strings.Contains(got.body, "remote") {
			t.Errorf("models: %s", got.body)
		}
		if got := w.post(completionsPath, `{"prompt":"hi"}`); got.status != 200 { // a is the only model
			t.Errorf("without a model: got %d %s", got.status, got.body)
		}
		served := len(a.seen())
		w.leave()
		if got := w.get("/v1/models"); !strings.Contains(got.body, `"id":"a"`) {
			t.Errorf("models without engines: %s", got.body)
		}
		for path, body := range map[string]string{
			"/v1/messages": `{"model":"a","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}`,
			"/tokenize":    `{"model":"a","prompt":"hi"}`,
		} {
			if got := w.post(path, strings.Replace(body, `"a"`, `"alias"`, 1)); got.status != 503 || !strings.Contains(got.body, `serve model \"alias\"`) {
				t.Errorf("%s: got %d %s", path, got.status, got.body)
			}
		}
		if n := len(cloud.seen()) + len(a.seen()) - served; n != 0 {
			t.Errorf("got %d requests", n)
		}
	})
}

// TestRemoteWithoutFallback: no client reaches a remote that no fallback names.
func TestRemoteWithoutFallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cloud := answering("cloud", "")
		w := withRemote(t, answering("a", "a"), cloud, func(c *config.Config) { c.Models = nil })
		for _, body := range []string{asking("remote:cloud"), `{"prompt":"hi"}`} {
			w.post(completionsPath, body)
		}
		w.leave()
		if got := w.post(completionsPath, `{"prompt":"hi"}`); got.status == 200 {
			t.Errorf("without a model and without engines: got %d", got.status)
		}
		if n := len(cloud.seen()); n != 0 {
			t.Errorf("the remote got %d requests", n)
		}
	})
}

// TestRemoteGetsNoSearch: the search for a stored response, which carries header lines of the
// client, does not reach a remote.
func TestRemoteGetsNoSearch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cloud := answering("cloud", "")
		w := withRemote(t, &fakeEngine{name: "a", connector: "vllm-nixl", models: "a", serve: holding("resp_a")}, cloud, nil)
		if got := w.get("/v1/responses/resp_x"); got.status != 404 {
			t.Errorf("got %d %s", got.status, got.body)
		}
		if legs := cloud.seen(); len(legs) != 0 {
			t.Errorf("the remote got %+v", legs)
		}
	})
}
