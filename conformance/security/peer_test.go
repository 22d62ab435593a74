package security

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

const (
	fleetToken = "fleet-token-of-the-test"
	engineKey  = "ENGINE-API-KEY-SECRET"
)

// twoHosts are a coordinator's host and a worker's host, and the attacker's relay
// between them.
type twoHosts struct {
	coordinator, worker *proxyProcess
	engine              *fakeEngine
	listen              string // fleet.listen
	relay               *relay
}

// newTwoHosts starts both. Only the coordinator's host knows the engine and its key.
func newTwoHosts(t *testing.T) *twoHosts {
	t.Helper()
	h := &twoHosts{engine: newFakeEngine(t), listen: testbed.FreeAddr(t)}
	dir := t.TempDir()
	token, key := filepath.Join(dir, "token"), filepath.Join(dir, "key")
	write(t, token, fleetToken+"\n")
	write(t, key, engineKey+"\n")
	h.coordinator = startProxy(t, setup{
		fleet:    fmt.Sprintf("workers = 1\nlisten = %q\ntoken_file = %q\n", h.listen, token),
		sections: h.engine.section("both", "none", fmt.Sprintf("api_key_file = %q", key)),
	})
	h.relay = newRelay(t, h.listen)
	workers := setup{fleet: fmt.Sprintf("workers = 1\ncoordinator = %q\ntoken_file = %q\n", h.relay.addr(), token)}
	h.worker = prepare(t, workers) // a worker has no admin address of its own: the coordinator serves all
	h.worker.run(workers)
	h.worker.await("the worker serves through the relay", func() bool {
		c := h.worker.client(1, "127.0.0.1")
		defer c.close()
		return c.ask("through the relay", false) == nil
	})
	return h
}

// relay is an attacker between two hosts: it records the traffic and may change
// it.
type relay struct {
	listener net.Listener
	to       string
	wg       sync.WaitGroup

	mu     sync.Mutex
	passed bytes.Buffer          // of both directions
	before int                   // bytes that had passed at the last change
	change func(b []byte) []byte // nil: nothing is changed
	conns  map[net.Conn]bool     // open connections, of both sides
}

func newRelay(t *testing.T, to string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{listener: l, to: to, conns: map[net.Conn]bool{}}
	r.wg.Go(r.accept)
	t.Cleanup(func() {
		l.Close()
		r.cut()
		r.wg.Wait()
	})
	return r
}

func (r *relay) addr() string { return r.listener.Addr().String() }

// cut ends all connections; the peers may come again.
func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		c.Close()
	}
}

// corrupt sets the change and cuts, so that everything is sent anew.
func (r *relay) corrupt(change func([]byte) []byte) {
	r.mu.Lock()
	r.change, r.before = change, r.passed.Len()
	r.mu.Unlock()
	r.cut()
}

// used waits until the worker has connected again, and both sides have sent some bytes.
func (r *relay) used(t *testing.T) {
	t.Helper()
	testbed.Eventually(t, "the worker connects again", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.passed.Len() > r.before+1000
	})
}

func (r *relay) saw(text string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bytes.Contains(r.passed.Bytes(), []byte(text))
}

func (r *relay) accept() {
	for {
		near, err := r.listener.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", r.to)
		if err != nil {
			near.Close()
			continue
		}
		r.mu.Lock()
		r.conns[near], r.conns[far] = true, true
		r.mu.Unlock()
		r.wg.Go(func() { r.copy(near, far) })
		r.wg.Go(func() { r.copy(far, near) })
	}
}

