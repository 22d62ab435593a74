package attempt_test

import (
	"context"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// usageEvent is vLLM's last event of a stream whose request sets the option for the usage.
func usageEvent(prompt, completion int) string {
	return fmt.Sprintf("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d,\"prompt_tokens_details\":null}}\n\n", prompt, prompt+completion, completion)
}

// Streams of one engine. Each piece is one write of the engine and one read of the proxy.
// want is the client's answer.
func TestStream(t *testing.T) {
	whole := func(pieces ...string) func(*world.Conn, int) {
		return func(c *world.Conn, _ int) { c.Stream(pieces...) }
	}
	cut := func(pieces ...string) func(*world.Conn, int) {
		return func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(pieces...)
			c.HangUp()
		}
	}
	bytewise := strings.Split(world.EventA+"data: {\"t\":\"é漢🎉\"}\r\n\r\n"+usageEvent(3, 2)+world.Done, "") // runes
	huge := "data: {\"t\":\"" + strings.Repeat("x", 3<<20) + "\"}\n\n"
	tests := []struct {
		name    string
		serve   func(*world.Conn, int)
		body    string
		cut     bool // the client's connection breaks
		outcome telemetry.Outcome
		reason  string // of pdproxy_leg_errors_total
	}{
		{"plain", whole(world.EventA, world.EventB, world.Done), world.EventA + world.EventB + world.Done, false, telemetry.OutcomeOK, ""},
		{"several events in one read", whole(world.EventA+world.EventB, world.EventA+world.Done), world.EventA + world.EventB + world.EventA + world.Done, false, telemetry.OutcomeOK, ""},
		{"rune by rune", whole(bytewise...), strings.Join(bytewise, ""), false, telemetry.OutcomeOK, ""},
		{"byte by byte", func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			for i := range world.EventB {
				c.Chunks(world.EventB[i : i+1])
			}
			c.Chunks("data: \"\xe6", "\xbc", "\xa2\"\n", "\n", world.Done)
			c.Send("0\r\n\r\n")
		}, world.EventB + "data: \"漢\"\n\n" + world.Done, false, telemetry.OutcomeOK, ""},
		{"comments before the first event", whole(world.Comment, world.Comment, world.EventA, world.Done), world.Comment + world.Comment + world.EventA + world.Done, false, telemetry.OutcomeOK, ""},
		{"an error event later", whole(world.EventA, "data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\n", world.Done), world.EventA + "data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\n" + world.Done, false, telemetry.OutcomeBroken, "error_event"},
		{"aborted later", whole(world.EventA, world.AbortEvent, world.Done), world.EventA + world.Aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted in one read with the rest", whole(world.EventA, world.EventB+world.AbortEvent+world.EventA+world.Done), world.EventA + world.EventB + world.Aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted in the read of the first event", whole(world.EventA + world.AbortEvent + world.Done), world.EventA + world.Aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted natively", whole(world.EventA, "data: {\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"status_code\":503}}}\n\n", world.Done), world.EventA + world.Aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted, and cut", cut(world.EventA, world.AbortEvent), world.EventA + world.Aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted, no blank line", whole(world.EventA, strings.TrimSuffix(world.AbortEvent, "\n")), world.EventA + world.Aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"ends without its closing event", whole(world.EventA, world.EventB), world.EventA + world.EventB + world.Broken, false, telemetry.OutcomeBroken, "no_end"},
		{"cut between events", cut(world.EventA, world.EventB), world.EventA + world.EventB + world.Broken, false, telemetry.OutcomeBroken, "body"},
		{"cut inside an event", cut(world.EventA, world.EventB[:9]), world.EventA + world.Broken, false, telemetry.OutcomeBroken, "body"},
		{"cut inside a rune", cut(world.EventA, "data: \"\xe6\xbc"), world.EventA + world.Broken, false, telemetry.OutcomeBroken, "body"},
		{"cut behind the closing event", cut(world.EventA, world.Done), world.EventA + world.Done, false, telemetry.OutcomeOK, ""},
		{"closing event without its blank line", whole(world.EventA, "data: [DONE]\n"), world.EventA + "data: [DONE]\n", false, telemetry.OutcomeOK, ""},
		{"half an event behind the closing one", whole(world.EventA, world.Done, "data: {\"x"), world.EventA + world.Done + "data: {\"x", false, telemetry.OutcomeOK, ""},
		{"huge event", whole(world.EventA, huge, world.Done), world.EventA + huge + world.Done, false, telemetry.OutcomeOK, ""},
		{"huge event cut in the middle", cut(world.EventA, huge[:2<<20]), world.EventA + huge[:2<<20], true, telemetry.OutcomeBroken, "body"},
		{"huge first event", whole(huge, world.Done), huge + world.Done, false, telemetry.OutcomeOK, ""},
		{"events end in CRLF", whole("data: {}\r\n\r\n", "data: [DONE]\r\n\r\n"), "data: {}\r\n\r\ndata: [DONE]\r\n\r\n", false, telemetry.OutcomeOK, ""},
		{"malformed chunk", func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(world.EventA)
			c.Send("zz\r\n")
			c.HangUp()
		}, world.EventA + world.Broken, false, telemetry.OutcomeBroken, "body"},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: tt.serve}}})
			a := w.Post(world.CompletionsPath, world.Completions(true))
			if (a.Err != nil) != tt.cut || a.Status != 200 || !strings.HasPrefix(a.Header.Get("Content-Type"), "text/event-stream") {
				t.Fatalf("got status %d, header %v, error %v", a.Status, a.Header, a.Err)
			}
			if a.Body != tt.body && !(tt.cut && strings.HasPrefix(tt.body, a.Body)) {
				t.Errorf("got  %.300q\nwant %.300q", a.Body, tt.body)
			}
			w.Outcome(tt.outcome)
			if got := w.Explained().Legs[0].Error; got != tt.reason {
				t.Errorf("error of the leg: got %q, want %q", got, tt.reason)
			}
			if n := w.Metric("pdproxy_broken_streams_total"); n != btof(tt.outcome == telemetry.OutcomeBroken) {
				t.Errorf("got %v counted broken streams", n)
			}
			if n := w.Metric("pdproxy_leg_errors_total", "decode", "e", tt.reason); tt.reason != "" && n != 1 {
				t.Errorf("got %v legs counted as %s", n, tt.reason)
			}
		})
	}
}

