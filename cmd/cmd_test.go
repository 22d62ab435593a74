package cmd

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

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
	keys := write(t, "sk-plain\n")
	plainKeys := write(t, "[server.auth]\nkeys_file = '"+keys+"'\n")
	empty := write(t, "")
	oneURL := write(t, "[[engine]]\nname = 'e'\nurl = 'http://127.0.0.1:1'\nrole = 'both'\n[[engine]]\nurl = 'http://127.0.0.1:1'\nname = 'f'\nrole = 'both'\n")
	bad := write(t, "[server]\nlisten = 'nowhere'\ncolour = 'red'\n")
	noKeys := write(t, "[server.auth]\nkeys_file = '/nonexistent/keys'\n")
	noPlugin := write(t, "[policy]\nplace = 'p'\n[[plugin]]\nname = 'p'\npath = '/nonexistent.wasm'\n")
	noEtcdKeys := write(t, "[discovery.etcd]\nendpoints = ['https://127.0.0.1:1']\nca = '/nonexistent/ca'\n")
	noList := write(t, "discovery.file.path = '/nonexistent/engines'\n")
	badList := write(t, "discovery.file.path = '"+write(t, "[[engine]]\nname = 'e'\nurl = 'http://h'\nrole = 'chef'\n")+"'\n")
	list := write(t, "discovery.file.path = '"+good+"'\n")
	const secure = "[[engine]]\nname = 'e'\nurl = 'https://127.0.0.1:1'\nrole = 'both'\n"
	noCA := write(t, secure+"ca = '/nonexistent/ca'\n")
	plainCA := write(t, secure+"ca = '"+good+"'\n")
	noRemoteCA := write(t, secure+"[[remote]]\nname = 'r'\nurl = 'https://127.0.0.1:1'\nmodel = 'm'\nca = '/nonexistent/ca'\n")
	noFleetCA := write(t, secure+"[fleet]\nlisten = '127.0.0.1:0'\n[fleet.etcd]\nendpoints = ['https://127.0.0.1:1']\nca = '/nonexistent/ca'\n")
	noCAOfList := write(t, "discovery.file.path = '"+noCA+"'\n")
	noLogFolder := write(t, secure+"[server]\naccess_log = '/nonexistent/access'\n")
	folderAsLog := write(t, secure+"[server]\naccess_log = '"+t.TempDir()+"'\n")
	noRecordingFolder := write(t, secure+"[recording]\npath = '"+good+"/trace'\n")
	garbage := write(t, "[[plugin]]\nname = 'p'\nphase = 'filter'\npath = '"+noPlugin+"'\n")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	used := l.Addr().String()
	_, usedPort, _ := net.SplitHostPort(used)
	for name, tt := range map[string]struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		"version":                      {[]string{"version"}, exit.OK, "pdproxy ", ""},
		"version as JSON":              {[]string{"version", "--json"}, exit.OK, `"version"`, ""},
		"licences":                     {[]string{"version", "--licenses"}, exit.OK, "github.com/spf13/cobra", ""},
		"help":                         {[]string{"--help"}, exit.OK, "run", ""},
		"unknown command":              {[]string{"fly"}, exit.Usage, "", `the command must be one of "admin-token", `},
		"unknown flag":                 {[]string{"check", "--fast", good}, exit.Usage, "", "--fast"},
		"--version":                    {[]string{"--version"}, exit.OK, "pdproxy ", ""},
		"ABIs":                         {[]string{"version"}, exit.OK, "(policy contract 2, proxy-wasm 0.1.0, 0.2.0, 0.2.1, go", ""},
		"check without file":           {[]string{"check"}, exit.Usage, "", "pdproxy: check: which config.toml?\nusage: pdproxy check config.toml [flags]\n"},
		"run without file":             {[]string{"run"}, exit.Usage, "", "pdproxy: run: which config.toml?\nusage: pdproxy run config.toml"},
		"run with two files":           {[]string{"run", good, bad}, exit.Usage, "", "run: unexpected argument \"" + bad + "\"\nusage:"},
		"new without name":             {[]string{"plugin", "new"}, exit.Usage, "", "plugin new: which NAME?\nusage: pdproxy plugin new NAME"},
		"test without frames":          {[]string{"plugin", "test", "m.wasm"}, exit.Usage, "", "plugin test: which FRAMES.json?"},
		"run --json":                   {[]string{"run", "--json", good}, exit.Usage, "", "--json: pdproxy run prints no result"},
		"flags first":                  {[]string{"--json", "--log-level", "debug", "version"}, exit.OK, `"policy_contract": 2`, ""},
		"keys":                         {[]string{"keys"}, exit.OK, "pdproxy keys new", ""},
		"keys new":                     {[]string{"keys", "new", "team-a"}, exit.OK, "\nline: team-a ", ""},
		"keys new as JSON":             {[]string{"keys", "new", "--json", "team-a"}, exit.OK, `"line": "team-a `, ""},
		"keys new with limits":         {[]string{"keys", "new", "team-a", "--tenant", "gold", "--class", "high", "--models", "a,b", "--rpm", "60", "--tpm", "1000", "--max", "4"}, exit.OK, " tenant=gold class=high models=a,b rpm=60 tpm=1000 max=4\n", ""},
		"keys new with a bad limit":    {[]string{"keys", "new", "team-a", "--rpm", "-1"}, exit.Usage, "", "attribute rpm: want a whole number"},
		"keys new with a bad tenant":   {[]string{"keys", "new", "team-a", "--tenant", "a b"}, exit.Usage, "", "attribute tenant: want letters"},
		"keys new bad name":            {[]string{"keys", "new", "a b"}, exit.Usage, "", `invalid name "a b"`},
		"check plain keys":             {[]string{"check", plainKeys}, exit.Usage, "", plainKeys + `:2: server.auth.keys_file: ` + keys + `: line 1 is not "NAME SHA256"`},
		"demo bad policy":              {[]string{"demo", "--place", "kvaware"}, exit.Usage, "", "did you mean kv_aware?"},
		"demo bad port":                {[]string{"demo", "--engine-port", "65534"}, exit.Usage, "", "--engine-port"},
		"completion":                   {[]string{"completion", "bash"}, exit.OK, "bash completion", ""},
		"no preset":                    {[]string{"replay", "--trace", good, "--preset", "h100"}, exit.Usage, "", `--preset: must be one of "llama70b-h100", "llama70b-a100", "deepseek-v3-h200", found "h100"`},
		"check good":                   {[]string{"check", good}, exit.OK, "ok\n", ""},
		"check bad":                    {[]string{"check", bad}, exit.Usage, "", bad + ":3: server.colour: unknown key"},
		"check missing file":           {[]string{"check", "/nonexistent.toml"}, exit.Usage, "", "nonexistent"},
		"check missing keys":           {[]string{"check", noKeys}, exit.Usage, "", "server.auth.keys_file"},
		"check no etcd CA":             {[]string{"check", noEtcdKeys}, exit.Usage, "", "discovery.etcd.ca: open /nonexistent/ca"},
		"check no list":                {[]string{"check", noList}, exit.Usage, "", "discovery.file.path: open /nonexistent/engines"},
		"check no CA":                  {[]string{"check", noCA}, exit.Usage, "", noCA + ":5: engine[0].ca (e): open /nonexistent/ca: no such file or directory"},
		"run no CA":                    {[]string{"run", noCA}, exit.Usage, "", noCA + ":5: engine[0].ca (e): open /nonexistent/ca: no such file or directory"},
		"check CA without PEM":         {[]string{"check", plainCA}, exit.Usage, "", plainCA + ":5: engine[0].ca (e): no certificate (PEM) in " + good},
		"run CA without PEM":           {[]string{"run", plainCA}, exit.Usage, "", plainCA + ":5: engine[0].ca (e): no certificate (PEM) in " + good},
		"check no remote CA":           {[]string{"check", noRemoteCA}, exit.Usage, "", noRemoteCA + ":9: remote[0].ca (r): open /nonexistent/ca"},
		"run no remote CA":             {[]string{"run", noRemoteCA}, exit.Usage, "", noRemoteCA + ":9: remote[0].ca (r): open /nonexistent/ca"},
		"check no fleet CA":            {[]string{"check", noFleetCA}, exit.Usage, "", noFleetCA + ":9: fleet.etcd.ca: open /nonexistent/ca"},
		"run no fleet CA":              {[]string{"run", noFleetCA}, exit.Usage, "", noFleetCA + ":9: fleet.etcd.ca: open /nonexistent/ca"},
		"check no CA in a list":        {[]string{"check", noCAOfList}, exit.Usage, "", noCA + ":5: engine[0].ca (e): open /nonexistent/ca"},
		"check no log folder":          {[]string{"check", noLogFolder}, exit.Usage, "", noLogFolder + ":6: server.access_log: open /nonexistent/access: no such file or directory"},
		"check a folder as log":        {[]string{"check", folderAsLog}, exit.Usage, "", folderAsLog + ":6: server.access_log: open "},
		"check no recording folder":    {[]string{"check", noRecordingFolder}, exit.Usage, "", noRecordingFolder + ":6: recording.path: open " + good + "/trace: not a directory"},
		"check strict":                 {[]string{"check", "--strict", good}, exit.OK, "ok\n", ""},
		"check without engines":        {[]string{"check", empty}, exit.OK, "ok\n", "warning: " + empty + ": engine: no engine"},
		"check strict without engines": {[]string{"check", "--strict", empty}, exit.Usage, "", "--strict: warnings: 1"},
		"check strict one URL":         {[]string{"check", "--strict", oneURL}, exit.Usage, "", oneURL + ":6: engine[1].url (f): is also the address of \"e\""},
		"check bad list":               {[]string{"check", badList}, exit.Usage, "", "pdproxy.toml:4: engine[0].role (e): must be one of"},
		"check list":                   {[]string{"check", list}, exit.OK, "ok\n", ""},
		"check no plugin":              {[]string{"check", noPlugin}, exit.Usage, "", noPlugin + ":5: plugin[0].path (p): read module: open /nonexistent.wasm"},
		"check no module":              {[]string{"check", garbage}, exit.Usage, "", garbage + ":1: plugin[0] (p): the file is not WebAssembly"},
		"run no plugin":                {[]string{"run", noPlugin}, exit.Usage, "", noPlugin + ":5: plugin[0].path (p): read module: open /nonexistent.wasm"},
		"run no module":                {[]string{"run", garbage}, exit.Usage, "", garbage + ":1: plugin[0] (p): the file is not WebAssembly"},
		"run bad":                      {[]string{"run", bad}, exit.Usage, "", "server.listen"},
		"run missing keys":             {[]string{"run", noKeys}, exit.Usage, "", "server.auth.keys_file"},
		"run bad log level":            {[]string{"run", "--log-level", "loud", good}, exit.Usage, "", "--log-level"},
		"sim bad role":                 {[]string{"sim", "--role", "chef"}, exit.Usage, "", "role"},
		"sim bad fault":                {[]string{"sim", "--fail", "often"}, exit.Usage, "", "--fail: must be one of"},
		"sim without its store":        {[]string{"sim", "--connector", "vllm-store", "--listen", "127.0.0.1:0", "--store", "/nonexistent/store"}, exit.Usage, "", "pdproxy: --store: open /nonexistent/store: no such file"},
		"demo public in use":           {[]string{"demo", "--admin", "127.0.0.1:0", "--listen", used}, exit.Failure, "", "pdproxy: --listen: listen tcp " + used + ": bind: address already in use; --listen 127.0.0.1:0 uses a free port\n"},
		"demo admin in use":            {[]string{"demo", "--listen", "127.0.0.1:0", "--admin", used}, exit.Failure, "", "pdproxy: --admin: listen tcp " + used + ": bind: address already in use; --admin 127.0.0.1:0 uses a free port\n"},
		"demo engine port in use":      {[]string{"demo", "--engine-port", usedPort}, exit.Failure, "", "bind: address already in use; without the flag the engines use free ports\n"},
		"demo bad address":             {[]string{"demo", "--listen", "nowhere"}, exit.Usage, "", "pdproxy: --listen: invalid address"},
		"demo without transfers":       {[]string{"demo", "--connector", "none"}, exit.Usage, "", "pdproxy: --connector: "},
		"demo without engine":          {[]string{"demo", "--prefill", "0"}, exit.Usage, "", "--prefill"},
		"explain nobody":               {[]string{"explain", "x", "--admin", "127.0.0.1:1"}, exit.Failure, "", "refused"},
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

