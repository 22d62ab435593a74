package journal

import "testing"

func TestAddress(t *testing.T) {
	for url, want := range map[string]string{
		"http://e:8000/base": "e:8000", "https://e": "e:443", "http://[::1]": "[::1]:80", "://": "",
	} {
		if got := address(url); got != want {
			t.Errorf("%s: address(url) = %q, want %q", url, got, want)
		}
	}
}
