package admission

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
)

// lineOf is the line of a keys file for a key.
func lineOf(name, key string) string {
	sum := sha256.Sum256([]byte(key))
	return name + " " + hex.EncodeToString(sum[:]) + "\n"
}

func TestParseKeys(t *testing.T) {
	good := lineOf("team-a", "secret-a")
	secret := strings.Repeat("5e", 31)
	tests := []struct{ name, text, err string }{
		{"one", good, ""},
		{"comments, empty lines, spaces", "# teams\n\n  " + good + "\t\r\n" + lineOf("b", "x"), ""},
		{"upper case", strings.ToUpper(good), ""},
		{"several spaces", strings.Replace(good, " ", "   ", 1), ""},
		{"no last line end", strings.TrimSpace(good), ""},
		{"nothing", "", "no key in the file"},
		{"comments only", "# a\n\n", "no key in the file"},
		{"plain key", "sk-plain-team-key\n", "\"pdproxy keys new NAME\" makes a key with its line"},
		{"short digest", good + "team-b " + secret + "\n", "line 2"},
		{"long digest", "\n\nteam-b " + secret + "5e5e\n", "line 3"},
		{"no hex", "team-b " + strings.Repeat("zz", 32), "line 1"},
		{"no digest", good + "\n" + secret, "line 3"},
		{"a third word", strings.TrimSpace(good) + " x", "line 1"},
		{"the SHA-256 of nothing", good + lineOf("team-b", ""), "line 2"},
		{"a name that is not UTF-8", good + lineOf("team-\xe9", "x"), "line 2"},
		{"endless line", good + strings.Repeat("a", 100_000), "line 2"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			k, err := ParseKeys([]byte(tt.text))
			switch {
			case tt.err == "" && err == nil:
				if c := k.client("secret-a"); tt.name != "upper case" && (c == nil || c.name != "team-a" || c.tenant.Name != "team-a") {
					t.Errorf("the key is that of %+v", c)
				}
			case tt.err == "":
				t.Fatal(err)
			case err == nil || !strings.Contains(err.Error(), tt.err):
				t.Errorf("got error %v, want one with %q", err, tt.err)
			case strings.Contains(err.Error(), "5e5e") || strings.Contains(err.Error(), "team"):
				t.Errorf("the error holds content of the file: %v", err)
			}
		})
	}
}

// A key is found at any position in the file. A similar text is not accepted as a key.
func TestKeysName(t *testing.T) {
	var text string
	for i := range 50 {
		text += lineOf(fmt.Sprintf("n%d", i), fmt.Sprintf("key-%d", i))
	}
	k, err := ParseKeys([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		if c := k.client(fmt.Sprintf("key-%d", i)); c == nil || c.name != fmt.Sprintf("n%d", i) {
			t.Errorf("key %d is that of %+v", i, c)
		}
	}
	for _, wrong := range []string{"", "key-", "key-50", "key-1 ", "KEY-1"} {
		if c := k.client(wrong); c != nil {
			t.Errorf("key %q is accepted as the key of %q", wrong, c.name)
		}
	}
}

func TestAuthenticate(t *testing.T) {
	tests := []struct {
		name   string
		header []string
		client string // "": the key is refused
	}{
		{"bearer", []string{"Authorization", "Bearer good"}, "team"},
		{"scheme in lower case", []string{"Authorization", "bearer good"}, "team"},
		{"Anthropic's line", []string{"X-Api-Key", "good"}, "team"},
		{"both, bearer counts", []string{"Authorization", "Bearer good", "X-Api-Key", "bad"}, "team"},
		{"both headers, the bearer key is invalid", []string{"Authorization", "Bearer bad", "X-Api-Key", "good"}, ""},
		{"other scheme", []string{"Authorization", "Basic good"}, ""},
		{"none", nil, ""},
		{"empty", []string{"Authorization", "Bearer "}, ""},
	}
	keys, err := ParseKeys([]byte(lineOf("team", "good")))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := httptest.NewRequest("POST", "/v1/completions", nil)
			for i := 0; i < len(tt.header); i += 2 {
				r.Header.Set(tt.header[i], tt.header[i+1])
			}
			got, err := keys.Authenticate(r)
			if tt.client == "" {
				if err != ErrNoKey {
					t.Errorf("let in: %v", err)
				}
				return
			}
			if err != nil || KeyName(got) != tt.client || Proxies(nil).Client(got) != tt.client {
				t.Errorf("client %q, error %v", KeyName(got), err)
			}
		})
	}
}

