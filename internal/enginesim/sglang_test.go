package enginesim

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/sglang"
)

// quickSGLang returns settings with short timeouts, so that a test can wait for
// them.
func quickSGLang() SGLangConfig {
	return SGLangConfig{
		BootstrapTimeout: 300 * time.Millisecond, WaitingTimeout: 300 * time.Millisecond,
		HandshakeInterval: 10 * time.Millisecond, HandshakeAttempts: 3,
		HeartbeatInterval: 20 * time.Millisecond, HealthPoll: 20 * time.Millisecond, HealthTimeout: 200 * time.Millisecond,
	}
}

// sglangPair starts a prefill and a decode engine.
func sglangPair(t *testing.T, p, d Config) (*Engine, *Engine) {
	t.Helper()
	p.Connector, p.Role = ConnectorSGLang, RolePrefill
	d.Connector, d.Role = ConnectorSGLang, RoleDecode
	return startEngine(t, p), startEngine(t, d)
}

// sglangOf returns an engine's protocol.
func sglangOf(e *Engine) *sglang.SGLang { return e.Proto.(*sglang.SGLang) }

// bootstrap returns the fields that a proxy adds to both legs.
func bootstrap(p *Engine, room int64, rid string) string {
	return fmt.Sprintf(`"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":%d,"rid":%q`, p.BootstrapPort(), room, rid)
}

// both posts a body to two engines at once.
func both(t *testing.T, route string, p, d *Engine, body string) (pa, da answer) {
	t.Helper()
	var wg sync.WaitGroup
	wg.Go(func() { pa, _ = try(t.Context(), p.URL()+route, body) })
	da, err := try(t.Context(), d.URL()+route, body)
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	return pa, da
}

// joined returns the text of a stream, of any route.
func joined(t *testing.T, a answer) string {
	t.Helper()
	var b strings.Builder
	done := false
	for event := range strings.SplitSeq(string(a.body), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			done = true
			continue
		}
		var v struct {
			Text    *string `json:"text"`
			Choices []struct {
				Text  string `json:"text"`
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
			} `json:"choices"`
			Error json.RawMessage `json:"error"`
		}
		if err := json.Unmarshal([]byte(data), &v); err != nil || v.Error != nil {
			t.Fatalf("event %q: %v", data, err)
		}
		if v.Text != nil { // native: cumulative
			b.Reset()
			b.WriteString(*v.Text)
		}
		for _, c := range v.Choices {
			b.WriteString(c.Text + c.Delta.Content)
		}
	}
	if !done {
		t.Fatalf("stream without [DONE]: %q", a.body)
	}
	return b.String()
}

func TestSGLangTextEqualsBoth(t *testing.T) {
	p, d := sglangPair(t, Config{}, Config{})
	one := startEngine(t, Config{Connector: ConnectorSGLang})
	tests := []struct{ name, route, body string }{
		{"completion", core.RouteCompletions, completion(words(1, 40), `"max_tokens":9`)},
		{"completion of token ids", core.RouteCompletions, `{"prompt":[1000,1001,1002,65],"max_tokens":9}`},
		{"one token", core.RouteCompletions, completion(words(2, 17), `"max_tokens":1`)},
		{"exactly one block", core.RouteCompletions, completion(words(3, 16), `"max_tokens":40`)},
		{"chat", core.RouteChat, `{"messages":[{"role":"user","content":"hello there"}],"max_tokens":12,"seed":7}`},
		{"chat without limit", core.RouteChat, `{"messages":[{"role":"user","content":"hello again"}]}`},
		{"first token ends it", core.RouteChat, `{"messages":[{"role":"user","content":"<eos1>"}],"max_tokens":12}`},
		{"stream", core.RouteCompletions, completion(words(4, 33), `"max_tokens":9,"stream":true`)},
		{"chat stream", core.RouteChat, `{"messages":[{"role":"user","content":"flow"}],"max_tokens":12,"stream":true,"stream_options":{"include_usage":true}}`},
		{"native", sglang.RouteGenerate, `{"text":"a native prompt of some length","sampling_params":{"max_new_tokens":7}}`},
		{"native token ids", sglang.RouteGenerate, `{"input_ids":[1000,1001,1002],"sampling_params":{"max_new_tokens":7,"ignore_eos":true}}`},
		{"native stream", sglang.RouteGenerate, `{"text":"flow","stream":true,"sampling_params":{"max_new_tokens":7}}`},
		{"stop string", core.RouteCompletions, completion(words(5, 20), `"max_tokens":60,"stop":["ba"]`)},
	}
	text := func(a answer) string {
		t.Helper()
		switch {
		case a.status != http.StatusOK:
			t.Fatalf("got status %d: %s", a.status, a.body)
		case strings.HasPrefix(string(a.body), "data: "):
			return joined(t, a)
		case strings.Contains(string(a.body), `"choices"`):
			return a.text(t)
		}
		return a.field(t, "text").(string)
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			want := text(post(t, one.URL()+tt.route, tt.body))
			before := d.State().Transfers
			pd := strings.TrimSuffix(tt.body, "}") + "," + bootstrap(p, int64(1)<<62+int64(i), fmt.Sprintf("eq-%02d-x", i)) + "}"
			pa, da := both(t, tt.route, p, d, pd)
			if got := text(da); got != want {
				t.Errorf("decode answered %q, one engine %q", got, want)
			}
			if pa.status != http.StatusOK || !strings.Contains(string(pa.body), "length") || !strings.HasPrefix(want, text(pa)) && !strings.Contains(tt.body, "stop\"") {
				t.Errorf("prefill answered %d %s", pa.status, pa.body)
			}
			if got := d.State().Transfers - before; got != 1 {
				t.Errorf("got %d transfers", got)
			}
		})
	}
}