// TestCheckScorers: unknown scorers and wrong parameters have their lines.
func TestCheckScorers(t *testing.T) {
	path := write(t, "[policy]\nplace = 'scores'\n[[scores]]\nname = 's'\n[[scores.scorer]]\nname = 'prefx'\n[[scores.scorer]]\nname = 'prefix'\nparams = { match_length_weight = 2 }\n"+
		"[[scores.scorer]]\nname = 'label_filter'\n[[scores.scorer]]\nname = 'queue'\n")
	code, _, stderr := run("check", path)
	for _, want := range []string{
		`:6: scores[0].scorer[0].name: no built-in scorer is named "prefx"; there are prefix, queue, `, "did you mean prefix?",
		":9: scores[0].scorer[1].params.match_length_weight: prefix: match_length_weight is 0 to 1, not 2",
		":11: scores[0].scorer[2].name: label_filter: needs the parameter label, the name of a label of engines",
	} {
		if !strings.Contains(stderr, want) {
			t.Errorf("%q is missing in\n%s", want, stderr)
		}
	}
	if code != exit.Usage {
		t.Errorf("exit %d", code)
	}
	if code, _, stderr := run("check", write(t, "[policy]\nplace = 'scores'\n")); code != exit.OK {
		t.Errorf("the usual set: exit %d, %s", code, stderr)
	}
}

