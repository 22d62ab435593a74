package epp

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
)

// llmdSidecar starts llm-d's routing sidecar (llm-d-router, cmd/pd-sidecar).
func llmdSidecar(w *world, t *testing.T, n int, addr, side, _ string) {
	start(t, fmt.Sprint("llm-d-sidecar-", n), os.Getenv("LLMD_SIDECAR"), "--secure-proxy=false", "--kv-connector=nixlv2",
		"--port="+strconv.Itoa(portOf(side)), "--model-server-port="+strconv.Itoa(portOf(addr)))
}

// TestLLMDSidecar: llm-d's own sidecar runs the picker's decisions. Each request has two legs:
// the named prefill engine computes the prompt, and the decode engine reads its KV. The text is
// that of one engine alone. LLMD_SIDECAR is the path of the built sidecar.
func TestLLMDSidecar(t *testing.T) {
	if os.Getenv("LLMD_SIDECAR") == "" {
		t.Skip("LLMD_SIDECAR does not name llm-d's sidecar: go build ./cmd/pd-sidecar in a checkout of llm-d-router")
	}
	w := newWorldWith(t, "", llmdSidecar)
	alone := "http://" + w.engine(t, "alone", "both")
	n := 0
	for _, mode := range []string{"closed", "buffered"} {
		for version, c := range clients {
			for _, size := range []int{500, 60_000} {
				for _, stream := range []bool{false, true} {
					n++
					name := fmt.Sprintf("%s %s %d %t", mode, version, size, stream)
					want, err := textOf(answer(t, clients["H1"], alone, body(name, size, 8, stream)))
					if err != nil {
						t.Fatal(err)
					}
					resp, text := answer(t, c, w.url(mode), body(name, size, 8, stream))
					if got, err := textOf(resp, text); err != nil || got != want {
						t.Errorf("%s: got %q, %v, want %q", name, got, err, want)
					}
					if p, d := resp.Header.Get("X-Pdproxy-Prefill"), resp.Header.Get("X-Pdproxy-Decode"); p == "" || d == "" {
						t.Errorf("%s: placed on %q and %q", name, p, d)
					}
				}
			}
		}
	}
	w.idle(t)
	transfers := 0
	for _, name := range []string{"d0", "d1"} {
		s, _ := w.state(t, name)
		transfers += s.Transfers
	}
	if transfers != n {
		t.Errorf("%d transfers for %d requests", transfers, n)
	}
}

// textOf returns the text of a completion, whole or as a stream.
func textOf(resp *http.Response, body string) (text string, err error) {
	if resp.StatusCode != 200 {
		return "", fmt.Errorf("%d %s", resp.StatusCode, body)
	}
	for line := range strings.Lines(body) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "data: ")
		if line == "" || line == "[DONE]" {
			continue
		}
		var part struct{ Choices []struct{ Text string } }
		if err := json.Unmarshal([]byte(line), &part); err != nil {
			return "", err
		}
		for _, c := range part.Choices {
			text += c.Text
		}
	}
	return text, nil
}
