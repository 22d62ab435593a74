package exchange_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	envoytype "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

// scripted is an endpoint picker that is written from the protocol. It gives each request the
// same answer.
type scripted struct {
	extproc.UnimplementedExternalProcessorServer
	lines  []string // header lines that it sets: names and values
	body   string   // of the request; "": that of the client
	refuse *extproc.ImmediateResponse
	hangs  bool     // it never answers
	answer []string // header lines of the answer that it sets

	seen  chan pickerSaw // one for each stream
	asked chan struct{}  // one for each request to a picker that hangs
}

// pickerSaw is what a picker has seen of one request.
type pickerSaw struct {
	request, response map[string]string
	body, answer      string
	served            string
	whole             bool // the answer has come to its end
}

func (p *scripted) Process(s extproc.ExternalProcessor_ProcessServer) error {
	var saw pickerSaw
	defer func() { p.seen <- saw }()
	for {
		m, err := s.Recv()
		if err != nil {
			return nil
		}
		switch r := m.Request.(type) {
		case *extproc.ProcessingRequest_RequestHeaders:
			saw.request = linesOf(r.RequestHeaders.GetHeaders())
		case *extproc.ProcessingRequest_RequestBody:
			if saw.body += string(r.RequestBody.GetBody()); r.RequestBody.GetEndOfStream() {
				p.choose(s, saw.body)
			}
		case *extproc.ProcessingRequest_ResponseHeaders:
			saw.response = linesOf(r.ResponseHeaders.GetHeaders())
			saw.served = m.GetMetadataContext().GetFilterMetadata()["envoy.lb"].GetFields()["x-gateway-destination-endpoint-served"].GetStringValue()
			s.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extproc.HeadersResponse{
				Response: &extproc.CommonResponse{HeaderMutation: setting(p.answer)},
			}}})
		case *extproc.ProcessingRequest_ResponseBody:
			saw.answer += string(r.ResponseBody.GetBody())
			saw.whole = saw.whole || r.ResponseBody.GetEndOfStream()
		}
	}
}

// choose sends the decision.
func (p *scripted) choose(s extproc.ExternalProcessor_ProcessServer, body string) {
	switch {
	case p.hangs:
		p.asked <- struct{}{}
		return
	case p.refuse != nil:
		s.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_ImmediateResponse{ImmediateResponse: p.refuse}})
		return
	case p.body != "":
		body = p.body
	}
	s.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{
		Response: &extproc.CommonResponse{HeaderMutation: setting(p.lines)},
	}}})
	s.Send(&extproc.ProcessingResponse{Response: &extproc.ProcessingResponse_RequestBody{RequestBody: &extproc.BodyResponse{
		Response: &extproc.CommonResponse{BodyMutation: &extproc.BodyMutation{Mutation: &extproc.BodyMutation_StreamedResponse{
			StreamedResponse: &extproc.StreamedBodyResponse{Body: []byte(body), EndOfStream: true},
		}}},
	}}})
}

func linesOf(m *core.HeaderMap) map[string]string {
	lines := map[string]string{}
	for _, l := range m.GetHeaders() {
		lines[l.GetKey()] = string(l.GetRawValue())
	}
	return lines
}

func setting(lines []string) *extproc.HeaderMutation {
	m := &extproc.HeaderMutation{}
	for i := 0; i < len(lines); i += 2 {
		m.SetHeaders = append(m.SetHeaders, &core.HeaderValueOption{Header: &core.HeaderValue{Key: lines[i], RawValue: []byte(lines[i+1])}})
	}
	return m
}

// listens starts the picker on a socket until the end of the test, and returns its address.
func (p *scripted) listens(t *testing.T) string {
	t.Helper()
	p.seen, p.asked = make(chan pickerSaw, 10), make(chan struct{}, 10)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.WaitForHandlers(true))
	extproc.RegisterExternalProcessorServer(server, p)
	ended := make(chan struct{})
	go func() { // ends with Stop
		defer close(ended)
		server.Serve(l)
	}()
	t.Cleanup(func() {
		server.Stop()
		<-ended
	})
	return l.Addr().String()
}