func (r *relay) copy(to, from net.Conn) {
	piece := make([]byte, 1<<20)
	for {
		n, err := from.Read(piece)
		r.mu.Lock()
		out := piece[:n]
		r.passed.Write(out)
		if r.change != nil {
			out = r.change(out)
		}
		r.mu.Unlock()
		if _, werr := to.Write(out); err != nil || werr != nil {
			break
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range []net.Conn{to, from} {
		c.Close()
		delete(r.conns, c)
	}
}

// TestRelayedLink: the relay sees no key and no member, and cannot redirect the
// worker's prompts. The worker serves through a relay that changes nothing.
func TestRelayedLink(t *testing.T) {
	t.Parallel()
	h, thief := newTwoHosts(t), newFakeEngine(t)
	for _, r := range h.engine.with("through the relay") {
		if got := r.values("Authorization"); len(got) != 1 || got[0] != "Bearer "+engineKey {
			t.Errorf("the engine received the keys %q", got)
		}
	}
	for _, secret := range []string{engineKey, fleetToken, h.engine.listener.Addr().String()} {
		if h.relay.saw(secret) {
			t.Errorf("secret %q crossed the link unencrypted", secret)
		}
	}
	from, to := []byte(h.engine.listener.Addr().String()), []byte(thief.listener.Addr().String())
	if len(from) != len(to) {
		t.Fatalf("the addresses %s and %s differ in length", from, to)
	}
	h.relay.corrupt(func(b []byte) []byte { return bytes.ReplaceAll(b, from, to) })
	h.relay.used(t)
	askSome(h, "a private prompt")
	n := 0
	h.relay.corrupt(func(b []byte) []byte { // one bit of some pieces
		if n++; len(b) > 100 && n%3 == 0 {
			b = bytes.Clone(b)
			b[len(b)/2] ^= 1
		}
		return b
	})
	h.relay.used(t)
	askSome(h, "a private prompt")
	if stolen := thief.with(""); len(stolen) > 0 {
		t.Errorf("the relay diverted %d requests, the first with %q: %s", len(stolen), stolen[0].values("Authorization"), stolen[0].body)
	}
	h.relay.corrupt(nil)
	h.worker.serves("after the attack on the link")
	h.coordinator.serves("after the attack on the link")
}

// askSome sends requests to the worker; a wrong answer is no failure while the
// link is attacked.
func askSome(h *twoHosts, prompt string) {
	c := h.worker.client(1, "127.0.0.1")
	defer c.close()
	for range 5 {
		c.ask(prompt, false)
	}
}

// strangers are what hosts without the token send to fleet.listen.
func strangers() map[string]string {
	nonce := strings.Repeat("n", 16)
	return map[string]string{
		"silent":         "",
		"old greeting":   "\x00pdlink\x02" + nonce,
		"wrong proof":    "\x00pdlink\x02" + nonce + "\x00\x00" + strings.Repeat("x", 32),
		"garbage":        strings.Repeat("\xff\x00garbage\n", 2000),
		"half a TLS":     "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
		"TLS of garbage": "\x16\x03\x01\x40\x00" + strings.Repeat("\x01", 0x4000),
		"large length":   "\x00pdlink\xff\xff\xff\xff\xff\xff\xff\xff" + strings.Repeat("\xff", 1000),
		"HTTP":           "POST /select HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
		"HTTP/2":         "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
	}
}

// TestStrangersAtFleetListen: many hosts without the token connect. None gets anything
// by which the token can be guessed, the log stays short, and the fleet works.
func TestStrangersAtFleetListen(t *testing.T) {
	t.Parallel()
	h := newTwoHosts(t)
	a := attacker{from: hostile, to: h.listen}
	before, refusals := h.coordinator.resources(), strings.Count(h.coordinator.logged(), "\n")
	var held holder
	for name, greeting := range strangers() {
		guessable(t, a, name, greeting)
		testbed.Parallel(times(40, 500), 16, func(int) {
			c, err := a.dial("")
			if err != nil {
				return
			}
			held.add(func() { c.Close() })
			c.SetWriteDeadline(time.Now().Add(2 * time.Second))
			io.WriteString(c, greeting)
		})
	}
	h.worker.serves("beside strangers")
	h.coordinator.serves("beside strangers")
	if grown := h.coordinator.rss() - before.rss; grown > 64<<20 {
		t.Errorf("strangers cost %d MiB", grown>>20)
	}
	if lines := strings.Count(h.coordinator.logged(), "\n") - refusals; lines > 20 {
		t.Errorf("strangers of one address made %d log lines", lines)
	}
	held.release()
	h.coordinator.nothingLeft()
}

// guessable asserts that the answer to a greeting is no proof of the token.
func guessable(t *testing.T, a attacker, name, greeting string) {
	t.Helper()
	answer, _, err := a.exchange(greeting, 300*time.Millisecond, false)
	if err != nil {
		t.Errorf("%s: a.exchange(greeting, 300*time.Millisecond, false) = %v, want nil", name, err)
		return
	}
	if len(answer) < 72 || len(greeting) < 24 {
		return
	}
	mac := hmac.New(sha256.New, []byte(fleetToken))
	mac.Write([]byte("coordinator" + greeting[8:24] + answer[8:24] + answer[24:40]))
	if string(mac.Sum(nil)) == answer[40:72] {
		t.Errorf("%s: an unauthenticated peer received a proof of the token, against which it can test guesses offline", name)
	}
}

// TestSelectNeedsToken: placement over HTTP requires the token.
func TestSelectNeedsToken(t *testing.T) {
	t.Parallel()
	h := newTwoHosts(t)
	for _, path := range []string{"/select", "/renew", "/finish"} {
		for _, token := range []string{"", "Bearer wrong", "Bearer ", "Basic " + fleetToken, "Bearer " + fleetToken + "x"} {
			r, err := http.NewRequest("POST", "http://"+h.listen+path, strings.NewReader(`{"model":"sim","prompt":"x"}`))
			if err != nil {
				t.Fatal(err)
			}
			r.Header.Set("Content-Type", "application/json")
			if token != "" {
				r.Header.Set("Authorization", token)
			}
			resp, err := (&http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}).Do(r)
			if err != nil {
				if os.IsTimeout(err) {
					t.Errorf("%s with %q: %v", path, token, err)
				}
				continue // the connection was closed: no answer is right too
			}
			resp.Body.Close()
			if resp.StatusCode < 400 {
				t.Errorf("%s with %q: status %d", path, token, resp.StatusCode)
			}
		}
	}
	h.coordinator.serves("after the strangers")
	h.coordinator.nothingLeft()
}
