package config

import (
	"slices"
	"testing"
)

// TestSecretsInTheClear: check reports the secrets that go over a network unencrypted.
func TestSecretsInTheClear(t *testing.T) {
	engine := func(url string) string {
		return "[[engine]]\nname='e'\nurl='" + url + "'\nrole='both'\nconnector='none'\napi_key_file='k'\n"
	}
	for _, tt := range []struct {
		text string
		want []string
	}{
		{engine("http://10.0.0.1:8000"), []string{"engine[0].api_key_file"}},
		{engine("http://127.0.0.1:8000"), nil},
		{engine("https://10.0.0.1:8000"), nil},
		{engine("https://10.0.0.1:8000") + "[fleet]\nlisten='10.0.0.5:1'\nopen=true\n", []string{"engine[0].api_key_file"}},
		{engine("https://10.0.0.1:8000") + "[fleet]\nlisten='10.0.0.5:1'\ntoken_file='t'\n", nil},
		{engine("https://10.0.0.1:8000") + "[fleet]\nlisten='10.0.0.5:1'\ntoken_file='t'\nplain_http=true\n", []string{"fleet.plain_http"}},
		{engine("https://10.0.0.1:8000") + "[discovery.trtllm]\ncluster_uri='http://10.0.0.5:1'\ntoken_file='t'\n", []string{"discovery.trtllm.token_file"}},
		{engine("https://10.0.0.1:8000") + "[discovery.moriio]\nlisten='tcp://10.0.0.5:1'\npassword_file='t'\n", []string{"discovery.moriio.password_file"}},
		{engine("https://10.0.0.1:8000") + "[discovery.etcd]\nendpoints=['http://10.0.0.5:1']\nusername='u'\npassword_file='t'\nplain_http=true\n", nil},
	} {
		cfg, err := Parse([]byte(tt.text))
		if err != nil {
			t.Errorf("%s: Parse([]byte(tt.text)) = %v, want nil", tt.text, err)
			continue
		}
		var got []string
		for _, p := range cfg.Warnings() {
			got = append(got, p.Key)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: warns of %v, want %v", tt.text, got, tt.want)
		}
	}
}
