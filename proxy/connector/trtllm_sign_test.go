package connector

import "testing"

// Signatures computed with Python's json and hmac from the two members as JSON.
func TestSignatureIsPythons(t *testing.T) {
	for _, tt := range []struct{ key, endpoint, state, want string }{
		{"unit-test-key", `null`, `"b3BhcXVl"`, "5bb964e820fe330f8c1966e5d34147af5cfe779851c5575643c8fa08651b86f9"},
		{"k", ``, `"b3BhcXVl"`, "6203757ed0fcbc77c53259fa82edda7be2dd3801cf91dabd81fa48d288da8f4b"},
		{"k", `null`, `"b3Bhc\u0058Vl"`, "6203757ed0fcbc77c53259fa82edda7be2dd3801cf91dabd81fa48d288da8f4b"},
		{"k", `"tcp:\/\/höst:1"`, `null`, "cc872d2811cb497c25ee44ad44f28c69caa47089f0c301959d5083f734b15a0e"},
		{"k", `"a\"b\\c\n\r\t\b\f\u0001\u007F\u0080\u2028😀/"`, `"x"`, "fc8852be426dc7499494aebb2c701c8ca823de9acbd62a7960024d46e47df2bd"},
		{"schlüssel", `"e"`, `"s"`, "bf220600b6cdf96ec9f31fa24abd22a7531e4b215a7e3e0c913ec4364edfeeb8"},
	} {
		if got := signature(tt.key, []byte(tt.endpoint), []byte(tt.state)); got != "sha256="+tt.want {
			t.Errorf("%s, %s with key %q: %s, want %s", tt.endpoint, tt.state, tt.key, got, tt.want)
		}
	}
}
