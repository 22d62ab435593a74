package replay

import (
	"os"
	"strings"
	"testing"
)

func TestPresets(t *testing.T) {
	for _, name := range Presets() {
		m, err := Preset(name)
		if err != nil {
			t.Fatal(err)
		}
		if m.Name != name {
			t.Errorf("%s names itself %q", name, m.Name)
		}
		// A prompt of the public trace's mean length takes between a tenth of a
		// second and three, and a stream is faster than a reader.
		if d := m.work(0, 12000).Seconds(); d < .1 || d > 3 {
			t.Errorf("%s: 12,000 tokens take %v s", name, d)
		}
		if d := m.step(64, 64*12000).Seconds(); d < .005 || d > m.ITLMillis/1000 {
			t.Errorf("%s: a step of 64 requests takes %v s", name, d)
		}
	}
	if entries, err := os.ReadDir("models"); err != nil || len(entries) != len(Presets()) {
		t.Errorf("%d files in models, %v", len(entries), err)
	}
	if _, err := Preset("../doc"); err == nil {
		t.Error("a preset outside of models")
	}
}

func TestReadModelRefuses(t *testing.T) {
	good, err := os.ReadFile("models/llama70b-h100.toml")
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ from, to, err string }{
		"unknown key": {"decode_kv_tokens", "decode_kv_token", "decode_kv_token"},
		"missing key": {"decode_us_per_step = 13400", "", "decode_us_per_step is missing"},
		"zero":        {"prefill_us_per_token = 64", "prefill_us_per_token = 0", "prefill_us_per_token is 0"},
		"negative":    {"transfer_us_per_token = 2.3", "transfer_us_per_token = -1", "transfer_us_per_token is -1"},
		"no TOML":     {"name = ", "name", "read model"},
	} {
		text := strings.Replace(string(good), tt.from, tt.to, 1)
		if _, err := ReadModel(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: ReadModel(strings.NewReader(text)) = %v", name, err)
		}
	}
}
