package cmd

import (
	"encoding/json"
	"strings"
	"testing"

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
		"", "--url x", "--url ftp://h", "--url http://h --api x", "--url http://h --rate -1", "--url http://h --requests 0",
		"--url http://h --shared-words -1", "--url http://h --timeout 0s", "--url http://h --key-file /no/such/file", "--url http://h more",
	} {
		if code, _, errs := run(append([]string{"bench"}, strings.Fields(args)...)...); code != exit.Usage || errs == "" {
			t.Errorf("%q: exit %d, %s", args, code, errs)
		}
	}
}