func TestSGLangBatch(t *testing.T) {
	p, d := sglangPair(t, Config{}, Config{})
	one := startEngine(t, Config{Connector: ConnectorSGLang})
	port := p.BootstrapPort()
	tests := []struct{ name, body, fields string }{
		{"one room counts up", `{"prompt":["a b","c d","e"],"max_tokens":5}`, fmt.Sprintf(`"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":100`, port)},
		{"lists", `{"prompt":["a b","c d"],"max_tokens":5}`, fmt.Sprintf(`"bootstrap_host":["127.0.0.1","127.0.0.1"],"bootstrap_port":[%d,%d],"bootstrap_room":[7,3]`, port, port)},
		{"one prompt in a list", `{"prompt":["a b"],"max_tokens":5}`, fmt.Sprintf(`"bootstrap_host":["127.0.0.1"],"bootstrap_port":[%d],"bootstrap_room":[9007199254740993]`, port)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			want := post(t, one.URL()+core.RouteCompletions, tt.body)
			pa, da := both(t, core.RouteCompletions, p, d, strings.TrimSuffix(tt.body, "}")+","+tt.fields+"}")
			if pa.status != http.StatusOK || da.status != http.StatusOK {
				t.Fatalf("prefill %d %s, decode %d %s", pa.status, pa.body, da.status, da.body)
			}
			for i := range want.field(t, "choices").([]any) {
				if got, want := da.field(t, "choices", i, "text"), want.field(t, "choices", i, "text"); got != want {
					t.Errorf("choice %d is %q, want %q", i, got, want)
				}
			}
		})
	}
	t.Run("one room counts up over embeddings", func(t *testing.T) {
		body := `{"input_embeds":[[[0.5],[1]],[[0.25],[2]],[[3]]],"sampling_params":{"max_new_tokens":5,"ignore_eos":true}`
		want := post(t, one.URL()+sglang.RouteGenerate, body+"}")
		fields := `,"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":%s}`
		pa, hangUp := postAside(t, p.URL()+sglang.RouteGenerate, body+fmt.Sprintf(fields, port, "[200,201,202]"))
		defer hangUp()
		da := post(t, d.URL()+sglang.RouteGenerate, body+fmt.Sprintf(fields, port, "200"))
		if a := <-pa; want.status != http.StatusOK || a.status != http.StatusOK || da.status != http.StatusOK {
			t.Fatalf("alone %d %s, prefill %d %s, decode %d %s", want.status, want.body, a.status, a.body, da.status, da.body)
		}
		texts := regexp.MustCompile(`"text":"[^"]*"`)
		if got, want := texts.FindAllString(string(da.body), -1), texts.FindAllString(string(want.body), -1); len(want) != 3 || !slices.Equal(got, want) {
			t.Errorf("texts %q, want %q", got, want)
		}
	})
	bad := post(t, d.URL()+core.RouteCompletions, `{"prompt":["a","b"],"bootstrap_room":[1]}`)
	if bad.status != http.StatusBadRequest {
		t.Errorf("a short list: %d %s", bad.status, bad.body)
	}
}

// TestSGLangSamplesShareARoom: all samples of a request with n > 1 use the
// first room, whatever rooms the request names, and not all of them get their
// KV.
func TestSGLangSamplesShareARoom(t *testing.T) {
	p, d := sglangPair(t, Config{}, Config{SGLang: SGLangConfig{WaitingTimeout: 2 * time.Second}})
	fields := fmt.Sprintf(`{"prompt":["a b"],"n":3,"max_tokens":5,"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":[11,12,13]}`, p.BootstrapPort())
	da, hangUp := postAside(t, d.URL()+core.RouteCompletions, fields)
	defer hangUp()
	eventually(t, "samples of decode that meet in one room", func() bool { return d.State().DuplicateIDs > 0 })
	pa, leave := postAside(t, p.URL()+core.RouteCompletions, fields)
	if a := <-da; a.status != http.StatusInternalServerError {
		t.Errorf("decode answered %d %s", a.status, a.body)
	}
	leave()
	<-pa
}