func TestClientWithoutKeys(t *testing.T) {
	for addr, want := range map[string]string{"10.0.0.1:4711": "10.0.0.1", "[::1]:80": "::1", "pipe": "pipe",
		"[2001:db8:1:2:3:4:5:6]:80": "2001:db8:1:2::/64", "[2001:db8:1:2::9]:81": "2001:db8:1:2::/64", "[fe80::1%eth0]:80": "fe80::/64", "[::ffff:10.0.0.1]:1": "10.0.0.1"} {
		r := &http.Request{RemoteAddr: addr}
		if got := Proxies(nil).Client(r); got != want || KeyName(r) != "" {
			t.Errorf("%s: client %q, want %q", addr, got, want)
		}
	}
}

// FuzzParseKeys: a keys file is either accepted, with names and hashes, or refused. The
// error contains only the number of a line, and no part of the file.
func FuzzParseKeys(f *testing.F) {
	sum := strings.Repeat("0f", sha256.Size)
	for _, text := range []string{"alice " + sum, "# who\n\nalice " + sum + "\r\nbob\t" + sum + "\n", "alice", "alice " + sum[1:], "", "\x00 " + sum,
		"a " + sum + " tenant=t class=c models=m,n rpm=1 tpm=2 max=3\nb " + sum + " tenant=t", "a " + sum + " rpm=0", "a " + sum + " tenant=", "a " + sum + " rpm=1\na " + sum + " tpm=1"} {
		f.Add([]byte(text))
	}
	allowed := regexp.MustCompile(`^(no key in the file|(line \d+ is|lines \d+(, \d+)+( and \d+ more)? are) not "NAME SHA256", .{100,250}|line \d+: the words after .{50,100}|line \d+: attribute (tenant|class|models|rpm|tpm|max): [a-z \[\]A-Z_.,:@0-9-]{20,120})$`)
	f.Fuzz(func(t *testing.T, text []byte) {
		k, err := ParseKeys(text)
		switch {
		case err != nil && k != nil, err != nil && !allowed.MatchString(err.Error()):
			t.Errorf("%+v, %v", k, err)
		case err == nil && (len(k.clients) == 0 || len(k.clients) != len(k.hashes)):
			t.Errorf("%d clients, %d hashes", len(k.clients), len(k.hashes))
		}
	})
}

// An error names the wrong lines, at most five of them.
func TestWrongLines(t *testing.T) {
	good := lineOf("team", "good")
	for text, want := range map[string]string{
		good + "secret\n" + good:                  `line 2 is not "NAME SHA256"`,
		"# keys\nsecret\n" + good + "secret 12\n": `lines 2, 4 are not "NAME SHA256"`,
		strings.Repeat("secret\n", 7) + good:      `lines 1, 2, 3, 4, 5 and 2 more are not "NAME SHA256"`,
	} {
		_, err := ParseKeys([]byte(text))
		if err == nil || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: error %v, want %s", text, err, want)
		}
	}
}

// A new key is accepted by a file with its line, under its name.
func TestGenerateKey(t *testing.T) {
	key, err := GenerateKey("team-a")
	if err != nil {
		t.Fatal(err)
	}
	k, err := ParseKeys([]byte("# clients\n" + key.Line + "\n"))
	if err != nil {
		t.Fatal(err)
	}
	if c := k.client(key.Key); c == nil || c.name != "team-a" || strings.Contains(key.Line, key.Key) {
		t.Errorf("%+v: the key is that of %+v", key, c)
	}
	if other, _ := GenerateKey("team-a"); other.Key == key.Key {
		t.Error("two equal keys")
	}
	for _, name := range []string{"", "a b", "#a", "a\nb", "é"} {
		if key, err := GenerateKey(name); err == nil {
			t.Errorf("%q: %+v", name, key)
		}
	}
}
