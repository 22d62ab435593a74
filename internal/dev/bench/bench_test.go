package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

func TestParseParent(t *testing.T) {
	// A name with a blank and parentheses.
	if got, err := parseParent([]byte("4211 (a (b) c) S 17 4211 4211 0 -1\n")); err != nil || got != 17 {
		t.Errorf("got %d, %v", got, err)
	}
	for _, bad := range []string{"", "1 (x) S", "1 (x) S y 0"} {
		if _, err := parseParent([]byte(bad)); err == nil {
			t.Errorf("the invalid text %q was accepted", bad)
		}
	}
}

func TestParseRSS(t *testing.T) {
	if got := parseRSS([]byte("Name:\tx\nVmHWM:\t 9 kB\nVmRSS:\t    1234 kB\nThreads:\t1\n")); got != 1234<<10 {
		t.Errorf("got %d", got)
	}
	if got := parseRSS([]byte("Name:\tkthreadd\n")); got != 0 {
		t.Errorf("got %d without a line", got)
	}
}

func TestParseBusy(t *testing.T) {
	const stat = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 20 30 5000 700 4 5 6 0 0\ncpu1 1 1 1 1 1 1 1 1 1 1\nintr 12 0\nctxt 7\n"
	got, err := parseBusy(stat, []int{0})
	if want := 1650 * time.Millisecond; err != nil || got != want {
		t.Errorf("got %s, %v, want %s", got, err, want)
	}
	if got, err = parseBusy(stat, []int{1, 0}); err != nil || got != 1710*time.Millisecond {
		t.Errorf("got %s, %v of both", got, err)
	}
	if _, err := parseBusy(stat, []int{0, 2}); err == nil {
		t.Error("a core that is not there was counted")
	}
}

func TestParseDescriptorLimit(t *testing.T) {
	limits := "Limit   Soft Limit   Hard Limit   Units\nMax open files            1024                 20000                files\n"
	if got := parseDescriptorLimit(limits, 7); got != 20000 {
		t.Errorf("got %d", got)
	}
	if got := parseDescriptorLimit("Max open files  unlimited unlimited files\n", 7); got != 7 {
		t.Errorf("got %d without numbers", got)
	}
}

func TestUsageOfThisProcess(t *testing.T) {
	u, err := usageOf([]int{os.Getpid()})
	if err != nil || u.RSS < 1<<20 || u.CPU <= 0 {
		t.Errorf("got %+v, %v", u, err)
	}
	if _, err := usageOf([]int{math.MaxInt32}); err == nil {
		t.Error("a process that is not there was counted")
	}
	all, err := family(os.Getppid())
	if err != nil || !slices.Contains(all, os.Getpid()) {
		t.Errorf("family of the parent: %v, %v, without %d", all, err, os.Getpid())
	}
}

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		of   []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 2, 9}, 3}} {
		if got := median(tt.of); got != tt.want {
			t.Errorf("median of %v: got %v, want %v", tt.of, got, tt.want)
		}
	}
}

func TestBackendAnswers(t *testing.T) {
	const prefilled = `{"do_remote_decode":false,"do_remote_prefill":true,"remote_block_ids":[1]}`
	tests := []struct {
		name, body string
		events     int
		want       counts
	}{
		{"unary", string(requestBody(2048, 0, 0)), 0, counts{Whole: 1}},
		{"stream", string(requestBody(2048, 3, time.Microsecond)), 3, counts{Stream: 1}},
		{"prefill", `{"stream": false, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": true}}`, 0, counts{Prefill: 1}},
		{"decode", `{"stream": true, "max_tokens": 2, "kv_transfer_params": ` + prefilled + `}`, 2, counts{Decode: 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBackend()
			m := message{first: []byte("POST " + requestPath + " HTTP/1.1")}
			var out bytes.Buffer
			if err := b.answer(&out, newEngine(b, "decode", 0), &m, []byte(tt.body)); err != nil {
				t.Fatal(err)
			}
			body := readAnswer(t, &out)
			if tt.events > 0 {
				checkStream(t, body, tt.events)
			} else {
				checkWhole(t, body, tt.want.Prefill > 0)
			}
			out.Reset()
			if err := b.get(&out, newEngine(b, "decode", 0), countsPath); err != nil {
				t.Fatal(err)
			}
			var got counts
			if err := json.Unmarshal(readAnswer(t, &out), &got); err != nil || got != tt.want {
				t.Errorf("counted %+v, %v, want %+v", got, err, tt.want)
			}
		})
	}
}

