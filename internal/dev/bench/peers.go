package main

import (
	"context"
	"crypto/tls"
	"embed"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"text/template"
	"time"
)

//go:embed peers
var peerFiles embed.FS

// Kinds of proxy. A kind with "-pd" splits each request into prefill and
// decode; the others pass it to one engine.
const (
	direct        = "direct" // no proxy
	nginx         = "nginx"
	reverse       = "reverseproxy"
	aiohttp       = "aiohttp"
	aiohttpPD     = "aiohttp-pd"
	fastapi       = "fastapi"
	fastapiPD     = "fastapi-pd"
	pdproxy       = "pdproxy"
	pdproxyTLS    = "pdproxy-tls" // TLS on TCP, and HTTP/3
	pdproxyPD     = "pdproxy-pd"
	pdproxyNative = "pdproxy-pd-native" // built-in policies compiled in
)

// kinds are all kinds in the order of a round. Kinds that are compared most
// closely are neighbours, so that the same disturbance affects both.
var kinds = []string{direct, nginx, pdproxy, reverse, aiohttp, fastapi, pdproxyTLS, pdproxyNative, pdproxyPD, aiohttpPD, fastapiPD}

func isPD(kind string) bool { return strings.Contains(kind, "-pd") }

// programs holds the paths of the kinds' programs, and facts about the machine.
type programs struct {
	self, pdproxy, python string
	dir                   string // for configurations and logs
	core                  int    // of the proxy under test
	descriptors           int
}

// probe returns the version of the program of a kind, or the reason why it
// cannot run.
func (p *programs) probe(kind string) (program, version string, err error) {
	switch kind {
	case nginx:
		out, err := exec.Command("nginx", "-v").CombinedOutput()
		return nginx, strings.TrimSpace(strings.TrimPrefix(string(out), "nginx version:")), err
	case aiohttp, aiohttpPD:
		return p.modules(aiohttp, "aiohttp")
	case fastapi, fastapiPD:
		return p.modules(fastapi, "fastapi", "httpx", "uvicorn")
	case pdproxy, pdproxyTLS, pdproxyPD, pdproxyNative:
		out, err := exec.Command(p.pdproxy, "version").Output()
		return pdproxy, strings.Join(strings.Fields(string(out)), " "), err
	}
	return "", "", nil // this program
}

func (p *programs) modules(program string, names ...string) (string, string, error) {
	script := "import sys, " + strings.Join(names, ", ") + "\nprint('python', sys.version.split()[0]"
	for _, name := range names {
		script += fmt.Sprintf(", '%s', %s.__version__", name, name)
	}
	out, err := exec.Command(p.python, "-c", script+")").Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		lines := strings.Split(strings.TrimSpace(string(exit.Stderr)), "\n")
		err = errors.New(lines[len(lines)-1])
	}
	return program, strings.TrimSpace(string(out)), err
}

// start runs a kind in front of the upstream address and waits until it serves.
func (p *programs) start(ctx context.Context, kind, upstream string) (*process, error) {
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	argv, err := p.commandLine(kind, addr, upstream)
	if err != nil {
		return nil, err
	}
	proc, err := launch(ctx, p.dir, kind, p.core, argv...)
	if err != nil {
		return nil, err
	}
	proc.addr = addr
	ready := func() error { return accepts(addr) }
	if argv[0] == p.pdproxy {
		ready = func() error { return healthy(ctx, kind, addr) }
	}
	if err := proc.await(ready); err != nil {
		proc.stop()
		return nil, fmt.Errorf("%s: %w", kind, err)
	}
	return proc, nil
}

