package proxy

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

const (
	eventA  = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n"
	eventB  = "data: {\"choices\":[{\"text\":\"b\"}]}\n\n"
	done    = "data: [DONE]\n\n"
	comment = ": keep-alive\n\n"
	opening = "data: {\"choices\":[{\"index\":0,\"text\":\"\",\"finish_reason\":null}]}\n\n"
	// abortEvent is the last event of a stream that SGLang aborts. aborted is the event
	// that the client gets instead.
	abortEvent = "data: {\"choices\":[{\"finish_reason\":\"abort\"}]}\n\n"
	aborted    = "data: {\"error\":{\"message\":\"the engine aborted the request; the answer is not complete\",\"type\":\"upstream_error\",\"param\":null,\"code\":\"stream_broken\"}}\n\n"
	broken     = "data: {\"error\":{\"message\":\"the engine's stream broke off; the answer is not complete\",\"type\":\"upstream_error\",\"param\":null,\"code\":\"stream_broken\"}}\n\n"
)

// usageEvent is vLLM's last event of a stream whose request sets the option for the usage.
func usageEvent(prompt, completion int) string {
	return fmt.Sprintf("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d,\"prompt_tokens_details\":null}}\n\n", prompt, prompt+completion, completion)
}

// Streams of one engine. Each piece is one write of the engine and one read of the proxy.
// want is the client's answer.
func TestStream(t *testing.T) {
	whole := func(pieces ...string) func(*engineConn, int) {
		return func(c *engineConn, _ int) { c.stream(pieces...) }
	}
	cut := func(pieces ...string) func(*engineConn, int) {
		return func(c *engineConn, _ int) {
			c.send(streamHead)
			c.chunks(pieces...)
			c.hangUp()
		}
	}
	bytewise := strings.Split(eventA+"data: {\"t\":\"é漢🎉\"}\r\n\r\n"+usageEvent(3, 2)+done, "") // runes
	huge := "data: {\"t\":\"" + strings.Repeat("x", 3<<20) + "\"}\n\n"
	tests := []struct {
		name    string
		serve   func(*engineConn, int)
		body    string
		cut     bool // the client's connection breaks
		outcome telemetry.Outcome
		reason  string // of pdproxy_leg_errors_total
	}{
		{"plain", whole(eventA, eventB, done), eventA + eventB + done, false, telemetry.OutcomeOK, ""},
		{"several events in one read", whole(eventA+eventB, eventA+done), eventA + eventB + eventA + done, false, telemetry.OutcomeOK, ""},
		{"rune by rune", whole(bytewise...), strings.Join(bytewise, ""), false, telemetry.OutcomeOK, ""},
		{"byte by byte", func(c *engineConn, _ int) {
			c.send(streamHead)
			for i := range eventB {
				c.chunks(eventB[i : i+1])
			}
			c.chunks("data: \"\xe6", "\xbc", "\xa2\"\n", "\n", done)
			c.send("0\r\n\r\n")
		}, eventB + "data: \"漢\"\n\n" + done, false, telemetry.OutcomeOK, ""},
		{"comments before the first event", whole(comment, comment, eventA, done), comment + comment + eventA + done, false, telemetry.OutcomeOK, ""},
		{"an error event later", whole(eventA, "data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\n", done), eventA + "data: {\"error\":{\"message\":\"no\",\"code\":500}}\n\n" + done, false, telemetry.OutcomeBroken, "error_event"},
		{"aborted later", whole(eventA, abortEvent, done), eventA + aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted in one read with the rest", whole(eventA, eventB+abortEvent+eventA+done), eventA + eventB + aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted in the read of the first event", whole(eventA + abortEvent + done), eventA + aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted natively", whole(eventA, "data: {\"meta_info\":{\"finish_reason\":{\"type\":\"abort\",\"status_code\":503}}}\n\n", done), eventA + aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted, and cut", cut(eventA, abortEvent), eventA + aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"aborted, no blank line", whole(eventA, strings.TrimSuffix(abortEvent, "\n")), eventA + aborted, false, telemetry.OutcomeBroken, "aborted"},
		{"ends without its closing event", whole(eventA, eventB), eventA + eventB + broken, false, telemetry.OutcomeBroken, "no_end"},
		{"cut between events", cut(eventA, eventB), eventA + eventB + broken, false, telemetry.OutcomeBroken, "body"},
		{"cut inside an event", cut(eventA, eventB[:9]), eventA + broken, false, telemetry.OutcomeBroken, "body"},
		{"cut inside a rune", cut(eventA, "data: \"\xe6\xbc"), eventA + broken, false, telemetry.OutcomeBroken, "body"},
		{"cut behind the closing event", cut(eventA, done), eventA + done, false, telemetry.OutcomeOK, ""},
		{"closing event without its blank line", whole(eventA, "data: [DONE]\n"), eventA + "data: [DONE]\n", false, telemetry.OutcomeOK, ""},
		{"half an event behind the closing one", whole(eventA, done, "data: {\"x"), eventA + done + "data: {\"x", false, telemetry.OutcomeOK, ""},
		{"huge event", whole(eventA, huge, done), eventA + huge + done, false, telemetry.OutcomeOK, ""},
		{"huge event cut in the middle", cut(eventA, huge[:2<<20]), eventA + huge[:2<<20], true, telemetry.OutcomeBroken, "body"},
		{"huge first event", whole(huge, done), huge + done, false, telemetry.OutcomeOK, ""},
		{"events end in CRLF", whole("data: {}\r\n\r\n", "data: [DONE]\r\n\r\n"), "data: {}\r\n\r\ndata: [DONE]\r\n\r\n", false, telemetry.OutcomeOK, ""},
		{"malformed chunk", func(c *engineConn, _ int) {
			c.send(streamHead)
			c.chunks(eventA)
			c.send("zz\r\n")
			c.hangUp()
		}, eventA + broken, false, telemetry.OutcomeBroken, "body"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{engines: []*fakeEngine{{serve: tt.serve}}})
				a := w.post(completionsPath, completions(true))
				if (a.err != nil) != tt.cut || a.status != 200 || !strings.HasPrefix(a.header.Get("Content-Type"), "text/event-stream") {
					t.Fatalf("got status %d, header %v, error %v", a.status, a.header, a.err)
				}
				if a.body != tt.body && !(tt.cut && strings.HasPrefix(tt.body, a.body)) {
					t.Errorf("got  %.300q\nwant %.300q", a.body, tt.body)
				}
				w.outcome(tt.outcome)
				if got := w.explained().Legs[0].Error; got != tt.reason {
					t.Errorf("error of the leg: got %q, want %q", got, tt.reason)
				}
				if n := w.metric("pdproxy_broken_streams_total"); n != btof(tt.outcome == telemetry.OutcomeBroken) {
					t.Errorf("got %v counted broken streams", n)
				}
				if n := w.metric("pdproxy_leg_errors_total", "decode", "e", tt.reason); tt.reason != "" && n != 1 {
					t.Errorf("got %v legs counted as %s", n, tt.reason)
				}
			})
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
	fail := func(piece string) func(*engineConn, int) {
		return func(c *engineConn, _ int) { c.stream(piece, done) }
	}
	const other = eventA + done
	bad := "{\"error\":{\"message\":\"too long\",\"type\":\"BadRequestError\",\"code\":400}}"
	tests := []struct {
		name    string
		serve   func(*engineConn, int)
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
		{"an empty text, then an error", func(c *engineConn, _ int) {
			c.send(streamHead)
			c.chunks(opening, comment)
			time.Sleep(3 * time.Second)
			c.chunks("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n", done)
			c.send("0\r\n\r\n")
		}, 200, other, "error_event"},
		{"an empty text, then the end", func(c *engineConn, _ int) { c.stream(opening, done) }, 200, other, "empty_answer"},
		{"the end alone", func(c *engineConn, _ int) { c.stream(done) }, 200, other, "empty_answer"},
		{"usage, then the end", func(c *engineConn, _ int) { c.stream(usageEvent(3, 0) + done) }, 200, other, "empty_answer"},
		{"an empty text, then hangs", func(c *engineConn, _ int) { c.send(streamHead); c.chunks(opening); c.hold() }, 200, other, "timeout"},
		{"comments, then an error", fail(comment + comment + "data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n"), 200, other, "error_event"},
		{"error event 400 is the request's fault", fail("data: " + bad + "\n\n"), 400, bad, ""},
		{"comments, then an error of the request", fail(comment + "data: " + bad + "\n\n"), 400, bad, ""},
		{"ends with nothing", func(c *engineConn, _ int) { c.stream() }, 200, other, "reset"},
		{"ends with comments", func(c *engineConn, _ int) { c.stream(comment) }, 200, other, "reset"},
		{"ends in the first event", func(c *engineConn, _ int) { c.stream(eventA[:9]) }, 200, other, "reset"},
		{"hangs up", func(c *engineConn, _ int) { c.send(streamHead); c.chunks(comment); c.hangUp() }, 200, other, "body"},
		{"hangs", func(c *engineConn, _ int) { c.send(streamHead); c.hold() }, 200, other, "timeout"},
		{"comments for ever", func(c *engineConn, _ int) {
			c.send(streamHead)
			for {
				if _, err := io.WriteString(c, fmt.Sprintf("%x\r\n%s\r\n", len(comment), comment)); err != nil {
					c.hangUp()
					return
				}
				time.Sleep(time.Second)
			}
		}, 200, other, "timeout"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bad := &fakeEngine{name: "e0", serve: tt.serve}
				good := &fakeEngine{name: "e1", serve: func(c *engineConn, _ int) { c.stream(eventA, done) }}
				w := newWorld(t, setup{engines: []*fakeEngine{bad, good}})
				a := w.post(completionsPath, completions(true))
				if a.err != nil || a.status != tt.status || a.body != tt.body {
					t.Errorf("got status %d, error %v: %q", a.status, a.err, a.body)
				}
				if n := w.metric("pdproxy_retries_total", tt.retried); n != btof(tt.retried != "") || len(good.seen()) != int(n) {
					t.Errorf("got %v retries for %s, and %d requests on the other engine", n, tt.retried, len(good.seen()))
				}
				if tt.retried != "" {
					if ids := bad.seen()[0].header["X-Request-Id"][0] + good.seen()[0].header["X-Request-Id"][0]; ids[:32] == ids[32:] {
						t.Errorf("both attempts have the same id %s", ids[:32])
					}
					if h := a.header.Get("X-Pdproxy-Decode"); h != "e1" {
						t.Errorf("the client's error names engine %q", h)
					}
				}
			})
		})
	}
}

