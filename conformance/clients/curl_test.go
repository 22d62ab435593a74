package clients

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// chatBody returns a chat request whose answer has that many tokens.
func chatBody(maxTokens int, stream bool) string {
	text, _ := json.Marshal(prompt)
	return fmt.Sprintf(`{"model":"sim","max_tokens":%d,"stream":%t,"messages":[{"role":"user","content":%s}]}`, maxTokens, stream, text)
}

// chatText is the text of a unary chat answer.
func chatText(body []byte) (string, error) {
	var answer struct {
		Choices []struct {
			Message struct{ Content string }
		}
	}
	if err := json.Unmarshal(body, &answer); err != nil || len(answer.Choices) != 1 {
		return "", fmt.Errorf("not a chat answer (%v): %.300s", err, body)
	}
	return answer.Choices[0].Message.Content, nil
}

// streamText reads a chat stream to its closing event and joins its text. It
// calls each after every event with text.
func streamText(r io.Reader, each func(events int)) (string, error) {
	var text strings.Builder
	events, done := 0, false
	for sc := bufio.NewScanner(r); sc.Scan(); {
		data, ok := strings.CutPrefix(sc.Text(), "data: ")
		switch {
		case !ok && sc.Text() != "":
			return "", fmt.Errorf("not an event stream: %.300s", sc.Text())
		case data == "[DONE]":
			done = true
			continue
		case !ok:
			continue
		}
		var chunk struct {
			Choices []struct {
				Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			return "", fmt.Errorf("event: %w: %.300s", err, data)
		}
		for _, c := range chunk.Choices {
			text.WriteString(c.Delta.Content)
			if c.Delta.Content != "" {
				events++
				each(events)
			}
		}
	}
	if !done {
		return text.String(), fmt.Errorf("no closing event after %d events", events)
	}
	return text.String(), nil
}

// curlAnswer is the answer that curl received.
type curlAnswer struct {
	version string // of HTTP
	status  int
	header  string // lower case, a line each
	body    []byte
	err     error // curl's exit error with its output
}

// runCurl runs curl with -k and without the user's configuration.
func runCurl(t *testing.T, stdin string, args ...string) curlAnswer {
	t.Helper()
	head := t.TempDir() + "/head"
	cmd := exec.CommandContext(t.Context(), "curl", append([]string{
		"-q", "-sSk", "--max-time", "30", "-D", head, "-w", "%{stderr}%{http_version} %{http_code}",
		"-H", "Content-Type: application/json", "--noproxy", "*",
	}, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	var a curlAnswer
	a.body, a.err = cmd.Output()
	if a.err != nil {
		a.err = fmt.Errorf("%w: %s", a.err, stderr.String())
		return a
	}
	if _, err := fmt.Sscan(stderr.String(), &a.version, &a.status); err != nil {
		t.Fatalf("output of curl %q: %v", stderr.String(), err)
	}
	a.header = strings.ToLower(readFile(t, head))
	return a
}

// want checks the status and, for errors, that the body has OpenAI's form and
// that code.
func (a curlAnswer) want(t *testing.T, status int, code string) {
	t.Helper()
	if a.err != nil {
		t.Fatal(a.err)
	}
	if a.status != status {
		t.Fatalf("got status %d, want %d: %.300s", a.status, status, a.body)
	}
	if !strings.Contains(a.header, "\nx-request-id: ") {
		t.Errorf("no x-request-id:\n%s", a.header)
	}
	var e struct {
		Error struct{ Message, Type, Code string }
	}
	if err := json.Unmarshal(a.body, &e); status >= 400 && (err != nil || e.Error.Code != code || e.Error.Message == "" || e.Error.Type == "") {
		t.Errorf("error body %.300s, want code %q", a.body, code)
	}
}

func TestCurl(t *testing.T) {
	fleet := startFleet(t, "vllm-nixl")
	limits := "max_body = \"8KiB\"\nmax_header = \"8KiB\""
	plain := startProxy(t, fleet, setup{server: limits})
	secure := startProxy(t, fleet, setup{server: limits, tls: "self_signed = true", http3: true})
	for _, c := range []curlCase{
		{"HTTP 1.1", plain, "--http1.1", "1.1", false},
		{"h2c", plain, "--http2-prior-knowledge", "2", false},
		{"HTTP 1.1 over TLS", secure, "--http1.1", "1.1", true},
		{"h2 over TLS", secure, "--http2", "2", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Run("unary", c.unary)
			t.Run("stream", c.stream)
			t.Run("left stream", c.leftStream)
			t.Run("chunked upload", c.chunkedUpload)
			t.Run("expect", c.expect)
			t.Run("body limit", c.bodyLimit)
			t.Run("header limit", c.headerLimit)
			t.Run("request id", c.requestID)
			t.Run("other endpoints", c.endpoints)
			t.Run("alt-svc", c.altSvc)
		})
	}
	t.Run("several requests on one connection", func(t *testing.T) { keepAlive(t, plain) })
	t.Run("plain text to the TLS port", func(t *testing.T) {
		a := runCurl(t, "", "http://"+secure.addr()+"/health")
		if a.err == nil && a.status/100 != 4 {
			t.Errorf("got status %d", a.status)
		}
	})
}

// curlCase is one way in which curl calls a proxy.
type curlCase struct {
	name string
	*front
	flag    string
	version string // of HTTP, as curl reports it
	http3   bool   // the proxy offers it
}

const chatPath = "/v1/chat/completions"

func (c curlCase) run(t *testing.T, stdin, path string, args ...string) curlAnswer {
	t.Helper()
	a := runCurl(t, stdin, append([]string{c.flag, c.URL + path}, args...)...)
	if a.err == nil && a.version != c.version {
		t.Errorf("HTTP %s, want %s", a.version, c.version)
	}
	return a
}

// aloneText returns the answer of one engine alone.
func (f *front) aloneText(t *testing.T, maxTokens int) string {
	t.Helper()
	a := runCurl(t, "", f.Alone+chatPath, "-d", chatBody(maxTokens, false))
	if a.err != nil {
		t.Fatal(a.err)
	}
	text, err := chatText(a.body)
	if err != nil || text == "" {
		t.Fatalf("answer of the lone engine: %q, %v", text, err)
	}
	return text
}

func (c curlCase) wantText(t *testing.T, a curlAnswer, maxTokens int) {
	t.Helper()
	a.want(t, 200, "")
	text, err := chatText(a.body)
	if want := c.aloneText(t, maxTokens); err != nil || text != want {
		t.Errorf("got text %q, want %q as from one engine alone, error %v", text, want, err)
	}
	if !strings.Contains(a.header, "\ncontent-type: application/json") {
		t.Errorf("header:\n%s", a.header)
	}
}

func (c curlCase) unary(t *testing.T) {
	c.wantText(t, c.run(t, "", chatPath, "-d", chatBody(12, false)), 12)
}

func (c curlCase) stream(t *testing.T) {
	a := c.run(t, "", chatPath, "-N", "-d", chatBody(12, true))
	a.want(t, 200, "")
	events := 0
	text, err := streamText(bytes.NewReader(a.body), func(n int) { events = n })
	if want := c.aloneText(t, 12); err != nil || text != want || events != 12 {
		t.Errorf("%d events, text %q, want %q as from one engine alone, error %v", events, text, want, err)
	}
	if !strings.Contains(a.header, "\ncontent-type: text/event-stream") || strings.Contains(a.header, "\ncontent-length:") {
		t.Errorf("header:\n%s", a.header)
	}
}

// leftStream kills curl in the middle of a long stream, whose events arrived
// while the engine was still computing.
func (c curlCase) leftStream(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "curl", "-q", "-sSkN", "--noproxy", "*", c.flag, c.URL+chatPath,
		"-H", "Content-Type: application/json", "-d", chatBody(2000, true))
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, err = streamText(stdout, func(n int) {
		if n == 5 {
			if running := c.engines(t).Running; running != 1 {
				t.Errorf("%d sequences run in the middle of one stream", running)
			}
			cmd.Process.Kill()
		}
	})
	if err == nil {
		t.Error("the stream ended like a complete one")
	}
	cmd.Wait()
	c.waitIdle(t)
}

func (c curlCase) chunkedUpload(t *testing.T) {
	a := c.run(t, chatBody(4, false), chatPath, "-H", "Transfer-Encoding: chunked", "--data-binary", "@-")
	c.wantText(t, a, 4)
}

func (c curlCase) expect(t *testing.T) {
	c.wantText(t, c.run(t, "", chatPath, "-H", "Expect: 100-continue", "-d", chatBody(4, false)), 4)
}

// bodyLimit: over HTTP/2 the proxy answers and resets the stream while it still
// carries the body, as RFC 9113 section 8.1 allows. Some versions of curl then
// sometimes lose the answer and exit with 92.
func (c curlCase) bodyLimit(t *testing.T) {
	before := c.engines(t).Requests
	large := strings.Replace(chatBody(4, false), "Tell me", strings.Repeat("Tell me ", 2000), 1)
	for _, args := range [][]string{{"--data-binary", "@-"}, {"-H", "Transfer-Encoding: chunked", "--data-binary", "@-"}} {
		a := c.run(t, large, chatPath, args...)
		var exit *exec.ExitError
		if c.version == "2" && errors.As(a.err, &exit) && exit.ExitCode() == 92 {
			continue
		}
		a.want(t, 413, "body_too_large")
	}
	if n := c.engines(t).Requests - before; n != 0 {
		t.Errorf("%d requests reached an engine", n)
	}
}

// headerLimit sends more than max_header, and less than four times as much: above that, net/http ends
// an HTTP/2 connection without an answer.
func (c curlCase) headerLimit(t *testing.T) {
	c.run(t, "", "/health", "-H", "X-Large: "+strings.Repeat("x", 20<<10)).want(t, 431, "head_too_large")
	c.run(t, "", "/health").want(t, 200, "")
}

func (c curlCase) requestID(t *testing.T) {
	a := c.run(t, "", chatPath, "-H", "X-Request-Id: curl-was-here", "-d", chatBody(2, false))
	a.want(t, 200, "")
	if !strings.Contains(a.header, "\nx-request-id: curl-was-here\r\n") {
		t.Errorf("header:\n%s", a.header)
	}
	var explained struct {
		Flow string `json:"flow"`
	}
	eventually(t, "explain", func() error { return c.getJSON(c.Admin+"/v1/explain/curl-was-here", &explained) })
	if explained.Flow != "prefill_first" {
		t.Errorf("got flow %q", explained.Flow)
	}
}

func (c curlCase) endpoints(t *testing.T) {
	a := c.run(t, "", "/v1/models")
	a.want(t, 200, "")
	if !bytes.Contains(a.body, []byte(`"sim"`)) {
		t.Errorf("models: %s", a.body)
	}
	c.run(t, "", "/health").want(t, 200, "")
	c.run(t, "", "/health", "-I").want(t, 200, "")
	c.run(t, "", "/version").want(t, 200, "")
	c.run(t, "", "/nothing").want(t, 404, "not_found")
	for path, body := range map[string]string{
		"/v1/rerank": `{"model":"sim","query":"the sea","documents":["a ship","the sea"]}`,
		"/score/":    `{"model":"sim","text_1":"the sea","text_2":["a ship","the sea"]}`,
	} {
		got, want := c.run(t, "", path, "-d", body), runCurl(t, "", c.Alone+strings.TrimSuffix(path, "/"), "-d", body)
		got.want(t, 200, "")
		if g, w := scores(t, got.body), scores(t, want.body); len(g) != 2 || !slices.Equal(g, w) {
			t.Errorf("%s: got scores %v, want %v as from one engine alone: %s", path, g, w, got.body)
		}
	}
	c.run(t, "", chatPath).want(t, 405, "method_not_allowed")
	c.run(t, "", chatPath, "-d", `{"model":"sim","messages":`).want(t, 400, "invalid_json")
}

// scores returns the scores in an answer of /rerank or /score.
func scores(t *testing.T, body []byte) (list []float64) {
	t.Helper()
	var answer struct {
		Results []struct {
			Score float64 `json:"relevance_score"`
		}
		Data []struct{ Score float64 }
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		t.Errorf("%v: %.300s", err, body)
	}
	for _, r := range answer.Results {
		list = append(list, r.Score)
	}
	for _, d := range answer.Data {
		list = append(list, d.Score)
	}
	return list
}

func (c curlCase) altSvc(t *testing.T) {
	a := c.run(t, "", "/health")
	a.want(t, 200, "")
	_, port, _ := strings.Cut(c.addr(), ":")
	if got := strings.Contains(a.header, fmt.Sprintf("\nalt-svc: h3=\":%s\"", port)); got != c.http3 {
		t.Errorf("header:\n%s", a.header)
	}
}

// keepAlive makes curl send three requests and checks whether one connection
// carried them: it remains usable after a stream.
func keepAlive(t *testing.T, f *front) {
	args := []string{"-q", "-sS", "--noproxy", "*", "--http1.1", "-w", "%{stderr}%{num_connects} "}
	for i, stream := range []bool{false, true, false} {
		if i > 0 {
			args = append(args, "--next", "-sS", "--http1.1", "-w", "%{stderr}%{num_connects} ")
		}
		args = append(args, "-d", chatBody(3, stream), f.URL+chatPath)
	}
	cmd := exec.CommandContext(t.Context(), "curl", args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil || strings.TrimSpace(stderr.String()) != "1 0 0" {
		t.Errorf("new connections of the requests: %s, error %v", &stderr, err)
	}
}
