package clients

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// browser is a headless Chromium, driven by the DevTools protocol over a pipe:
// each message is JSON that ends with a zero byte. One goroutine uses it.
type browser struct {
	in      *os.File
	out     *bufio.Reader
	last    int            // id of the last command
	target  string         // the page
	session string         // attached to it
	seen    map[string]int // events, by name
}

// startChromium opens an empty page. Although its authority is unknown, the
// certificate with that SPKI hash is accepted, and no other. HTTP/3 is used for
// addr from the first request: without the flag, Chromium would first use
// HTTP/2.
func startChromium(t *testing.T, addr string, spki [32]byte) *browser {
	t.Helper()
	profile, err := os.MkdirTemp(filepath.Join(buildDir), "profile-")
	if err != nil {
		t.Fatal(err)
	}
	if profile, err = filepath.Abs(profile); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-breakpad", "--no-proxy-server",
		"--user-data-dir="+profile, "--remote-debugging-pipe",
		"--origin-to-force-quic-on="+addr,
		"--ignore-certificate-errors-spki-list="+base64.StdEncoding.EncodeToString(spki[:]),
		"about:blank")
	cmd.Env = append(os.Environ(), "HOME="+profile)
	var stderr logBuffer
	cmd.Stderr = &stderr
	theirIn, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, theirOut, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.ExtraFiles = []*os.File{theirIn, theirOut} // descriptors 3 and 4
	if err := cmd.Start(); err != nil {
		t.Fatalf("Chromium does not start (run.sh installs it): %v", err)
	}
	theirIn.Close()
	theirOut.Close()
	b := &browser{in: in, out: bufio.NewReader(out), seen: make(map[string]int)}
	hung := time.AfterFunc(3*patience, func() { cmd.Process.Kill() })
	t.Cleanup(func() {
		in.Close() // the end of its pipe ends the browser
		out.Close()
		cmd.Wait()
		hung.Stop()
		os.RemoveAll(profile) // a child may still write; the next run removes it
		if t.Failed() {
			t.Logf("output of Chromium:\n%s", lastLines(stderr.String(), 20))
		}
	})
	var target struct{ TargetID, SessionID string }
	b.call(t, "Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	b.call(t, "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &target)
	b.target, b.session = target.TargetID, target.SessionID
	b.call(t, "Page.enable", nil, nil)
	return b
}

// call sends a command and reads until its answer. It counts other events by name.
func (b *browser) call(t *testing.T, method string, params, result any) {
	t.Helper()
	b.last++
	command := map[string]any{"id": b.last, "method": method}
	if params != nil {
		command["params"] = params
	}
	if b.session != "" {
		command["sessionId"] = b.session
	}
	text, err := json.Marshal(command)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.in.Write(append(text, 0)); err != nil {
		t.Fatalf("%s: b.in.Write(append(text, 0)) = %v, want nil", method, err)
	}
	for {
		m := b.read(t, method)
		if m.ID != b.last {
			continue
		}
		if m.Error != nil {
			t.Fatalf("%s: %s", method, m.Error)
		}
		if result != nil {
			if err := json.Unmarshal(m.Result, result); err != nil {
				t.Fatalf("%s: json.Unmarshal(m.Result, result) = %v, want nil", method, err)
			}
		}
		return
	}
}

type devtoolsMessage struct {
	ID            int
	Method        string
	Result, Error json.RawMessage
}

func (b *browser) read(t *testing.T, what string) (m devtoolsMessage) {
	t.Helper()
	text, err := b.out.ReadBytes(0)
	if err == nil {
		err = json.Unmarshal(bytes.TrimSuffix(text, []byte{0}), &m)
	}
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	b.seen[m.Method]++
	return m
}

// navigate opens a page and waits until it has loaded.
func (b *browser) navigate(t *testing.T, url string) {
	t.Helper()
	loads := b.seen["Page.loadEventFired"]
	var result struct{ ErrorText string }
	b.call(t, "Page.navigate", map[string]any{"url": url}, &result)
	if result.ErrorText != "" {
		t.Fatalf("open %s: %s", url, result.ErrorText)
	}
	for b.seen["Page.loadEventFired"] == loads {
		b.read(t, "load "+url)
	}
}

// eval runs the body of an async function in the page; result receives the
// returned value.
func (b *browser) eval(t *testing.T, script string, result any) {
	t.Helper()
	var answer struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails json.RawMessage
	}
	b.call(t, "Runtime.evaluate", map[string]any{
		"expression": "(async () => {" + script + "})()", "awaitPromise": true, "returnByValue": true,
	}, &answer)
	if answer.ExceptionDetails != nil {
		t.Fatalf("the page threw: %.1000s", answer.ExceptionDetails)
	}
	if err := json.Unmarshal(answer.Result.Value, result); err != nil {
		t.Fatalf("the page returned %.300s: %v", answer.Result.Value, err)
	}
}

// pageScript defines functions in the page. send makes one request, reads its
// answer as it arrives, and returns the protocol.
const pageScript = `
globalThis.protocolOf = async url => {
  for (;;) {
    const entry = performance.getEntriesByName(url)[0]
    if (entry) return entry.nextHopProtocol
    await new Promise(resolve => setTimeout(resolve, 10))
  }
}
globalThis.send = async (path, body, each = () => {}, signal) => {
  const r = await fetch(path, {method: 'POST', headers: {'Content-Type': 'application/json'}, body, signal})
  const reader = r.body.getReader(), decoder = new TextDecoder()
  let text = '', reads = 0
  for (;;) {
    const {done, value} = await reader.read()
    if (done) break
    text += decoder.decode(value, {stream: true})
    await each(++reads)
  }
  return {status: r.status, type: r.headers.get('content-type'), text, reads, protocol: await protocolOf(r.url)}
}
return true`

