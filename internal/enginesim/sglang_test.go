package enginesim

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/sglang"
)

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

func TestSGLangRoomExpiry(t *testing.T) {
	p, _ := sglangPair(t, Config{SGLang: SGLangConfig{RoomExpiry: time.Nanosecond}}, Config{})
	b := sglangOf(p).Boot
	b.Register(1, 0)
	b.Register(2, 0)
	b.Mu.Lock()
	defer b.Mu.Unlock()
	if len(b.Rooms) != 1 {
		t.Errorf("%d rooms are remembered", len(b.Rooms))
	}
}

// TestSGLangPrefillReplaced: decode keeps the ports of a prefill process that was replaced at the
// same address between two heartbeats, also after an abort, until a wait for the KV times out.
func TestSGLangPrefillReplaced(t *testing.T) {
	p, d := sglangPair(t, Config{}, Config{SGLang: core.SGLangConfig{HeartbeatInterval: time.Hour, WaitingTimeout: 500 * time.Millisecond}})
	room := int64(0)
	both := func() (decode answer) {
		room++
		body := completion("x y", bootstrap(p, room, fmt.Sprint("replaced-", room)))
		_, leave := postAside(t, p.URL()+core.RouteCompletions, body)
		defer leave()
		decode, _ = try(t.Context(), d.URL()+core.RouteCompletions, body)
		return decode
	}
	if a := both(); a.status != http.StatusOK {
		t.Fatalf("decode answered %d %s", a.status, a.body)
	}
	port := p.BootstrapPort()
	p.Kill()
	p.Close()
	p = startEngine(t, Config{Connector: ConnectorSGLang, Role: RolePrefill, BootstrapPort: port})
	got, leave := postAside(t, d.URL()+core.RouteCompletions, completion("x y", bootstrap(p, 1000, "left")))
	eventually(t, "decode waits", func() bool { return sglangOf(d).InFlight("left") })
	leave()
	<-got
	if a := both(); a.status != http.StatusInternalServerError || !strings.Contains(string(a.body), "timed out") {
		t.Errorf("decode answered %d %s", a.status, a.body)
	}
	eventually(t, "decode has asked for the new ports", func() bool { return both().status == http.StatusOK })
}

// FuzzSGLangParse: any body is rejected or gives every sequence an item.
func FuzzSGLangParse(f *testing.F) {
	for _, body := range []string{
		completion("x", `"bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":9223372036854775807,"rid":"r"`),
		`{"prompt":["a","b"],"n":2,"bootstrap_room":[1,2],"bootstrap_port":[null,3],"rid":["x","y"]}`,
		`{"text":["a"],"input_ids":[[1]],"sampling_params":{"n":3},"bootstrap_room":5}`,
		`{"input_embeds":[[[0.5],[1]],[[-2e9]]],"bootstrap_room":5}`, `{"input_embeds":[[0.5],[]]}`, `{"input_embeds":[[[]],[]]}`, `{"input_embeds":[]}`,
		`{"messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"routed_dp_rank":"0","disagg_prefill_dp_rank":1e3}`,
		`{"prompt":[],"rid":{}}`, `{"text":[[]],"bootstrap_room":[[]]}`, `[]`, `{"prompt":"x","bootstrap_room":1.5}`,
	} {
		f.Add(body, core.RouteCompletions, "7")
		f.Add(body, sglang.RouteGenerate, "")
		f.Add(body, core.RouteChat, "x")
	}
	e, err := New(Config{Connector: ConnectorSGLang, Role: RoleDecode, KVBlocks: 64, SGLang: SGLangConfig{HeaderOverrides: true}})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body, route, room string) {
		if route != sglang.RouteGenerate && route != core.RouteChat {
			route = core.RouteCompletions
		}
		h := http.Header{}
		h.Set("X-Override-Bootstrap-Room", room)
		req, refusal := e.Proto.Parse(route, h, []byte(body))
		if refusal != nil {
			if refusal.Status != http.StatusBadRequest {
				t.Fatalf("refused with %d", refusal.Status)
			}
			if _, err := core.EncodeJSON(e.Proto.ErrorBody(refusal)); err != nil {
				t.Fatal(err)
			}
			return
		}
		if e.CheckTokens(req) != nil {
			return
		}
		if n := len(req.Ext.(*sglang.SGLangRequest).Items); n != len(e.NewSequences(req)) {
			t.Fatalf("%d items for %d sequences", n, len(e.NewSequences(req)))
		}
	})
}
