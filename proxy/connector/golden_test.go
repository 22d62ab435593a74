package connector

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// golden is one file of testdata: a client's request, its placement, and the bytes of
// every message that the protocol's documents prescribe for it. Parts that a case does
// not set are not tested. Bodies are strings, so that white space and escapes in them
// are exact.
type golden struct {
	About        string       // the rule that the case shows
	API          string       // the client's path
	Request      string       // the client's body
	Trust        bool         // server.trust_pd_fields
	ID           uint64       // the disagg id
	LegID        string       `json:"leg_id"`
	Conversation string       // the proxy's name for the conversation
	TRTLLM       TRTLLM       // the operator's settings
	Style        string       // trtllm.schedule_style; "" is the connector's own order
	Order        string       // the resulting order
	Asks         bool         // the prefill leg asks for the token ids of the prompt
	Known        string       // token ids of the prompt that each leg gets
	Taken        string       // token ids of prefill's answer that decode gets
	Prefill      *goldenPlace // null: aggregated only
	Decode       goldenPlace

	Encode        []goldenLeg   // the calls to encoders
	NotPairable   *string       `json:"not_pairable"` // the field that the error names
	Aggregated    *goldenLeg    // the one leg of an aggregated request
	PrefillLeg    *goldenLeg    `json:"prefill_leg"`
	PrefillAnswer *string       `json:"prefill_answer"` // fixed
	Handoff       *goldenHand   // the meaning of the answer
	DecodeLeg     *goldenLeg    `json:"decode_leg"`
	Cleanups      []goldenClean // the clean-up calls, by how far the attempt had come

	Turn         string      // the KV of the turn before, which prefill pulls
	ReturnIDs    bool        `json:"return_ids"`    // decode's leg asks for the token ids of its events
	DecodeAnswer string      `json:"decode_answer"` // fixed
	Public       string      // the part that the client sees
	Kept         *goldenKept // the KV that decode retains
	DecodeStream string      `json:"decode_stream"` // whole events, fixed
	PublicStream string      `json:"public_stream"`
	Forget       *goldenCall // the call that frees the KV
}

type goldenKept struct {
	Params, Host, Prompt, Answer, Unfit string
	Tokens                              int
}

type goldenPlace struct {
	Host          string
	Rank          int
	Ranks         int
	BootstrapHost string `json:"bootstrap_host"`
	BootstrapPort int    `json:"bootstrap_port"`
	Overrides     bool   // header_overrides
	Wire          string
	TPSize        int    `json:"tp_size"`
	PPSize        int    `json:"pp_size"`
	EngineID      string `json:"engine_id"`
	SideChannel   string `json:"side_channel"`
	Bidirectional bool
	Facts         engine.Facts
}

func (p *goldenPlace) target() engine.Target {
	if p == nil {
		return engine.Target{}
	}
	return place(config.Engine{
		Ranks: max(p.Ranks, 1), BootstrapHost: p.BootstrapHost, BootstrapPort: p.BootstrapPort, Wire: p.Wire,
		TPSize: p.TPSize, PPSize: p.PPSize, EngineID: p.EngineID, SideChannel: p.SideChannel,
		HeaderOverrides: p.Overrides, Bidirectional: p.Bidirectional,
	}, p.Host, p.Rank, p.Facts)
}

type goldenLeg struct {
	Path   string
	Header [][2]string
	Body   string
	Alias  bool
	Unary  bool
}

type goldenHand struct {
	Done     bool
	Answer   string
	Fallback string
	Pinned   bool
	Bad      bool // the engine broke the protocol
}

type goldenClean struct {
	When  string // a name for the case
	After goldenOrphan
	Calls []goldenCall
}

type goldenOrphan struct {
	PrefillSent bool `json:"prefill_sent"`
	PrefillDone bool `json:"prefill_done"`
	DecodeSent  bool `json:"decode_sent"`
	DecodeTook  bool `json:"decode_took"`
	DecodeOver  bool `json:"decode_over"`
	Refused     bool `json:"refused"`
	DecodeEnded bool `json:"decode_ended"`
}

type goldenCall struct {
	Phase     string
	AnyTarget bool `json:"any_target"`
	Leg       goldenLeg
	Until     string
	Restarted bool
	How       string
}

// TestGolden runs every case of testdata/<connector>.
func TestGolden(t *testing.T) {
	for _, c := range All() {
		files, err := filepath.Glob(filepath.Join("testdata", c.Name(), "*.json"))
		if err != nil {
			t.Fatal(err)
		}
		least := 12
		if c.Name() == "none" {
			least = 4
		}
		if len(files) < least {
			t.Errorf("%s has %d cases, want %d or more", c.Name(), len(files), least)
		}
		for _, file := range files {
			name := c.Name() + "/" + filepath.Base(file[:len(file)-len(".json")])
			t.Run(name, func(t *testing.T) { readGolden(t, file).run(t, c) })
		}
	}
}

