package cmd

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/cmd/exit"
)

// run runs one command line.
func run(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = Main(args, &out, &errs)
	return code, out.String(), errs.String()
}

func write(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pdproxy.toml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestExitCodes(t *testing.T) {
	good := write(t, "[[engine]]\nname = 'e'\nurl = 'http://127.0.0.1:1'\nrole = 'both'\n")
	bad := write(t, "[server]\nlisten = 'nowhere'\ncolour = 'red'\n")
	noKeys := write(t, "[server.auth]\nkeys_file = '/nonexistent/keys'\n")
	noPlugin := write(t, "[policy]\nplace = 'p'\n[[plugin]]\nname = 'p'\npath = '/nonexistent.wasm'\n")
	noEtcdKeys := write(t, "[discovery.etcd]\nendpoints = ['https://127.0.0.1:1']\nca = '/nonexistent/ca'\n")
	noList := write(t, "discovery.file.path = '/nonexistent/engines'\n")
	badList := write(t, "discovery.file.path = '"+write(t, "[[engine]]\nname = 'e'\nurl = 'http://h'\nrole = 'chef'\n")+"'\n")
	list := write(t, "discovery.file.path = '"+good+"'\n")
	garbage := write(t, "[[plugin]]\nname = 'p'\nphase = 'filter'\npath = '"+noPlugin+"'\n")
	for name, tt := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		"version":             {[]string{"version"}, exit.OK, "pdproxy ", ""},
		"version as JSON":     {[]string{"version", "--json"}, exit.OK, `"version"`, ""},
		"licences":            {[]string{"version", "--licenses"}, exit.OK, "github.com/spf13/cobra", ""},
		"help":                {[]string{"--help"}, exit.OK, "run", ""},
		"unknown command":     {[]string{"fly"}, exit.Usage, "", "unknown command"},
		"unknown flag":        {[]string{"check", "--fast", good}, exit.Usage, "", "--fast"},
		"check without file":  {[]string{"check"}, exit.Usage, "", "arg"},
		"check good":          {[]string{"check", good}, exit.OK, "ok\n", ""},
		"check bad":           {[]string{"check", bad}, exit.Usage, "", "line 3: server.colour"},
		"check missing file":  {[]string{"check", "/nonexistent.toml"}, exit.Usage, "", "nonexistent"},
		"check missing keys":  {[]string{"check", noKeys}, exit.Usage, "", "server.auth.keys_file"},
		"check no etcd CA":    {[]string{"check", noEtcdKeys}, exit.Usage, "", "discovery.etcd.ca: open /nonexistent/ca"},
		"check no list":       {[]string{"check", noList}, exit.Usage, "", "discovery.file.path: open /nonexistent/engines"},
		"check bad list":      {[]string{"check", badList}, exit.Usage, "", "line 4: engine[0].role: must be one of"},
		"check list":          {[]string{"check", list}, exit.OK, "ok\n", ""},
		"check no plugin":     {[]string{"check", noPlugin}, exit.Usage, "", `line 5: plugin[0].path: "p": `},
		"check no module":     {[]string{"check", garbage}, exit.Usage, "", `line 1: plugin[0]: "p": the file is not WebAssembly`},
		"run no plugin":       {[]string{"run", noPlugin}, exit.Usage, "", `line 5: plugin[0].path: "p": `},
		"run no module":       {[]string{"run", garbage}, exit.Usage, "", `line 1: plugin[0]: "p": the file is not WebAssembly`},
		"run bad":             {[]string{"run", bad}, exit.Usage, "", "server.listen"},
		"run missing keys":    {[]string{"run", noKeys}, exit.Usage, "", "server.auth.keys_file"},
		"run bad log level":   {[]string{"run", "--log-level", "loud", good}, exit.Usage, "", "--log-level"},
		"sim bad role":        {[]string{"sim", "--role", "chef"}, exit.Usage, "", "role"},
		"sim bad fault":       {[]string{"sim", "--fail", "often"}, exit.Usage, "", "RATE:KIND"},
		"demo without engine": {[]string{"demo", "--prefill", "0"}, exit.Usage, "", "--prefill"},
		"explain nobody":      {[]string{"explain", "x", "--admin", "127.0.0.1:1"}, exit.Failure, "", "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := run(tt.args...)
			if code != tt.code {
				t.Errorf("exit %d, want %d: %s", code, tt.code, stderr)
			}
			if !strings.Contains(stdout, tt.stdout) || !strings.Contains(stderr, tt.stderr) {
				t.Errorf("stdout %q, stderr %q", stdout, stderr)
			}
		})
	}
}

func TestCheckAsJSON(t *testing.T) {
	code, stdout, _ := run("check", "--json", write(t, "[server]\ncolour = 'red'\n"))
	var res checkResult
	if err := json.Unmarshal([]byte(stdout), &res); err != nil {
		t.Fatal(err)
	}
	if code != exit.Usage || res.OK || len(res.Problems) != 1 || res.Problems[0].Key != "server.colour" || res.Problems[0].Line != 2 {
		t.Errorf("exit %d, %+v", code, res)
	}
	code, stdout, _ = run("check", "--json", write(t, "[[engine]]\nname='d'\nurl='http://h:1'\nrole='decode'\nconnector='sglang'\n"))
	if err := json.Unmarshal([]byte(stdout), &res); err != nil {
		t.Fatal(err)
	}
	if code != exit.OK || !res.OK || len(res.Warnings) == 0 {
		t.Errorf("decode without prefill: exit %d, %+v", code, res)
	}
}

func TestExplain(t *testing.T) {
	admin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" || r.URL.Path != "/v1/explain/a b" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		w.Write([]byte(`{"request_id":"a b","flow":"prefill_first","policy":"least_load","outcome":"ok","status":200,` +
			`"candidates":[{"engine":"p0","rank":0,"score":null,"facts":{"role":"prefill"}}],` +
			`"legs":[{"phase":"prefill","engine":"p0","attempt":1,"start_ms":0.1,"end_ms":5}],"fallbacks":[{"what":"plan","reason":"late"}]}`))
	}))
	defer admin.Close()
	token := write(t, "secret\n")
	code, stdout, stderr := run("explain", "a b", "--admin", admin.URL, "--token-file", token)
	for _, want := range []string{"flow prefill_first", "policy least_load", "p0", "fallback: plan (late)"} {
		if code != exit.OK || !strings.Contains(stdout, want) {
			t.Fatalf("exit %d, %q is missing: %s%s", code, want, stdout, stderr)
		}
	}
	if code, _, stderr := run("explain", "other", "--admin", admin.URL, "--token-file", token); code != exit.Failure || !strings.Contains(stderr, "404") {
		t.Errorf("exit %d: %s", code, stderr)
	}
}
