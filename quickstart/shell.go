package quickstart

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// jsonText is the text of a JSON value.
type jsonText string

// MarshalJSON returns the text itself, so that objects nest.
func (t jsonText) MarshalJSON() ([]byte, error) { return []byte(t), nil }

// object writes a JSON object with the given names and values, in this order.
func object(pairs ...any) jsonText {
	var members []string
	for pair := range slices.Chunk(pairs, 2) {
		value, err := json.Marshal(pair[1])
		if err != nil {
			panic(err) // the table holds only texts, numbers and lists of them
		}
		members = append(members, strconv.Quote(pair[0].(string))+":"+string(value))
	}
	return jsonText("{" + strings.Join(members, ",") + "}")
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// QuoteShell writes s as one word of a POSIX shell.
func QuoteShell(s string) string {
	if plainWord.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// lines splits a command into lines: the program with its operands, then one option with
// its value on each line.
func lines(command []string) []string {
	var all []string
	for i, arg := range command {
		word := QuoteShell(arg)
		switch {
		case i == 0 || strings.HasPrefix(arg, "--"):
			all = append(all, word)
		default:
			all[len(all)-1] += " " + word
		}
	}
	return all
}

// shell returns the command of e with its environment, as one command of a shell. prefix
// stands before the program, suffix after the last argument.
func (e *Engine) shell(prefix, suffix string) string {
	var all []string
	for _, v := range e.Env {
		name, value, _ := strings.Cut(v, "=")
		all = append(all, name+"="+QuoteShell(value))
	}
	command := lines(e.Command)
	command[0] = prefix + command[0]
	all = append(all, command...)
	return strings.Join(all, " \\\n  ") + suffix + "\n"
}

// shell returns the command of s.
func (s *Service) shell() string { return strings.Join(lines(s.Command), " \\\n  ") + "\n" }

// Output returns the files of the deployment for a folder: config.toml, the files of the
// engines, one script for each process, and the same processes for Docker Compose and
// Kubernetes. The scripts pass their arguments on to the engine.
func (p *Plan) Output() []File {
	out := append([]File{{"config.toml", p.Config}}, p.Files...)
	out = append(out, File{composeFile, p.Compose()}, File{kubernetesFile, p.Kubernetes()})
	script := func(name, host, command string) {
		out = append(out, File{name + ".sh", fmt.Sprintf("#!/usr/bin/env bash\n# %s of the quickstart %s, for the host %s.\nset -euo pipefail\ncd \"$(dirname \"$0\")\"\n%s", name, p.Name, host, command)})
	}
	for i := range p.Services {
		s := &p.Services[i]
		script(s.Name, s.Host, s.shell())
	}
	for i := range p.Engines {
		e := &p.Engines[i]
		script(e.Name, e.Host, e.shell("exec ", ` "$@"`))
	}
	return out
}

// Text returns the deployment for a terminal: comments, commands, and files as here
// documents. Each part can be pasted into a shell.
func (p *Plan) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# %s: %s. Checked against %s.\n", p.Name, p.Title, p.Release)
	fmt.Fprint(&b, "# With --out DIR, the same command writes the configuration and a script for each process to files.\n")
	fmt.Fprintf(&b, "\n# Install on each host of the engines:\n%s\n", strings.Join(p.Install, "\n"))
	for _, f := range p.Files {
		fmt.Fprintf(&b, "\n# The file %s, on each host of the engines:\n%s", f.Name, heredoc(f))
	}
	for i := range p.Services {
		fmt.Fprintf(&b, "\n# %s, on %s:\n%s", p.Services[i].Name, p.Services[i].Host, p.Services[i].shell())
	}
	for i := range p.Engines {
		fmt.Fprintf(&b, "\n# %s, on %s:\n%s", p.Engines[i].Name, p.Engines[i].Host, p.Engines[i].shell("", ""))
	}
	fmt.Fprintf(&b, "\n# The proxy:\n%spdproxy check config.toml\npdproxy run config.toml\n", heredoc(File{"config.toml", p.Config}))
	fmt.Fprintf(&b, "\n# Smoke test, when the engines are ready. The answer has the line \"X-Pdproxy-Flow: %s\".\n%s", p.Flow, p.SmokeTest)
	fmt.Fprintf(&b, "\n# The KV has moved if this value has risen:\n%s", p.Evidence)
	return b.String()
}

// heredoc returns a command that writes f.
func heredoc(f File) string { return fmt.Sprintf("cat >%s <<'EOF'\n%sEOF\n", f.Name, f.Text) }

// smokeTest returns commands that send one long prompt. A short prompt fills no whole
// block or chunk, so its KV does not move.
func (p *Plan) smokeTest() string {
	body := object("model", p.Model, "max_tokens", 16, "prompt", "PROMPT")
	quoted := strings.Replace(QuoteShell(string(body)), "PROMPT", `'"$prompt"'`, 1)
	return fmt.Sprintf("prompt=$(printf 'The quick brown fox jumps over the lazy dog. %%.0s' {1..60})\ncurl -sSi http://127.0.0.1:%d/v1/completions -H 'Content-Type: application/json' \\\n  -d %s\n", proxyPort, quoted)
}

// evidence returns a command that shows the engine's own count of moved KV.
func (p *Plan) evidence() string {
	ev := p.guide.evidence
	e := &p.Engines[slices.IndexFunc(p.Engines, func(e Engine) bool { return e.Role == ev.role })]
	return fmt.Sprintf("curl -s http://%s%s | grep '^%s'\n", e.address(e.Port), ev.path, ev.metric)
}
