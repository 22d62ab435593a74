package connector

import (
	"errors"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
)

// TestSGLangReleases lists the first releases with a transfer on each route, read in the sources of
// SGLang 0.5.19 to 0.5.23.
func TestSGLangReleases(t *testing.T) {
	const (
		response = `{"input":"x"}`
		message  = `{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"x"}]}`
		chat     = `{"messages":[{"role":"user","content":"x"}]}`
	)
	for _, tt := range []struct {
		path, body, version string
		overrides           bool
		want                string // the release that the error names; "": the engine is fit
	}{
		{"/v1/responses", response, "0.5.19", false, "0.5.20"},
		{"/v1/responses", response, "0.5.19.post3", true, "0.5.20"},
		{"/v1/responses", response, "0.5.9", false, "0.5.20"},
		{"/v1/responses", response, "0.4.10", false, "0.5.20"},
		{"/v1/responses", response, "0.5.20", false, ""},
		{"/v1/responses", response, "0.5.20rc1", false, ""},
		{"/v1/responses", response, "0.5.100", false, ""},
		{"/v1/responses", response, "0.6.0", false, ""},
		{"/v1/responses", response, "1.0.0", false, ""},
		{"/v1/responses", response, "0.0.0.dev1+g0123abc", false, ""},
		{"/v1/responses", response, "", false, ""},
		{"/v1/responses", response, "0.5", false, ""},
		{"/v1/responses", response, "x.y.z", false, ""},
		{"/v1/messages", message, "0.5.21", false, "0.5.22"},
		{"/v1/messages", message, "0.5.22.post1", false, ""},
		{"/v1/messages", message, "0.5.19", true, ""},
		{"/v1/chat/completions", chat, "0.5.1", false, ""},
		{"/generate", `{"text":"x"}`, "0.4.0", false, ""},
	} {
		e := place(config.Engine{HeaderOverrides: tt.overrides}, "10.0.0.5", 0, engine.Facts{Version: tt.version})
		for _, phase := range []abi.Phase{abi.Prefill, abi.Decode} {
			reason, sure, err := sglang{}.Unfit(request(t, tt.path, tt.body), phase, e)
			var refusal *openai.Error
			switch {
			case tt.want == "":
				if err != nil {
					t.Errorf("%s, release %q: %v", tt.path, tt.version, err)
				}
			case !errors.As(err, &refusal) || refusal.Status != 501 || !sure || reason != "old_engine" ||
				!strings.Contains(refusal.Message, tt.want+" or newer") || !strings.Contains(refusal.Message, tt.path):
				t.Errorf("%s, release %q: reason %q, sure %v, %v", tt.path, tt.version, reason, sure, err)
			}
		}
	}
}
