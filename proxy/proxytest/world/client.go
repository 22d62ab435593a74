package world

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// CompletionsPath is the endpoint of most tests.
const CompletionsPath = "/v1/completions"

// Completions is a minimal request.
func Completions(stream bool) string {
	return fmt.Sprintf(`{"model":"m","prompt":"hi","max_tokens":5,"stream":%t}`, stream)
}

// Asking is a request for a model.
func Asking(model string) string {
	return fmt.Sprintf(`{"model":%q,"prompt":"hi","max_tokens":5}`, model)
}

// Answer is the answer that a client received.
type Answer struct {
	Status int
	Header http.Header
	Body   string
	Err    error // the body is incomplete, or there is no answer
}

// Ask sends one request and reads the whole answer. header has pairs of name and value.
func Ask(ctx context.Context, c *http.Client, method, url, body string, header ...string) Answer {
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return Answer{Err: err}
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return Answer{Err: err}
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return Answer{resp.StatusCode, resp.Header, string(data), err}
}

// Open sends a request to the completions endpoint and returns when the head of the answer is there.
func Open(t *testing.T, ctx context.Context, c *http.Client, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, "POST", "http://proxy"+CompletionsPath, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// WriteRequest writes one request.
func WriteRequest(t *testing.T, conn net.Conn, body string) {
	t.Helper()
	_, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: proxy\r\nContent-Length: %d\r\n\r\n%s", CompletionsPath, len(body), body)
	if err != nil {
		t.Fatal(err)
	}
}

// KeyLine is the line of a keys file for a key.
func KeyLine(name, key string) string {
	sum := sha256.Sum256([]byte(key))
	return name + " " + hex.EncodeToString(sum[:]) + "\n"
}

// TenantLine is the line of the key "NAME-key" with attributes.
func TenantLine(name, attributes string) string {
	return strings.TrimSpace(KeyLine(name, name+"-key")) + " " + attributes + "\n"
}
