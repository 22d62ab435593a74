package cmd

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/internal/loadgen"
)

func TestBench(t *testing.T) {
	e := startEngine(t, enginesim.Config{})
	args := []string{"bench", "--url", e.URL(), "--requests", "6", "--concurrency", "2", "--max-tokens", "5", "--ignore-eos"}
	code, out, errs := run(append(args, "--json")...)
	var r loadgen.Result
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != exit.OK {
		t.Fatalf("exit %d: %s %v", code, errs, err)
	}
	if r.Requests != 6 || r.Failed != 0 || r.OutputTokens != 30 || r.TTFT.P50 <= 0 || r.ITL.Max <= 0 || r.Throughput <= 0 {
		t.Errorf("%+v", r)
	}
	if code, out, _ := run(args...); code != exit.OK || !strings.Contains(out, "6 requests in ") || !strings.Contains(out, "TTFT") {
		t.Errorf("exit %d: %s", code, out)
	}
	for _, url := range []string{e.URL() + "/v1", e.URL() + "/v1/", strings.TrimPrefix(e.URL(), "http://")} {
		if code, out, errs := run("bench", "--url", url, "--requests", "1", "--max-tokens", "1", "--warm-up", "0"); code != exit.OK {
			t.Errorf("%s: exit %d: %s%s", url, code, out, errs)
		}
	}
	e.Close()
	if code, out, errs := run(append(args, "--model", "sim")...); code != exit.Failure || !strings.Contains(out, "connection failed: 6") || !strings.Contains(errs, "no request") {
		t.Errorf("exit %d: %s %s", code, out, errs)
	}
	if code, _, errs := run(args...); code != exit.Failure || errs == "" {
		t.Errorf("exit %d: %s", code, errs)
	}
}

func TestBenchUsage(t *testing.T) {
	trace := "--url http://h --trace " + replayTrace
	for args, want := range map[string]string{
		"": "--url", "--url http://": "--url", "--url ftp://h": "--url", "--url http://h --warm-up -2": "--warm-up", "--url http://h --api x": "--api",
		"--url http://h --rate -1": "--rate", "--url http://h --rate NaN": "--rate", "--url http://h --requests 0": "--requests", "--url http://h --shared-words -1": "--shared-words",
		"--url http://h --timeout 0s": "--timeout", "--url http://h --key-file /no/such/file": "--key-file", "--url http://h more": "more",
		"--url http://h --turns 0": "--turns", "--url http://h --turn-words 0": "--turn-words", "--url http://h --think -1s": "--think",
		"--url http://h --slo p99=1s": "--slo", "--url http://h --output /no/such/file": "--output", "--url http://h --html /no/such/file": "--html: open", "--url http://h --speed 2": "--speed: needs --trace",
		"--url http://h --block-tokens 2": "--block-tokens: needs", "--url http://h --token-ids 1-5": "--token-ids: needs", "--url http://h --trace /no/such": "--trace /no/such",
		"--url http://h --sweep turns=1": "--sweep", "--url http://h --sweep speed=1": "--sweep", "--url http://h --sweep rate=1 --rate 2": "--sweep: --rate",
		"--url http://h --sweep concurrency=1 --rate 2": "--sweep",
		trace + " --sweep rate=1":                       "--sweep", trace + " --rate 1": "--rate: must not", trace + " --turns 2": "--turns", trace + " --max-tokens 2": "--max-tokens",
		trace + " --speed 0": "--speed", trace + " --block-tokens 0": "--block-tokens", trace + " --token-ids 5": "--token-ids", trace + " --ignore-eos": "--ignore-eos",
	} {
		if code, _, errs := run(append([]string{"bench"}, strings.Fields(args)...)...); code != exit.Usage || !strings.Contains(errs, want) {
			t.Errorf("%q: exit %d, %s", args, code, errs)
		}
	}
}

// startEngine starts a simulated engine that ends with the test.
func startEngine(t *testing.T, cfg enginesim.Config) *enginesim.Engine {
	t.Helper()
	e, err := enginesim.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

// A sweep writes the lines of all runs; compare matches them by their values.
func TestBenchSweep(t *testing.T) {
	e := startEngine(t, enginesim.Config{})
	dir := t.TempDir()
	a, b, page := filepath.Join(dir, "a.jsonl"), filepath.Join(dir, "b.jsonl"), filepath.Join(dir, "r.html")
	args := []string{"bench", "--url", e.URL(), "--requests", "20", "--max-tokens", "4", "--ignore-eos", "--prompt-words", "40", "--sweep", "concurrency=1,3", "--slo", "ttft=1h,itl=1h"}
	code, out, errs := run(append(args, "--output", a, "--html", page)...)
	if code != exit.OK || errs != "" || strings.Count(out, "20 requests in") != 2 || !strings.Contains(out, "concurrency=3") || !strings.Contains(out, "20 of 20 within the limits (100.0 %)") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	if html, err := os.ReadFile(page); err != nil || !strings.Contains(string(html), "concurrency=3") {
		t.Errorf("the page: %v", err)
	}
	args[2] = startEngine(t, enginesim.Config{}).URL() // which has no prompt in its cache
	code, out, errs = run(append(args, "--output", b, "--json")...)
	var sweep struct {
		Sweep string
		Runs  []loadgen.Result
	}
	if err := json.Unmarshal([]byte(out), &sweep); err != nil || code != exit.OK {
		t.Fatalf("exit %d: %s %v", code, errs, err)
	}
	if sweep.Sweep != "concurrency=1,3" || len(sweep.Runs) != 2 || sweep.Runs[1].Run != "concurrency=3" || sweep.Runs[1].Good != 20 || sweep.Runs[1].CachedTokens != 0 {
		t.Errorf("%+v", sweep)
	}
	code, out, errs = run("bench", "compare", a, b, "--html", page, "--slo", "ttft=1h")
	if code != exit.OK || strings.Count(out, "TTFT p99") != 2 || strings.Count(out, "good requests/s") != 2 || !strings.Contains(out, "confidence of 95 %") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	if html, err := os.ReadFile(page); err != nil || !strings.Contains(string(html), "A concurrency=1") {
		t.Errorf("the page: %v", err)
	}
	code, out, errs = run("bench", "compare", a, a, "--json")
	var same []loadgen.Comparison
	if err := json.Unmarshal([]byte(out), &same); err != nil || code != exit.OK || len(same) != 2 || *same[0].Differences[2].Change != 0 {
		t.Errorf("exit %d: %s%s %v", code, out, errs, err)
	}
}

// If a run of a sweep cannot begin, the results of the earlier runs are printed.
func TestBenchKeepsResults(t *testing.T) {
	e := startEngine(t, enginesim.Config{})
	target, err := url.Parse(e.URL())
	if err != nil {
		t.Fatal(err)
	}
	var asked atomic.Int32
	forward := httputil.NewSingleHostReverseProxy(target)
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" && asked.Add(1) > 1 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		forward.ServeHTTP(w, r)
	}))
	defer front.Close()
	page := filepath.Join(t.TempDir(), "r.html")
	code, out, errs := run("bench", "--url", front.URL, "--requests", "3", "--max-tokens", "2", "--sweep", "concurrency=1,2", "--html", page)
	if code != exit.Failure || strings.Count(out, "3 requests in") != 1 || !strings.Contains(errs, "concurrency=2 ask for models: status 503") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
	if html, err := os.ReadFile(page); err != nil || !strings.Contains(string(html), "concurrency=1") {
		t.Errorf("the page: %v", err)
	}
}