// TestSGLangPrefillWaits: without decode, prefill computes nothing, holds
// nothing and does not answer, until it is aborted.
func TestSGLangPrefillWaits(t *testing.T) {
	p, _ := sglangPair(t, Config{}, Config{})
	answered, _ := postAside(t, p.URL()+core.RouteCompletions, completion("x y z", bootstrap(p, 5, "wait-1")))
	eventually(t, "the leg in the bootstrap queue", func() bool {
		return sglangOf(p).Queues[0].Bootstrap.Load() == 1 && p.State().RequestsWaiting == 1
	})
	if s := p.State(); s.BlocksUsed != 0 || s.RequestsWaiting != 1 || s.PromptTokens != 0 {
		t.Errorf("parked prefill: %+v", s)
	}
	select {
	case a := <-answered:
		t.Fatalf("answered %d %s", a.status, a.body)
	default:
	}
	if a := post(t, p.URL()+"/abort_request", `{"rid":"wait-1"}`); a.status != http.StatusOK || len(a.body) != 0 {
		t.Errorf("abort answered %d %q", a.status, a.body)
	}
	a := <-answered
	want := `{"object":"error","message":"Prefill bootstrap failed for request rank=0 req.rid='wait-1' req.bootstrap_room=5 with exception KVTransferError(bootstrap_room=5): Aborted by AbortReq.","type":"500","param":null,"code":500}`
	if a.status != http.StatusInternalServerError || string(a.body) != want {
		t.Errorf("aborted prefill answered %d\n%s\nwant\n%s", a.status, a.body, want)
	}
	if s := p.State(); s.Aborted != 1 || s.RequestsWaiting != 0 {
		t.Errorf("state of prefill after the abort: %+v", s)
	}
}

// TestSGLangDecodeWaits: decode reserves its blocks at once. They count as
// pinned, and an abort or the client's leaving frees them.
func TestSGLangDecodeWaits(t *testing.T) {
	p, d := sglangPair(t, Config{}, Config{})
	body := completion(words(1, 40), `"max_tokens":9,`+bootstrap(p, 6, "wait-2"))
	waiting := func() bool {
		s := d.State()
		return s.BlocksPinned == 3 && s.BlocksUsed == 3 && s.RequestsWaiting == 1 && s.RequestsRunning == 0
	}
	t.Run("abort", func(t *testing.T) {
		answered, _ := postAside(t, d.URL()+core.RouteCompletions, body)
		eventually(t, "pinned blocks", waiting)
		post(t, d.URL()+"/abort_request", `{"rid":"wait-2"}`)
		if a := <-answered; a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), "Decode transfer failed for request rank=0 decode_req.req.rid='wait-2' decode_req.req.bootstrap_room=6 with") {
			t.Errorf("answered %d %s", a.status, a.body)
		}
		if s := d.State(); s.BlocksUsed != 0 || s.BlocksPinned != 0 {
			t.Errorf("state of decode after the abort: %+v", s)
		}
	})
	t.Run("client leaves", func(t *testing.T) {
		ctx, leave := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			try(ctx, d.URL()+core.RouteCompletions, body)
		}()
		eventually(t, "pinned blocks", waiting)
		leave()
		<-done
		eventually(t, "free blocks", func() bool { return d.State().BlocksUsed == 0 })
	})
	eventually(t, "no rooms on prefill", func() bool {
		g := sglangOf(p)
		g.Mu.Lock()
		defer g.Mu.Unlock()
		return len(g.Rooms) == 0
	})
	// The room was given up: a later prefill leg waits like any other.
	answered, _ := postAside(t, p.URL()+core.RouteCompletions, body)
	eventually(t, "the leg in the bootstrap queue", func() bool { return sglangOf(p).Queues[0].Bootstrap.Load() == 1 })
	post(t, p.URL()+"/abort_request", `{"abort_all":true}`)
	<-answered
}