func readGolden(t *testing.T, file string) *golden {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	g := new(golden)
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(g); err != nil {
		t.Fatal(err)
	}
	if g.About == "" {
		t.Error("the case has no About text")
	}
	return g
}

func (g *golden) attempt(t *testing.T, c Connector) *Attempt {
	t.Helper()
	a := &Attempt{
		Request: request(t, g.API, g.Request),
		ID:      g.ID, LegID: g.LegID, Trust: g.Trust, Conversation: g.Conversation, TRTLLM: g.TRTLLM,
		Prefill: g.Prefill.target(), Decode: g.Decode.target(), Flow: c.Flow(), RetainedKV: []byte(g.Turn),
	}
	if g.Known != "" {
		a.PromptIDs = []byte(g.Known)
	}
	if g.Order != "" {
		var reason string
		if a.Flow, reason = c.(Ordered).Order(a, g.Style); a.Flow.String()+reason != g.Order {
			t.Errorf("order %s, fallback %q, want %s", a.Flow, reason, g.Order)
		}
	}
	return a
}

func (g *golden) run(t *testing.T, c Connector) {
	a := g.attempt(t, c)
	if !c.Serves(a.Request.API) {
		t.Errorf("Serves(%s) = false", a.Request.API)
	}
	g.checkPairable(t, c.Pairable(a.Request))
	if g.Encode != nil {
		legs := c.(Encoder).Encode(a)
		if len(legs) != len(g.Encode) {
			t.Errorf("got %d calls to encoders, want %d", len(legs), len(g.Encode))
		}
		for i := range min(len(legs), len(g.Encode)) {
			g.checkLeg(t, "encoder's leg", legs[i], nil, &g.Encode[i])
		}
	}
	if g.Aggregated != nil {
		leg, err := c.Aggregated(a, nil)
		g.checkLeg(t, "aggregated leg", leg, err, g.Aggregated)
	}
	if g.PrefillLeg != nil {
		a.ReturnIDs = g.Asks
		leg, err := c.Prefill(a, nil)
		a.ReturnIDs = false
		g.checkLeg(t, "prefill leg", leg, err, g.PrefillLeg)
	}
	if g.Taken != "" {
		a.PromptIDs = []byte(g.Taken)
	}
	var h *Handoff
	if g.PrefillAnswer != nil {
		got, err := c.ReadPrefill(a, []byte(*g.PrefillAnswer))
		if h = &got; !g.checkHandoff(t, got, err) {
			return
		}
	}
	if g.DecodeLeg != nil {
		a.ReturnIDs = g.ReturnIDs
		leg, err := c.Decode(a, h, nil)
		a.ReturnIDs = false
		g.checkLeg(t, "decode leg", leg, err, g.DecodeLeg)
	}
	g.checkKept(t, c, a)
	for _, want := range g.Cleanups {
		o := Orphan{
			PrefillSent: want.After.PrefillSent, PrefillDone: want.After.PrefillDone,
			DecodeSent: want.After.DecodeSent, KVRead: want.After.DecodeTook, DecodeFailed: want.After.DecodeOver,
			Refused: want.After.Refused, DecodeIdle: want.After.DecodeEnded,
		}
		if o.PrefillDone {
			o.Handoff = h
		}
		g.checkCalls(t, want.When, c.Cleanup(a, o), want.Calls)
	}
}

// checkKept checks the handling of decode's answer, whose KV decode retains.
func (g *golden) checkKept(t *testing.T, c Connector, a *Attempt) {
	t.Helper()
	var k Retained
	var ok bool
	switch {
	case g.DecodeAnswer != "":
		if got := string(c.Public(a, []byte(g.DecodeAnswer))); got != g.Public {
			t.Errorf("public answer\n got %s\nwant %s", got, g.Public)
		}
		k, ok = c.(Retainer).Retained(a, []byte(g.DecodeAnswer))
	case g.DecodeStream != "":
		var rest []byte
		if rest, k, ok = c.(Retainer).CutRetained(a, []byte(g.DecodeStream)); string(rest) != g.PublicStream {
			t.Errorf("public stream\n got %s\nwant %s", rest, g.PublicStream)
		}
	}
	if ok != (g.Kept != nil) {
		t.Fatalf("KV is retained: %v", ok)
	}
	got := goldenKept{Params: string(k.Params), Host: k.Host, Prompt: string(k.Prompt), Answer: string(k.Answer), Unfit: k.Unfit, Tokens: k.Tokens}
	if ok && got != *g.Kept {
		t.Errorf("retained KV\n got %+v\nwant %+v", got, *g.Kept)
	}
	if g.Forget != nil {
		g.checkCalls(t, "kept", []Cleanup{c.(Retainer).FreeRetained(a, k.Params)}, []goldenCall{*g.Forget})
	}
}