func TestBenchCompareUsage(t *testing.T) {
	file := write(t, `{"e2e_ms":5}`)
	for _, tt := range [][2]string{
		{"", "which A and B"}, {file, "which B"}, {file + " /no/such", "/no/such"}, {file + " " + replayTrace, "line 1"}, {file + " " + file + " --slo x", "--slo"},
	} {
		if code, _, errs := run(append([]string{"bench", "compare"}, strings.Fields(tt[0])...)...); code != exit.Usage || !strings.Contains(errs, tt[1]) {
			t.Errorf("%q: exit %d, %s", tt[0], code, errs)
		}
	}
}

func TestBenchProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		p := progress{out: &out, label: "rate=1", total: 3, began: time.Now()}
		time.Sleep(2 * time.Second)
		p.ended(true)
		time.Sleep(time.Millisecond)
		p.ended(false)
		p.ended(false)
		p.end()
		bar := func(full int) string {
			return "[" + strings.Repeat("#", full) + strings.Repeat(".", barWidth-full) + "]"
		}
		if want := "\r\x1b[Krate=1 " + bar(10) + " 1 of 3 requests, 1 failed, 2 s\r\x1b[Krate=1 " + bar(30) + " 3 of 3 requests, 1 failed, 2 s\r\x1b[K"; out.String() != want {
			t.Errorf("got %q", out.String())
		}
	})
}

// A bar is for terminals only.
func TestIsTerminal(t *testing.T) {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	file, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for name, w := range map[string]io.Writer{"nothing": null, "file": file, "buffer": new(strings.Builder)} {
		if isTerminal(w) {
			t.Errorf("%s is a terminal", name)
		}
	}
	if tty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0); err == nil {
		defer tty.Close()
		if !isTerminal(tty) {
			t.Error("a terminal is none")
		}
	}
}

// A trace whose blocks have another size is sent with a warning.
func TestBenchUneven(t *testing.T) {
	e := startEngine(t, enginesim.Config{BlockSize: 16})
	trace := write(t, `{"timestamp":0,"input_length":30,"output_length":2,"hash_ids":[1,2,3]}`+"\n"+`{"timestamp":1,"input_length":30,"output_length":2,"hash_ids":[1,4,5]}`+"\n")
	code, out, errs := run("bench", "--url", e.URL(), "--trace", trace, "--json")
	var r loadgen.Result
	if err := json.Unmarshal([]byte(out), &r); err != nil || code != exit.OK || r.PromptTokens != 60 || r.OutputTokens != 4 {
		t.Errorf("exit %d: %s %v", code, out, err)
	}
	if !strings.Contains(errs, "2 of 2 requests") || !strings.Contains(errs, "mean length of 10 tokens") {
		t.Errorf("warning %q", errs)
	}
}

// With limits, the JSON output has the figures of good requests even if no request is good. Without
// limits it does not have them.
func TestBenchGoodInJSON(t *testing.T) {
	e := startEngine(t, enginesim.Config{})
	for slo, want := range map[string]map[string]float64{
		"ttft=1ns": {"good": 0, "good_ratio": 0, "goodput_rps": 0},
		"ttft=1h":  {"good": 5, "good_ratio": 1},
		"":         nil,
	} {
		args := []string{"bench", "--url", e.URL(), "--requests", "5", "--max-tokens", "2", "--json"}
		if slo != "" {
			args = append(args, "--slo", slo)
		}
		code, out, errs := run(args...)
		var got map[string]any
		if err := json.Unmarshal([]byte(out), &got); err != nil || code != exit.OK {
			t.Fatalf("--slo %q: exit %d: %s %v", slo, code, errs, err)
		}
		for _, name := range []string{"good", "good_ratio", "goodput_rps"} {
			v, is := got[name]
			if value, given := want[name]; is != (slo != "") || given && v != value {
				t.Errorf("--slo %q: %s is %v", slo, name, v)
			}
		}
	}
}
