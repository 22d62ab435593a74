package kvevents

import "testing"

func TestEndpoint(t *testing.T) {
	for _, tt := range []struct {
		base string
		rank int
		want string
	}{
		{"tcp://10.0.0.1:5557", 0, "tcp://10.0.0.1:5557"},
		{"tcp://engine-a:5557", 7, "tcp://engine-a:5564"},
		{"tcp://[fd00::1]:5557", 1, "tcp://[fd00::1]:5558"},
		{"tcp://a:65535", 0, "tcp://a:65535"},
		{"tcp://a:65535", 1, ""},
		{"tcp://a:0", 0, ""},
		{"tcp://a", 0, ""},
		{"tcp://:5557", 0, ""},
		{"ipc:///run/kv", 0, ""},
		{"a:5557", 0, ""},
		{"", 0, ""},
	} {
		got, err := Endpoint(tt.base, tt.rank)
		if got != tt.want || (err != nil) != (tt.want == "") {
			t.Errorf("Endpoint(%q, %d) = %q, %v", tt.base, tt.rank, got, err)
		}
	}
}

func TestAnnounced(t *testing.T) {
	for _, tt := range []struct {
		host   string
		port   int
		engine string
		want   string
	}{
		{"*", 5557, "10.0.0.1", "tcp://10.0.0.1:5557"},
		{"0.0.0.0", 5557, "engine-a", "tcp://engine-a:5557"},
		{"::", 5557, "fd00::1", "tcp://[fd00::1]:5557"},
		{"[::]", 5557, "[fd00::1]", "tcp://[fd00::1]:5557"},
		{"10.0.0.9", 5557, "10.0.0.1", "tcp://10.0.0.9:5557"},
		{"", 5557, "10.0.0.1", "tcp://10.0.0.1:5557"},
		{"*", 0, "10.0.0.1", ""},
		{"*", 70000, "10.0.0.1", ""},
		{"*", 5557, "", ""},
	} {
		if got := Announced(tt.host, tt.port, tt.engine); got != tt.want {
			t.Errorf("Announced(%q, %d, %q) = %q, want %q", tt.host, tt.port, tt.engine, got, tt.want)
		}
	}
}
