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
	ownEngines    = "own engines"       // a peer that does not use the backend
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
	return nginxFile(p.dir, addr, upstream, 1, p.descriptors)
}

func nginxFile(dir, addr, upstream string, workers, descriptors int) (path string, err error) {
	return fill(dir, "nginx.conf", map[string]any{
		"Dir": dir, "Listen": addr, "Upstream": upstream, "Workers": workers,
		"Descriptors": descriptors, "Connections": descriptors - 10,
	})
}

// fill writes a file of the folder peers, with its values, into dir.
func fill(dir, name string, values any) (path string, err error) {
	t, err := template.ParseFS(peerFiles, "peers/"+name)
	if err != nil {
		return "", err
	}
	var text strings.Builder
	if err := t.Execute(&text, values); err != nil {
		return "", err
	}
	path = filepath.Join(dir, name)
	return path, os.WriteFile(path, []byte(text.String()), 0o600)
}

func (p *programs) pdproxyConfig(kind, addr, upstream string) (path string, err error) {
	more := ""
	if kind == pdproxyTLS {
		more = fmt.Sprintf("http3 = %q\n[server.tls]\nself_signed = true\n", addr)
	}
	if kind == pdproxyNative {
		more = "[policy]\nruntime = \"native\"\n"
	}
	if isPD(kind) {
		more += engineEntry("p0", upstream, "prefill", "vllm-nixl") + engineEntry("d0", upstream, "decode", "vllm-nixl")
	} else {
		more += engineEntry("e0", upstream, "both", "none")
	}
	return pdproxyFile(p.dir, kind, addr, more)
}

// pdproxyFile writes a configuration with the defaults wherever possible. more begins in the
// section server.
func pdproxyFile(dir, name, addr, more string) (path string, err error) {
	admin, err := freeAddr()
	if err != nil {
		return "", err
	}
	// All load comes from one address, as behind a gateway.
	text := fmt.Sprintf("[admin]\nlisten = %q\n[limits]\nper_client = 0\nmax_connections_per_address = -1\n"+
		"[server]\nlisten = %q\ndrain_timeout = \"1s\"\n%s", admin, addr, more)
	path = filepath.Join(dir, name+".toml")
	return path, os.WriteFile(path, []byte(text), 0o600)
}

// engineEntry is the entry of an engine in a configuration.
func engineEntry(name, addr, role, connector string) string {
	return fmt.Sprintf("[[engine]]\nname = %q\nurl = \"http://%s\"\nrole = %q\nconnector = %q\n", name, addr, role, connector)
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