// fetched is the result of send.
type fetched struct {
	Status   int
	Type     string
	Text     string
	Reads    int
	Protocol string
}

// TestChromium fetches from a page of the proxy's own origin over HTTP/3.
func TestChromium(t *testing.T) {
	ca := newAuthority(t, "ca")
	cert := ca.issue(t, "server")
	f := startProxy(t, startFleet(t, "vllm-nixl"), setup{http3: true, tls: fmt.Sprintf("cert = %q\nkey = %q", cert.certFile, cert.key)})
	b := startChromium(t, f.addr(), sha256.Sum256(cert.cert.RawSubjectPublicKeyInfo))
	b.navigate(t, f.URL+"/v1/models")
	var ok bool
	b.eval(t, pageScript, &ok)
	p := &page{f, b}
	t.Run("page", p.page)
	t.Run("unary", p.unary)
	t.Run("stream", p.stream)
	t.Run("parallel streams", p.parallel)
	t.Run("error", p.error)
	t.Run("aborted stream", p.abort)
	t.Run("closed tab", p.closeTab) // the last one, because no page remains
}

// page is the browser on a page of the proxy.
type page struct {
	*front
	b *browser
}

// js returns text as a JavaScript literal.
func js(text string) string {
	b, _ := json.Marshal(text)
	return string(b)
}

func (p *page) page(t *testing.T) {
	var protocol, text string
	p.b.eval(t, `return performance.getEntriesByType('navigation')[0].nextHopProtocol`, &protocol)
	p.b.eval(t, `return document.body.innerText`, &text)
	if protocol != "h3" || !strings.Contains(text, `"sim"`) {
		t.Errorf("protocol %q, text %q", protocol, text)
	}
}

func (p *page) unary(t *testing.T) {
	var got fetched
	p.b.eval(t, `return send('/v1/chat/completions?unary', `+js(chatBody(12, false))+`)`, &got)
	text, err := chatText([]byte(got.Text))
	if want := p.aloneText(t, 12); err != nil || text != want || got.Status != 200 || got.Protocol != "h3" {
		t.Errorf("%+v, text %q, want %q as from one engine alone, error %v", got, text, want, err)
	}
}

func (p *page) stream(t *testing.T) {
	var got fetched
	p.b.eval(t, `return send('/v1/chat/completions?stream', `+js(chatBody(24, true))+`)`, &got)
	p.wantStream(t, got, p.aloneText(t, 24))
	if got.Type != "text/event-stream; charset=utf-8" && got.Type != "text/event-stream" {
		t.Errorf("content type %q", got.Type)
	}
}

func (p *page) wantStream(t *testing.T, got fetched, want string) {
	t.Helper()
	text, err := streamText(strings.NewReader(got.Text), ignore)
	if err != nil || text != want || got.Status != 200 || got.Protocol != "h3" {
		t.Errorf("got status %d, protocol %q, text %q, want %q as from one engine alone, error %v", got.Status, got.Protocol, text, want, err)
	}
}

func (p *page) parallel(t *testing.T) {
	var got []fetched
	p.b.eval(t, `return Promise.all([...Array(12).keys()].map(i => send('/v1/chat/completions?parallel=' + i, `+js(chatBody(30, true))+`)))`, &got)
	want := p.aloneText(t, 30)
	if len(got) != 12 {
		t.Fatalf("got %d answers", len(got))
	}
	for _, one := range got {
		p.wantStream(t, one, want)
	}
}

func (p *page) error(t *testing.T) {
	var got fetched
	p.b.eval(t, `return send('/v1/chat/completions?error', `+js(strings.Replace(chatBody(2, true), "sim", "nobody", 1))+`)`, &got)
	if got.Status != 404 || !strings.Contains(got.Text, `"model_not_found"`) || got.Protocol != "h3" {
		t.Errorf("%+v", got)
	}
}

// abort ends a fetch in the middle of a stream that has thousands of tokens
// left. The events so far arrived while the engine was computing.
func (p *page) abort(t *testing.T) {
	p.waitIdle(t)
	before := p.metric(t, "pdproxy_exchanges_total", `outcome="cancelled"`)
	var name string
	p.b.eval(t, `
const stop = new AbortController()
return send('/v1/chat/completions?abort', `+js(chatBody(5000, true))+`, n => n == 4 && stop.abort(), stop.signal).then(() => 'whole', e => e.name)`, &name)
	if name != "AbortError" {
		t.Errorf("the fetch ended as %q", name)
	}
	p.waitIdle(t)
	if n := p.metric(t, "pdproxy_exchanges_total", `outcome="cancelled"`) - before; n != 1 {
		t.Errorf("got %v exchanges counted as cancelled, want 1", n)
	}
}

// closeTab closes the page while a stream runs.
func (p *page) closeTab(t *testing.T) {
	var ok bool
	p.b.eval(t, `
send('/v1/chat/completions?tab', `+js(chatBody(5000, true))+`, n => n == 4 && globalThis.begun()).catch(() => {})
return new Promise(resolve => { globalThis.begun = () => resolve(true) })`, &ok)
	if n := p.engines(t).Running; n != 1 {
		t.Errorf("%d sequences run in the middle of one stream", n)
	}
	p.b.call(t, "Target.closeTarget", map[string]any{"targetId": p.b.target}, nil)
	p.waitIdle(t)
}