// TestBackendAnswersIDs: a prefill leg that asks for ids gets as many as the usage has.
func TestBackendAnswersIDs(t *testing.T) {
	b := newBackend()
	m := message{first: []byte("POST " + requestPath + " HTTP/1.1")}
	var out bytes.Buffer
	body := `{"return_token_ids": true, "kv_transfer_params": {"do_remote_decode": true}}`
	if err := b.answer(&out, newEngine(b, "prefill", 0), &m, []byte(body)); err != nil {
		t.Fatal(err)
	}
	var answer struct {
		Choices []struct {
			IDs []int `json:"prompt_token_ids"`
		}
		Usage struct {
			Prompt int `json:"prompt_tokens"`
		}
	}
	if err := json.Unmarshal(readAnswer(t, &out), &answer); err != nil {
		t.Fatal(err)
	}
	if n := len(answer.Choices[0].IDs); n != len(body)/4 || n != answer.Usage.Prompt {
		t.Errorf("got %d ids, usage %d, want %d", n, answer.Usage.Prompt, len(body)/4)
	}
}

// readAnswer reads one answer, after which no bytes may remain.
func readAnswer(t *testing.T, from *bytes.Buffer) []byte {
	t.Helper()
	br := bufio.NewReader(from)
	var m message
	if err := readMessage(br, &m); err != nil {
		t.Fatal(err)
	}
	if code, err := m.status(); code != 200 || err != nil {
		t.Fatalf("status %d, %v", code, err)
	}
	r, err := m.body(br)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	if rest, _ := io.ReadAll(br); len(rest) > 0 {
		t.Errorf("%q after the answer", rest)
	}
	return body
}

func checkStream(t *testing.T, body []byte, events int) {
	t.Helper()
	tally := tally{}
	w := worker{load: &load{Events: events}, tally: &tally}
	if err := w.stream(bytes.NewReader(body), time.Now()); err != nil {
		t.Error(err)
	}
	if len(tally.first) != 1 || len(tally.events) != events-1 {
		t.Errorf("%d first and %d other events of %d", len(tally.first), len(tally.events), events)
	}
	event, _, _ := bytes.Cut(body, []byte("\n\n"))
	if data, ok := bytes.CutPrefix(event, []byte("data: ")); !ok || !json.Valid(data) || len(event)+2 != eventSize {
		t.Errorf("event of %d bytes: %s", len(event)+2, event)
	}
	w.load.Events++
	if err := w.stream(bytes.NewReader(body), time.Now()); err == nil {
		t.Error("a stream without one of its events was accepted")
	}
}

