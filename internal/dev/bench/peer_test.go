package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestPeerFiles: each peer's start writes its files and names programs, and pdproxy reads its
// configurations.
func TestPeerFiles(t *testing.T) {
	h := &shelf{self: "bench", pdproxy: pdproxy, dir: t.TempDir(), descriptors: 4096, sources: map[string]string{"LLMD_EPP": "epp", "LLMD_SIDECAR": "sidecar"}, log: io.Discard}
	st := &stub{engines: []string{"127.0.0.1:9001", "127.0.0.1:9002"}, prefill: "127.0.0.1:9003", boot: 9004}
	names := map[string]bool{}
	for _, p := range append(peers, kvAware) {
		if names[p.Name] {
			t.Errorf("two peers are named %s", p.Name)
		}
		names[p.Name] = true
		if p.start == nil {
			continue
		}
		s := st.scene(p.Work, 1)
		s.dir, s.listen = t.TempDir(), "127.0.0.1:9000"
		programs, err := p.start(h, s)
		if err != nil || len(programs) == 0 || programs[0].ready != s.listen {
			t.Errorf("%s: programs %+v, %v", p.Name, programs, err)
		}
		if p.Software == pdproxy {
			text, err := os.ReadFile(filepath.Join(s.dir, "pdproxy.toml"))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := config.Parse(text); err != nil {
				t.Errorf("%s: %v", p.Name, err)
			}
		}
		if p.Software != "" && !bytes.Contains([]byte(softwareNames()), []byte(p.Software)) {
			t.Errorf("%s: no software is named %s", p.Name, p.Software)
		}
	}
}

func softwareNames() string {
	var names []string
	for _, s := range softwares {
		names = append(names, s.name)
	}
	return strings.Join(names, " ")
}

func TestPeerWithoutSource(t *testing.T) {
	for _, start := range []func(*shelf, *scene) ([]program, error){startLLMD, startLLMDSidecar} {
		if _, err := start(&shelf{}, &scene{}); err == nil || !strings.Contains(err.Error(), "LLMD_") {
			t.Errorf("got %v, want the name of the variable", err)
		}
	}
}

func TestEngineOfSGLang(t *testing.T) {
	b := newBackend()
	b.sglang = true
	const leg = `{"stream":true,"max_tokens":1,"bootstrap_room":7}`
	for _, tt := range []struct {
		mode string
		want counts
	}{{"prefill", counts{Prefill: 1}}, {"decode", counts{Prefill: 1, Decode: 1}}} {
		var out bytes.Buffer
		m := message{first: []byte("POST " + requestPath + " HTTP/1.1")}
		if err := b.answer(&out, newEngine(b, tt.mode, 1), &m, []byte(leg)); err != nil {
			t.Fatal(err)
		}
		if got := (counts{b.wholes.Load(), b.prefills.Load(), b.decodes.Load(), b.streams.Load()}); got != tt.want {
			t.Errorf("%s: counts %+v, want %+v", tt.mode, got, tt.want)
		}
	}
	var out bytes.Buffer
	if err := b.get(&out, newEngine(b, "decode", 1), "/version"); err != nil || !strings.HasPrefix(out.String(), "HTTP/1.1 404 ") {
		t.Errorf("GET /version: %q, %v", out.String(), err)
	}
}

func TestPrefixCache(t *testing.T) {
	block := func(letters string) (prompt []byte) {
		for _, l := range letters {
			prompt = append(prompt, bytes.Repeat([]byte(string(l)), promptBlock)...)
		}
		return append(prompt, "rest"...)
	}
	c := prefixCache{room: 4}
	for _, tt := range []struct {
		prompt       string
		blocks, hits int
	}{
		{"ab", 2, 0},
		{"abc", 3, 2},
		{"bc", 2, 0}, // other blocks: nothing comes before them; c after ab leaves
		{"ab", 2, 2},
		{"xyz", 3, 0}, // the room is for these and a
		{"ab", 2, 1},
	} {
		if blocks, hits := c.add(block(tt.prompt)); blocks != tt.blocks || hits != tt.hits {
			t.Errorf("%s: %d blocks, %d hits, want %d and %d", tt.prompt, blocks, hits, tt.blocks, tt.hits)
		}
	}
}

func TestStreamed(t *testing.T) {
	events := strings.Repeat(`data: {"choices":[{"text":"x"}]}`+"\n\n", faultTokens)
	const done, failed = "data: [DONE]\n\n", `data: {"error":{"message":"lost"}}` + "\n\n"
	for body, want := range map[string]string{
		events + done:                 "ok",
		events:                        "short, without [DONE]",
		events[:len(events)/2] + done: "short, with [DONE]",
		failed:                        "error event",
		events + failed + done:        "error event, then [DONE]",
		"":                            "short, without [DONE]",
	} {
		if got := streamed([]byte(body)); got != want {
			t.Errorf("%.60q…: got %q, want %q", body, got, want)
		}
	}
}

