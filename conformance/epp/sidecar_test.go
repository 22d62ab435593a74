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

// beside is one sidecar of a decode engine.
type beside struct {
	engine, listen string // addresses
	keys           string // lines of the configuration of pdproxy that come before its tables
	prefill        string // tables of the prefill engines
}

// kind is a kind of sidecar.
type kind struct {
	name string
	// start starts the sidecar number n.
	start func(w *world, t *testing.T, n int, b beside)
	// limits: it ends a leg that takes too long. cleans: it frees the KV that a failed request
	// left on an engine, so that no engine waits for its own time limit. retries: if prefill
	// fails, it computes the prompt on its own engine. reports: it ends a broken stream with
	// an error event.
	limits, cleans, retries, reports bool
}

var pdproxySidecar = kind{name: "pdproxy", start: startSidecar, limits: true, cleans: true, retries: true, reports: true}

// llmdSidecar is llm-d's routing sidecar (llm-d-router, cmd/pd-sidecar). It passes an error of
// prefill to the client, has no time limit for a leg, and never calls an engine again for a
// request that has failed (pkg/sidecar/proxy/connector_nixlv2.go).
var llmdSidecar = kind{name: "llm-d", start: startLLMD}

// eachSidecar runs a test with each kind of sidecar. LLMD_SIDECAR is the path of llm-d's.
func eachSidecar(t *testing.T, test func(t *testing.T, k *kind)) {
	for _, k := range []*kind{&pdproxySidecar, &llmdSidecar} {
		t.Run(k.name, func(t *testing.T) {
			if k == &llmdSidecar && os.Getenv("LLMD_SIDECAR") == "" {
				t.Skip("LLMD_SIDECAR does not name llm-d's sidecar: go build ./cmd/pd-sidecar in a checkout of llm-d-router")
			}
			test(t, k)
		})
	}
}

func startSidecar(w *world, t *testing.T, n int, b beside) {
	admin := free(t)
	w.beside = append(w.beside, run(t, fmt.Sprint("sidecar-", n), fmt.Sprintf("server.listen = %q\nadmin.listen = %q\nfleet.node_id = %d\n%s\n[sidecar]\nlocal = \"http://%s\"\nrole = \"decode\"\nconnector = \"vllm-nixl\"\n%s",
		b.listen, admin, n, b.keys, b.engine, b.prefill)))
	w.sidecars = append(w.sidecars, "http://"+admin)
}

func startLLMD(w *world, t *testing.T, n int, b beside) {
	w.beside = append(w.beside, start(t, fmt.Sprint("llm-d-sidecar-", n), os.Getenv("LLMD_SIDECAR"), "--secure-proxy=false", "--kv-connector=nixlv2",
		"--port="+strconv.Itoa(portOf(b.listen)), "--model-server-port="+strconv.Itoa(portOf(b.engine))))
}

// TestTexts: the sidecar runs the picker's decisions. Each request has two legs: the named prefill
// engine computes the prompt, and the decode engine reads its KV. The text is that of one engine
// alone.
func TestTexts(t *testing.T) {
	eachSidecar(t, func(t *testing.T, k *kind) {
		w := newWorld(t, setting{kind: k})
		alone := "http://" + w.engine(t, "alone", "both")
		n := 0
		for _, mode := range []string{"closed", "buffered"} {
			for version, c := range clients {
				for _, size := range []int{500, 60_000} {
					for _, stream := range []bool{false, true} {
						n++
						b := body(fmt.Sprintf("%s %s %d %t", mode, version, size, stream), size, 8, stream)
						resp, text := answer(t, c, w.url(mode), b)
						w.whole(t, alone, b, resp, text)
						if p, d := resp.Header.Get("X-Pdproxy-Prefill"), resp.Header.Get("X-Pdproxy-Decode"); p == "" || d == "" {
							t.Errorf("request %d: placed on %q and %q", n, p, d)
						}
					}
				}
			}
		}
		w.idle(t)
		transfers := 0
		for _, name := range decodes {
			s, _ := w.state(t, name)
			transfers += s.Transfers
		}
		if transfers != n {
			t.Errorf("%d transfers for %d requests", transfers, n)
		}
	})
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
