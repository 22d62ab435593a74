package conformance

import (
	"bytes"
	"strings"
	"sync"
	"testing"

	"github.com/pdproxy/pdproxy/conformance/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// pairRow is one row of GET /v1/pairs.
type pairRow struct {
	Prefill, Decode, State, Refused string
	LastError                       string `json:"last_error"`
	Failures                        int
}

// lockedBuffer is a log that is read while it is written.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestRefusedPair: an engine that tells of blocks which none of the other side
// can read gets no request, while its like would; operators are told why.
func TestRefusedPair(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorSGLang} {
		t.Run(connector, func(t *testing.T) {
			var log lockedBuffer
			f := startFleet(t, connector, fleetOptions{prefill: 1, decode: 2, log: &log, engine: func(role string, n int, c *enginesim.Config) {
				if role == enginesim.RoleDecode && n == 1 {
					c.BlockSize = 8 // the others' is 16
				}
			}})
			for range 6 {
				body := chat("a prompt of some blocks, which all of them have to be read", 4, false)
				f.right(f.try("/v1/chat/completions", body), "/v1/chat/completions", body)
			}
			if n := f.decode[1].State().Requests; n != 0 {
				t.Errorf("the refused decode engine saw %d requests", n)
			}
			var rows []pairRow
			f.admin("/v1/pairs", &rows)
			if len(rows) != 2 || rows[0].State != "ready" || rows[0].Refused != "" ||
				rows[1].Decode != "d1" || rows[1].State != "broken" || rows[1].LastError != "incompatible" || rows[1].Refused == "" {
				t.Errorf("pairs %+v", rows)
			}
			if n := f.metric("pdproxy_pair_refused", `prefill="p0"`, `decode="d1"`); n != 1 {
				t.Errorf("pdproxy_pair_refused is %v", n)
			}
			if n := strings.Count(log.String(), "pairs refused"); n != 1 {
				t.Errorf("said %d times", n)
			}
		})
	}
}

// TestRefusedPairOnly: where no pair is left, clients are told at once, and no
// engine is asked.
func TestRefusedPairOnly(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 1, decode: 1,
		engine: func(role string, _ int, c *enginesim.Config) {
			if role == enginesim.RolePrefill {
				c.BlockSize = 64
			}
		},
		config: func(c *config.Config) { c.Policy.Plan = "always" },
	})
	if a := f.try("/v1/chat/completions", chat("hello", 4, false)); a.status != 503 {
		t.Errorf("status %d: %s", a.status, a.body)
	}
	if p, d := f.prefill[0].State(), f.decode[0].State(); p.Requests+d.Requests != 0 {
		t.Errorf("the engines saw %d and %d requests", p.Requests, d.Requests)
	}
}
