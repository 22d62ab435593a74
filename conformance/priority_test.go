package conformance

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/conformance/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestFloodTakesItsShareOnly: three clients compete for the places of the proxy. One of them
// floods with long answers. All get the same number of tokens (Jain's index of at least 0.98).
func TestFloodTakesItsShareOnly(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{
		engine: func(_ string, _ int, c *enginesim.Config) { c.DecodeUsPerToken = 300 },
		config: func(c *config.Config) {
			c.Server.TrustedProxies = []string{"127.0.0.0/8"}
			c.Limits.MaxExchanges, c.Limits.QueueTimeout = 8, config.Duration(5*time.Minute)
		},
	})
	type client struct {
		address           string
		connections, long int // long is the number of tokens of each answer
		ended             atomic.Int64
	}
	flood := &client{address: "192.0.2.1", connections: 120, long: 64}
	middle := &client{address: "192.0.2.2", connections: 32, long: 16}
	small := &client{address: "192.0.2.3", connections: 32, long: 4}
	clients := []*client{flood, middle, small}
	enough := make(chan struct{})
	end := sync.OnceFunc(func() { close(enough) })
	var wg sync.WaitGroup
	var begun sync.WaitGroup
	for _, c := range clients {
		begun.Add(c.connections)
		for range c.connections {
			wg.Go(func() {
				started := sync.OnceFunc(begun.Done)
				defer started()
				for {
					if err := f.from(c.address, chat("fair", c.long, false)); err != nil {
						t.Error(err)
						end()
						return
					}
					started()
					select {
					case <-enough:
						return
					default:
					}
					c.ended.Add(1)
				}
			})
		}
	}
	begun.Wait() // from now on the requests of all clients wait
	before := make([]int64, len(clients))
	for i, c := range clients {
		before[i] = c.ended.Load()
	}
	for small.ended.Load()-before[2] < 200 {
		select {
		case <-enough:
		case <-time.After(time.Millisecond):
			continue
		}
		break
	}
	sum, squares := 0.0, 0.0
	for i, c := range clients {
		const prompt = 10 // about; the small client's requests consist mostly of it
		tokens := float64((c.ended.Load() - before[i]) * int64(c.long+prompt))
		t.Logf("%s: %.0f tokens", c.address, tokens)
		sum, squares = sum+tokens, squares+tokens*tokens
	}
	end()
	wg.Wait()
	if jain := sum * sum / (3 * squares); jain < 0.98 {
		t.Errorf("Jain index %.4f", jain)
	}
}

// from posts a chat for a client of that address. The answer must be right.
func (f *fleet) from(address, body string) error {
	r, err := http.NewRequest(http.MethodPost, f.url+chatPath, strings.NewReader(body))
	if err != nil {
		return err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("X-Forwarded-For", address)
	resp, err := f.client.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d, %w: %s", resp.StatusCode, err, answer)
	}
	return nil
}