// underPicker is a world whose engines the picker p chooses. A test that does not let the picker
// hang waits as long as needed.
func underPicker(t *testing.T, p *scripted, engines []*world.Engine, edit func(*config.Config)) *world.World {
	t.Helper()
	address := p.listens(t)
	return world.New(t, world.Setup{Engines: engines, Config: func(c *config.Config) {
		c.Sidecar.Picker, c.Sidecar.PickerTimeout = "ext_proc://"+address, config.Duration(time.Minute)
		if edit != nil {
			edit(c)
		}
	}})
}

const usageAnswer = `{"choices":[{"text":"x","finish_reason":"length"}],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8}}`

// answeringWholes are engines that answer whole requests.
func answeringWholes() []*world.Engine {
	list := world.Wholes()
	for _, e := range list {
		e.Serve = func(c *world.Conn, _ int) {
			if strings.Contains(c.Leg.Body, `"stream":true`) {
				c.Stream("data: {\"choices\":[{\"text\":\"x\"}]}\n\n", "data: [DONE]\n\n")
				return
			}
			c.JSON(200, usageAnswer)
		}
	}
	return list
}

// TestPicked: the picker's engine gets the request with the picker's changes, the picker sees the
// answer, and the client gets its header lines.
func TestPicked(t *testing.T) {
	p := &scripted{
		lines:  []string{"x-gateway-destination-endpoint", "10.0.0.2:80,10.0.0.3:80", "x-slo", "5", "x-kv-source", "evil", "x-pdproxy-x", "evil", "x-request-id", "evil"},
		answer: []string{"x-session-token", "abc", "x-pdproxy-decode", "evil"},
	}
	engines := answeringWholes()
	w := underPicker(t, p, engines, func(c *config.Config) { c.Sidecar.PickerSubset = true })
	for _, stream := range []bool{false, true} {
		a := w.Post(world.CompletionsPath, world.Completions(stream), "X-Request-Id", "r", "X-Prefiller-Host-Port", "evil", "X-Client", "v")
		if a.Status != 200 || a.Err != nil || a.Header.Get("X-Pdproxy-Decode") != "b" || a.Header.Get("X-Session-Token") != "abc" {
			t.Fatalf("%d %v %v %s", a.Status, a.Err, a.Header, a.Body)
		}
		saw := <-p.seen
		if saw.body != world.Completions(stream) || saw.request["x-client"] != "v" || saw.request["x-request-id"] != "r" || saw.request[":path"] != world.CompletionsPath || saw.request["x-prefiller-host-port"] != "" {
			t.Errorf("the picker saw the request %v %s", saw.request, saw.body)
		}
		if saw.answer != a.Body || !saw.whole || saw.served != "10.0.0.2:80" || saw.response[":status"] != "200" {
			t.Errorf("the picker saw the answer %v %q of %q, whole %t", saw.response, saw.answer, saw.served, saw.whole)
		}
	}
	legs := engines[1].Seen()
	if len(legs) != 2 || legs[0].Header.Get("X-Slo") != "5" || legs[0].Header.Get("X-Kv-Source") != "" || legs[0].Header.Get("X-Pdproxy-X") != "" || legs[0].Header.Get("X-Request-Id") == "evil" {
		t.Errorf("the engine got %v", legs)
	}
	if n := w.Metric("pdproxy_picker_requests_total", "picked"); n != 2 {
		t.Errorf("%v requests were picked", n)
	}
	e, _ := w.Explain("r")
	if e.Picker == nil || e.Picker.Result != "picked" || !slices.Equal(e.Picker.Destinations, []string{"10.0.0.2:80", "10.0.0.3:80"}) || e.Coordination != "picker" {
		t.Errorf("explain shows %+v of %q", e.Picker, e.Coordination)
	}
}

