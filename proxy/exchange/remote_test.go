package exchange_test

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

const remoteKey = "sk-remote-secret"

// withRemote starts a world with the engine a of model a, whose fallback is the endpoint
// cloud.
func withRemote(t *testing.T, a, cloud *world.Engine, change func(*config.Config)) *world.World {
	cloud.Remote = true
	return world.New(t, world.Setup{Engines: []*world.Engine{a, cloud}, Config: func(c *config.Config) {
		c.Models = []config.Model{{Name: "a", Fallback: []string{"remote:cloud"}}}
		c.Remotes = []config.Remote{{Name: "cloud", URL: "http://" + cloud.Host(), Model: "gpt", APIKeyFile: remoteKey}}
		if change != nil {
			change(c)
		}
	}})
}

// TestRemote: a remote serves only while the model has no engine. It gets its own key and
// name of the model, and neither PD fields nor header lines that name the client or hosts.
func TestRemote(t *testing.T) {
	for _, stream := range []bool{false, true} {
		world.Run(t, fmt.Sprint("stream ", stream), func(t *testing.T) {
			a, cloud := world.Answering("a", "a"), world.Answering("cloud", "")
			w := withRemote(t, a, cloud, func(c *config.Config) { c.Server.TrustPDFields = true })
			body := fmt.Sprintf(`{"model":"a","prompt":"hi","user":"u","kv_transfer_params":{"x":1},"stream":%t}`, stream)
			header := []string{"Authorization", "Bearer of-the-client", "X-Api-Key", "of-the-client", "Cookie", "c=1", "X-Forwarded-For", "10.1.1.1",
				"X-Session-ID", "s", "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "X-Internal", "1", "Accept", "*/*"}
			fellBack(w, w.Post(world.CompletionsPath, body, header...), "a", "no_engine", 0)
			leave(w)
			got := w.Post(world.CompletionsPath, body, header...)
			fellBack(w, got, "cloud", "no_engine", 1)
			legs := cloud.Seen()
			if len(legs) != 1 {
				t.Fatalf("the remote got %d requests", len(legs))
			}
			if want := fmt.Sprintf(`{"model":"gpt","prompt":"hi","user":"u","stream":%t}`, stream); legs[0].Body != want || legs[0].Path != world.CompletionsPath {
				t.Errorf("the remote got %s %s, want %s", legs[0].Path, legs[0].Body, want)
			}
			var names []string
			for name := range legs[0].Header {
				names = append(names, name)
			}
			slices.Sort(names)
			if want := []string{"Accept", "Authorization", "Content-Length", "Content-Type"}; !slices.Equal(names, want) || legs[0].Header.Get("Authorization") != "Bearer "+remoteKey {
				t.Errorf("the remote got the header %v", legs[0].Header)
			}
			if n := w.Metric("pdproxy_exchanges_total", "remote:cloud", "ok"); n != 1 {
				t.Errorf("got %v exchanges of the remote", n)
			}
			if got := w.Get("/health"); got.Status != 200 {
				t.Errorf("health: %d, but the remote serves", got.Status)
			}
			leave(w, a)
			fellBack(w, w.Post(world.CompletionsPath, body), "a", "no_engine", 1)
			if strings.Contains(w.Logged.String(), remoteKey) {
				t.Error("the key is in the log")
			}
		})
	}
}

// TestRemoteAnswerHeader: header lines of a remote that name the operator's account do not
// reach the client.
func TestRemoteAnswerHeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cloud := &world.Engine{Name: "cloud", Serve: func(c *world.Conn, _ int) {
			c.Send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nOpenai-Organization: org-1\r\nSet-Cookie: a=b\r\nX-Ratelimit-Remaining-Tokens: 5\r\nContent-Length: 13\r\n\r\n{\"model\":\"x\"}")
		}}
		w := withRemote(t, world.Answering("a", "a"), cloud, nil)
		leave(w)
		got := w.Post(world.CompletionsPath, world.Asking("a"))
		if got.Status != 200 || got.Header.Get("Content-Type") != "application/json" {
			t.Errorf("got %d %v", got.Status, got.Header)
		}
		for _, name := range []string{"Openai-Organization", "Set-Cookie", "X-Ratelimit-Remaining-Tokens"} {
			if v := got.Header.Get(name); v != "" {
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
		serve  func(c *world.Conn, _ int)
		status int
	}{
		"wrong key":    {func(c *world.Conn, _ int) { c.JSON(401, quoting) }, 502},
		"no access":    {func(c *world.Conn, _ int) { c.JSON(403, quoting) }, 502},
		"no model":     {func(c *world.Conn, _ int) { c.JSON(404, quoting) }, 502},
		"limit":        {func(c *world.Conn, _ int) { c.JSON(429, quoting) }, 502},
		"error":        {func(c *world.Conn, _ int) { c.JSON(500, quoting) }, 502},
		"web page":     {func(c *world.Conn, _ int) { c.JSON(200, "<html>"+remoteKey+"</html>") }, 502},
		"list":         {func(c *world.Conn, _ int) { c.JSON(200, `["`+remoteKey+`"]`) }, 502},
		"empty":        {func(c *world.Conn, _ int) { c.JSON(200, "") }, 502},
		"broken off":   {func(c *world.Conn, _ int) { c.Send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"); c.HangUp() }, 502},
		"hangs up":     {func(c *world.Conn, _ int) { c.HangUp() }, 502},
		"no HTTP":      {func(c *world.Conn, _ int) { c.Send("220 mail.example.com ESMTP\r\n"); c.HangUp() }, 502},
		"slow":         {func(c *world.Conn, _ int) { c.Hold() }, 504},
		"error event":  {func(c *world.Conn, _ int) { c.Stream("data: {\"error\":{\"message\":\"no\",\"code\":401}}\n\n") }, 502},
		"empty stream": {func(c *world.Conn, _ int) { c.Stream("") }, 502},
	} {
		for _, stream := range []bool{false, true} {
			world.Run(t, fmt.Sprint(name, " ", stream), func(t *testing.T) {
				if !stream && strings.Contains(name, "event") || !stream && name == "empty stream" {
					return // only for streams
				}
				var works atomic.Bool
				cloud := &world.Engine{Name: "cloud", Serve: func(c *world.Conn, nth int) {
					if works.Load() {
						world.Answering("cloud", "").Serve(c, nth)
						return
					}
					tt.serve(c, nth)
				}}
				w := withRemote(t, world.Answering("a", "a"), cloud, func(c *config.Config) {
					c.Circuit.Failures, c.Circuit.OpenFor = 1, config.Duration(time.Minute)
					c.Timeouts.FirstByte = config.Duration(10 * time.Second)
				})
				leave(w)
				body := fmt.Sprintf(`{"model":"a","prompt":"hi","stream":%t}`, stream)
				got := w.Post(world.CompletionsPath, body)
				if got.Status != tt.status || !strings.Contains(got.Body, `"error"`) {
					t.Errorf("got %d %s, want %d", got.Status, got.Body, tt.status)
				}
				tries := len(cloud.Seen())
				if again := w.Post(world.CompletionsPath, body); again.Status != 503 || again.Header.Get("Retry-After") == "" {
					t.Errorf("with an open circuit: got %d %s", again.Status, again.Body)
				}
				if n := len(cloud.Seen()); n != tries {
					t.Errorf("the remote got %d requests with an open circuit", n-tries)
				}
				if text := got.Body + w.Logged.String(); strings.Contains(text, remoteKey) {
					t.Errorf("the key is in an answer or the log: %s", text)
				}
				works.Store(true)
				time.Sleep(time.Minute)
				if later := w.Post(world.CompletionsPath, body); later.Status != 200 {
					t.Errorf("after open_for: got %d %s", later.Status, later.Body)
				}
			})
		}
	}
}

// TestRemoteRefusesTheRequest: the client gets the remote's answer about the request itself.
func TestRemoteRefusesTheRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cloud := &world.Engine{Name: "cloud", Serve: func(c *world.Conn, _ int) { c.JSON(400, `{"error":{"message":"too long"}}`) }}
		w := withRemote(t, world.Answering("a", "a"), cloud, func(c *config.Config) { c.Circuit.Failures = 1 })
		leave(w)
		for range 2 {
			if got := w.Post(world.CompletionsPath, world.Asking("a")); got.Status != 400 || !strings.Contains(got.Body, "too long") {
				t.Errorf("got %d %s", got.Status, got.Body)
			}
		}
		if n := len(cloud.Seen()); n != 2 {
			t.Errorf("the remote got %d requests", n)
		}
	})
}

// TestRemoteIsNoModel: clients cannot name a remote, no list shows it, an engine that claims
// its name gets nothing, and it takes no routes that it does not serve.
func TestRemoteIsNoModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, cloud := world.Answering("a", "a,remote:cloud"), world.Answering("cloud", "")
		w := withRemote(t, a, cloud, func(c *config.Config) { c.Models = append(c.Models, config.Model{Name: "alias", AliasOf: "a"}) })
		if got := w.Post(world.CompletionsPath, world.Asking("remote:cloud")); got.Status != 404 || strings.Contains(got.Body, "serve a, remote") {
			t.Errorf("got %d %s", got.Status, got.Body)
		}
		if got := w.Get("/v1/models"); strings.Contains(got.Body, "remote") {
			t.Errorf("models: %s", got.Body)
		}
		if got := w.Post(world.CompletionsPath, `{"prompt":"hi"}`); got.Status != 200 { // a is the only model
			t.Errorf("without a model: got %d %s", got.Status, got.Body)
		}
		served := len(a.Seen())
		leave(w)
		if got := w.Get("/v1/models"); !strings.Contains(got.Body, `"id":"a"`) {
			t.Errorf("models without engines: %s", got.Body)
		}
		for path, body := range map[string]string{
			"/v1/messages": `{"model":"a","max_tokens":5,"messages":[{"role":"user","content":"hi"}]}`,
			"/tokenize":    `{"model":"a","prompt":"hi"}`,
		} {
			if got := w.Post(path, strings.Replace(body, `"a"`, `"alias"`, 1)); got.Status != 503 || !strings.Contains(got.Body, `serve model \"alias\"`) {
				t.Errorf("%s: got %d %s", path, got.Status, got.Body)
			}
		}
		if n := len(cloud.Seen()) + len(a.Seen()) - served; n != 0 {
			t.Errorf("got %d requests", n)
		}
	})
}

// TestRemoteWithoutFallback: no client reaches a remote that no fallback names.
func TestRemoteWithoutFallback(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cloud := world.Answering("cloud", "")
		w := withRemote(t, world.Answering("a", "a"), cloud, func(c *config.Config) { c.Models = nil })
		for _, body := range []string{world.Asking("remote:cloud"), `{"prompt":"hi"}`} {
			w.Post(world.CompletionsPath, body)
		}
		leave(w)
		if got := w.Post(world.CompletionsPath, `{"prompt":"hi"}`); got.Status == 200 {
			t.Errorf("without a model and without engines: got %d", got.Status)
		}
		if n := len(cloud.Seen()); n != 0 {
			t.Errorf("the remote got %d requests", n)
		}
	})
}

// TestRemoteGetsNoSearch: the search for a stored response, which carries header lines of the
// client, does not reach a remote.
func TestRemoteGetsNoSearch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cloud := world.Answering("cloud", "")
		w := withRemote(t, &world.Engine{Name: "a", Connector: "vllm-nixl", Models: "a", Serve: world.Holding("resp_a")}, cloud, nil)
		if got := w.Get("/v1/responses/resp_x"); got.Status != 404 {
			t.Errorf("got %d %s", got.Status, got.Body)
		}
		if legs := cloud.Seen(); len(legs) != 0 {
			t.Errorf("the remote got %+v", legs)
		}
	})
}
