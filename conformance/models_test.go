package conformance

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// TestModels: each process of a fleet shows the statements of the engines about their model,
// also on a path with a slash at the end.
func TestModels(t *testing.T) {
	for _, connector := range []string{enginesim.ConnectorVLLMNixl, enginesim.ConnectorSGLang} {
		t.Run(connector, func(t *testing.T) {
			f := startFleet(t, connector, fleetOptions{engine: func(role string, n int, c *enginesim.Config) {
				if c.KVBlocks, c.BlockSize = 4096, 16; role == enginesim.RoleDecode && n == 1 {
					c.KVBlocks = 1024
				}
			}})
			for range 4 { // all workers in turn
				var list struct{ Data []json.RawMessage }
				if err := json.Unmarshal([]byte(f.get("/v1/models/")), &list); err != nil || len(list.Data) != 1 {
					t.Fatalf("%d models, error %v", len(list.Data), err)
				}
				one := f.get("/v1/models/sim")
				if got, want := withoutIDs(t, one), withoutIDs(t, string(list.Data[0])); got != want { // each worker has its own start time
					t.Errorf("got %s and %s", got, want)
				}
				var row struct {
					ID, Root    string
					Created     int64
					MaxModelLen int `json:"max_model_len"`
				}
				if err := json.Unmarshal([]byte(one), &row); err != nil || row.ID != "sim" || row.Root != "sim" || row.Created == 0 || row.MaxModelLen != 16384 {
					t.Errorf("got %s, %v", one, err)
				}
				body := chat("slash", 3, false)
				f.right(f.try(chatPath+"/", body), chatPath, body)
			}
		})
	}
}

// get returns the body of the answer to a GET at the proxy, which must be 200.
func (f *fleet) get(path string) string {
	f.t.Helper()
	resp, err := f.client.Get(f.url + path)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		f.t.Fatalf("GET %s: status %d, %v: %s", path, resp.StatusCode, err, body)
	}
	return string(body)
}

// TestWebPages: a browser may use each process of a fleet for the listed pages, and for no others.
func TestWebPages(t *testing.T) {
	const page = "https://chat.example.org"
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{config: func(c *config.Config) { c.Server.CORSOrigins = []string{page} }})
	for range 4 {
		for _, origin := range []string{page, "https://evil.example"} {
			want := map[string]string{page: "204 " + page}[origin]
			if want == "" {
				want = "403 "
			}
			if got := f.asPage("OPTIONS", origin, ""); got != want {
				t.Errorf("preflight of %s: got %q, want %q", origin, got, want)
			}
			want = strings.Replace(want, "204", "200", 1)
			if got := f.asPage("POST", origin, chat("page", 3, true)); got != want {
				t.Errorf("chat of %s: got %q, want %q", origin, got, want)
			}
		}
	}
}

// asPage sends a request as a browser does for a page of an origin. It returns the status and
// the origin that the answer allows.
func (f *fleet) asPage(method, origin, body string) string {
	f.t.Helper()
	r, err := http.NewRequest(method, f.url+chatPath, strings.NewReader(body))
	if err != nil {
		f.t.Fatal(err)
	}
	r.Header.Set("Origin", origin)
	r.Header.Set("Content-Type", "application/json")
	if method == http.MethodOptions {
		r.Header.Set("Access-Control-Request-Method", "POST")
		r.Header.Set("Access-Control-Request-Headers", "authorization,content-type")
	}
	resp, err := f.client.Do(r)
	if err != nil {
		f.t.Fatal(err)
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	return fmt.Sprint(resp.StatusCode, " ", resp.Header.Get("Access-Control-Allow-Origin"))
}