// TestPickedOrder: destinations are tried in the order of the picker, unknown ones are left out,
// and a failed one is followed by the next.
func TestPickedOrder(t *testing.T) {
	p := &scripted{lines: []string{"x-gateway-destination-endpoint", "evil:80,10.0.0.3:80,10.0.0.1:80"}}
	engines := answeringWholes()
	engines[2].Serve = func(c *world.Conn, _ int) { c.JSON(500, `{"error":{"message":"x"}}`) }
	w := underPicker(t, p, engines, nil)
	a := w.Post(world.CompletionsPath, world.Completions(false))
	if saw := <-p.seen; a.Status != 200 || a.Header.Get("X-Pdproxy-Decode") != "a" || saw.served != "10.0.0.1:80" {
		t.Errorf("%d %s by %s, served by %s", a.Status, a.Body, a.Header.Get("X-Pdproxy-Decode"), saw.served)
	}
	if n := len(engines[2].Seen()); n != 1 {
		t.Errorf("the first destination got %d requests", n)
	}
	if n := w.Metric("pdproxy_fallbacks_total", "picker_destination", "not_allowed"); n != 1 {
		t.Errorf("%v unknown destinations", n)
	}
}

// TestPickedPair: prefill runs on the engine that the picker names, decode on the destination.
// Without a prefill engine, or with one that is unknown, the destination runs both phases.
func TestPickedPair(t *testing.T) {
	for prefill, want := range map[string]string{"10.0.0.4:80": "p1", "http://10.0.0.3:80": "p0", "": "", "evil:80": "", "10.0.0.1:80": ""} {
		t.Run(prefill, func(t *testing.T) {
			p := &scripted{lines: []string{"x-gateway-destination-endpoint", "10.0.0.2:80", "x-prefiller-host-port", prefill}}
			engines := []*world.Engine{world.DecodeAt("d0", "10.0.0.1:80"), world.DecodeAt("d1", "10.0.0.2:80"), world.PrefillAt("p0", "10.0.0.3:80"), world.PrefillAt("p1", "10.0.0.4:80")}
			for _, e := range engines {
				e.Serve = func(c *world.Conn, _ int) {
					if e.Role == "prefill" {
						c.JSON(200, world.NIXLAnswer)
						return
					}
					c.JSON(200, usageAnswer)
				}
			}
			w := underPicker(t, p, engines, nil)
			a := w.Post(world.CompletionsPath, world.Completions(false))
			if a.Status != 200 || a.Header.Get("X-Pdproxy-Decode") != "d1" || a.Header.Get("X-Pdproxy-Prefill") != want {
				t.Errorf("%d %s on %q and %q", a.Status, a.Body, a.Header.Get("X-Pdproxy-Prefill"), a.Header.Get("X-Pdproxy-Decode"))
			}
			<-p.seen
		})
	}
}

// TestPickedDecodeMoves: if the decode leg cannot be sent after prefill has answered, the leg moves to the next
// destination of the picker, although another decode engine is idle.
func TestPickedDecodeMoves(t *testing.T) {
	p := &scripted{lines: []string{"x-gateway-destination-endpoint", "10.0.0.2:80,10.0.0.5:80", "x-prefiller-host-port", "10.0.0.3:80"}}
	engines := []*world.Engine{world.DecodeAt("d0", "10.0.0.1:80"), world.DecodeAt("d1", "10.0.0.2:80"), world.DecodeAt("d2", "10.0.0.5:80"), world.PrefillAt("p0", "10.0.0.3:80")}
	engines[1].Dialing = errors.New("connection refused") // so that the KV stays unread
	for _, e := range engines {
		e.Serve = func(c *world.Conn, _ int) {
			if e.Role == "prefill" {
				c.JSON(200, world.NIXLAnswer)
				return
			}
			c.JSON(200, usageAnswer)
		}
	}
	w := underPicker(t, p, engines, nil)
	a := w.Post(world.CompletionsPath, world.Completions(false))
	if saw := <-p.seen; a.Status != 200 || a.Header.Get("X-Pdproxy-Decode") != "d2" || saw.served != "10.0.0.5:80" {
		t.Errorf("%d %s on %q, served by %q", a.Status, a.Body, a.Header.Get("X-Pdproxy-Decode"), saw.served)
	}
	if n := len(engines[3].Seen()); n != 1 {
		t.Errorf("prefill got %d requests", n)
	}
}