// TestSGLangPeerFails checks the effect of one leg's end on the other.
func TestSGLangPeerFails(t *testing.T) {
	const dead = "Failed to get kvcache from prefill instance, it might be dead"
	tests := []struct {
		name  string
		spoil func(t *testing.T, p, d *Engine, leave map[*Engine]func())
		p, d  string // messages; empty: the client of that leg left
	}{
		{"prefill aborted", func(t *testing.T, p, _ *Engine, _ map[*Engine]func()) {
			post(t, p.URL()+"/abort_request", `{"rid":"peer"}`)
		}, "Prefill transfer failed", dead},
		{"decode aborted", func(t *testing.T, _, d *Engine, _ map[*Engine]func()) {
			post(t, d.URL()+"/abort_request", `{"rid":"peer"}`)
		}, "Prefill transfer failed", "Aborted by AbortReq."},
		{"prefill's client leaves", func(_ *testing.T, p, _ *Engine, leave map[*Engine]func()) { leave[p]() }, "", dead},
		{"decode's client leaves", func(_ *testing.T, _, d *Engine, leave map[*Engine]func()) { leave[d]() }, "Aborted by AbortReq.", ""},
		{"decode dies", func(_ *testing.T, _, d *Engine, _ map[*Engine]func()) { d.Kill() }, "Decode instance could be dead, remote mooncake session", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p, d := sglangPair(t, Config{PrefillUsPerToken: 10_000}, Config{})
			body := completion(words(1, 60), `"max_tokens":9,`+bootstrap(p, 8, "peer"))
			leave := map[*Engine]func(){}
			got := map[*Engine]chan answer{}
			for _, e := range []*Engine{p, d} {
				ctx, cancel := context.WithCancel(t.Context())
				leave[e], got[e] = cancel, make(chan answer, 1)
				go func() {
					a, _ := try(ctx, e.URL()+core.RouteCompletions, body)
					got[e] <- a
				}()
			}
			eventually(t, "prefill computing", func() bool { return p.State().RequestsRunning == 1 })
			tt.spoil(t, p, d, leave)
			for e, want := range map[*Engine]string{p: tt.p, d: tt.d} {
				a := <-got[e]
				if want != "" && (a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), want)) {
					t.Errorf("%s answered %d %s, want %q", e.Cfg.Role, a.status, a.body, want)
				}
				if want == "" && a.status != 0 {
					t.Errorf("%s answered %d %s although its client has left", e.Cfg.Role, a.status, a.body)
				}
				eventually(t, "free blocks", func() bool { return e.State().BlocksUsed == 0 })
			}
		})
	}
}

func TestSGLangTimeouts(t *testing.T) {
	p, d := sglangPair(t, Config{SGLang: quickSGLang()}, Config{SGLang: quickSGLang()})
	t.Run("prefill without decode", func(t *testing.T) {
		a := post(t, p.URL()+core.RouteCompletions, completion("x", bootstrap(p, 20, "alone-p")))
		if a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), "Request 20 timed out after 0.3s in KVPoll.Bootstrapping") {
			t.Errorf("answered %d %s", a.status, a.body)
		}
	})
	t.Run("decode without prefill", func(t *testing.T) {
		a := post(t, d.URL()+core.RouteCompletions, completion("x", bootstrap(p, 21, "alone-d")))
		if a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), "Request 21 timed out after 0.3s in KVPoll.WaitingForInput") {
			t.Errorf("answered %d %s", a.status, a.body)
		}
	})
	t.Run("no registry", func(t *testing.T) {
		// No program listens on TCP port 1.
		a := post(t, d.URL()+core.RouteCompletions, completion("x", `"bootstrap_host":"127.0.0.1","bootstrap_port":1,"bootstrap_room":22`))
		if a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), "Decode handshake failed") {
			t.Errorf("answered %d %s", a.status, a.body)
		}
	})
	t.Run("prefill dies", func(t *testing.T) {
		cfg := quickSGLang()
		cfg.WaitingTimeout = time.Minute
		p, d := sglangPair(t, Config{}, Config{SGLang: cfg})
		answered, _ := postAside(t, d.URL()+core.RouteCompletions, completion("x", bootstrap(p, 23, "dies")))
		eventually(t, "pinned blocks", func() bool { return d.State().BlocksPinned > 0 })
		p.Kill()
		if a := <-answered; a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), "Lost connection with prefill instance") {
			t.Errorf("answered %d %s", a.status, a.body)
		}
	})
}

// TestSGLangRestart: a prefill restarts on the same bootstrap port. Decode
// reads its topology again after the heartbeat has missed the old one.
func TestSGLangRestart(t *testing.T) {
	port := testbed.Ports(t, 1)
	p, d := sglangPair(t, Config{BootstrapPort: port}, Config{SGLang: quickSGLang()})
	pa, da := both(t, core.RouteCompletions, p, d, completion("before", bootstrap(p, 1, "r-1")))
	if pa.status != http.StatusOK || da.status != http.StatusOK {
		t.Fatalf("both = %d, %s, %d, %s", pa.status, pa.body, da.status, da.body)
	}
	p.Kill()
	eventually(t, "the prefill forgotten", func() bool {
		g := sglangOf(d)
		g.Mu.Lock()
		defer g.Mu.Unlock()
		return len(g.Prefills) == 0
	})
	p.Close()
	p = startEngine(t, Config{Connector: ConnectorSGLang, Role: RolePrefill, BootstrapPort: port})
	pa, da = both(t, core.RouteCompletions, p, d, completion("after", bootstrap(p, 2, "r-2")))
	if pa.status != http.StatusOK || da.status != http.StatusOK {
		t.Errorf("both = %d, %s, %d, %s", pa.status, pa.body, da.status, da.body)
	}
}

