package cmd

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestChaosJudges: only an answer that equals that of one engine alone is right. An answer that
// ends too early counts by its reason, and not as wrong.
func TestChaosJudges(t *testing.T) {
	const (
		role  = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"
		one   = "data: {\"choices\":[{\"delta\":{\"content\":\"one\"},\"finish_reason\":null}]}\n\n"
		two   = "data: {\"choices\":[{\"delta\":{\"content\":\" two\"},\"finish_reason\":\"length\"}]}\n\n"
		usage = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":2}}\n\n"
		done  = "data: [DONE]\n\n"
		whole = role + one + two + usage + done
	)
	for name, tt := range map[string]struct {
		answer string
		wrong  bool
		ended  string
	}{
		"the same":              {": comment\n\n" + whole, false, ""},
		"other text":            {role + one + one + two + usage + done, true, ""},
		"a second role":         {role + role + one + two + usage + done, true, ""},
		"a second reason":       {role + one + two + strings.Replace(two, " two", "", 1) + usage + done, true, ""},
		"usage twice":           {role + one + two + usage + usage + done, true, ""},
		"no usage":              {role + one + two + done, true, ""},
		"cut off":               {role + one, false, "cut off"},
		"an error event":        {role + one + "data: {\"error\":{\"message\":\"m\",\"not_continued\":\"no_ids\"}}\n\n" + done, false, "no_ids"},
		"an error of an engine": {role + "data: {\"error\":{\"message\":\"m\"}}\n\n" + done, false, "error event"},
		"garbage":               {"data: {\n\n", false, "not JSON"},
		"a refusal":             {"503", false, "status 503"},
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if tt.answer == "503" {
					w.WriteHeader(503)
				}
				fmt.Fprint(w, tt.answer)
			}))
			defer s.Close()
			var out bytes.Buffer
			c := newChaos(&app{out: &out}, enginesim.ConnectorVLLMNixl, nil, s.URL, "", "")
			want := make(chan chaosAnswer, 1)
			want <- chaosAnswer{text: "one two", role: "assistant", finish: "length", tokens: 2}
			c.send(t.Context(), "id", "/", "{}", want)
			ended := map[string]int{}
			if tt.ended != "" {
				ended[tt.ended] = 1
			}
			if c.sum.Streams != 1 || c.sum.Wrong > 0 != tt.wrong || !maps.Equal(c.sum.Ended, ended) || len(c.open) > 0 {
				t.Errorf("got %+v", c.sum)
			}
			if err := c.conclude(); (err != nil) != tt.wrong || strings.Contains(out.String(), "equals") == tt.wrong {
				t.Errorf("%v\n%s", err, &out)
			}
		})
	}
}

// TestDemoRestart: a killed engine comes back at the addresses that the proxy's configuration has.
func TestDemoRestart(t *testing.T) {
	for _, connector := range []string{
		enginesim.ConnectorVLLMNixl, enginesim.ConnectorVLLMNixlPush, enginesim.ConnectorVLLMMoRIIO, enginesim.ConnectorVLLMMoRIIORead,
		enginesim.ConnectorVLLMMooncake, enginesim.ConnectorVLLMP2PTier, enginesim.ConnectorSGLang, enginesim.ConnectorTRTLLM,
	} {
		t.Run(connector, func(t *testing.T) {
			cfg := config.Default()
			engines, err := startDemoEngines(&cfg, demoFlags{connector: connector, prefill: 1, decode: 1})
			for _, e := range engines {
				defer func() { e.Close() }()
			}
			if err != nil {
				t.Fatal(err)
			}
			e := engines[1]
			addresses := func() string {
				return fmt.Sprint(e.URL(), e.SideAddress(), e.KVAddress(), e.BootstrapPort(), e.KVEventsEndpoint(), e.KVEventsReplay())
			}
			before := addresses()
			e.Kill()
			if err := e.restart(); err != nil {
				t.Fatal(err)
			}
			if got := addresses(); got != before {
				t.Errorf("got %s, want %s", got, before)
			}
			resp, err := http.Get(e.URL() + "/health")
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			http.DefaultClient.CloseIdleConnections()
		})
	}
}