// TestPickedBody: the engine gets the body of the picker. A body that is no request is no usable
// answer.
func TestPickedBody(t *testing.T) {
	for body, want := range map[string]int{`{"model":"n","prompt":"other","max_tokens":1}`: 200, `{"model":`: 503, `{"prompt":5}`: 503} {
		p := &scripted{lines: []string{"x-gateway-destination-endpoint", "10.0.0.1:80"}, body: body}
		engines := answeringWholes()
		engines[0].Models = "n"
		w := underPicker(t, p, engines, nil)
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != want || want != 200 && !strings.Contains(a.Body, `"picker_failed"`) {
			t.Errorf("%s: %d %s", body, a.Status, a.Body)
		}
		<-p.seen
		if legs := engines[0].Seen(); want == 200 && (len(legs) != 1 || !strings.Contains(legs[0].Body, `"other"`)) {
			t.Errorf("%s: the engine got %v", body, legs)
		}
	}
}

// hangsUp returns an address that closes each connection at once.
func hangsUp(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { // ends with the listener
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-ended
	})
	return l.Addr().String()
}

// TestPickerFails: without a usable choice the policies place the request, or the client gets
// 503.
func TestPickerFails(t *testing.T) {
	for reason, p := range map[string]*scripted{
		"no_destination": {},
		"not_allowed":    {lines: []string{"x-gateway-destination-endpoint", "169.254.169.254:80"}},
		"timeout":        {hangs: true},
		"unavailable":    nil,
	} {
		for _, open := range []bool{false, true} {
			t.Run(reason, func(t *testing.T) {
				script := p
				if script == nil {
					script = &scripted{}
				} else {
					script = &scripted{lines: p.lines, hangs: p.hangs}
				}
				w := underPicker(t, script, answeringWholes(), func(c *config.Config) {
					c.Sidecar.PickerFailureModeAllow = open
					if reason == "timeout" {
						c.Sidecar.PickerTimeout = config.Duration(time.Millisecond)
					}
					if reason == "unavailable" {
						c.Sidecar.Picker = "ext_proc://" + hangsUp(t)
					}
				})
				a := w.Post(world.CompletionsPath, world.Completions(false))
				if open && a.Status != 200 || !open && (a.Status != 503 || !strings.Contains(a.Body, `"picker_failed"`) || !strings.Contains(a.Body, reason)) {
					t.Errorf("open %t: %d %s", open, a.Status, a.Body)
				}
				if n := w.Metric("pdproxy_picker_requests_total", reason); n != 1 {
					t.Errorf("open %t: %v requests counted as %s", open, n, reason)
				}
				if n := w.Metric("pdproxy_fallbacks_total", "picker", reason); (n == 1) != open {
					t.Errorf("open %t: %v fallbacks", open, n)
				}
			})
		}
	}
}

// TestPickerRefuses: the client gets the answer of the picker, in OpenAI's form unless it is JSON.
func TestPickerRefuses(t *testing.T) {
	for _, tt := range []struct {
		status  int
		body    string
		want    string // part of the answer
		outcome telemetry.Outcome
	}{
		{429, "the pool is\nfull", `"message":"the endpoint picker refused the request: the pool is full"`, telemetry.OutcomeShed},
		{503, "", `"code":"rejected_by_picker"`, telemetry.OutcomeNoTarget},
		{400, `{"error":{"message":"own"}}`, `{"error":{"message":"own"}}`, telemetry.OutcomeClientError},
		{200, "cached", "cached", telemetry.OutcomeOK},
	} {
		p := &scripted{refuse: &extproc.ImmediateResponse{
			Status: &envoytype.HttpStatus{Code: envoytype.StatusCode(tt.status)}, Body: []byte(tt.body), Headers: setting([]string{"retry-after", "7", "content-length", "1"}),
		}}
		w := underPicker(t, p, answeringWholes(), nil)
		a := w.Post(world.CompletionsPath, world.Completions(false))
		if a.Status != tt.status || a.Err != nil || !strings.Contains(a.Body, tt.want) || a.Header.Get("Retry-After") != "7" {
			t.Errorf("%d %q: got %d %v %s %v", tt.status, tt.body, a.Status, a.Header, a.Body, a.Err)
		}
		if saw := <-p.seen; saw.whole {
			t.Errorf("the picker saw an answer: %v", saw)
		}
		w.Outcome(tt.outcome)
	}
}