// TestSGLangBackpressure: while decode is full, prefill waits before it computes.
func TestSGLangBackpressure(t *testing.T) {
	p, d := sglangPair(t, Config{}, Config{KVBlocks: 4, Hang: core.HangDecode})
	_, leave := postAside(t, d.URL()+core.RouteCompletions, completion(words(1, 40), `"max_tokens":20,`+bootstrap(p, 30, "bp-1")))
	if a := post(t, p.URL()+core.RouteCompletions, completion(words(1, 40), bootstrap(p, 30, "bp-1"))); a.status != http.StatusOK {
		t.Fatalf("first prefill answered %d %s", a.status, a.body)
	}
	got := make(chan answer, 1)
	var wg sync.WaitGroup
	for _, e := range []*Engine{p, d} {
		wg.Go(func() {
			a, _ := try(t.Context(), e.URL()+core.RouteCompletions, completion(words(2, 40), `"max_tokens":2,`+bootstrap(p, 31, "bp-2")))
			if e == d {
				got <- a
			}
		})
	}
	eventually(t, "decode without room", func() bool { return sglangOf(d).Queues[0].Prealloc.Load() == 1 })
	eventually(t, "decode says so", func() bool {
		return get(t, d.URL()+"/v1/loads?include=queues").field(t, "loads", 0, "queues", "prealloc_ready") == json.Number("1")
	})
	eventually(t, "prefill parked", func() bool { return sglangOf(p).Queues[0].Bootstrap.Load() == 1 })
	if s := p.State(); s.BlocksUsed != 0 {
		t.Errorf("parked prefill: %+v", s)
	}
	if err := d.SetFault("", 0, ""); err != nil {
		t.Fatal(err)
	}
	leave()
	if a := <-got; a.status != http.StatusOK {
		t.Errorf("second decode answered %d %s", a.status, a.body)
	}
	wg.Wait()
	a := post(t, d.URL()+core.RouteCompletions, completion(words(3, 80), bootstrap(p, 32, "bp-3")))
	if a.status != http.StatusBadRequest {
		t.Errorf("a prompt beyond the cache: %d %s", a.status, a.body)
	}
}

// postAside posts in the background; leave closes the connection.
func postAside(t *testing.T, url, body string) (<-chan answer, func()) {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	got := make(chan answer, 1)
	go func() {
		a, _ := try(ctx, url, body)
		got <- a
	}()
	return got, leave
}

func TestSGLangRoomIsNeeded(t *testing.T) {
	p, d := sglangPair(t, Config{}, Config{})
	const message = "Invalid request: Disaggregated request received without bootstrap room id"
	for _, e := range []*Engine{p, d} {
		for route, body := range map[string]string{core.RouteCompletions: `{"prompt":"x"`, sglang.RouteGenerate: `{"text":"x"`, core.RouteChat: `{"messages":[{"role":"user","content":"x"}]`} {
			t.Run(e.Cfg.Role+route, func(t *testing.T) {
				a := post(t, e.URL()+route, body+`,"bootstrap_host":"127.0.0.1","bootstrap_room":null}`)
				if a.status != http.StatusBadRequest || !strings.Contains(string(a.body), message) {
					t.Errorf("answered %d %s", a.status, a.body)
				}
				if flat := route != sglang.RouteGenerate; flat != strings.Contains(string(a.body), `"object":"error"`) {
					t.Errorf("form %s", a.body)
				}
				a = post(t, e.URL()+route, body+`,"stream":true}`)
				if a.status != http.StatusOK || !strings.Contains(string(a.body), message) || !strings.HasSuffix(string(a.body), "data: [DONE]\n\n") {
					t.Errorf("stream %d %s", a.status, a.body)
				}
				want := `"type":"BAD_REQUEST","param":null,"code":400}}`
				if route == sglang.RouteGenerate {
					want = `"finish_reason":{"type":"abort","message":"` + message
				}
				if !strings.Contains(string(a.body), want) {
					t.Errorf("stream %s, want %s", a.body, want)
				}
			})
		}
	}
	for _, s := range []State{p.State(), d.State()} {
		if s.BlocksUsed != 0 || s.PromptTokens == 0 {
			t.Errorf("%+v", s)
		}
	}
}

