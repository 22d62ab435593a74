package security

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// An engineMode is a hostile engine's treatment of one request. It returns true
// if the connection must end.
type engineMode func(c net.Conn) bool

// say writes a text and keeps the connection open.
func say(text string) engineMode {
	return func(c net.Conn) bool {
		io.WriteString(c, text)
		return false
	}
}

// sayAndLeave writes a text and ends the connection.
func sayAndLeave(text string) engineMode {
	return func(c net.Conn) bool {
		io.WriteString(c, text)
		return true
	}
}

// repeat writes begin and then piece n times, with pauses.
func repeat(begin, piece string, n int, pause time.Duration) engineMode {
	return func(c net.Conn) bool {
		io.WriteString(c, begin)
		for range n {
			if _, err := io.WriteString(c, piece); err != nil {
				return true
			}
			if pause > 0 {
				time.Sleep(pause)
			}
		}
		return true
	}
}

func zipped(text string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, text)
	w.Close()
	return b.String()
}

// engineModes are the hostile answers, by name.
func engineModes() map[string]engineMode {
	ok := "HTTP/1.1 200 OK\r\n"
	endlessLine := chunk("data: " + strings.Repeat("z", 1<<20))
	return map[string]engineMode{
		"good":                         say(jsonHead(len(goodAnswer)) + goodAnswer),
		"chunk size is no number":      say(streamHead + chunk(goodEvent) + "ZZ\r\nxx\r\n"),
		"chunk size with 0x":           say(streamHead + "0x10\r\n" + strings.Repeat("a", 16) + "\r\n"),
		"huge chunk":                   say(streamHead + chunk(goodEvent) + "ffffffffffffffff\r\n"),
		"chunk extension":              say(streamHead + chunk(goodEvent) + "5;" + strings.Repeat("a", 3000) + "\r\n"),
		"end after an event":           sayAndLeave(streamHead + chunk(goodEvent)),
		"end in an event":              sayAndLeave(streamHead + chunk(goodEvent+`data: {"id":"x","cho`)),
		"no last event":                say(streamHead + chunk(goodEvent) + "0\r\n\r\n"),
		"length too short":             say(jsonHead(10) + goodAnswer),
		"length too long":              sayAndLeave(jsonHead(len(goodAnswer)+50) + goodAnswer),
		"length and chunks":            say(ok + "Content-Type: application/json\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(goodAnswer) + "0\r\n\r\n"),
		"two lengths":                  say(ok + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345"),
		"gzip, chunked":                say(ok + "Transfer-Encoding: gzip, chunked\r\n\r\n" + chunk(goodAnswer) + "0\r\n\r\n"),
		"a second answer":              say(jsonHead(len(goodAnswer)) + goodAnswer + jsonHead(12) + `{"POISON":1}`),
		"1xx flood":                    repeat("", strings.Repeat("HTTP/1.1 102 Processing\r\n\r\n", 1000), 100, 0),
		"slow 1xx":                     repeat("", "HTTP/1.1 102 Processing\r\n\r\n", 30, 300*time.Millisecond),
		"103":                          say("HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + jsonHead(len(goodAnswer)) + goodAnswer),
		"101":                          say("HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n"),
		"large head":                   say(ok + "X: " + strings.Repeat("a", 200000) + "\r\n\r\n"),
		"endless head":                 repeat(ok, "X: "+strings.Repeat("a", 1000)+"\r\n", 100000, 0),
		"slow head":                    repeat(ok, "X: a\r\n", 60, 300*time.Millisecond),
		"CR in the head":               say(ok + "X: a\rSet-Cookie: b\r\nContent-Length: 2\r\n\r\n{}"),
		"NUL in the head":              say(ok + "X: a\x00b\r\nContent-Length: 2\r\n\r\n{}"),
		"folded head":                  say(ok + "X: a\r\n Content-Length: 7\r\nContent-Length: 2\r\n\r\n{}"),
		"hop-by-hop lines":             say(jsonHead(len(goodAnswer), hostileLines) + goodAnswer),
		"hop-by-hop lines of a stream": say(strings.TrimSuffix(streamHead, "\r\n") + hostileLines + "\r\n" + chunk(goodEvent) + chunk(lastEvent) + "0\r\n\r\n"),
		"status 999":                   say("HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\n{}"),
		"status 000":                   say("HTTP/1.1 000 X\r\nContent-Length: 2\r\n\r\n{}"),
		"204 with a body":              say("HTTP/1.1 204 X\r\nContent-Length: 30\r\n\r\n" + goodAnswer[:30]),
		"304":                          say("HTTP/1.1 304 X\r\n\r\n"),
		"HTTP/0.9":                     sayAndLeave(goodAnswer),
		"HTTP/2.0":                     sayAndLeave("HTTP/2.0 200 OK\r\n\r\n"),
		"gzip":                         say(jsonHead(len(zipped(goodAnswer)), "Content-Encoding: gzip\r\n") + zipped(goodAnswer)),
		"gzip stream":                  say(strings.TrimSuffix(streamHead, "\r\n") + "Content-Encoding: gzip\r\n\r\n" + chunk(zipped(goodEvent+lastEvent)) + "0\r\n\r\n"),
		"garbage":                      say(streamHead + chunk(goodEvent) + chunk(strings.Repeat("\x00\xff\x01", 30000)) + "0\r\n\r\n"),
		"endless event":                repeat(streamHead+chunk(goodEvent), endlessLine, 200, 0),
		"endless first event":          repeat(streamHead, endlessLine, 200, 0),
		"endless answer":               repeat(ok+"Content-Type: application/json\r\n\r\n", strings.Repeat("x", 1<<20), 200, 0),
		"announces 64 MiB":             repeat(jsonHead(64<<20), " ", 30, 300*time.Millisecond),
		"announces 1 TiB":              repeat(jsonHead(1<<40), " ", 30, 300*time.Millisecond),
		"event byte by byte":           repeat(streamHead+chunk(goodEvent), chunk("d"), 40, 250*time.Millisecond),
		"answer byte by byte":          repeat(jsonHead(len(goodAnswer)), " ", 60, 300*time.Millisecond),
		"bare CR":                      say(streamHead + chunk(strings.ReplaceAll(goodEvent+lastEvent, "\n", "\r")) + "0\r\n\r\n"),
		"trailer":                      say(streamHead + chunk(goodEvent+lastEvent) + "0\r\nX-Evil: 1\r\n\r\n"),
		"trailer flood":                repeat(streamHead+chunk(goodEvent+lastEvent)+"0\r\n", strings.Repeat("X-Evil: 1\r\n", 1000), 100, 0),
		"empty events":                 say(streamHead + chunk(strings.Repeat("\n\n", 100000)) + chunk(goodEvent+lastEvent) + "0\r\n\r\n"),
		"one byte in each chunk":       say(streamHead + bytesInChunks(goodEvent+lastEvent) + "0\r\n\r\n"),
		"deep JSON":                    say(jsonHead(len(deepJSON)) + deepJSON),
		"nothing":                      repeat("", "", 60, 100*time.Millisecond),
		"reset": func(c net.Conn) bool {
			c.(*net.TCPConn).SetLinger(0)
			return true
		},
	}
}

// hostileLines are header lines that must not reach a client.
const hostileLines = "Connection: X-Secret\r\nX-Secret: 1\r\nKeep-Alive: timeout=5\r\nUpgrade: h2c\r\nAlt-Svc: h3=\":666\"\r\nTrailer: X\r\n" +
	"X-Pdproxy-Prefill: forged\r\nx-pdproxy-decode: forged\r\nX-PDPROXY-FLOW: forged\r\n"

var deepJSON = strings.Repeat(`{"a":`, 1<<20) + "1" + strings.Repeat("}", 1<<20)

func bytesInChunks(text string) string {
	var b strings.Builder
	for _, c := range []byte(text) {
		b.WriteString(chunk(string(c)))
	}
	return b.String()
}

var modeName = regexp.MustCompile(`MODE=([^"\\]+)\.`)

// hostileEngine answers a request according to the mode in its prompt, "MODE=name.", and
// answers other requests correctly.
func hostileEngine(t *testing.T) *fakeEngine {
	e, modes := newFakeEngine(t), engineModes()
	e.act = func(c net.Conn, r received) bool {
		if m := modeName.FindStringSubmatch(r.body); m != nil {
			return modes[m[1]](c)
		}
		answerWell(c, r)
		return false
	}
	return e
}

// TestHostileAnswers gets every hostile answer, unary and streamed, and asserts that
// the client gets one well-formed answer that ends, and that the next request is served.
func TestHostileAnswers(t *testing.T) {
	t.Parallel()
	e := hostileEngine(t)
	p := startProxy(t, setup{server: "expose_placement = true\n", sections: e.section("both", "none") +
		"[timeouts]\nfirst_byte = \"3s\"\nstream_idle = \"2s\"\n[retry]\nattempts = 1\n[circuit]\nfailures = 100000\n"})
	var names []string
	for name := range engineModes() {
		names = append(names, name)
	}
	testbed.Parallel(2*len(names), 12, func(n int) {
		name, stream := names[n/2], n%2 == 1
		if err := hostileAnswer(p.addr, name, stream); err != nil {
			t.Errorf("%s, stream %t: %v", name, stream, err)
		}
	})
	p.serves("after hostile answers")
	p.nothingLeft()
}

// hostileAnswer requests one hostile answer and checks the client's result.
func hostileAnswer(addr, mode string, stream bool) error {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	body := chat("MODE="+mode+".", stream)
	c.SetDeadline(time.Now().Add(tolerated))
	fmt.Fprintf(c, "%sConnection: close\r\nContent-Length: %d\r\n\r\n%s", postLine, len(body), body)
	in := bufio.NewReader(c)
	resp, err := http.ReadResponse(in, nil)
	for n := 0; err == nil && resp.StatusCode == http.StatusEarlyHints && n < 16; n++ { // the proxy passes on hints of engines
		resp, err = http.ReadResponse(in, nil)
	}
	if err != nil {
		return fmt.Errorf("no answer: %w", err)
	}
	text, err := io.ReadAll(resp.Body)
	if isTimeout(err) {
		return fmt.Errorf("no end after %s, %d bytes", tolerated, len(text))
	}
	if err == nil {
		err = judged(mode, stream, resp, string(text))
	} else {
		err = nil // a connection that breaks is visible to the client
	}
	if rest, _ := io.ReadAll(in); len(rest) > 0 {
		return fmt.Errorf("%d bytes behind the answer: %.200q", len(rest), rest)
	}
	for name, v := range resp.Header {
		if low := strings.ToLower(name); low == "x-secret" || low == "upgrade" || low == "keep-alive" || low == "trailer" || low == "x-evil" || strings.Contains(strings.Join(v, ""), "forged") {
			return fmt.Errorf("the client received %s: %q", name, v)
		}
	}
	return err
}

// judged checks an answer that arrived completely.
func judged(mode string, stream bool, resp *http.Response, text string) error {
	if resp.StatusCode < 200 || resp.StatusCode > 599 {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	if mode == "good" && resp.StatusCode != 200 {
		return fmt.Errorf("status %d: %.200s", resp.StatusCode, text)
	}
	if strings.Contains(text, "POISON") {
		return fmt.Errorf("the client received bytes behind the answer")
	}
	isStream := strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream")
	if resp.StatusCode >= 400 && !isStream && !json.Valid([]byte(text)) {
		return fmt.Errorf("status %d with %.200q", resp.StatusCode, text)
	}
	if stream && isStream && resp.Header.Get("Content-Encoding") == "" && !strings.Contains(text, "[DONE]") && !strings.Contains(text, `"error"`) &&
		mode != "no last event" && mode != "bare CR" { // whole for HTTP: the engine's fault is in its events
		return fmt.Errorf("the stream ends without a last event and without an error: %.300q", text)
	}
	return nil
}

// TestHeldAnswers: the memory of answers that the proxy holds stays within
// limits.buffer_memory, with any number of hostile engines.
func TestHeldAnswers(t *testing.T) {
	t.Parallel()
	e := hostileEngine(t)
	p := startProxy(t, setup{sections: e.section("both", "none") + "[limits]\nbuffer_memory = \"64MiB\"\n[retry]\nattempts = 1\n[circuit]\nfailures = 100000\n"})
	p.serves("before the answers")
	modes := []string{"endless event", "endless first event", "endless answer", "announces 64 MiB", "deep JSON"}
	// 64 MiB are held. Buffers of more than 4 MiB are left to the garbage collector, which
	// lets the heap of about 110 MiB double, and 64 MiB more come while it runs.
	p.wantGrowth("endless answers", 320, func() {
		testbed.Parallel(times(20, 200), 10, func(n int) {
			if err := hostileAnswer(p.addr, modes[n%len(modes)], n%2 == 1); err != nil {
				t.Errorf("%s: hostileAnswer(p.addr, modes[n%%len(modes)], n%%2 == 1) = %v, want nil", modes[n%len(modes)], err)
			}
		})
	})
	p.serves("after the answers")
	p.nothingLeft()
}

// TestPrefillParameters: decode gets no parameters of a compromised prefill engine,
// unless their types are vLLM's and every host is the engine's own.
func TestPrefillParameters(t *testing.T) {
	t.Parallel()
	var params string // prefill's answer; set between requests
	prefill, decode := newFakeEngine(t), newFakeEngine(t)
	prefill.act = func(c net.Conn, _ received) bool {
		text := strings.Replace(goodAnswer, `"finish_reason":"stop"`, `"finish_reason":"length"`, 1)
		text = strings.TrimSuffix(text, "}") + `,"kv_transfer_params":` + params + "}"
		io.WriteString(c, jsonHead(len(text))+text)
		return false
	}
	// An engine of a discovery file counts as an engine that has registered itself,
	// because it is not in the configuration.
	list := t.TempDir() + "/engines.toml"
	write(t, list, prefill.section("prefill", "vllm-nixl")+decode.section("decode", "vllm-nixl"))
	p := startProxy(t, setup{sections: fmt.Sprintf("[discovery.file]\npath = %q\n[retry]\nattempts = 1\n[circuit]\nfailures = 100000\n", list)})
	rest := `"remote_engine_id":"e","remote_host":"HOST","remote_port":5600,"remote_request_id":"r","tp_size":1`
	c := p.client(1, "127.0.0.1")
	defer c.close()
	for _, tt := range []struct {
		name, params string
		reaches      bool
	}{
		{"own host", `{"do_remote_prefill":true,"remote_block_ids":[1],` + strings.Replace(rest, "HOST", "127.0.0.1", 1) + `}`, true},
		{"own host, groups", `{"do_remote_prefill":true,"remote_block_ids":[[1,2],[3]],` + strings.Replace(rest, "HOST", "127.0.0.1", 1) + `}`, true},
		{"foreign host", `{"do_remote_prefill":true,"remote_block_ids":[1],` + rest + `}`, false},
		{"no blocks", `{"do_remote_prefill":true,"remote_block_ids":[],` + rest + `}`, false},
		{"order 1", `{"do_remote_prefill":1,"remote_block_ids":[true],` + rest + `}`, false},
		{"order yes, no blocks", `{"do_remote_prefill":"yes","remote_block_ids":[],` + rest + `}`, false},
		{"order is a list", `{"do_remote_prefill":[0],"remote_block_ids":[{}],` + rest + `}`, false},
		{"nested connector", `{"connectors":[{"do_remote_prefill":true,"remote_block_ids":[1],` + rest + `}]}`, false},
		{"host is a list", `{"do_remote_prefill":true,"remote_block_ids":[1],` + strings.Replace(rest, `"HOST"`, `["HOST"]`, 1) + `}`, false},
		{"two hosts", `{"do_remote_prefill":true,"remote_block_ids":[1],"remote_host":"127.0.0.1",` + rest + `}`, false},
		{"escaped name", `{"do_remote_prefill":true,"remote_block_ids":[1],` + strings.Replace(rest, "remote_host", `remote\u005fhost`, 1) + `}`, false},
		{"URL", `{"do_remote_prefill":true,"remote_block_ids":[1],"remote_bootstrap_addr":"http://HOST:1",` + strings.Replace(rest, "HOST", "127.0.0.1", 1) + `}`, false},
		{"not an object", `[{` + rest + `}]`, false},
	} {
		params = strings.ReplaceAll(tt.params, "HOST", foreignHost)
		_, err := c.post(chatPath, chat("prefill-answer", false))
		seen := decode.take("")
		prefill.take("")
		reached := false
		for _, r := range seen {
			reached = reached || strings.Contains(r.body, `"remote_engine_id"`)
			if strings.Contains(r.body, foreignHost) {
				t.Errorf("%s: decode received %s (the client got: %v)", tt.name, r.body, err)
			}
		}
		if tt.reaches && (!reached || err != nil) {
			t.Errorf("%s: decode did not receive the parameters, %v: %q", tt.name, err, seen)
		}
	}
	p.nothingLeft()
}