func checkWhole(t *testing.T, body []byte, prefill bool) {
	t.Helper()
	var answer struct {
		Params *struct {
			DoRemotePrefill bool  `json:"do_remote_prefill"`
			RemoteBlockIDs  []int `json:"remote_block_ids"`
		} `json:"kv_transfer_params"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		t.Fatal(err)
	}
	if (answer.Params != nil) != prefill {
		t.Fatalf("kv_transfer_params: %+v", answer.Params)
	}
	if prefill && (!answer.Params.DoRemotePrefill || len(answer.Params.RemoteBlockIDs) == 0) {
		t.Errorf("kv_transfer_params: %+v", answer.Params)
	}
	if len(body) < 900 || len(body) > 1200 {
		t.Errorf("%d bytes", len(body))
	}
}

func TestReadMessageRefuses(t *testing.T) {
	for _, head := range []string{
		"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
		"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
		"HTTP/1.1 200 OK\r\n",
	} {
		var m message
		if err := readMessage(bufio.NewReader(strings.NewReader(head)), &m); err == nil {
			t.Errorf("the invalid head %q was accepted", head)
		}
	}
	m := message{length: -1}
	if _, err := m.body(bufio.NewReader(strings.NewReader(""))); err == nil {
		t.Error("a body without a length was accepted")
	}
}

func TestChunkedBodyNeedsItsEnd(t *testing.T) {
	for _, tt := range []struct {
		wire string
		ok   bool
	}{
		{"2\r\nab\r\n0\r\n\r\n", true},
		{"2\r\nab\r\n0\r\n", false},
		{"2\r\nab\r\n", false},
		{"2\r\nab\r\n0\r\nX: y\r\n\r\n", false},
	} {
		m := message{chunked: true}
		r, err := m.body(bufio.NewReader(strings.NewReader(tt.wire)))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(r); string(got) != "ab" || (err == nil) != tt.ok {
			t.Errorf("%q: io.ReadAll(r) = %q, %v", tt.wire, got, err)
		}
		if n, err := r.Read(make([]byte, 1)); n != 0 || (err == io.EOF) != tt.ok {
			t.Errorf("%q: got %d bytes and %v after the end", tt.wire, n, err)
		}
	}
}

func TestRequestBody(t *testing.T) {
	for _, size := range []int{2048, 32 << 10, 256 << 10} {
		body := requestBody(size, 5, 20*time.Millisecond)
		var got map[string]any
		if err := json.Unmarshal(body, &got); err != nil {
			t.Fatal(err)
		}
		if len(body) != size || got["stream"] != true || got["max_tokens"] != 5. || got[periodField] != 20000. {
			t.Errorf("body of %d bytes, want %d: stream %v, max_tokens %v, period %v", len(body), size, got["stream"], got["max_tokens"], got[periodField])
		}
		if number(body, `"max_tokens"`) != 5 || !hasTrue(body, `"stream"`) {
			t.Error("the backend reads another request")
		}
	}
}

// TestLoadArgs starts each load of the suite from its own command line.
func TestLoadArgs(t *testing.T) {
	loads := map[string]load{}
	for _, c := range newCases(quickPace, 20000) {
		loads[c.name] = c.load
	}
	for _, r := range checkRows() {
		loads[r.name] = r.load
	}
	for name, l := range loads {
		l.Addr, l.PIDs = "127.0.0.1:1", []int{7, 8}
		got, err := parseLoad(l.args()[1:])
		if err != nil || !reflect.DeepEqual(*got, l) {
			t.Errorf("%s: got %+v, %v, want %+v", name, got, err, l)
		}
	}
}

func TestCasesAndGoalsFit(t *testing.T) {
	measured := map[place]bool{}
	for _, c := range newCases(fullPace, 20000) {
		for _, kind := range c.kinds {
			if !slices.Contains(kinds, kind) {
				t.Errorf("%s: unknown kind %s", c.name, kind)
			}
			measured[place{kind, c.name}] = true
		}
	}
	for _, g := range goals() {
		if !measured[g.mine] || !measured[g.peer] {
			t.Errorf("%s: %v or %v is not measured", g.what, g.mine, g.peer)
		}
		if g.aim > g.must {
			t.Errorf("%s: the aim is above the required limit", g.what)
		}
	}
}

func TestHoldCounts(t *testing.T) {
	for _, tt := range []struct{ limit, weigh, most int }{{20000, 5000, 9500}, {1 << 20, 5000, 9500}, {4096, 1548, 1548}, {100, 1, 1}} {
		if weigh, most := holdCounts(tt.limit); weigh != tt.weigh || most != tt.most {
			t.Errorf("%d: got %d and %d", tt.limit, weigh, most)
		}
	}
}

func TestCheckCounts(t *testing.T) {
	stream, unary := &load{Events: 1}, &load{}
	tests := []struct {
		name string
		kind string
		load *load
		got  counts
		ok   bool
	}{
		{"unary", pdproxy, unary, counts{Whole: 4}, true},
		{"two legs", pdproxyPD, stream, counts{Prefill: 4, Decode: 4}, true},
		{"a leg repeated", pdproxyPD, stream, counts{Prefill: 5, Decode: 4}, true},
		{"prefill skipped", pdproxyPD, stream, counts{Stream: 4}, false},
		{"decode without blocks", pdproxyPD, stream, counts{Prefill: 4, Stream: 4}, false},
		{"answers from nowhere", nginx, unary, counts{Whole: 3}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := checkCounts(tt.got, tt.kind, tt.load, &result{Requests: 4}); (err == nil) != tt.ok {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestRow(t *testing.T) {
	at := func(round int, kind string, cpu float64) run {
		return run{Round: round, Kind: kind, Case: caseJSON, Result: &result{CPURequest: cpu}}
	}
	s := &suite{
		missing: map[string]string{aiohttp: "not installed"},
		runs: []run{
			at(1, pdproxy, 30), at(2, pdproxy, 20), at(3, pdproxy, 90),
			at(1, nginx, 20), at(2, nginx, 10), at(3, nginx, 30),
			{Round: 1, Kind: fastapi, Case: caseJSON, Failed: "3 errors", Result: &result{CPURequest: 1}},
		},
	}
	g := goal{"x", cpuRequest, place{pdproxy, caseJSON}, place{nginx, caseJSON}, 2, 1.4}
	want := row{What: "x", Unit: cpuRequest.unit, Peer: nginx, Mine: 30, Theirs: 20, Ratio: 1.5, RatioMin: 1.5, RatioMax: 3, Must: 2, Aim: 1.4, Verdict: reachedMust}
	if got := s.row(g); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	for i := range s.runs { // only the first round of pdproxy and the second of nginx are quiet
		s.runs[i].Others = 0.9
	}
	s.runs[0].Others, s.runs[4].Others = 0, disturbed
	quiet := row{What: "x", Unit: cpuRequest.unit, Peer: nginx, Mine: 30, Theirs: 10, Ratio: 3, Must: 2, Aim: 1.4, Verdict: missedMust}
	if got := s.row(g); got != quiet {
		t.Errorf("got %+v, want %+v", got, quiet)
	}
	s.runs[4].Result.CPURequest = 0
	if got := s.row(g); !got.Disturbed || got.Theirs != 25 || got.Ratio != 1.2 {
		t.Errorf("without a quiet figure of the peer: %+v", got)
	}
	for kind, verdict := range map[string]string{aiohttp: "missing: aiohttp", fastapi: "fastapi: failed", reverse: "reverseproxy: not run"} {
		g.peer.kind = kind
		if got := s.row(g); got.Verdict != verdict || got.Ratio != 0 {
			t.Errorf("%s: got %+v", kind, got)
		}
	}
}

func TestVerdict(t *testing.T) {
	for _, tt := range []struct {
		ratio, must, aim float64
		want             string
	}{{1, 2, 1.4, reachedAim}, {1.5, 2, 1.4, reachedMust}, {2.1, 2, 1.4, missedMust}, {5, 0, 0, noGoal}} {
		if got := verdict(tt.ratio, tt.must, tt.aim); got != tt.want {
			t.Errorf("%v of %v, %v: %s", tt.ratio, tt.must, tt.aim, got)
		}
	}
	for r, want := range map[float64]string{0: "-", 1.0 / 12: "1/12.0", 0.5: "0.50", 1.25: "1.25"} {
		if got := ratio(r); got != want {
			t.Errorf("ratio %v printed as %s", r, got)
		}
	}
}

// TestConfigurations checks that pdproxy accepts the generated configurations.
func TestConfigurations(t *testing.T) {
	p := &programs{dir: t.TempDir(), descriptors: 20000}
	for _, kind := range []string{pdproxy, pdproxyTLS, pdproxyPD, pdproxyNative} {
		path, err := p.pdproxyConfig(kind, "127.0.0.1:18080", "127.0.0.1:18100")
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := config.Parse(text); err != nil {
			t.Errorf("%s: config.Parse(text) = %v, want nil", kind, err)
		}
	}
	path, err := p.nginxConfig("127.0.0.1:18080", "127.0.0.1:18100")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil || bytes.Contains(text, []byte("{{")) || !bytes.Contains(text, []byte("listen 127.0.0.1:18080 ")) {
		t.Errorf("os.ReadFile(path) = %v, %s", err, text)
	}
}