func TestSGLangAbort(t *testing.T) {
	e := startEngine(t, Config{Connector: ConnectorSGLang, Hang: core.HangDecode})
	start := func(rid, extra string) chan answer {
		got := make(chan answer, 1)
		go func() {
			a, _ := try(t.Context(), e.URL()+core.RouteCompletions, completion("x", `"max_tokens":5,"rid":"`+rid+`"`+extra))
			got <- a
		}()
		eventually(t, "leg "+rid, func() bool { return sglangOf(e).InFlight(rid) })
		return got
	}
	one, ten, other := start("req-1", ""), start("req-10", `,"stream":true`), start("other", "")
	if a := post(t, e.URL()+core.RouteCompletions, completion("x", `"rid":"req-1"`)); a.status != http.StatusBadRequest || !strings.Contains(string(a.body), "Duplicate request ID detected: req-1") {
		t.Errorf("a rid in flight: %d %s", a.status, a.body)
	}
	for _, body := range []string{`{"rid":"req-"}`, `{"rid":""}`, `{}`, `{"rid":"unknown","abort_all":false}`} {
		if a := post(t, e.URL()+"/abort_request", body); a.status != http.StatusOK {
			t.Errorf("abort %s: %d", body, a.status)
		}
	}
	if n := e.State().Aborted; n != 0 {
		t.Fatalf("%d legs aborted by rids that are not in flight", n)
	}
	// A known rid ends all requests whose rid begins with it.
	post(t, e.URL()+"/abort_request", `{"rid":"req-1"}`)
	if a := <-one; a.status != http.StatusOK || a.field(t, "choices", 0, "finish_reason") != "abort" {
		t.Errorf("req-1 answered %d %s", a.status, a.body)
	}
	if a := <-ten; a.status != http.StatusOK || !strings.Contains(string(a.body), `"finish_reason":"abort"`) {
		t.Errorf("req-10 answered %d %s", a.status, a.body)
	}
	if !sglangOf(e).InFlight("other") {
		t.Error("a request with another rid was aborted too")
	}
	post(t, e.URL()+"/abort_request", `{"abort_all":true}`)
	if a := <-other; a.field(t, "choices", 0, "finish_reason") != "abort" {
		t.Errorf("other answered %s", a.body)
	}
	if s := e.State(); s.Aborted != 3 || s.BlocksUsed != 0 {
		t.Errorf("e.State() = %+v", s)
	}
}

func TestSGLangRanks(t *testing.T) {
	follow := Config{Ranks: 4}
	force := Config{Ranks: 4, SGLang: SGLangConfig{ForceQueryRank: true}}
	inTurn := Config{Ranks: 4, SGLang: SGLangConfig{LoadBalance: core.BalanceRoundRobin}}
	tests := []struct {
		name  string
		p, d  Config
		room  int64
		extra string // of the prefill leg
		both  string // of both legs
		rank  int    // of the prefill, -1 for any
		fails string // prefill's message
	}{
		{name: "the room determines the rank", p: follow, room: 4*1000 + 3, rank: 3},
		{name: "agrees with the room", p: follow, room: 4*1000 + 2, extra: `"routed_dp_rank":2`, rank: 2},
		{name: "contradicts the room", p: follow, room: 4 * 1000, extra: `"routed_dp_rank":1`, fails: "follow_bootstrap_room conflict: dispatched to dp_rank 1 but bootstrap_room 4000 implies dp_rank 0."},
		{name: "old name", p: follow, room: 4 * 1000, extra: `"data_parallel_rank":1`, fails: "conflict"},
		{name: "sent on both legs", p: follow, room: 4 * 1000, extra: `"routed_dp_rank":1`, both: `"disagg_prefill_dp_rank":1`, rank: 1},
		{name: "forced query", p: force, d: Config{SGLang: SGLangConfig{ForceQueryRank: true}}, room: 4 * 1000, extra: `"routed_dp_rank":1`, rank: 1},
		{name: "in turn", p: inTurn, room: 4 * 1000, rank: -1},
		{name: "in turn, named", p: inTurn, room: 4 * 1000, extra: `"routed_dp_rank":3`, rank: 3},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.d.SGLang.WaitingTimeout = 200 * time.Millisecond
			p, d := sglangPair(t, tt.p, tt.d)
			one := startEngine(t, Config{Connector: ConnectorSGLang})
			fields := func(parts ...string) string {
				parts = append(parts, `"max_tokens":4`, bootstrap(p, tt.room, "rank"))
				return completion(words(9, 33), strings.Trim(strings.Join(parts, ","), ","))
			}
			join := func(a, b string) string { return strings.Trim(a+","+b, ",") }
			var pa answer
			var wg sync.WaitGroup
			wg.Go(func() { pa = post(t, p.URL()+core.RouteCompletions, fields(join(tt.extra, tt.both))) })
			da := post(t, d.URL()+core.RouteCompletions, fields(join(`"routed_dp_rank":0`, tt.both)))
			wg.Wait()
			if tt.fails != "" {
				if pa.status != http.StatusInternalServerError || !strings.Contains(string(pa.body), tt.fails) || da.status != http.StatusInternalServerError {
					t.Errorf("prefill %d %s, decode %d", pa.status, pa.body, da.status)
				}
				return
			}
			if pa.status != http.StatusOK || da.status != http.StatusOK {
				t.Fatalf("prefill %d %s, decode %d %s", pa.status, pa.body, da.status, da.body)
			}
			if want := post(t, one.URL()+core.RouteCompletions, completion(words(9, 33), `"max_tokens":4`)).text(t); da.text(t) != want {
				t.Errorf("decode answered %q, one engine %q", da.text(t), want)
			}
			for _, r := range p.Ranks {
				r.Mu.Lock()
				has := len(r.Cache.ByHash) > 0
				r.Mu.Unlock()
				if tt.rank >= 0 && has != (r.Index == tt.rank) {
					t.Errorf("rank %d computed: %v", r.Index, has)
				}
			}
		})
	}
	p, d := sglangPair(t, follow, Config{Ranks: 2})
	for _, e := range []*Engine{p, d} {
		for _, stream := range []string{"false", "true"} {
			a := post(t, e.URL()+core.RouteCompletions, completion("x", `"routed_dp_rank":4,"stream":`+stream+`,`+bootstrap(p, 4, "")))
			if a.status != http.StatusBadRequest || !strings.Contains(string(a.body), "out of range") {
				t.Errorf("rank 4 on %s: %d %s", e.Cfg.Role, a.status, a.body)
			}
		}
		a := post(t, e.URL()+core.RouteCompletions, completion("x", `"routed_dp_rank":0,`+bootstrap(p, 4, "")), "X-Data-Parallel-Rank", "9")
		if a.status != http.StatusBadRequest {
			t.Errorf("the header wins on %s: %d", e.Cfg.Role, a.status)
		}
	}
}

