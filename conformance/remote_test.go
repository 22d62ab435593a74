package conformance

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// cloud is an OpenAI endpoint of another operator, over TLS.
type cloud struct {
	*httptest.Server
	mu     sync.Mutex
	served int      // requests; guarded by mu
	wrong  []string // violations of what a remote may get; guarded by mu
}

// startCloud starts an endpoint. It accepts one key and one name of the model.
func startCloud(t *testing.T) *cloud {
	t.Helper()
	c := new(cloud)
	c.Server = httptest.NewTLSServer(c)
	t.Cleanup(c.Close)
	return c
}

// ServeHTTP implements http.Handler.
func (c *cloud) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var asked map[string]any
	_ = json.Unmarshal(body, &asked) // a wrong body has no model
	c.mu.Lock()
	defer c.mu.Unlock()
	c.served++
	if r.URL.Path != chatPath || r.Header.Get("Authorization") != "Bearer sk-cloud" || asked["model"] != "gpt" || asked["kv_transfer_params"] != nil ||
		r.Header.Get("X-Request-Id") != "" || r.Header.Get("X-Session-Id") != "" {
		c.wrong = append(c.wrong, fmt.Sprintf("%s %v %s", r.URL.Path, r.Header, body))
	}
	if asked["stream"] != true {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"model":"gpt","choices":[{"message":{"content":"from afar"}}]}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	for _, word := range []string{"from", " afar"} {
		fmt.Fprintf(w, "data: {\"model\":\"gpt\",\"choices\":[{\"delta\":{\"content\":%q}}]}\n\n", word)
		_ = http.NewResponseController(w).Flush() // the client may have left
	}
	io.WriteString(w, "data: [DONE]\n\n")
}

// TestRemote: when all engines are dead, every process of a fleet relays answers of the
// remote over verified TLS. A certificate of an unknown authority is refused.
func TestRemote(t *testing.T) {
	for _, trusted := range []bool{true, false} {
		t.Run(fmt.Sprint("trusted ", trusted), func(t *testing.T) {
			c := startCloud(t)
			remote := config.Remote{Name: "cloud", URL: c.URL, Model: "gpt", APIKeyFile: filepath.Join(t.TempDir(), "key")}
			if err := os.WriteFile(remote.APIKeyFile, []byte("sk-cloud\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			if trusted {
				remote.CA = filepath.Join(t.TempDir(), "ca.pem")
				if err := os.WriteFile(remote.CA, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate().Raw}), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 1, decode: 1, config: func(cfg *config.Config) {
				cfg.Models = []config.Model{{Name: "sim", Fallback: []string{"remote:cloud"}}}
				cfg.Remotes = []config.Remote{remote}
			}})
			for i := range 4 {
				body := chat(fmt.Sprint("before ", i), 5, i%2 == 0)
				f.right(f.try(chatPath, body), chatPath, body)
			}
			c.mu.Lock()
			if c.served != 0 {
				t.Errorf("the remote got %d requests while engines serve", c.served)
			}
			c.mu.Unlock()
			f.prefill[0].Kill()
			f.decode[0].Kill()
			for i := range 6 {
				a := f.post(t.Context(), f.url, chatPath, chat(fmt.Sprint("after ", i), 5, i%2 == 0), "X-Session-Id", "s")
				switch {
				case trusted && (a.status != 200 || a.errors > 0 || a.text != "from afar" || a.done != (i%2 == 0)):
					t.Errorf("request %d: got %d %q: %s", i, a.status, a.text, a.body)
				case !trusted && a.status != 502 && a.status != 503: // 503 while the circuit is open
					t.Errorf("request %d: got %d: %s", i, a.status, a.body)
				}
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			if want := map[bool]int{true: 6}[trusted]; c.served != want || len(c.wrong) > 0 {
				t.Errorf("the remote got %d requests, want %d; wrong ones: %q", c.served, want, c.wrong)
			}
		})
	}
}
