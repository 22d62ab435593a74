package config

import (
	"strings"
	"testing"
)

// ncclEngine is an engine with every key of the retired connector.
const ncclEngine = "[[engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-p2p-nccl'\nkv_address='10.0.0.5:21001'\n"

// TestRetiredEngines: every list of engines refuses the retired connector.
func TestRetiredEngines(t *testing.T) {
	const engine = `{"name":"p","url":"http://p","role":"prefill","connector":"vllm-p2p-nccl","kv_address":"10.0.0.5:21001"}`
	_, one := EngineFromJSON([]byte(engine))
	_, list := ParseEngines([]byte("[" + engine + "]"))
	_, tables := ParseEngines([]byte(ncclEngine))
	e := DefaultEngine()
	e.Name, e.URL, e.Role, e.Connector = "p", "http://p", RolePrefill, "vllm-p2p-nccl"
	for name, err := range map[string]error{"object": one, "list": list, "TOML": tables, "built in code": e.Check()} {
		if problems := AsProblems(err); len(problems) != 1 || !strings.Contains(err.Error(), `is retired: vLLM removed P2pNcclConnector in June 2026; use "vllm-nixl"`) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestRetired: a retired key is one problem, at its line, that names the replacement.
func TestRetired(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want want
	}{
		"transport.client":     {"[transport]\nclient = 'nethttp'\n", want{"transport.client", 2, "remove the key"}},
		"transport.client own": {"[transport]\nclient = 'own'\n", want{"transport.client", 2, "remove the key"}},
		"schedule_style":       {"[retry]\nschedule_style = 'generation_first'\n", want{"retry.schedule_style", 2, "is retired: use trtllm.schedule_style"}},
		"base64_ids":           {"[trtllm]\nbase64_ids = true\n", want{"trtllm.base64_ids", 2, "a list of numbers; remove the key"}},
		"msgpack":              {"[trtllm]\nmsgpack = true\n", want{"trtllm.msgpack", 2, "bodies are JSON, which every worker reads; remove the key"}},
		"strip_history":        {"[trtllm]\nstrip_history = true\n", want{"trtllm.strip_history", 2, "decode gets all messages of a chat; remove the key"}},
		"an engine":            {ncclEngine, want{"engine[0].connector", 5, `"vllm-p2p-nccl" is retired: vLLM removed P2pNcclConnector in June 2026; use "vllm-nixl"`}},
		"engines of a pair":    {ncclEngine + "[[engine]]\nname='d'\nurl='http://d'\nrole='decode'\nconnector='vllm-nixl'\n", want{"engine[0].connector", 5, `use "vllm-nixl"`}},
		"sidecar":              {"[sidecar]\nlocal = 'http://127.0.0.1:8200'\nconnector = 'vllm-p2p-nccl'\n", want{"sidecar.connector", 3, `use "vllm-nixl"`}},
		"dns":                  {"[[discovery.dns.engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-p2p-nccl'\n", want{"discovery.dns.engine[0].connector", 5, `use "vllm-nixl"`}},
		"kubernetes":           {"[[discovery.kubernetes.engine]]\nname='p'\nurl='http://p'\nrole='prefill'\nconnector='vllm-p2p-nccl'\n", want{"discovery.kubernetes.engine[0].connector", 5, `use "vllm-nixl"`}},
	} {
		t.Run(name, func(t *testing.T) {
			checkProblems(t, tt.text, []want{tt.want})
			if _, err := Parse([]byte(tt.text)); err == nil || !strings.Contains(err.Error(), "is retired: ") {
				t.Errorf("got %v", err)
			}
		})
	}
}