// TestSGLangDuplicateRoom: two prefill legs in one live room both send to the
// same decode, whose answer is that of the first KV to arrive.
func TestSGLangDuplicateRoom(t *testing.T) {
	p, d := sglangPair(t, Config{}, Config{})
	one := startEngine(t, Config{Connector: ConnectorSGLang})
	right, wrong := completion(words(1, 40), `"max_tokens":6`), completion(words(2, 40), `"max_tokens":6`)
	pd := func(body, rid string) string {
		return strings.TrimSuffix(body, "}") + "," + bootstrap(p, 77, rid) + "}"
	}
	got := make(chan answer, 2)
	for i, body := range []string{right, wrong} {
		go func() {
			a, _ := try(t.Context(), p.URL()+core.RouteCompletions, pd(body, fmt.Sprintf("dup-%d", i)))
			got <- a
		}()
	}
	eventually(t, "two legs in the room", func() bool { return sglangOf(p).Queues[0].Bootstrap.Load() == 2 })
	da := post(t, d.URL()+core.RouteCompletions, pd(right, "dup-d"))
	a, b := <-got, <-got
	if a.status != http.StatusOK {
		a, b = b, a
	}
	if a.status != http.StatusOK || b.status != http.StatusInternalServerError {
		t.Errorf("prefills answered %d %s and %d %s", a.status, a.body, b.status, b.body)
	}
	if p.State().DuplicateIDs != 1 {
		t.Errorf("prefill counted %d duplicates", p.State().DuplicateIDs)
	}
	want := post(t, one.URL()+core.RouteCompletions, right).text(t)
	if first := a.field(t, "id"); (da.text(t) == want) != (first == "dup-0") {
		t.Errorf("%s came first, decode answered %q, the correct text is %q", first, da.text(t), want)
	}
	// A leg of another length sends as many blocks as fit.
	go func() {
		a, _ := try(t.Context(), p.URL()+core.RouteCompletions, pd(completion(words(3, 100), ""), "long"))
		got <- a
	}()
	eventually(t, "the leg in the room", func() bool { return sglangOf(p).Queues[0].Bootstrap.Load() == 1 })
	da = post(t, d.URL()+core.RouteCompletions, pd(right, "short"))
	if a := <-got; a.status != http.StatusOK {
		t.Errorf("prefill answered %d %s", a.status, a.body)
	}
	if da.text(t) == want {
		t.Error("decode answered the right text from the wrong KV")
	}
}