func btof(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// Bytes of a stream before its first token. None of them reaches the client. If another
// engine may succeed, the proxy retries there.
func TestStreamBeforeFirstEvent(t *testing.T) {
	fail := func(piece string) func(*world.Conn, int) {
		return func(c *world.Conn, _ int) { c.Stream(piece, world.Done) }
	}
	const other = world.EventA + world.Done
	bad := "{\"error\":{\"message\":\"too long\",\"type\":\"BadRequestError\",\"code\":400}}"
	tests := []struct {
		name    string
		serve   func(*world.Conn, int)
		status  int
		body    string
		retried string // reason, "" for none
	}{
		{"error event 500", fail("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n"), 200, other, "error_event"},
		{"flat error event", fail("data: {\"object\":\"error\",\"message\":\"x\",\"code\":503}\n\n"), 200, other, "error_event"},
		{"typed error event", fail("event: error\ndata: {\"message\":\"x\"}\n\n"), 200, other, "error_event"},
		{"too many requests", fail("data: {\"error\":{\"message\":\"x\",\"code\":429}}\n\n"), 200, other, "error_event"},
		{"abort", fail("data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n"), 200, other, "error_event"},
		{"error as a finish reason", fail("data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"error\"}]}\n\n"), 200, other, "error_event"},
		{"an empty text, then an error", func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(world.Opening, world.Comment)
			time.Sleep(3 * time.Second)
			c.Chunks("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n", world.Done)
			c.Send("0\r\n\r\n")
		}, 200, other, "error_event"},
		{"an empty text, then the end", func(c *world.Conn, _ int) { c.Stream(world.Opening, world.Done) }, 200, other, "empty_answer"},
		{"the end alone", func(c *world.Conn, _ int) { c.Stream(world.Done) }, 200, other, "empty_answer"},
		{"usage, then the end", func(c *world.Conn, _ int) { c.Stream(usageEvent(3, 0) + world.Done) }, 200, other, "empty_answer"},
		{"an empty text, then hangs", func(c *world.Conn, _ int) { c.Send(world.StreamHead); c.Chunks(world.Opening); c.Hold() }, 200, other, "timeout"},
		{"comments, then an error", fail(world.Comment + world.Comment + "data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n"), 200, other, "error_event"},
		{"error event 400 is the request's fault", fail("data: " + bad + "\n\n"), 400, bad, ""},
		{"comments, then an error of the request", fail(world.Comment + "data: " + bad + "\n\n"), 400, bad, ""},
		{"ends with nothing", func(c *world.Conn, _ int) { c.Stream() }, 200, other, "reset"},
		{"ends with comments", func(c *world.Conn, _ int) { c.Stream(world.Comment) }, 200, other, "reset"},
		{"ends in the first event", func(c *world.Conn, _ int) { c.Stream(world.EventA[:9]) }, 200, other, "reset"},
		{"hangs up", func(c *world.Conn, _ int) { c.Send(world.StreamHead); c.Chunks(world.Comment); c.HangUp() }, 200, other, "body"},
		{"hangs", func(c *world.Conn, _ int) { c.Send(world.StreamHead); c.Hold() }, 200, other, "timeout"},
		{"comments for ever", func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			for {
				if _, err := io.WriteString(c, fmt.Sprintf("%x\r\n%s\r\n", len(world.Comment), world.Comment)); err != nil {
					c.HangUp()
					return
				}
				time.Sleep(time.Second)
			}
		}, 200, other, "timeout"},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			bad := &world.Engine{Name: "e0", Serve: tt.serve}
			good := &world.Engine{Name: "e1", Serve: func(c *world.Conn, _ int) { c.Stream(world.EventA, world.Done) }}
			w := world.New(t, world.Setup{Engines: []*world.Engine{bad, good}})
			a := w.Post(world.CompletionsPath, world.Completions(true))
			if a.Err != nil || a.Status != tt.status || a.Body != tt.body {
				t.Errorf("got status %d, error %v: %q", a.Status, a.Err, a.Body)
			}
			if n := w.Metric("pdproxy_retries_total", tt.retried); n != btof(tt.retried != "") || len(good.Seen()) != int(n) {
				t.Errorf("got %v retries for %s, and %d requests on the other engine", n, tt.retried, len(good.Seen()))
			}
			if tt.retried != "" {
				if ids := bad.Seen()[0].Header["X-Request-Id"][0] + good.Seen()[0].Header["X-Request-Id"][0]; ids[:32] == ids[32:] {
					t.Errorf("both attempts have the same id %s", ids[:32])
				}
				if h := a.Header.Get("X-Pdproxy-Decode"); h != "e1" {
					t.Errorf("the client's error names engine %q", h)
				}
			}
		})
	}
}

