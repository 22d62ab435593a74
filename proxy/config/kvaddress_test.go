package config

import "testing"

func TestParseKVAddress(t *testing.T) {
	full := KVAddress{"10.0.0.5", 6301, 61005}
	for _, tt := range []struct {
		text string
		want KVAddress
		bad  bool
	}{
		{"", KVAddress{}, false},
		{"host:10.0.0.5,handshake:6301,notify:61005", full, false},
		{" notify: 61005 , host: 10.0.0.5 ,handshake:6301,later:1", full, false},
		{"host:::1,handshake:1,notify:65535", KVAddress{"::1", 1, 65535}, false},
		{"host:[fd00::5],handshake:1,notify:2", KVAddress{"fd00::5", 1, 2}, false},
		{"host:p0.pods,handshake:1,notify:2", KVAddress{"p0.pods", 1, 2}, false},
		{"10.0.0.5", KVAddress{}, true},
		{"10.0.0.5:21001", KVAddress{}, true},
		{"host:10.0.0.5,handshake:6301", KVAddress{}, true},
		{"host:10.0.0.5,handshake:x,notify:1", KVAddress{}, true},
		{"host:10.0.0.5,handshake:0,notify:1", KVAddress{}, true},
		{"host:10.0.0.5,handshake:1,notify:65536", KVAddress{}, true},
		{"host:a b,handshake:1,notify:2", KVAddress{}, true},
		{"host:a\r\nX-Evil:1,handshake:1,notify:2", KVAddress{}, true},
		{"host:,handshake:1,notify:2", KVAddress{}, true},
	} {
		got, err := ParseKVAddress(tt.text)
		if got != tt.want || (err != nil) != tt.bad {
			t.Errorf("%q: ParseKVAddress(tt.text) = %+v, %v", tt.text, got, err)
		}
		if again, err := ParseKVAddress(got.String()); err != nil || again != got {
			t.Errorf("%q is written as %q", tt.text, got.String())
		}
	}
}

func FuzzParseKVAddress(f *testing.F) {
	f.Add("host:10.0.0.5,handshake:6301,notify:61005")
	f.Add("host:::1,handshake:1,notify:2,notify:3")
	f.Fuzz(func(t *testing.T, text string) {
		a, err := ParseKVAddress(text)
		if err != nil {
			return
		}
		if again, err := ParseKVAddress(a.String()); err != nil || again != a {
			t.Errorf("%+v is written as %q, read as %+v (%v)", a, a.String(), again, err)
		}
	})
}
