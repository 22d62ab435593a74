package config

import "testing"

func TestSupports(t *testing.T) {
	for _, tt := range []struct {
		key, value string
		want       bool
	}{
		{"discovery.trtllm.cluster_uri", "etcd://a:1", true},
		{"discovery.trtllm.cluster_uri", "http://a:1", true},
		{"discovery.trtllm.metadata_uri", "etcd://a:1", true},
		{"discovery.trtllm.metadata_uri", "", true},
		{"discovery.file.path", "engines.toml", true},
		{"engine.connector", ConnectorSGLang, true},
		{"engine.connector", ConnectorVLLMMoRIIO, true},
		{"engine.connector", ConnectorVLLMMooncake, true},
	} {
		if got := Supports(tt.key, tt.value); got != tt.want {
			t.Errorf("%s = %q: %v", tt.key, tt.value, got)
		}
	}
}
