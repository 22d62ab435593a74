package config

import (
	"slices"
	"testing"
)

// TestChanges: a reader learns which keys and which entries differ, and no values.
func TestChanges(t *testing.T) {
	const plugin = "[[plugin]]\nname='kv'\npath='a.wasm'\nconfig='%s'\n"
	for _, tt := range []struct {
		name, before, after string
		want                []string
	}{
		{"nothing", twoEngines, twoEngines, nil},
		{"defaults", twoEngines, twoEngines + "[server]\naccess_log=''\ncors_origins=[]\n", nil},
		{"keys", twoEngines, twoEngines + "[server]\naccess_log='stderr'\n[server.auth]\nkeys_file='secret'\n[limits]\nqueue=7\n", []string{"server.access_log", "server.auth.keys_file", "limits.queue"}},
		{"a key of an engine", twoEngines, twoEngines + "weight=2\nmodel='m'\n", []string{"engine.d0.model", "engine.d0.weight"}},
		{"an engine", twoEngines, twoEngines + "[[engine]]\nname='d1@10.0.0.1'\nurl='http://d1'\nrole='decode'\nconnector='vllm-nixl'\n", []string{`engine."d1@10.0.0.1" added`}},
		{"another engine", twoEngines + "[[engine]]\nname='d1'\nurl='http://d1'\nrole='decode'\nconnector='vllm-nixl'\n",
			twoEngines + "[[engine]]\nname='d2'\nurl='http://d1'\nrole='decode'\nconnector='vllm-nixl'\n", []string{"engine.d2 added", "engine.d1 removed"}},
		{"a secret", plugin, "[[plugin]]\nname='kv'\npath='a.wasm'\nconfig='hunter2'\n", []string{"plugin.kv.config"}},
		{"a table without a name", "", "[[jwt]]\nissuer='i'\naudience='a'\njwks_file='k'\ntenant_claim='t'\n", []string{"jwt"}},
		{"the order", "[[tenant]]\nname='a'\n[[tenant]]\nname='b'\n", "[[tenant]]\nname='b'\n[[tenant]]\nname='a'\n", []string{"tenant"}},
		{"an entry of discovery", "", "[[discovery.dns.engine]]\nname='e'\nurl='http://e:1'\nrole='both'\n", []string{"discovery.dns.engine.e added"}},
		{"parameters", "", "[policy.params.kv_aware]\nqueue_weight=2\n", []string{"policy.params"}},
	} {
		before, err := Parse([]byte(tt.before))
		if err != nil {
			t.Fatal(tt.name, err)
		}
		after, err := Parse([]byte(tt.after))
		if err != nil {
			t.Fatal(tt.name, err)
		}
		if got := before.Changes(&after); !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}