// One run reports the problems of the text, of the files and of the plugins, each with its
// line.
func TestCheckAll(t *testing.T) {
	module := write(t, "no module")
	path := write(t, "[server]\ncolour = 'red'\nauth.keys_file = '"+write(t, "plain-key\n")+"'\n[admin]\ntoken_file = '/nonexistent/token'\n"+
		"[tokens.files]\n'a.b' = '/nonexistent/tokenizer'\n"+
		"[policy.params.kv_aware]\npatience = -1\nnope = 1\nlabel_micros = { zone = 1, 'a/b' = -1 }\n"+
		"[[plugin]]\nname = 'x'\npath = '"+module+"'\n[[plugin]]\nname = 'y'\npath = '/nonexistent.wasm'\n")
	code, stdout, stderr := run("check", "--json", path)
	var res struct {
		Problems []struct {
			File, Key, Name, Message string
			Line                     int
		}
	}
	if err := json.Unmarshal([]byte(stdout), &res); err != nil {
		t.Fatal(err, stderr)
	}
	var got []string
	for _, p := range res.Problems {
		got = append(got, fmt.Sprint(p.Line, " ", p.Key))
		if p.File != path || p.Message == "" {
			t.Errorf("%+v", p)
		}
	}
	want := []string{"2 server.colour", "3 server.auth.keys_file", "5 admin.token_file", `7 tokens.files."a.b"`,
		"9 policy.params.kv_aware.patience", "10 policy.params.kv_aware.nope", `11 policy.params.kv_aware.label_micros."a/b"`, "12 plugin[0]", "17 plugin[1].path"}
	if code != exit.Usage || !slices.Equal(got, want) {
		t.Errorf("exit %d, problems %q, want %q", code, got, want)
	}
	if !strings.Contains(stdout, `"line": 2`) || strings.Contains(stdout, `"Line"`) {
		t.Errorf("members of problems are not lower case: %s", stdout)
	}
}

