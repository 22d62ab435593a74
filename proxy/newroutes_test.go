package proxy_test

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
)

// TestOtherRoutes: a compressed body, a slash at the end of the path, and a web page work on each
// route as they do for chats.
func TestOtherRoutes(t *testing.T) {
	const page = "https://chat.example"
	const form = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n" +
		"--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n\x00\xff\r\n--b--\r\n"
	listed := []string{"Access-Control-Allow-Origin: " + page, "Access-Control-Expose-Headers: *", "Vary: Origin"}
	synctest.Test(t, func(t *testing.T) {
		stored := world.Holding("resp_a")
		e := &world.Engine{Connector: "vllm-nixl", Serve: func(c *world.Conn, nth int) {
			if c.Leg.Method == "POST" {
				c.Send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n" + engineCORS + "\r\n{}")
				return
			}
			stored(c, nth)
		}}
		w := newWorld(t, world.Setup{Engines: []*world.Engine{e}, Config: func(c *config.Config) {
			c.Server.EngineRoutes, c.Server.CORSOrigins = []string{"/generative_scoring"}, []string{page}
		}})
		for _, tt := range []struct{ method, path, kind, body string }{
			{"POST", "/generative_scoring", "application/json", `{"model":"m"}`},
			{"POST", "/generative_scoring", "multipart/form-data; boundary=b", form},
			{"POST", "/v1/audio/transcriptions", "multipart/form-data; boundary=b", form},
			{"POST", "/v1/audio/translations", "multipart/form-data; boundary=b", form},
			{"POST", "/v1/audio/speech", "application/json", `{"model":"m","input":"x"}`},
			{"POST", "/v1/images/generations", "application/json", `{"model":"m","prompt":"x"}`},
			{"POST", "/v1/images/edits", "multipart/form-data; boundary=b", form},
			{"POST", "/rerank", "application/json", `{"model":"m","query":"x","documents":["y"]}`},
			{"POST", "/score", "application/json", `{"model":"m","text_1":"x","text_2":"y"}`},
			{"POST", "/pooling", "application/json", `{"model":"m","input":"x"}`},
			{"GET", "/v1/responses/resp_a", "", ""},
			{"DELETE", "/v1/responses/resp_a", "", ""},
		} {
			for _, coding := range []struct{ name, body string }{{"", tt.body}, {"gzip", proxytest.Gzipped(tt.body)}, {"zstd", proxytest.Zstd(t, tt.body)}} {
				if coding.name != "" && tt.body == "" {
					continue
				}
				for _, slash := range []string{"", "/"} {
					name := tt.method + " " + tt.path + slash + " " + coding.name
					header := []string{"Origin", page}
					if tt.kind != "" {
						header = append(header, "Content-Type", tt.kind)
					}
					if coding.name != "" {
						header = append(header, "Content-Encoding", coding.name)
					}
					a := world.Ask(t.Context(), w.Client, tt.method, "http://proxy"+tt.path+slash, coding.body, header...)
					if got := corsLines(a.Header); a.Status != 200 || !slices.Equal(got, listed) {
						t.Errorf("%s: got status %d, %v, lines %q: %s", name, a.Status, a.Err, got, a.Body)
						continue
					}
					legs := e.Seen()
					leg := legs[len(legs)-1]
					if leg.Method != tt.method || leg.Path != tt.path || leg.Body != tt.body || leg.Header.Get("Content-Encoding") != "" {
						t.Errorf("%s: the engine received %s %s, coding %q, %d bytes", name, leg.Method, leg.Path, leg.Header.Get("Content-Encoding"), len(leg.Body))
					}
				}
			}
			preflight := world.Ask(t.Context(), w.Client, "OPTIONS", "http://proxy"+tt.path+"/", "", "Origin", page, "Access-Control-Request-Method", tt.method)
			if preflight.Status != 204 || preflight.Header.Get("Access-Control-Allow-Origin") != page {
				t.Errorf("preflight for %s: got %+v", tt.path, preflight)
			}
		}
		for _, tt := range []struct {
			name, path, coding, body string
			status                   int
		}{
			{"a broken coding", "/rerank", "gzip", "no", 400},
			{"an unknown coding", "/v1/images/generations", "br", "no", 415},
			{"a broken coding of a form", "/v1/audio/transcriptions", "zstd", form, 400},
		} {
			contentType := "application/json"
			if tt.body == form {
				contentType = "multipart/form-data; boundary=b"
			}
			a := world.Ask(t.Context(), w.Client, "POST", "http://proxy"+tt.path, tt.body, "Content-Type", contentType, "Content-Encoding", tt.coding)
			if a.Status != tt.status {
				t.Errorf("%s: got %+v", tt.name, a)
			}
		}
	})
}
