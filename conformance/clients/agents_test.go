package clients

import "testing"

// TestAgents plays sessions in the shape of Claude Code, Codex and OpenCode through Anthropic's and
// OpenAI's clients. The place policy is kv_aware, and the configuration has only the URLs of the
// engines: they announce where they publish their KV events.
func TestAgents(t *testing.T) {
	for _, connector := range []string{"vllm-nixl", "sglang"} {
		t.Run(connector, func(t *testing.T) {
			f := &fleet{alone: startEngine(t, connector, "both")}
			for _, name := range []string{"p0", "p1", "d0", "d1"} {
				role := map[byte]string{'p': "prefill", 'd': "decode"}[name[0]]
				f.add(name, startEngine(t, connector, role, "--zmq-events", "tcp://127.0.0.1:0"), role, connector)
			}
			front := startProxy(t, f, setup{
				server: "expose_placement = true",
				more:   "[policy]\nplace = \"kv_aware\"\n[[plugin]]\nname = \"prefix\"\npath = \"builtin:stable_prefix\"\nphase = \"filter\"\n",
			})
			pythonScript(t, "python/agents_test.py").run(t, front)
			t.Run("nothing left", front.waitIdle)
		})
	}
}