// An engine opens an answer, and its parser then holds the text back for long. The client gets
// the head of the answer once keep-alives show that the engine still computes.
func TestOpenedStreamIsNotHeldForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(world.Opening)
			for range 20 {
				time.Sleep(time.Second)
				c.Chunks(world.Comment)
			}
			c.Chunks(world.EventA, world.Done)
			c.Send("0\r\n\r\n")
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}})
		start := time.Now()
		resp := w.Streams(t.Context())
		if held := time.Since(start); held < 5*time.Second || held > 7*time.Second {
			t.Errorf("the head came after %v", held)
		}
		got, err := io.ReadAll(resp.Body)
		if err != nil || string(got) != world.Opening+strings.Repeat(world.Comment, 20)+world.EventA+world.Done {
			t.Errorf("got %q, %v", got, err)
		}
	})
}

// The proxy records the usage that an engine reports, with all or with some of its
// numbers.
func TestStreamUsage(t *testing.T) {
	tests := []struct {
		name   string
		events []string
		want   [3]int64
	}{
		{"all", []string{"data: {\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\"prompt_tokens_details\":{\"cached_tokens\":5}}}\n\n"}, [3]int64{7, 3, 5}},
		{"no cached tokens", []string{usageEvent(7, 3)}, [3]int64{7, 3, 0}},
		{"the last one counts", []string{usageEvent(7, 1), usageEvent(7, 2)}, [3]int64{7, 2, 0}},
		{"none", nil, [3]int64{}},
		{"split in the middle", []string{usageEvent(7, 3)[:40], usageEvent(7, 3)[40:]}, [3]int64{7, 3, 0}},
	}
	for _, tt := range tests {
		world.Run(t, tt.name, func(t *testing.T) {
			pieces := append(append([]string{world.EventA}, tt.events...), world.Done)
			w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.Stream(pieces...) }}}})
			if a := w.Post(world.CompletionsPath, world.Completions(true)); a.Body != strings.Join(pieces, "") {
				t.Fatalf("got %q", a.Body)
			}
			row := w.Ended()[0]
			if got := [3]int64{row.PromptTokens, row.OutputTokens, row.CachedTokens}; got != tt.want {
				t.Errorf("prompt, output, cached: got %v, want %v", got, tt.want)
			}
			if n := w.Metric("pdproxy_tokens_total", "completion"); n != float64(tt.want[1]) {
				t.Errorf("got %v counted tokens", n)
			}
		})
	}
}

