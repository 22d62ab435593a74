package conformance

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// A worker's own /v1/responses has no form for two legs. Decode engines answer
// it whole, with the usual retries, typed errors and cancellations.
func TestResponsesOfTRTLLM(t *testing.T) {
	const path = "/v1/responses"
	a := api{path: path, body: func(prompt string, tokens int, stream bool) string {
		return fmt.Sprintf(`{"model":"sim","input":[{"role":"user","content":%s}],"instructions":"be brief","max_output_tokens":%d,"stream":%t}`, quoted(prompt), tokens, stream)
	}}
	f := startFleet(t, enginesim.ConnectorTRTLLM, fleetOptions{config: apiFaults, engine: slow(enginesim.RoleDecode, 2000)})
	for _, stream := range []bool{false, true} {
		body := a.body(long, 9, stream)
		got := f.try(path, body)
		f.right(got, path, body)
		if got.header.Get("X-Pdproxy-Prefill") != "" || got.header.Get("X-Pdproxy-Flow") != "aggregated" {
			t.Errorf("header %v", got.header)
		}
	}
	bare := strings.Replace(a.body("who", 5, false), `"model":"sim",`, "", 1)
	f.right(f.try(path, bare), path, bare)
	if f.metric("pdproxy_fallbacks_total", `what="aggregated"`, `reason="not_pairable"`) == 0 {
		t.Error("the fallback is not counted")
	}
	fault := func(fail string, engines ...*enginesim.Engine) {
		for _, e := range engines {
			if err := e.SetFault(fail, 0, ""); err != nil {
				t.Fatal(err)
			}
		}
	}
	fault("1:500", f.decode[0])
	f.retried(a)
	fault("", f.decode...)
	fault("1:cut", f.decode...)
	f.breaksAt(a)
	fault("", f.decode...)
	if got := f.try(path, strings.Replace(a.body("x", 5, true), "{", `{"ignore_eos":true,`, 1)); got.status != 400 || !strings.Contains(got.body, "ignore_eos") {
		t.Errorf("got status %d: %s", got.status, got.body)
	}
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	resp := f.openAt(ctx, path, a.body(long, 2000, true))
	if _, err := resp.Body.Read(make([]byte, 10)); err != nil {
		t.Error(err)
	}
	leave()
	resp.Body.Close()
	f.settled()
}
