package config

import (
	"strings"
	"testing"
)

func TestEngineFromJSON(t *testing.T) {
	e, err := EngineFromJSON([]byte(`{"name":"p9","url":"http://127.0.0.1:8109","role":"prefill","connector":"sglang","ranks":4}`))
	if err != nil {
		t.Fatal(err)
	}
	if e.Name != "p9" || e.Role != RolePrefill || e.Connector != ConnectorSGLang || e.Ranks != 4 {
		t.Fatalf("got %+v", e)
	}
	for name, tt := range map[string]struct{ body, want string }{
		"not JSON":      {`{`, "invalid JSON"},
		"not an object": {`[]`, "one object"},
		"two":           {`{} {}`, "invalid JSON"},
		"null":          {`{"name":null,"url":"http://h:1","role":"both"}`, "engine[0].name: wrong type: want string, found null"},
		"twice":         {`{"name":"a","name":"b","url":"http://h:1","role":"both"}`, "engine[0].name: the key occurs twice"},
		"unknown key":   {`{"name":"a","url":"http://h:1","role":"both","colour":"red"}`, "colour"},
		"wrong type":    {`{"name":"a","url":"http://h:1","role":"both","ranks":"four"}`, "ranks"},
		"fraction":      {`{"name":"a","url":"http://h:1","role":"both","ranks":1.5}`, "ranks"},
		"bad role":      {`{"name":"a","url":"http://h:1","role":"chef"}`, "role"},
		"nothing":       {`{}`, "name"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := EngineFromJSON([]byte(tt.body)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got error %v, want one that names %q", err, tt.want)
			}
		})
	}
}