func (g *golden) checkPairable(t *testing.T, err error) {
	t.Helper()
	if g.NotPairable == nil {
		if err != nil {
			t.Errorf("Pairable = %v", err)
		}
		return
	}
	var refusal *openai.Error
	if !errors.As(err, &refusal) {
		t.Fatalf("Pairable = %v, want an *openai.Error", err)
	}
	if refusal.Status != 400 || refusal.Param != *g.NotPairable || refusal.Message == "" {
		t.Errorf("Pairable = %+v, want status 400 and param %q", refusal, *g.NotPairable)
	}
}

func (g *golden) checkLeg(t *testing.T, what string, leg Leg, err error, want *goldenLeg) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	if leg.Path != want.Path {
		t.Errorf("path of %s = %s, want %s", what, leg.Path, want.Path)
	}
	if string(leg.Body) != want.Body {
		t.Errorf("%s body\n got %s\nwant %s", what, leg.Body, want.Body)
	}
	if leg.Alias != want.Alias || leg.Unary != want.Unary {
		t.Errorf("%s: alias %v unary %v, want %v %v", what, leg.Alias, leg.Unary, want.Alias, want.Unary)
	}
	var header [][2]string
	for _, f := range leg.Header {
		header = append(header, [2]string{f.Name, f.Value})
	}
	if len(header) != len(want.Header) {
		t.Errorf("%s header %v, want %v", what, header, want.Header)
		return
	}
	for i := range header {
		if header[i] != want.Header[i] {
			t.Errorf("%s header %v, want %v", what, header, want.Header)
		}
	}
}

// checkHandoff reports whether the attempt continues.
func (g *golden) checkHandoff(t *testing.T, got Handoff, err error) bool {
	t.Helper()
	want := g.Handoff
	if want == nil {
		want = &goldenHand{}
	}
	if want.Bad {
		if !errors.Is(err, ErrBadReply) {
			t.Errorf("ReadPrefill = %v, want ErrBadReply", err)
		}
		var refusal *openai.Error
		if errors.As(err, &refusal) {
			t.Error("a fault of the engine is reported as an invalid request of the client")
		}
		return false
	}
	if err != nil {
		t.Errorf("ReadPrefill: %v", err)
		return false
	}
	if got.Done != want.Done || got.Fallback != want.Fallback || got.Pinned != want.Pinned {
		t.Errorf("handoff done %v fallback %q pinned %v, want %v %q %v",
			got.Done, got.Fallback, got.Pinned, want.Done, want.Fallback, want.Pinned)
	}
	if string(got.Answer) != want.Answer {
		t.Errorf("answer\n got %s\nwant %s", got.Answer, want.Answer)
	}
	return !got.Done
}

func (g *golden) checkCalls(t *testing.T, when string, got []Cleanup, want []goldenCall) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d clean-up calls, want %d", when, len(got), len(want))
		return
	}
	for i, w := range want {
		c := got[i]
		until := map[Until]string{UntilAnswer: "answer", UntilHead: "head", UntilEvent: "event", UntilRefused: "refused", UntilServed: "served"}[c.Until]
		if c.Restarted != w.Restarted {
			t.Errorf("%s: call %d waits for a restart: %v", when, i, c.Restarted)
		}
		if c.Phase.String() != w.Phase || c.AnyTarget != w.AnyTarget || until != w.Until || c.How != w.How {
			t.Errorf("%s: call %d is %s any %v until %s how %s, want %+v", when, i, c.Phase, c.AnyTarget, until, c.How, w)
		}
		g.checkLeg(t, when+": clean-up", c.Leg, nil, &w.Leg)
	}
}

// request scans a body as the exchange does.
func request(t testing.TB, path, body string) *openai.Request {
	t.Helper()
	api, ok := openai.APIFor(path)
	if !ok {
		t.Fatalf("no API at %s", path)
	}
	r := new(openai.Request)
	if err := openai.ParseRequest(api, []byte(body), r); err != nil {
		t.Fatal(err)
	}
	return r
}

// pair returns an attempt placed on one instance for each phase.
func pair(t testing.TB, path, body string) *Attempt {
	t.Helper()
	return &Attempt{
		Request: request(t, path, body),
		ID:      abi.MinDisaggID, LegID: "0123456789abcdef0123456789abcdef",
		Prefill: place(config.Engine{Ranks: 1, EngineID: "p0", SideChannel: "10.0.0.5:5600"}, "10.0.0.5", 0, engine.Facts{EngineIDs: []string{"e0", "e1", "e2", "e3"}}),
		Decode:  place(config.Engine{Ranks: 1}, "10.0.1.7", 0, engine.Facts{}),
	}
}