// TestPickedClientLeaves: the picker's stream ends when the client leaves, before the choice and
// in the answer.
func TestPickedClientLeaves(t *testing.T) {
	p := &scripted{hangs: true}
	w := underPicker(t, p, answeringWholes(), nil)
	ctx, leave := context.WithCancel(t.Context())
	go func() { // ends with the request
		<-p.asked
		leave()
	}()
	if a := world.Ask(ctx, w.Client, "POST", "http://proxy"+world.CompletionsPath, world.Completions(false)); a.Err == nil {
		t.Errorf("got %d", a.Status)
	}
	if saw := <-p.seen; saw.whole || saw.response != nil {
		t.Errorf("the picker saw %v", saw)
	}
	for w.Metric("pdproxy_picker_requests_total", "cancelled") != 1 { // the proxy counts after the stream has ended
		time.Sleep(time.Millisecond)
	}

	p = &scripted{lines: []string{"x-gateway-destination-endpoint", "10.0.0.1:80"}}
	engines := answeringWholes()
	engines[0].Serve = func(c *world.Conn, _ int) {
		c.Send(world.StreamHead)
		c.Chunks("data: {\"choices\":[{\"text\":\"x\"}]}\n\n")
		c.Hold()
	}
	w = underPicker(t, p, engines, nil)
	ctx, leave = context.WithCancel(t.Context())
	resp := w.Streams(ctx)
	leave()
	resp.Body.Close()
	if saw := <-p.seen; saw.whole || saw.served != "10.0.0.1:80" {
		t.Errorf("the picker saw %v", saw)
	}
}

// TestPickedClientHasTheAnswer: the picker sees a whole answer although the client closes its
// connection as soon as it has the answer.
func TestPickedClientHasTheAnswer(t *testing.T) {
	p := &scripted{lines: []string{"x-gateway-destination-endpoint", "10.0.0.1:80"}}
	w := underPicker(t, p, answeringWholes(), nil)
	body := world.Completions(false)
	for range 50 {
		c, err := w.DialPublic(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%s", world.CompletionsPath, len(body), body)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		c.Close()
		if saw := <-p.seen; err != nil || !saw.whole || saw.answer != string(text) {
			t.Fatalf("the client got %q, %v; the picker saw %q, whole %t", text, err, saw.answer, saw.whole)
		}
	}
}

// TestPickerReload: a reload connects to another picker, and to none.
func TestPickerReload(t *testing.T) {
	one, two := &scripted{lines: []string{"x-gateway-destination-endpoint", "10.0.0.1:80"}}, &scripted{lines: []string{"x-gateway-destination-endpoint", "10.0.0.2:80"}}
	w := underPicker(t, one, answeringWholes(), nil)
	picks := func(want string) {
		t.Helper()
		if a := w.Post(world.CompletionsPath, world.Completions(false)); a.Status != 200 || want != "" && a.Header.Get("X-Pdproxy-Decode") != want {
			t.Errorf("%d %s on %q", a.Status, a.Body, a.Header.Get("X-Pdproxy-Decode"))
		}
	}
	picks("a")
	next := *w.Config
	next.Sidecar.Picker = "ext_proc://" + two.listens(t)
	w.Reload(&next, nil)
	picks("b")
	last := next
	last.Sidecar.Picker = ""
	w.Reload(&last, nil)
	picks("")
	if n := w.Metric("pdproxy_picker_requests_total"); n != 2 {
		t.Errorf("%v requests were picked", n)
	}
}