// TestCheckBuiltinFilter: the text of a built-in filter is checked with the configuration, and the
// problem suggests the rule that is probably meant.
func TestCheckBuiltinFilter(t *testing.T) {
	for text, want := range map[string]string{
		"rules = safe, env_date": "",
		"rules = billing_heder":  `plugin[0].config (p): line 1: there is no rule "billing_heder"; there are safe, none, billing_header, token_budget, env_date, git_status, clock, tool_order, did you mean billing_header?`,
	} {
		path := write(t, "[[plugin]]\nname = 'p'\npath = 'builtin:stable_prefix'\nphase = 'filter'\nconfig = '"+text+"'\n[[engine]]\nname='e'\nurl='http://h:1'\nrole='both'\nconnector='none'\n")
		code, _, stderr := run("check", path)
		if (code == exit.OK) != (want == "") || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit %d: %s", text, code, stderr)
		}
	}
}

// Every command shows an example, and lists only flags that it uses.
func TestHelp(t *testing.T) {
	code, stdout, _ := run("--help")
	if code != exit.OK || !strings.Contains(stdout, "Start here: pdproxy demo") || !strings.Contains(stdout, "completion") {
		t.Errorf("exit %d: %s", code, stdout)
	}
	var commands func(c *cobra.Command)
	commands = func(c *cobra.Command) {
		if c.Example == "" && !c.Hidden {
			t.Errorf("%s has no example", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			commands(sub)
		}
	}
	commands((&app{}).root())
	for _, tt := range []struct {
		command   string
		json, log bool
	}{{"run", false, true}, {"check", true, true}, {"demo", true, true}, {"sim", true, true}, {"version", true, false}, {"bench", true, false}} {
		_, stdout, _ := run(tt.command, "--help")
		if strings.Contains(stdout, "--json ") != tt.json || strings.Contains(stdout, "--log-format ") != tt.log {
			t.Errorf("%s --help: --json %v, --log-format %v wanted:\n%s", tt.command, tt.json, tt.log, stdout)
		}
	}
}