// If an engine sends nothing for timeouts.stream_idle, the proxy closes the engine's
// connection and sends an error to the client. SSE comments do not restart the time.
func TestStreamIdle(t *testing.T) {
	for _, comments := range []bool{false, true} {
		world.Run(t, fmt.Sprintf("comments %v", comments), func(t *testing.T) {
			e := &world.Engine{Serve: func(c *world.Conn, _ int) {
				c.Send(world.StreamHead)
				c.Chunks(world.EventA)
				for comments {
					time.Sleep(4 * time.Second)
					if _, err := fmt.Fprintf(c, "%x\r\n%s\r\n", len(world.Comment), world.Comment); err != nil {
						break
					}
				}
				c.Hold()
			}}
			w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) { c.Timeouts.StreamIdle = config.Duration(10 * time.Second) }})
			begin := time.Now()
			a := w.Post(world.CompletionsPath, world.Completions(true))
			want := world.EventA + world.Broken
			if strings.ReplaceAll(a.Body, world.Comment, "") != want || a.Err != nil {
				t.Errorf("got %q, %v", a.Body, a.Err)
			}
			if d := time.Since(begin); d < 10*time.Second || d > 13*time.Second {
				t.Errorf("the stream lasted %v of simulated time", d)
			}
			w.Outcome(telemetry.OutcomeBroken)
			if e := w.Explained().Legs[0].Error; e != "timeout" {
				t.Errorf("error of the leg: got %q", e)
			}
		})
	}
}

// A client that stops reading occupies its engine no longer than the limit.
func TestClientStopsReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hungUp := make(chan time.Time, 1)
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			for {
				if _, err := fmt.Fprintf(c, "%x\r\n%s\r\n", len(world.EventA), world.EventA); err != nil {
					hungUp <- time.Now()
					c.HangUp()
					return
				}
				time.Sleep(time.Second)
			}
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) { c.Server.WriteTimeout = config.Duration(10 * time.Second) }})
		conn, err := w.Public.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		begin := time.Now()
		world.WriteRequest(t, conn, world.Completions(true))
		if d := (<-hungUp).Sub(begin); d > 15*time.Second {
			t.Errorf("the leg lasted %v of simulated time", d)
		}
		synctest.Wait()
		w.Outcome(telemetry.OutcomeCancelled)
	})
}

// Each event reaches the client before the engine sends the next one.
func TestStreamIsFlushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next := make(chan struct{})
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			for _, event := range []string{world.EventA, world.EventB, world.EventA} {
				c.Chunks(event)
				<-next
			}
			c.Chunks(world.Done)
			c.Send("0\r\n\r\n")
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}})
		resp, err := w.Client.Post("http://proxy"+world.CompletionsPath, "application/json", strings.NewReader(world.Completions(true)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		for _, want := range []string{world.EventA, world.EventB, world.EventA} {
			got := make([]byte, len(want))
			if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != want {
				t.Fatalf("got %q, %v", got, err)
			}
			next <- struct{}{}
		}
		if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != world.Done {
			t.Fatalf("got %q, %v", rest, err)
		}
		if n := w.Metric("pdproxy_inter_event_seconds"); n != 3 {
			t.Errorf("got %v counted times between events, want 3", n)
		}
	})
}