// An engine opens an answer, and its parser then holds the text back for long. The client gets
// the head of the answer once keep-alives show that the engine still computes.
func TestOpenedStreamIsNotHeldForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			c.send(streamHead)
			c.chunks(opening)
			for range 20 {
				time.Sleep(time.Second)
				c.chunks(comment)
			}
			c.chunks(eventA, done)
			c.send("0\r\n\r\n")
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}})
		start := time.Now()
		resp := w.streams(t.Context())
		if held := time.Since(start); held < 5*time.Second || held > 7*time.Second {
			t.Errorf("the head came after %v", held)
		}
		got, err := io.ReadAll(resp.Body)
		if err != nil || string(got) != opening+strings.Repeat(comment, 20)+eventA+done {
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
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				pieces := append(append([]string{eventA}, tt.events...), done)
				w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.stream(pieces...) }}}})
				if a := w.post(completionsPath, completions(true)); a.body != strings.Join(pieces, "") {
					t.Fatalf("got %q", a.body)
				}
				row := w.books.Ended.PerfRows()[0]
				if got := [3]int64{row.PromptTokens, row.OutputTokens, row.CachedTokens}; got != tt.want {
					t.Errorf("prompt, output, cached: got %v, want %v", got, tt.want)
				}
				if n := w.metric("pdproxy_tokens_total", "completion"); n != float64(tt.want[1]) {
					t.Errorf("got %v counted tokens", n)
				}
			})
		})
	}
}

