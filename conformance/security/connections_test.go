package security

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestConnectionFlood opens more connections than the process has descriptors.
// A client, a connection that is already open, the engine and the operator must
// still work.
func TestConnectionFlood(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		from    []string
		newcome bool // a new client must be served during the flood
	}{
		{"one address", []string{hostile}, true},
		{"ten addresses", addresses(10), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := newFakeEngine(t)
			p := startProxy(t, setup{files: 256, sections: e.section("both", "none")})
			early := p.client(1, "127.0.0.1")
			defer early.close()
			if err := early.ask("early", false); err != nil {
				t.Fatal(err)
			}
			var held holder
			defer held.release()
			for _, from := range tt.from {
				idle(&held, attacker{from: from, to: p.addr}, 400/len(tt.from))
			}
			if held.len() == 0 {
				t.Error("the attack did not reach the proxy")
			}
			for range 3 {
				if err := askAgain(early, false); err != nil {
					t.Errorf("a client that connected before: %v", err)
				}
			}
			if tt.newcome {
				p.serves("during the flood")
			}
			var engines []struct{ State string }
			if !within(10*time.Second, func() {
				if err := p.admin.Get("/v1/engines", &engines); err != nil {
					t.Errorf("an operator: %v", err)
				}
			}) {
				t.Error("an operator gets no answer")
			}
			text, _ := json.Marshal(engines)
			if strings.Contains(string(text), "ejected") || strings.Contains(string(text), "unhealthy") {
				t.Errorf("the engine is blamed: %s", text)
			}
			held.release()
			p.serves("after the flood")
			p.nothingLeft()
		})
	}
}

// addresses are n loopback addresses of attackers.
func addresses(n int) (list []string) {
	for i := range n {
		list = append(list, fmt.Sprintf("127.0.0.%d", 100+i))
	}
	return list
}

// idle opens n connections with one small request each, and keeps them open.
func idle(held *holder, a attacker, n int) {
	var dials sync.WaitGroup
	for range n {
		dials.Go(func() {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(a.from)}, Timeout: 2 * time.Second}
			c, err := d.Dial("tcp", a.to)
			if err != nil {
				return
			}
			held.add(func() { c.Close() })
			io.WriteString(c, "GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
		})
	}
	dials.Wait()
}
