package conformance

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestPushedLoads: SGLang engines publish their loads, and the configuration names only URLs. Requests
// of others count as load of the engine although no poll is due. After a restart the new process is
// heard again.
func TestPushedLoads(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorSGLang, fleetOptions{
		prefill: 2, decode: 1,
		engine: func(_ string, _ int, c *enginesim.Config) {
			c.KVEvents.Endpoint, c.KVEvents.Loads = "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"
			c.PrefillUsPerToken = 2000
		},
		config: func(c *config.Config) { c.Health.LoadInterval = config.Duration(50 * time.Millisecond) },
	})
	foreign := func(id string) float64 {
		for _, c := range f.explained(id, prompt(0, 16)).Candidates {
			if c.Engine == "p0" {
				n, _ := c.Facts["requests"].(float64)
				return n
			}
		}
		return -1
	}
	next := f.cfg
	next.Health.LoadInterval = config.Duration(time.Hour)
	if err := f.reload(&next); err != nil {
		t.Fatal(err)
	}
	if n := foreign("before"); n != 0 {
		t.Fatalf("p0 has %v requests before others send one", n)
	}
	// A transfer to this host moves no KV: the engine computes the prompt for nobody.
	body := fmt.Sprintf(`{"text":%q,"bootstrap_host":"2.2.2.2","bootstrap_port":1,"bootstrap_room":7}`, strings.Repeat("other ", 800))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if resp, err := http.Post(f.prefill[0].URL()+"/generate", "application/json", strings.NewReader(body)); err == nil {
			resp.Body.Close()
		}
	}()
	tries := 0
	f.eventually("the request of others counts", func() bool { tries++; return foreign(fmt.Sprint("during-", tries)) == 1 })
	<-ended
	f.eventually("its end counts", func() bool { tries++; return foreign(fmt.Sprint("after-", tries)) == 0 })
}