// If an engine sends nothing for timeouts.stream_idle, the proxy closes the engine's
// connection and sends an error to the client. SSE comments do not restart the time.
func TestStreamIdle(t *testing.T) {
	for _, comments := range []bool{false, true} {
		t.Run(fmt.Sprintf("comments %v", comments), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				e := &fakeEngine{serve: func(c *engineConn, _ int) {
					c.send(streamHead)
					c.chunks(eventA)
					for comments {
						time.Sleep(4 * time.Second)
						if _, err := fmt.Fprintf(c, "%x\r\n%s\r\n", len(comment), comment); err != nil {
							break
						}
					}
					c.hold()
				}}
				w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) { c.Timeouts.StreamIdle = config.Duration(10 * time.Second) }})
				begin := time.Now()
				a := w.post(completionsPath, completions(true))
				want := eventA + broken
				if strings.ReplaceAll(a.body, comment, "") != want || a.err != nil {
					t.Errorf("got %q, %v", a.body, a.err)
				}
				if d := time.Since(begin); d < 10*time.Second || d > 13*time.Second {
					t.Errorf("the stream lasted %v of simulated time", d)
				}
				w.outcome(telemetry.OutcomeBroken)
				if e := w.explained().Legs[0].Error; e != "timeout" {
					t.Errorf("error of the leg: got %q", e)
				}
			})
		})
	}
}

// A client that stops reading occupies its engine no longer than the limit.
func TestClientStopsReading(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hungUp := make(chan time.Time, 1)
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			c.send(streamHead)
			for {
				if _, err := fmt.Fprintf(c, "%x\r\n%s\r\n", len(eventA), eventA); err != nil {
					hungUp <- time.Now()
					c.hangUp()
					return
				}
				time.Sleep(time.Second)
			}
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}, config: func(c *config.Config) { c.Server.WriteTimeout = config.Duration(10 * time.Second) }})
		conn, err := w.public.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		begin := time.Now()
		writeRequest(t, conn, completions(true))
		if d := (<-hungUp).Sub(begin); d > 15*time.Second {
			t.Errorf("the leg lasted %v of simulated time", d)
		}
		synctest.Wait()
		w.outcome(telemetry.OutcomeCancelled)
	})
}

