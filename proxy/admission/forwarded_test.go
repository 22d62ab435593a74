package admission

import (
	"net/http"
	"net/netip"
	"strings"
	"testing"
)

func TestForwardedClient(t *testing.T) {
	proxies := Proxies{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("2001:db8:ff::/48")}
	for _, tt := range []struct {
		name, peer string
		lines      []string
		want       string
	}{
		{"peer that is not trusted", "192.0.2.1:1", []string{"198.51.100.7"}, "192.0.2.1"},
		{"trusted peer", "10.0.0.1:1", []string{"198.51.100.7"}, "198.51.100.7"},
		{"trusted peer as a mapped address", "[::ffff:10.0.0.1]:1", []string{"198.51.100.7"}, "198.51.100.7"},
		{"trusted peer without the header", "10.0.0.1:1", nil, "10.0.0.1"},
		{"addresses that the client invented", "10.0.0.1:1", []string{"127.0.0.1, 203.0.113.1, 198.51.100.7"}, "198.51.100.7"},
		{"two proxies", "10.0.0.1:1", []string{"203.0.113.1, 198.51.100.7, 10.0.0.2"}, "198.51.100.7"},
		{"several lines", "10.0.0.1:1", []string{"203.0.113.1", "198.51.100.7", "10.0.0.2"}, "198.51.100.7"},
		{"only proxies", "10.0.0.1:1", []string{"10.0.0.3,10.0.0.2"}, "10.0.0.3"},
		{"no address", "10.0.0.1:1", []string{"198.51.100.7, unknown, 10.0.0.2"}, "10.0.0.2"},
		{"empty entry", "10.0.0.1:1", []string{"198.51.100.7,"}, "198.51.100.7"},
		{"with a port", "10.0.0.1:1", []string{"198.51.100.7:4711"}, "198.51.100.7"},
		{"IPv6", "[2001:db8:ff::1]:1", []string{"2001:db8:1:2::9"}, "2001:db8:1:2::/64"},
		{"IPv6 with a port", "10.0.0.1:1", []string{"[2001:db8:1:2::9]:80"}, "2001:db8:1:2::/64"},
		{"peer without an address", "pipe", []string{"198.51.100.7"}, "pipe"},
	} {
		r := &http.Request{RemoteAddr: tt.peer, Header: http.Header{"X-Forwarded-For": tt.lines}}
		if got := proxies.Client(r); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
		if peer, _, _ := strings.Cut(tt.peer, ":"); tt.peer[0] != '[' && Proxies(nil).Client(r) != peer {
			t.Errorf("%s: without trusted proxies %q", tt.name, Proxies(nil).Client(r))
		}
	}
	for peer, want := range map[string]string{"192.0.2.1:1": "192.0.2.1", "[2001:db8::7]:1": "2001:db8::7", "10.0.0.1:1": "2001:db8:1:2::9", "pipe": "pipe", "": ""} {
		r := &http.Request{RemoteAddr: peer, Header: http.Header{"X-Forwarded-For": {"[2001:db8:1:2::9]:80"}}}
		if got := proxies.Address(r); got != want {
			t.Errorf("%q: address %q, want %q", peer, got, want)
		}
	}
	k, err := ParseKeys([]byte(lineOf("team-a", "k")))
	if err != nil {
		t.Fatal(err)
	}
	r := &http.Request{RemoteAddr: "10.0.0.1:1", Header: http.Header{"X-Forwarded-For": {"198.51.100.7"}, "X-Api-Key": {"k"}}}
	if r, err = k.Authenticate(r); err != nil || proxies.Client(r) != "team-a" {
		t.Errorf("with a key: %v", err)
	}
}

// FuzzForwardedClient: any X-Forwarded-For yields the peer or one whole address or network.
func FuzzForwardedClient(f *testing.F) {
	for _, text := range []string{"", "1.2.3.4", "1.2.3.4, 10.0.0.1", "[::1]:2,,", ",", "fe80::1%eth0", "10.0.0.1:99999"} {
		f.Add(text)
	}
	proxies := Proxies{netip.MustParsePrefix("10.0.0.0/8")}
	f.Fuzz(func(t *testing.T, text string) {
		got := proxies.Client(&http.Request{RemoteAddr: "10.0.0.1:1", Header: http.Header{"X-Forwarded-For": {text}}})
		if _, err := netip.ParseAddr(got); err == nil {
			return
		}
		if _, err := netip.ParsePrefix(got); err != nil || !strings.HasSuffix(got, "/64") {
			t.Errorf("%q: client %q", text, got)
		}
	})
}
