package cmd

import (
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/cmd/exit"
	"github.com/pdproxy/pdproxy/conformance/enginesim"
	"github.com/pdproxy/pdproxy/conformance/load"
)

func TestBench(t *testing.T) {
	e, err := enginesim.New(enginesim.Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	args := []string{"bench", "--url", e.URL(), "--requests", "6", "--concurrency", "2", "--max-tokens", "5", "--ignore-eos"}
	code, out, errs := run(append(args, "--json")...)
	var r load.Result
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
	for _, args := range []string{
		"", "--url http://", "--url http://h --warm-up -2", "--url ftp://h", "--url http://h --api x", "--url http://h --rate -1", "--url http://h --requests 0",
		"--url http://h --shared-words -1", "--url http://h --timeout 0s", "--url http://h --key-file /no/such/file", "--url http://h more",
	} {
		if code, _, errs := run(append([]string{"bench"}, strings.Fields(args)...)...); code != exit.Usage || errs == "" {
			t.Errorf("%q: exit %d, %s", args, code, errs)
		}
	}
}

func TestBenchProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		p := progress{out: &out, total: 9, began: time.Now()}
		for n := range 9 {
			time.Sleep(2 * time.Second)
			p.ended(n == 0)
		}
		if want := "6 s: 3 of 9 requests, 1 failed\n12 s: 6 of 9 requests, 1 failed\n18 s: 9 of 9 requests, 1 failed\n"; out.String() != want {
			t.Errorf("got %q", out.String())
		}
	})
}
