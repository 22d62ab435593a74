package world

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// Wrapped returns a setup whose handler is inside wrap.
func Wrapped(wrap func(http.Handler, http.ResponseWriter, *http.Request)) Setup {
	return Setup{
		Engines: []*Engine{{Serve: func(c *Conn, _ int) { c.Stream(EventA, Done) }}},
		Options: func(d *proxy.Options) {
			d.Wrap = func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { wrap(h, w, r) })
			}
		},
	}
}

// EmptyWorld is a world whose engine has served model m and has left. back adds the
// engine again.
func EmptyWorld(t *testing.T, timeout time.Duration, limits func(*config.Limits)) (w *World, e *Engine, back func()) {
	t.Helper()
	e = &Engine{Serve: func(c *Conn, _ int) {
		c.JSON(200, `{"id":"x","choices":[{"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}`)
	}}
	w = New(t, Setup{Engines: []*Engine{e}, Config: func(c *config.Config) {
		c.Limits.NoEngineTimeout = config.Duration(timeout)
		if limits != nil {
			limits(&c.Limits)
		}
	}})
	apply := func(specs ...config.Engine) {
		if err := w.Registry.Apply(engine.SourceStatic, specs, 0); err != nil {
			t.Fatal(err)
		}
	}
	apply()
	for len(w.Registry.Snapshot().Instances) > 0 {
		time.Sleep(time.Millisecond)
	}
	return w, e, func() { apply(e.Spec()) }
}

// BySaturation configures a wait from two waiting requests on.
func BySaturation(c *config.Config) {
	c.Limits.SaturationQueueDepth, c.Limits.SaturationKVUsage = 2, 0.8
	c.Limits.QueueTimeout, c.Limits.DeadlineHeader = config.Duration(20*time.Second), "X-Deadline"
}

// Says sets the report of an engine, which stays valid.
func (w *World) Says(name string, running, waiting int32, usage float32) {
	c := &w.Registry.Snapshot().Instance(name).Load[0]
	c.Report(load.Report{At: time.Now(), Every: time.Hour, Running: running, Waiting: waiting, Queued: -1, Usage: usage}, c.Mark())
}

// DecodeAt is a decode engine at an address of the network of the gateway.
func DecodeAt(name, at string) *Engine {
	return &Engine{Name: name, At: at, Role: "decode", Connector: "vllm-nixl"}
}

// PrefillAt is a prefill engine at an address of the network of the gateway.
func PrefillAt(name, at string) *Engine {
	return &Engine{Name: name, At: at, Role: "prefill", Connector: "vllm-nixl"}
}

// Wholes are three engines that serve whole requests.
func Wholes() []*Engine {
	return []*Engine{{Name: "a", At: "10.0.0.1:80"}, {Name: "b", At: "10.0.0.2:80"}, {Name: "c", At: "10.0.0.3:80"}}
}

// Answering is an engine of models that answers with the name of the requested model.
func Answering(name, models string) *Engine {
	return &Engine{Name: name, Models: models, Serve: func(c *Conn, _ int) {
		if strings.Contains(c.Leg.Body, `"stream":true`) {
			c.Stream(fmt.Sprintf("data: {\"model\":%q}\n\n", name), "data: [DONE]\n\n")
			return
		}
		c.JSON(200, fmt.Sprintf(`{"id":"x","model":%q,"choices":[{"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2}}`, name))
	}}
}

// Holding answers for an engine that stores the response of one id.
func Holding(id string) func(c *Conn, nth int) {
	return func(c *Conn, _ int) {
		switch path := c.Leg.Path; {
		case path == "/v1/responses":
			c.JSON(200, `{"id":"new","object":"response","output":[]}`)
		case !strings.HasPrefix(path, "/v1/responses/"+id):
			c.JSON(404, `{"error":{"message":"not found"}}`)
		case strings.HasSuffix(path, "/cancel"):
			c.JSON(404, `{"detail":"Not Found"}`) // as TensorRT-LLM, which has no such route
		case c.Leg.Method == "DELETE":
			c.JSON(200, `{"id":"`+id+`","object":"response","deleted":true}`)
		case c.Leg.Query != "":
			c.Stream("event: response.created\ndata: {}\n\n", "event: response.completed\ndata: {\"q\":\""+c.Leg.Query+"\"}\n\n")
		default:
			c.JSON(200, `{"id":"`+id+`","output":[],"kv_transfer_params":{"remote_host":"p"}}`)
		}
	}
}

// PrefillAnswers serves a prefill leg of vLLM.
func PrefillAnswers(c *Conn, _ int) {
	c.JSON(200, `{"choices":[{"text":"a"}],"kv_transfer_params":`+KVParams+`,"usage":{"prompt_tokens":7,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`)
}

// Aborting answers the calls that abort a request with 200, and all other requests with serve.
func Aborting(serve func(c *Conn, nth int)) func(c *Conn, nth int) {
	return func(c *Conn, nth int) {
		if c.Leg.Path == "/abort_request" {
			c.JSON(200, "{}")
			return
		}
		serve(c, nth)
	}
}

// Run runs f as the subtest of that name, in a bubble of synctest.
func Run(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}
