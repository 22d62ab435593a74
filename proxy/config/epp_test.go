package config

import (
	"strings"
	"testing"
)

func TestGatewayEndpoint(t *testing.T) {
	for _, tt := range []struct{ url, endpoint, want string }{
		{"http://10.0.0.1:8000", "", "10.0.0.1:8000"},
		{"https://10.0.0.1/path", "", "10.0.0.1:443"},
		{"http://[::ffff:10.0.0.1]:8000", "", "10.0.0.1:8000"},
		{"http://[fd00::1]:8000", ":9000", "[fd00::1]:9000"},
		{"http://engine:8000", "10.0.0.2:9000", "10.0.0.2:9000"},
		{"http://engine:8000", "", ""},
		{"http://engine:8000", ":9000", ""},
		{"http://10.0.0.1:8000", "engine:9000", ""},
		{"http://10.0.0.1:8000", "9000", ""},
	} {
		e := Engine{URL: tt.url, Endpoint: tt.endpoint}
		got, ok := e.GatewayEndpoint()
		if ok != (tt.want != "") || ok && got.String() != tt.want {
			t.Errorf("%s with endpoint %q: got %v, %t, want %q", tt.url, tt.endpoint, got, ok, tt.want)
		}
	}
}

func TestEPPProblems(t *testing.T) {
	const engine = "[[engine]]\nname = \"e\"\nrole = \"both\"\n"
	for _, tt := range []struct{ text, want string }{
		{"[epp]\nlisten = \"127.0.0.1:9002\"\n" + engine + "url = \"http://10.0.0.1:8000\"\n", ""},
		{"[epp]\nlisten = \"127.0.0.1:9002\"\n" + engine + "url = \"http://engine:8000\"\n", "engine[0].endpoint"},
		{"[epp]\nlisten = \"127.0.0.1:9002\"\n" + engine + "url = \"http://engine:8000\"\nendpoint = \"10.0.0.1:8000\"\n", ""},
		{engine + "url = \"http://engine:8000\"\n", ""},
		{engine + "url = \"http://engine:8000\"\nendpoint = \"engine:8000\"\n", "engine[0].endpoint"},
		{"[epp]\nlisten = \"9002\"\n", "epp.listen"},
		{"[epp]\nlisten = \"127.0.0.1:8080\"\n", "epp.listen"},
		{"[epp]\nlisten = \"127.0.0.1:9002\"\n[sidecar]\nlocal = \"http://127.0.0.1:8200\"\n", "epp.listen"},
		{"[epp]\nfallbacks = 17\n", "epp.fallbacks"},
		{"[epp]\ndrain_quiet = \"-1s\"\n", "epp.drain_quiet"},
		{"[epp]\nmetadata = \"pdproxy\"\n", ""},
		{"[epp]\nmetadata = \"a b\"\n", "epp.metadata"},
		{"[epp.tls]\ncert = \"x.pem\"\n", "epp.tls.cert"},
		{"[epp.tls]\nclient_ca = \"x.pem\"\n", "epp.tls.client_ca"},
	} {
		_, err := Parse([]byte(tt.text))
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s\ngot %v, want a problem with %q", tt.text, err, tt.want)
		}
	}
}