// writeRequest writes one request.
func writeRequest(t *testing.T, conn net.Conn, body string) {
	t.Helper()
	_, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%s", completionsPath, len(body), body)
	if err != nil {
		t.Fatal(err)
	}
}

// Each event reaches the client before the engine sends the next one.
func TestStreamIsFlushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next := make(chan struct{})
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			c.send(streamHead)
			for _, event := range []string{eventA, eventB, eventA} {
				c.chunks(event)
				<-next
			}
			c.chunks(done)
			c.send("0\r\n\r\n")
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}})
		resp, err := w.client.Post("http://proxy"+completionsPath, "application/json", strings.NewReader(completions(true)))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		for _, want := range []string{eventA, eventB, eventA} {
			got := make([]byte, len(want))
			if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != want {
				t.Fatalf("got %q, %v", got, err)
			}
			next <- struct{}{}
		}
		if rest, err := io.ReadAll(resp.Body); err != nil || string(rest) != done {
			t.Fatalf("got %q, %v", rest, err)
		}
		if n := w.metric("pdproxy_inter_event_seconds"); n != 3 {
			t.Errorf("got %v counted times between events, want 3", n)
		}
	})
}

// If the client leaves, the proxy closes the engine's connection at once.
func TestClientLeavesStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			c.send(streamHead)
			c.chunks(eventA)
			c.hold()
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}})
		ctx, leave := context.WithCancel(t.Context())
		resp := w.streams(ctx)
		begin := time.Now()
		leave()
		resp.Body.Close()
		e.wg.Wait() // the proxy has closed the engine's connection
		synctest.Wait()
		if time.Since(begin) != 0 {
			t.Errorf("it took %v", time.Since(begin))
		}
		w.outcome(telemetry.OutcomeCancelled)
		if e := w.explained(); e.Status != 499 || e.Legs[0].Error != "cancelled" {
			t.Errorf("explained as %+v", e)
		}
		if n := w.metric("pdproxy_legs_cancelled_total", "decode"); n != 1 {
			t.Errorf("got %v cancelled legs", n)
		}
	})
}

// A stream ends early after its first event, by the client or by a failure. No blocks
// wait for an engine's time-out, because decode has already read the KV.
func TestBegunStreamOwesNothing(t *testing.T) {
	for _, tt := range []struct{ connector, answer string }{
		{"vllm-nixl", nixlAnswer}, {"vllm-moriio", `{"kv_transfer_params":{}}`}, {"sglang", doneAnswer}, {"trtllm", trtAnswer},
	} {
		for _, breaks := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s breaks %t", tt.connector, breaks), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					w := newWorld(t, setup{engines: []*fakeEngine{
						{name: "p", role: "prefill", connector: tt.connector, serve: func(c *engineConn, _ int) { c.json(200, tt.answer) }},
						{name: "d", role: "decode", connector: tt.connector, serve: func(c *engineConn, _ int) {
							if c.leg.path == "/abort_request" {
								c.json(200, "{}")
								return
							}
							time.Sleep(time.Second) // until prefill has answered
							c.send(streamHead)
							c.chunks(eventA)
							if breaks {
								c.hangUp()
								return
							}
							c.hold()
						}},
					}})
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					resp := w.streams(ctx)
					if breaks {
						io.Copy(io.Discard, resp.Body)
					}
					leave()
					resp.Body.Close()
					time.Sleep(time.Minute) // clean-ups
					if n := w.metric("pdproxy_exchanges_total"); n != 1 {
						t.Errorf("got %v ended exchanges", n)
					}
					if n := w.metric("pdproxy_kv_cleanups_total", "engine_timeout"); n != 0 {
						t.Errorf("got %v clean-ups left to the time-outs of engines", n)
					}
				})
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
		{"/v1/chat/completions", `{"model":"m","stream":true,"messages":[{"role":"user","content":"x"}]}`, eventA, "data: {\"error\":{", 0},
	}
	for _, tt := range tests {
		t.Run(tt.path, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, setup{engines: []*fakeEngine{{serve: func(c *engineConn, _ int) { c.send(streamHead); c.chunks(tt.first); c.hangUp() }}}})
				a := w.post(tt.path, tt.body)
				if !strings.HasPrefix(a.body, tt.first+tt.want) || !strings.HasSuffix(a.body, "\n\n") || a.err != nil {
					t.Errorf("got status %d, error %v: %q", a.status, a.err, a.body)
				}
				if api, ok := openai.APIFor(tt.path); !ok || !strings.HasSuffix(a.body, string(api.AppendErrorEvent(nil, openai.NewError(openai.CodeStreamBroken, "the engine's stream broke off; the answer is not complete"), tt.sequence))) {
					t.Errorf("the last event is not of the API's form: %q", a.body)
				}
			})
		})
	}
}
