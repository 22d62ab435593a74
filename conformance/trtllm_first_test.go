package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/journal"
)

// TestGenerationIsSentFirst: decode's leg is sent before prefill's. Each engine answers only when the other has its leg, so a
// proxy that waited for either would wait forever.
func TestGenerationIsSentFirst(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprint("stream ", stream), func(t *testing.T) {
			asked, served := make(chan struct{}), make(chan struct{})
			params := func(l testbed.Leg) (p struct {
				Kind     string `json:"request_type"`
				Disagg   uint64 `json:"disagg_request_id"`
				Ctx      uint64 `json:"ctx_request_id"`
				Style    int    `json:"schedule_style"`
				Endpoint string `json:"ctx_info_endpoint"`
			}) {
				var body struct {
					P json.RawMessage `json:"disaggregated_params"`
				}
				if json.Unmarshal([]byte(l.Text), &body) != nil || json.Unmarshal(body.P, &p) != nil {
					t.Errorf("the leg's body is %s", l.Text)
				}
				return p
			}
			prefill := &testbed.Engine{Name: "p0", Role: "prefill", Info: `{"disaggregated_params":{"ctx_dp_rank":null,"ctx_info_endpoint":["tcp://10.0.0.5:4711"]},"tokens_per_block":32}`,
				Spec: func(e *config.Engine) { e.KVHosts = "10.0.0.5" },
				Serve: func(w http.ResponseWriter, l testbed.Leg) {
					select {
					case <-asked:
					case <-l.Context().Done():
						return
					}
					p := params(l)
					if p.Kind != "context_only" || p.Style != 1 || p.Endpoint != "" {
						t.Errorf("prefill got %+v", p)
					}
					fmt.Fprintf(w, `{"id":"c","choices":[{"index":0,"message":{"content":"x"},"finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":%d,"disagg_request_id":%[1]d}}]}`, p.Disagg)
					close(served)
				}}
			decode := &testbed.Engine{Name: "d0", Role: "decode", Serve: func(w http.ResponseWriter, l testbed.Leg) {
				close(asked)
				p := params(l)
				if p.Kind != "generation_only" || p.Style != 1 || p.Endpoint != "tcp://10.0.0.5:4711" || p.Disagg == 0 || p.Ctx != p.Disagg {
					t.Errorf("decode got %+v", p)
				}
				select {
				case <-served:
				case <-l.Context().Done():
					return
				}
				if !stream {
					io.WriteString(w, `{"choices":[{"message":{"content":"whole"}}]}`)
					return
				}
				w.Header().Set("Content-Type", "text/event-stream")
				io.WriteString(w, "data: {\"choices\":[{\"delta\":{\"content\":\"whole\"}}]}\n\ndata: [DONE]\n\n")
			}}
			f := startScripted(t, enginesim.ConnectorTRTLLM, func(c *config.Config) {
				c.TRTLLM.ScheduleStyle = "generation_first"
			}, prefill, decode)
			a := f.post(context.Background(), f.url, chatPath, chat(strings.Repeat("long ", 5000), 5, stream), "X-Request-Id", "first")
			if a.status != 200 || a.text != "whole" || a.header.Get("X-Pdproxy-Flow") != "decode_first" {
				t.Fatalf("got status %d, flow %q: %s", a.status, a.header.Get("X-Pdproxy-Flow"), a.body)
			}
			var e journal.Explanation
			f.eventually("the request is explained", func() bool {
				f.admin("/v1/explain/first", &e)
				return e.RequestID != ""
			})
			if len(e.Legs) != 2 || e.Legs[0].Phase != "decode" || e.Legs[1].Phase != "prefill" {
				t.Errorf("the legs in the order of their start: %+v", e.Legs)
			}
		})
	}
}

// TestPrefillIsSparedWhereDecodeIsAway: no context is computed for a leg that
// could not be sent.
func TestPrefillIsSparedWhereDecodeIsAway(t *testing.T) {
	f := startFleet(t, trtllmFirst, fleetOptions{prefill: 1, decode: 1})
	f.decode[0].Kill() // the proxy has not noticed yet
	if a := f.try(chatPath, chat(long, 5, false)); a.status/100 != 5 {
		t.Fatalf("got status %d: %s", a.status, a.body)
	}
	f.settled()
	if n := f.prefill[0].State().Requests; n != 0 {
		t.Errorf("prefill got %d requests", n)
	}
}

// TestGenerationFirstFallsBack: engines that publish no address, and engines of
// the first wire generation, are called context first, and this is counted.
func TestGenerationFirstFallsBack(t *testing.T) {
	f := startFleet(t, trtllmFirst, fleetOptions{prefill: 1, decode: 1, engine: func(_ string, _ int, c *enginesim.Config) {
		c.TRTLLM.Wire = enginesim.TRTLLMWireG1
	}})
	body := chat("one of the old", 8, true)
	a := f.try(chatPath, body)
	f.right(a, chatPath, body)
	if flow := a.header.Get("X-Pdproxy-Flow"); flow != "prefill_first" {
		t.Errorf("got flow %q", flow)
	}
	if n := f.metric("pdproxy_fallbacks_total", `what="schedule_style"`, `reason="no_rendezvous"`); n != 1 {
		t.Errorf("got %v counted fallbacks", n)
	}
}

// TestGenerationFirstUsage: decode's usage contains prefill's cached tokens,
// which decode receives with the KV.
func TestGenerationFirstUsage(t *testing.T) {
	f := startFleet(t, trtllmFirst, fleetOptions{prefill: 1, decode: 1})
	body := prompt(0, 200)
	f.right(f.try(completionsPath, body), completionsPath, body)
	a := f.try(completionsPath, body)
	f.right(a, completionsPath, body)
	var answer struct {
		Usage struct {
			Prompt  int `json:"prompt_tokens"`
			Details struct {
				Cached int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
	}
	if err := json.Unmarshal([]byte(a.body), &answer); err != nil || answer.Usage.Prompt != 200 || answer.Usage.Details.Cached < 176 {
		t.Errorf("usage %+v, %v", answer.Usage, err)
	}
}

// TestScheduleStyleAsTheEngineSays: if the style depends on the engines, those
// that support it are called generation first and the others context first.
// Neither is counted as a fallback.
func TestScheduleStyleAsTheEngineSays(t *testing.T) {
	for wire, flow := range map[int]string{enginesim.TRTLLMWireG1: "prefill_first", enginesim.TRTLLMWireG3: "decode_first"} {
		t.Run(flow, func(t *testing.T) {
			f := startFleet(t, enginesim.ConnectorTRTLLM, fleetOptions{
				prefill: 1, decode: 1,
				engine: func(_ string, _ int, c *enginesim.Config) { c.TRTLLM.Wire = wire },
				config: func(c *config.Config) { c.TRTLLM.ScheduleStyle = "" },
			})
			body := chat("as you like it", 8, true)
			a := f.try(chatPath, body)
			f.right(a, chatPath, body)
			if got := a.header.Get("X-Pdproxy-Flow"); got != flow {
				t.Errorf("got flow %q, want %q", got, flow)
			}
			if n := f.metric("pdproxy_fallbacks_total", `what="schedule_style"`); n != 0 {
				t.Errorf("got %v counted fallbacks", n)
			}
		})
	}
}