// If the client leaves, the proxy closes the engine's connection at once.
func TestClientLeavesStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(world.EventA)
			c.Hold()
		}}
		w := world.New(t, world.Setup{Engines: []*world.Engine{e}})
		ctx, leave := context.WithCancel(t.Context())
		resp := w.Streams(ctx)
		begin := time.Now()
		leave()
		resp.Body.Close()
		e.Wait() // the proxy has closed the engine's connection
		synctest.Wait()
		if time.Since(begin) != 0 {
			t.Errorf("it took %v", time.Since(begin))
		}
		w.Outcome(telemetry.OutcomeCancelled)
		if e := w.Explained(); e.Status != 499 || e.Legs[0].Error != "cancelled" {
			t.Errorf("explained as %+v", e)
		}
		if n := w.Metric("pdproxy_legs_cancelled_total", "decode"); n != 1 {
			t.Errorf("got %v cancelled legs", n)
		}
	})
}

// A stream ends early after its first event, by the client or by a failure. No blocks
// wait for an engine's time-out, because decode has already read the KV.
func TestBegunStreamOwesNothing(t *testing.T) {
	for _, tt := range []struct{ connector, answer string }{
		{"vllm-nixl", world.NIXLAnswer}, {"vllm-moriio", `{"kv_transfer_params":{}}`}, {"sglang", world.DoneAnswer}, {"trtllm", world.TRTAnswer},
	} {
		for _, breaks := range []bool{false, true} {
			world.Run(t, fmt.Sprintf("%s breaks %t", tt.connector, breaks), func(t *testing.T) {
				w := world.New(t, world.Setup{Engines: []*world.Engine{
					{Name: "p", Role: "prefill", Connector: tt.connector, Serve: func(c *world.Conn, _ int) { c.JSON(200, tt.answer) }},
					{Name: "d", Role: "decode", Connector: tt.connector, Serve: world.Aborting(func(c *world.Conn, _ int) {
						time.Sleep(time.Second) // until prefill has answered
						c.Send(world.StreamHead)
						c.Chunks(world.EventA)
						if breaks {
							c.HangUp()
							return
						}
						c.Hold()
					})},
				}})
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				resp := w.Streams(ctx)
				if breaks {
					io.Copy(io.Discard, resp.Body)
				}
				leave()
				resp.Body.Close()
				time.Sleep(time.Minute) // clean-ups
				if n := w.Metric("pdproxy_exchanges_total"); n != 1 {
					t.Errorf("got %v ended exchanges", n)
				}
				if n := w.Metric("pdproxy_kv_cleanups_total", "engine_timeout"); n != 0 {
					t.Errorf("got %v clean-ups left to the time-outs of engines", n)
				}
			})
		}
	}
}

// The error event has the form that the client's API requires.
func TestBrokenStreamPerAPI(t *testing.T) {
	tests := []struct {
		path, body, first, want string
		sequence                int64
	}{
		{"/v1/messages", `{"model":"m","max_tokens":5,"stream":true,"messages":[{"role":"user","content":"x"}]}`, "event: message_start\ndata: {\"type\":\"message_start\"}\n\nevent: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"x\"}}\n\n", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"upstream_error\",", 0},
		{"/v1/responses", `{"model":"m","stream":true,"input":"x"}`, "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\":0}\n\nevent: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n", "event: error\ndata: {\"type\":\"error\",\"sequence_number\":2,\"code\":\"stream_broken\",", 2},
		{"/v1/responses", `{"model":"m","stream":true,"input":"x"}`, "event: response.created\ndata: {\"type\":\"response.created\",\"sequence_number\": 1 }\n\nevent: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n", "event: error\ndata: {\"type\":\"error\",\"sequence_number\":3,\"code\":\"stream_broken\",", 3},
		{"/v1/chat/completions", `{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}`, world.EventA, "data: {\"error\":{", 0},
	}
	for _, tt := range tests {
		world.Run(t, tt.path, func(t *testing.T) {
			w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.Send(world.StreamHead); c.Chunks(tt.first); c.HangUp() }}}})
			a := w.Post(tt.path, tt.body)
			if !strings.HasPrefix(a.Body, tt.first+tt.want) || !strings.HasSuffix(a.Body, "\n\n") || a.Err != nil {
				t.Errorf("got status %d, error %v: %q", a.Status, a.Err, a.Body)
			}
			broken := openai.NewError(openai.CodeStreamBroken, "the engine's stream broke off; the answer is not complete")
			broken.NotContinued = "no_ids"
			if api, ok := openai.APIFor(tt.path); !ok || !strings.HasSuffix(a.Body, string(api.AppendErrorEvent(nil, broken, tt.sequence))) {
				t.Errorf("the last event is not of the API's form: %q", a.Body)
			}
		})
	}
}
