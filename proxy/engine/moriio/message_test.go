package moriio

import (
	"encoding/hex"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// Python's msgpack.dumps produced these bytes from the engines' maps.
const (
	// {"type": "P", "http_address": "10.0.0.5:8100", "zmq_address":
	// "host:10.0.0.5,handshake:6301,notify:61005", "dp_size": 2, "tp_size": 8,
	// "transfer_mode": "WRITE"}
	newP = "86a474797065a150ac687474705f61646472657373ad31302e302e302e353a38313030ab7a6d715f61646472657373d929686f73743a31302e302e302e352c68616e647368616b653a363330312c6e6f746966793a3631303035a764705f73697a6502a774705f73697a6508ad7472616e736665725f6d6f6465a55752495445"
	// {"type": "register", "role": "D", "index": "17", "request_address":
	// "http://10.0.1.7:8200/v1/completions", "handshake_port": 6301,
	// "notify_port": 61005, "dp_size": 1, "tp_size": 8, "transfer_mode": "READ"}
	oldD = "89a474797065a87265676973746572a4726f6c65a144a5696e646578a23137af726571756573745f61646472657373d923687474703a2f2f31302e302e312e373a383230302f76312f636f6d706c6574696f6e73ae68616e647368616b655f706f7274cd189dab6e6f746966795f706f7274cdee4da764705f73697a6501a774705f73697a6508ad7472616e736665725f6d6f6465a452454144"
	// {"type": "HELLO"}
	hello = "81a474797065a548454c4c4f"
	// {"type": "P", "http_address": "10.0.0.5:8100"}
	other = "82a474797065a150ac687474705f61646472657373ad31302e302e302e353a38313030"
	// {"type": "P", "http_address": "10.0.0.5:8100", "zmq_address":
	// "10.0.0.5:21001"}, of P2pNcclConnector
	nccl = "83a474797065a150ac687474705f61646472657373ad31302e302e302e353a38313030ab7a6d715f61646472657373ae31302e302e302e353a3231303031"
)

func bytesOf(t testing.TB, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestForms(t *testing.T) {
	p, d := config.DefaultEngine(), config.DefaultEngine()
	p.Name, p.URL, p.Role, p.Connector = "prefill@10.0.0.5:8100", "http://10.0.0.5:8100", "prefill", "vllm-moriio"
	p.Ranks, p.TPSize, p.KVAddress = 2, 8, "host:10.0.0.5,handshake:6301,notify:61005"
	d.Name, d.URL, d.Role, d.Connector = "decode@10.0.1.7:8200", "http://10.0.1.7:8200", "decode", "vllm-moriio-read"
	d.Ranks, d.TPSize, d.KVAddress = 1, 8, "host:10.0.1.7,handshake:6301,notify:61005"
	for text, want := range map[string]config.Engine{newP: p, oldD: d} {
		reg, err := readRegistration(bytesOf(t, text))
		if err != nil || reg.notARegister {
			t.Fatalf("readRegistration(bytesOf(text)) = %v, %+v", err, reg)
		}
		if got, err := reg.engine(); err != nil || got != want {
			t.Errorf("got %+v (%v)\nwant %+v", got, err, want)
		}
	}
	if reg, err := readRegistration(bytesOf(t, hello)); err != nil || !reg.notARegister {
		t.Errorf("HELLO is %+v, %v", reg, err)
	}
}

func TestEngineIsChecked(t *testing.T) {
	good := registration{kind: "P", role: "P", http: "10.0.0.5:8100", zmq: "host:10.0.0.5,handshake:1,notify:2", mode: "write"}
	for _, tt := range []struct {
		name    string
		change  func(*registration)
		url     string // "": the registration is refused
		problem string
	}{
		{"as it is", func(*registration) {}, "http://10.0.0.5:8100", ""},
		{"a name", func(r *registration) { r.http = "p0.pods:80" }, "http://p0.pods:80", ""},
		{"IPv6", func(r *registration) { r.http = "[fd00::5]:8100" }, "http://[fd00::5]:8100", ""},
		{"IPv6 without brackets", func(r *registration) { r.http = "fd00::5:8100" }, "http://[fd00::5]:8100", ""},
		{"no role", func(r *registration) { r.role = "B" }, "", "role"},
		{"no port", func(r *registration) { r.http = "10.0.0.5" }, "", "HTTP address"},
		{"a path", func(r *registration) { r.http = "10.0.0.5:80/x" }, "", "HTTP address"},
		{"a user", func(r *registration) { r.http = "a:b@10.0.0.5:80" }, "", "HTTP address"},
		{"another line", func(r *registration) { r.http = "a\r\nb:80" }, "", "HTTP address"},
		{"a user in the old form", func(r *registration) { r.http, r.request = "", "http://a:b@10.0.0.5:80/v1" }, "", "HTTP address"},
		{"a file", func(r *registration) { r.http, r.request = "", "file:///etc" }, "", "HTTP address"},
		{"no KV address", func(r *registration) { r.zmq = "" }, "", "KV transfer"},
		{"another line in it", func(r *registration) { r.zmq = "host:a\r\nX:1,handshake:1,notify:2" }, "", "KV transfer"},
		{"no mode", func(r *registration) { r.mode, r.hasRanks = "", true }, "", "transfer_mode"},
		{"P2P-NCCL", func(r *registration) { r.mode, r.zmq = "", "10.0.0.5:21001" }, "", `engine 10.0.0.5:8100: connector "vllm-p2p-nccl" is retired: vLLM removed P2pNcclConnector in June 2026; use "vllm-nixl"`},
		{"P2P-NCCL with sizes", func(r *registration) { r.mode, r.zmq, r.ranks, r.hasRanks = "", "10.0.0.5:21001", 1, true }, "", "transfer_mode"},
		{"MoRI-IO with one port", func(r *registration) { r.zmq = "10.0.0.5:21001" }, "", "KV transfer"},
		{"another mode", func(r *registration) { r.mode = "SWAP" }, "", "transfer_mode"},
		{"no ranks", func(r *registration) { r.ranks, r.hasRanks = 0, true }, "", "size"},
		{"too many ranks", func(r *registration) { r.ranks, r.hasRanks = 1<<20, true }, "", "size"},
		{"no port of the KV transfer", func(r *registration) { r.kind, r.http, r.request = "register", "", "http://10.0.0.5:80/v1" }, "", "KV transfer"},
	} {
		r := good
		tt.change(&r)
		e, err := r.engine()
		switch {
		case tt.url != "" && (err != nil || e.URL != tt.url):
			t.Errorf("%s: %q, %v", tt.name, e.URL, err)
		case tt.url == "" && (err == nil || !strings.Contains(err.Error(), tt.problem)):
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

// The decoder refuses anything that is not a map with names as keys. It allocates no
// memory for a length before it has the bytes.
func FuzzReadRegistration(f *testing.F) {
	for _, text := range []string{newP, oldD, hello, nccl, "", "c0", "dfffffffff", "81a474797065ddffffffff", "81a474797065c6ffffffff", "81a764705f73697a65cfffffffffffffffff"} {
		f.Add(bytesOf(f, text))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		reg, err := readRegistration(b)
		if err != nil || reg.notARegister {
			return
		}
		e, err := reg.engine()
		if err != nil {
			return
		}
		if e.Ranks < 1 || e.KVAddress == "" || strings.ContainsAny(e.URL+e.Name+e.KVAddress, "\r\n ") {
			t.Errorf("%+v", e)
		}
	})
}
