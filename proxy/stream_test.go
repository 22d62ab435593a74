package proxy

import (
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/telemetry"
)

func TestX(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := &fakeEngine{serve: func(c *engineConn, _ int) {
			c.stream("data: {\"a\":1}\n\n", "data: {\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"prompt_tokens_details\":null}}\n\n", "data: [DONE]\n\n")
		}}
		w := newWorld(t, setup{engines: []*fakeEngine{e}})
		a := w.post(completionsPath, completions(true))
		t.Logf("%+v", a)
		t.Log(w.logged.String())
		w.outcome(telemetry.OutcomeOK)
	})
}
