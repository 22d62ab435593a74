package config

import (
	"reflect"
	"strings"
	"testing"
)

func TestParseEngines(t *testing.T) {
	p, d := DefaultEngine(), DefaultEngine()
	p.Name, p.URL, p.Role, p.Connector, p.Ranks = "p0", "http://10.0.0.1:8000", RolePrefill, ConnectorSGLang, 2
	d.Name, d.URL, d.Role, d.Connector = "d0", "http://10.0.0.2:8000", RoleDecode, ConnectorTRTLLM
	const object = `{"name":"p0","url":"http://10.0.0.1:8000","role":"prefill","connector":"sglang","ranks":2}`
	for name, tt := range map[string]struct {
		text string
		want []Engine
	}{
		"toml": {"[[engine]]\nname='p0'\nurl='http://10.0.0.1:8000'\nrole='prefill'\nconnector='sglang'\nranks=2\n" +
			"[[engine]]\nname='d0'\nurl='http://10.0.0.2:8000'\nrole='decode'\nconnector='trtllm'\n", []Engine{p, d}},
		"json array":       {"[" + object + "]", []Engine{p}},
		"json object":      {` {"engine": [` + object + `]}`, []Engine{p}},
		"none, toml":       {"engine = [] # for now\n", []Engine{}},
		"none, json":       {"[]", []Engine{}},
		"none, json table": {`{"engine": []}`, []Engine{}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ParseEngines([]byte(tt.text))
			if err != nil || !reflect.DeepEqual(got, tt.want) {
				t.Fatalf("got %+v, %v", got, err)
			}
		})
	}
}

func TestParseEnginesProblems(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want []want
	}{
		"nothing":            {" \n", []want{{"engine", 0, "the file is empty: write engine = []"}}},
		"null":               {"null", []want{{"engine", 1, "want array of tables, found null"}}},
		"no list, json":      {`{}`, []want{{"engine", 0, "is missing"}}},
		"half written":       {"[[engine]]\nname = \"p", []want{{"engine.name", 2, "invalid TOML"}}},
		"half written, json": {"[\n {\"name\": \"p", []want{{"", 2, "invalid JSON"}}},
		"a whole config":     {"engine = []\n[server]\nlisten = ':1'\n", []want{{"server", 2, "unknown key"}}},
		"toml": {"[[engine]]\nname='a'\nurl='http://a'\nrole='both'\n[[engine]]\nname='a'\nurl='u'\nrole='chef'\nranks='x'\n",
			[]want{{"engine[1].name", 6, "already"}, {"engine[1].url", 7, "scheme"}, {"engine[1].role", 8, "one of"}, {"engine[1].ranks", 9, "want integer"}}},
		"json": {"[\n {\"name\": \"a\",\n  \"url\": \"u\", \"role\": \"both\",\n  \"colour\": {\n \"x\": 1}}\n]",
			[]want{{"engine[0].url", 3, "scheme"}, {"engine[0].colour", 4, "unknown key"}}},
		"json of another connector": {`[{"name":"a","url":"http://a","role":"both","connector":"vllm-other"}]`,
			[]want{{"engine[0].connector", 1, "one of"}}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseEngines([]byte(tt.text))
			problems, _ := err.(Problems)
			if len(problems) != len(tt.want) {
				t.Fatalf("got %v, want %v", err, tt.want)
			}
			for i, w := range tt.want {
				if p := problems[i]; p.Key != w.key || p.Line != w.line || !strings.Contains(p.Message, w.fragment) {
					t.Errorf("got %q, want %+v", p, w)
				}
			}
		})
	}
}

// FuzzParseEngines checks that any text yields engines that are valid in a
// configuration, or problems of one line each.
func FuzzParseEngines(f *testing.F) {
	f.Add([]byte(twoEngines))
	f.Add([]byte(`[{"name":"a","url":"http://a:1","role":"both","ranks":2}]`))
	f.Add([]byte(`{"engine":[{"name":"a","url":"http://a:1","role":"both","x":[1,{"y":null}],"x":1e999}]}`))
	f.Add([]byte(`[[],null,{}]`))
	f.Add([]byte("engine = []"))
	f.Fuzz(func(t *testing.T, data []byte) {
		engines, err := ParseEngines(data)
		if err != nil {
			problems, _ := err.(Problems)
			if len(problems) == 0 || engines != nil {
				t.Fatalf("engines %v together with error %v", engines, err)
			}
			for _, p := range problems {
				if p.Message == "" || strings.Contains(p.String(), "\n") {
					t.Errorf("problem of no or several lines: %q", p)
				}
			}
			return
		}
		for _, e := range engines {
			cfg := Default()
			cfg.Engines = []Engine{e}
			if problems := cfg.Validate(); len(problems) > 0 {
				t.Errorf("accepted, then refused: %v", problems)
			}
		}
	})
}

func FuzzEngineFromJSON(f *testing.F) {
	f.Add([]byte(`{"name":"p9","url":"http://127.0.0.1:8109","role":"prefill","connector":"sglang","ranks":4}`))
	f.Add([]byte(`{"":{},"a":null,"ranks":1.5e3,"engine":[[]]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		e, err := EngineFromJSON(data)
		if err == nil && (e.Name == "" || e.Ranks < 1) || err != nil && e != (Engine{}) {
			t.Errorf("engine %+v together with error %v", e, err)
		}
	})
}