func (p *programs) commandLine(kind, addr, upstream string) ([]string, error) {
	mode := "pass"
	if isPD(kind) {
		mode = "pd"
	}
	switch kind {
	case nginx:
		conf, err := p.nginxConfig(addr, upstream)
		return []string{"nginx", "-e", "stderr", "-c", conf, "-g", "daemon off;"}, err
	case reverse:
		return []string{p.self, "reverse", "-listen", addr, "-upstream", upstream}, nil
	case aiohttp, aiohttpPD:
		script, err := p.unpack("aiohttp_proxy.py")
		return []string{p.python, script, addr, upstream, mode}, err
	case fastapi, fastapiPD:
		script, err := p.unpack("fastapi_proxy.py")
		return []string{p.python, script, addr, upstream, mode}, err
	}
	conf, err := p.pdproxyConfig(kind, addr, upstream)
	return []string{p.pdproxy, "run", conf}, err
}

func (p *programs) unpack(name string) (path string, err error) {
	text, err := peerFiles.ReadFile("peers/" + name)
	if err != nil {
		return "", err
	}
	path = filepath.Join(p.dir, name)
	return path, os.WriteFile(path, text, 0o600)
}

func (p *programs) nginxConfig(addr, upstream string) (path string, err error) {
	t, err := template.ParseFS(peerFiles, "peers/nginx.conf")
	if err != nil {
		return "", err
	}
	var text strings.Builder
	err = t.Execute(&text, map[string]any{
		"Dir": p.dir, "Listen": addr, "Upstream": upstream, "Workers": 1,
		"Descriptors": p.descriptors, "Connections": p.descriptors - 10,
	})
	if err != nil {
		return "", err
	}
	path = filepath.Join(p.dir, "nginx.conf")
	return path, os.WriteFile(path, []byte(text.String()), 0o600)
}

// pdproxyConfig uses the defaults wherever possible.
func (p *programs) pdproxyConfig(kind, addr, upstream string) (path string, err error) {
	admin, err := freeAddr()
	if err != nil {
		return "", err
	}
	var text strings.Builder
	fmt.Fprintf(&text, "[server]\nlisten = %q\ndrain_timeout = \"1s\"\n", addr)
	if kind == pdproxyTLS {
		fmt.Fprintf(&text, "http3 = %q\n[server.tls]\nself_signed = true\n", addr)
	}
	fmt.Fprintf(&text, "[admin]\nlisten = %q\n", admin)
	// All load comes from one address, as behind a gateway.
	text.WriteString("[limits]\nper_client = 0\nmax_connections_per_address = -1\n")
	if kind == pdproxyNative {
		text.WriteString("[policy]\nruntime = \"native\"\n")
	}
	engine := func(name, role, connector string) {
		fmt.Fprintf(&text, "[[engine]]\nname = %q\nurl = \"http://%s\"\nrole = %q\nconnector = %q\n", name, upstream, role, connector)
	}
	if isPD(kind) {
		engine("p0", "prefill", "vllm-nixl")
		engine("d0", "decode", "vllm-nixl")
	} else {
		engine("e0", "both", "none")
	}
	path = filepath.Join(p.dir, kind+".toml")
	return path, os.WriteFile(path, []byte(text.String()), 0o600)
}

// healthy reports whether pdproxy could serve a request now.
func healthy(ctx context.Context, kind, addr string) error {
	base := "http://" + addr
	if kind == pdproxyTLS {
		base = "https://" + addr
	}
	c := http.Client{
		Timeout: time.Second,
		// The certificate is made at start.
		Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/health", nil)
	if err != nil {
		return err
	}
	answer, err := c.Do(r)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("GET /health: %s", answer.Status)
	}
	return nil
}

// reverseCommand serves Go's stock reverse proxy, with the settings that a
// stream proxy needs: many idle connections, a flush after every read.
func reverseCommand(args []string) error {
	fs := flag.NewFlagSet("reverse", flag.ContinueOnError)
	listen := fs.String("listen", "127.0.0.1:9100", "`address`")
	upstream := fs.String("upstream", "127.0.0.1:9000", "`address`")
	if err := fs.Parse(args); err != nil {
		return err
	}
	to := &url.URL{Scheme: "http", Host: *upstream}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(to) },
		Transport:     &http.Transport{MaxIdleConnsPerHost: 12000, DisableCompression: true},
		FlushInterval: -1,
	}
	return http.ListenAndServe(*listen, proxy)
}