func TestChanges(t *testing.T) {
	for body, want := range map[string]string{
		exact: "as sent",
		strings.Replace(exact, "{ ", `{"kv_transfer_params":{}, `, 1):                                        "as sent, but for the members of the transfer",
		`{"model":"bench","prompt":"café hello","max_tokens":3,"stream":false,"x_number":1e22,"echo":false}`: "adds echo; blanks removed; escapes decoded; large numbers rounded",
		strings.Replace(exact, `, "x_number": 12345678901234567890123`, "", 1):                               "drops x_number; large numbers rounded",
	} {
		if got := changes(body); got != want {
			t.Errorf("%s: got %q, want %q", body, got, want)
		}
	}
}

func TestCorpusPrompts(t *testing.T) {
	for _, corpus := range []string{"hot64:200", "cold:200", "cold:16384"} {
		prompt, err := corpusPrompts(corpus)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for i := range 300 {
			text := string(prompt(i))
			if size := corpus[strings.Index(corpus, ":")+1:]; size == "200" && len(text) != 200 {
				t.Fatalf("%s: a prompt of %d bytes", corpus, len(text))
			}
			seen[text[:16]] = true
		}
		if want := map[bool]int{true: hotPrompts, false: 300}[strings.HasPrefix(corpus, "hot")]; len(seen) != want {
			t.Errorf("%s: %d different beginnings of 300 prompts, want %d", corpus, len(seen), want)
		}
	}
	for _, bad := range []string{"hot64", "hot64:x", "hot64:3", "warm:200"} {
		if _, err := corpusPrompts(bad); err == nil {
			t.Errorf("the corpus %q was accepted", bad)
		}
	}
}

func TestTracePrompts(t *testing.T) {
	prompts, err := tracePrompts("../../replay/testdata/mooncake.gz", heldOut[0], 50)
	if err != nil || len(prompts) != 50 {
		t.Fatalf("%d prompts, %v", len(prompts), err)
	}
	shared := 0
	for _, p := range prompts {
		if len(p) == 0 || len(p)%promptBlock != 0 || bytes.ContainsAny(p, `"\`) {
			t.Fatalf("a prompt of %d bytes", len(p))
		}
		if bytes.Equal(p[:promptBlock], prompts[0][:promptBlock]) {
			shared++
		}
	}
	if shared < 2 {
		t.Error("no two prompts share the first block, which most conversations of the trace have")
	}
}

func TestCompactNumbers(t *testing.T) {
	const in = "{\n \"a\": [\n  1,\n  -2.5e-3\n ],\n \"b\": [\n  \"1\"\n ]\n}"
	const want = "{\n \"a\": [1,-2.5e-3],\n \"b\": [\n  \"1\"\n ]\n}"
	if got := string(compactNumbers([]byte(in))); got != want {
		t.Errorf("got %s", got)
	}
}

// TestPage: the page has medians, ranges and ratios of the same rounds, the peers that are ahead,
// and why a peer is missing.
func TestPage(t *testing.T) {
	dir := t.TempDir()
	many := func(peer string, cpu ...float64) measured {
		return measured{Peer: peer, Case: "many", Rounds: []int{1, 2, 3}, Others: []float64{0.4, 0.4, 0.4}, Figures: map[string][]float64{figCPU: cpu}}
	}
	c := &comparison{
		Software: []installed{{Name: "smg", Error: "no wheel | for this machine"}},
		Peers:    peers,
		Parts:    map[string]partRun{"load": {Program: "pdproxy 1"}},
		Loads: []measured{many("pdproxy", 60, 50, 70), many("nginx", 30, 25, 30), many("sglang-router", 120, 150, 140),
			{Peer: "SMG", Case: "many", Failed: []string{"not installed: no wheel"}}, {Peer: "SMG", Case: "one", Failed: []string{"not installed: no wheel"}}},
		Faults: []outcome{{Peer: "SMG, PD", Case: "decode killed", Clients: map[string]int{"ok": 3, "cut off": 5}, Pinned: 12}},
	}
	in, out := filepath.Join(dir, "b.json"), filepath.Join(dir, "b.md")
	if err := c.write(in); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "images"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := pageCommand([]string{"-json", in, "-out", out}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| pdproxy | – | 60.0 [50.0–70.0] | – |", "30.0 [25.0–30.0] ×0.5", "140 [120–150] ×2",
		"one engine for a request: 64 connections, CPU µs | nginx ×0.5 |",
		"**not installed**: `no wheel \\| for this machine`", "used 40 % of the two cores", "medians over 3 rounds", "Program: pdproxy 1.", "| SMG | many, one | `not installed: no wheel` |", "| SMG, PD | 5 cut off, 3 ok | – | 0.0 | 12 | 0 |",
		"images/benchmarks-requests.svg",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	svg, err := os.ReadFile(filepath.Join(dir, "images", "benchmarks-requests.svg"))
	if err != nil || !bytes.Contains(svg, []byte("nginx")) {
		t.Errorf("the plot: %v", err)
	}
	var again comparison
	if err := again.read(in); err != nil || !reflect.DeepEqual(again.Loads, c.Loads) {
		t.Errorf("read again: %+v, %v", again.Loads, err)
	}
}