// TestSGLangMetadataRoom: metadata of another room is rejected.
func TestSGLangMetadataRoom(t *testing.T) {
	p, d := sglangPair(t, Config{}, Config{})
	got, _ := postAside(t, d.URL()+core.RouteCompletions, completion("x y", bootstrap(p, 50, "meta")))
	var info *sglang.DecodeInfo
	eventually(t, "decode's indices", func() bool {
		g := sglangOf(p)
		g.Mu.Lock()
		defer g.Mu.Unlock()
		if rm := g.Rooms[50]; rm != nil {
			info = rm.Info
		}
		return info != nil
	})
	forged := core.SideMessage{
		Op: sglang.OpKV, Engine: info.Session, Key: "50", Blocks: info.Blocks, Payload: make([]byte, len(info.Blocks)*16*core.BytesPerKV),
		Fields: map[string]string{"bootstrap_room": "51", "first_token": "1000", "cached_tokens": "0"},
	}
	for name, spoil := range map[string]func(m *core.SideMessage){
		"other blocks":  func(m *core.SideMessage) { m.Blocks = []core.BlockID{99} },
		"short payload": func(m *core.SideMessage) { m.Payload = m.Payload[1:] },
		"bad token": func(m *core.SideMessage) {
			m.Fields = map[string]string{"bootstrap_room": "50", "first_token": "-4", "cached_tokens": "0"}
		},
		"other room":   func(m *core.SideMessage) { m.Key = "52" },
		"other engine": func(m *core.SideMessage) { m.Engine = "gone" },
	} {
		m := forged
		spoil(&m)
		if _, err := p.Ranks[0].Side.Call(t.Context(), info.Addr, m); err == nil {
			t.Errorf("%s: the message was accepted", name)
		}
	}
	if _, err := p.Ranks[0].Side.Call(t.Context(), info.Addr, forged); err != nil {
		t.Fatal(err)
	}
	a := <-got
	want := `{"object":"error","message":"Metadata corruption detected - bootstrap_room mismatch","type":"500","param":null,"code":500}`
	if a.status != http.StatusInternalServerError || string(a.body) != want {
		t.Errorf("answered %d %s", a.status, a.body)
	}
}

func TestSGLangFaults(t *testing.T) {
	t.Run("load", func(t *testing.T) {
		p, d := sglangPair(t, Config{}, Config{Fail: "1:load"})
		pa, da := both(t, core.RouteCompletions, p, d, completion("x", bootstrap(p, 1, "f")))
		if pa.status != http.StatusInternalServerError || da.status != http.StatusInternalServerError {
			t.Errorf("prefill %d %s, decode %d %s", pa.status, pa.body, da.status, da.body)
		}
	})
	t.Run("no-params", func(t *testing.T) {
		p, d := sglangPair(t, Config{Fail: "1:no-params"}, Config{SGLang: quickSGLang()})
		pa, da := both(t, core.RouteCompletions, p, d, completion("x", bootstrap(p, 1, "f")))
		if pa.status != http.StatusOK || da.status != http.StatusInternalServerError {
			t.Errorf("prefill %d %s, decode %d %s", pa.status, pa.body, da.status, da.body)
		}
	})
	for name, tt := range map[string]struct{ p, d Config }{
		"page size":       {Config{BlockSize: 32}, Config{}},
		"cache type":      {Config{SGLang: SGLangConfig{KVCacheDtype: "fp8_e4m3"}}, Config{}},
		"pipeline stages": {Config{}, Config{SGLang: SGLangConfig{PPSize: 2}}},
	} {
		t.Run(name+" ends decode", func(t *testing.T) {
			p, d := sglangPair(t, tt.p, tt.d)
			if _, err := try(t.Context(), d.URL()+core.RouteCompletions, completion("x", bootstrap(p, 1, "f"))); err == nil {
				t.Error("decode answered")
			}
			<-d.Died()
		})
	}
	for name, tt := range map[string]struct {
		p, d SGLangConfig
		want int
	}{
		"decode without stages":  {SGLangConfig{PPSize: 4}, quickSGLang(), http.StatusOK},
		"ranks that map":         {SGLangConfig{TPSize: 4}, quickSGLang(), http.StatusOK},
		"ranks that do not map":  {SGLangConfig{TPSize: 3}, SGLangConfig{TPSize: 2}, http.StatusInternalServerError},
		"backends of two makers": {SGLangConfig{TransferBackend: "nixl"}, quickSGLang(), http.StatusInternalServerError},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := sglangPair(t, Config{SGLang: tt.p}, Config{SGLang: tt.d})
			_, leave := postAside(t, p.URL()+core.RouteCompletions, completion("x", bootstrap(p, 1, "f")))
			defer leave()
			if a := post(t, d.URL()+core.RouteCompletions, completion("x", bootstrap(p, 1, "f"))); a.status != tt.want {
				t.Errorf("decode answered %d %s", a.status, a.body)
			}
		})
	}
}
