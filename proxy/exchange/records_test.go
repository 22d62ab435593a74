package exchange_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/accesslog"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/recording"
)

// TestAccessLog: each ended request has one line, with its outcome and without its text or its query.
func TestAccessLog(t *testing.T) { synctest.Test(t, testAccessLog) }

func testAccessLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.jsonl")
	access, err := accesslog.Open(path, "json", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	serve := func(c *world.Conn, _ int) {
		switch {
		case strings.Contains(c.Leg.Body, "broken"):
			c.JSON(500, `{"error":"broken"}`)
		case strings.Contains(c.Leg.Body, `"stream":true`):
			c.Stream(world.EventA, world.EventB, world.Done)
		default:
			c.JSON(200, world.Unary)
		}
	}
	w := world.New(t, world.Setup{
		Engines: []*world.Engine{{Name: "a", Serve: serve}, {Name: "b", Serve: serve}},
		Options: func(d *proxy.Options) { d.AccessLog = access },
		Config: func(c *config.Config) {
			c.Models = []config.Model{{Name: "alias", AliasOf: "m"}}
			c.PriorityClasses = []config.PriorityClass{config.DefaultPriorityClass()}
			c.PriorityClasses[0].Name = "default"
		},
	})
	sent := map[string][2]int{} // bytes of the bodies, by request
	post := func(id, path, body string) {
		answer := w.Post(path, body, "X-Request-Id", id)
		sent[id] = [2]int{len(body), len(answer.Body)}
	}
	post("good", "/v1/completions?key=secret", `{"model":"m","prompt":"a secret","max_tokens":3}`)
	post("bad", "/v1/completions", `{"model":"m","prompt":"a secret","max_tokens":"many"}`)
	post("alias", "/v1/completions", `{"model":"alias","prompt":"a secret","max_tokens":3}`)
	post("stream", "/v1/completions", `{"model":"m","prompt":"a secret","max_tokens":3,"stream":true}`)
	post("broken", "/v1/completions", `{"model":"m","prompt":"a secret","max_tokens":3,"user":"broken"}`)
	synctest.Wait()
	if err := access.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(text, []byte("secret")) {
		t.Errorf("the log contains the text of a prompt or of a query: %s", text)
	}
	byID := map[string]accesslog.Entry{}
	for line := range bytes.Lines(text) {
		var e accesslog.Entry
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		byID[e.RequestID] = e
		if e.Method != "POST" || e.Path != "/v1/completions" || e.Protocol != "HTTP/1.1" || [2]int{int(e.BytesIn), int(e.BytesOut)} != sent[e.RequestID] || e.BytesOut == 0 {
			t.Errorf("line %s: want POST /v1/completions HTTP/1.1 and %v bytes", line, sent[e.RequestID])
		}
	}
	if e := byID["good"]; e.Status != 200 || e.Outcome != "ok" || e.Model != "m" || e.RequestedModel != "m" || e.Class != "default" || e.Legs != 1 || e.Retries != 0 || e.Decode == "" || e.FirstByteMS == nil || e.PromptTokens == 0 {
		t.Errorf("line of a successful request: %+v", e)
	}
	if e := byID["bad"]; e.Status != 400 || e.Outcome == "ok" || e.Legs != 0 || e.FirstByteMS != nil {
		t.Errorf("line of a rejected request: %+v", e)
	}
	if e := byID["alias"]; e.RequestedModel != "alias" || e.Model != "m" {
		t.Errorf("line of an alias: %+v", e)
	}
	if e := byID["stream"]; !e.Stream || e.Status != 200 {
		t.Errorf("line of a stream: %+v", e)
	}
	if e := byID["broken"]; e.Status != 502 || e.Legs < 2 || e.Retries != e.Legs-1 {
		t.Errorf("line of a request that every engine fails: %+v", e)
	}
	if len(byID) != 5 {
		t.Errorf("got %d lines, want 5: %s", len(byID), text)
	}
}

// TestExplainNamesCauses: a failed leg has the text of its error beside the reason, and nothing of the
// bodies.
func TestExplainNamesCauses(t *testing.T) {
	for _, tt := range []struct {
		name, reason, cause string
		stream              bool
		engine              *world.Engine
	}{
		{"cut body", "body", "read answer body: unexpected EOF", false, &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
			c.HangUp()
		}}},
		{"cut stream", "body", "read answer body: unexpected EOF", true, &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send(world.StreamHead)
			c.Chunks(world.EventA)
			c.HangUp()
		}}},
		{"open stream", "no_end", "the stream ended without its closing event", true, &world.Engine{Serve: func(c *world.Conn, _ int) { c.Stream(world.EventA) }}},
		{"status", "status_500", "the engine answered with status 500", false, &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(500, `{"error":"a secret"}`) }}},
		{"error in an answer", "error_answer", "the engine reported an error", false, &world.Engine{Serve: func(c *world.Conn, _ int) { c.JSON(200, `{"error":{"message":"a secret"}}`) }}},
		{"error in a stream", "error_event", "the engine reported an error", true, &world.Engine{Serve: func(c *world.Conn, _ int) { c.Stream("data: {\"error\":{\"message\":\"a secret\"}}\n\n") }}},
		{"no form", "head", "read answer head: malformed status line", false, &world.Engine{Serve: func(c *world.Conn, _ int) {
			c.Send("a secret\r\n\r\n")
			c.HangUp()
		}}},
		{"no connection", "dial", "dial engine: no route to host", false, &world.Engine{Dialing: errors.New("no route to host")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := world.New(t, world.Setup{Engines: []*world.Engine{tt.engine}, Config: func(c *config.Config) { c.Retry.Attempts = 1 }})
				w.Post(world.CompletionsPath, world.Completions(tt.stream))
				synctest.Wait()
				e := w.Explained()
				if len(e.Legs) != 1 || e.Legs[0].Error != tt.reason || e.Legs[0].Cause != tt.cause {
					t.Errorf("got legs %+v, want %s: %s", e.Legs, tt.reason, tt.cause)
				}
			})
		})
	}
}

// TestRecorder: two prompts with the same beginning have the same first hashes. The file
// contains no text of the prompts.
func TestRecorder(t *testing.T) { synctest.Test(t, testRecorder) }

func testRecorder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	rec, err := recording.New(path, 4)
	if err != nil {
		t.Fatal(err)
	}
	w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}, Options: func(d *proxy.Options) { d.Recorder = rec }})
	for _, body := range []string{
		`{"model":"m","prompt":"a secret of sixteen and more","max_tokens":3}`,
		`{"model":"m","prompt":"a secret of sixteen and else","max_tokens":3,"session_id":"s-1"}`,
		`{"model":"m","prompt":[1,2,3,4,5,6],"max_tokens":3}`,
		`{"model":"m","prompt":[1,2,3,4,5],"max_tokens":3}`,
	} {
		if got := w.Post("/v1/completions", body); got.Status != 200 {
			t.Fatalf("got status %d", got.Status)
		}
	}
	synctest.Wait()
	if err := rec.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(text, []byte("secret")) || bytes.Contains(text, []byte("s-1")) {
		t.Errorf("the recording contains text: %s", text)
	}
	var lines []recording.Line
	for line := range bytes.Lines(text) {
		var l recording.Line
		if err := json.Unmarshal(line, &l); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, l)
	}
	if len(lines) != 4 {
		t.Fatalf("got %d lines", len(lines))
	}
	if a, b := lines[0].HashIDs, lines[1].HashIDs; len(a) != 2 || len(b) != 2 || a[0] != b[0] || a[1] == b[1] {
		t.Errorf("hashes of texts: got %x and %x, want one common block and a partial one", a, b)
	}
	if a, b := lines[2].HashIDs, lines[3].HashIDs; len(a) != 2 || len(b) != 2 || a[0] != b[0] || a[1] == b[1] {
		t.Errorf("hashes of ids: got %x and %x, want one common block and a partial one", a, b)
	}
	if lines[0].Conversation != "" || len(lines[1].Conversation) != 16 {
		t.Errorf("got conversations %q and %q", lines[0].Conversation, lines[1].Conversation)
	}
	if l := lines[2]; l.InputLength <= 0 || l.OutputLength <= 0 {
		t.Errorf("got lengths %d and %d", l.InputLength, l.OutputLength)
	}
}

// TestRecorderOfSeveral: several processes write one recording. The hashes of a prompt
// are the same in all processes, and differ from the hashes that the processes send to
// each other.
func TestRecorderOfSeveral(t *testing.T) { synctest.Test(t, testRecorderOfSeveral) }

func testRecorderOfSeveral(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	rec, err := recording.New(path, 4)
	if err != nil {
		t.Fatal(err)
	}
	var sent [][]byte
	away := false
	forward := func() *recording.Recorder {
		return recording.NewForwarder(4, func(line []byte) bool {
			sent = append(sent, line)
			if !away && rec.Add(line) != nil {
				t.Error("the recorder rejected a line")
			}
			return !away
		})
	}
	forwarders := []*recording.Recorder{forward(), forward()}
	const body = `{"model":"m","prompt":"a secret of sixteen and more","max_tokens":3,"session_id":"s-1"}`
	time.Sleep(time.Second)
	for n, one := range append(forwarders, forwarders[0]) {
		away = n == 2
		w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}, Options: func(d *proxy.Options) { d.Recorder = one }})
		if got := w.Post("/v1/completions", body); got.Status != 200 {
			t.Fatalf("got status %d", got.Status)
		}
		synctest.Wait()
	}
	if forwarders[0].Close() == nil || forwarders[1].Close() != nil {
		t.Error("want one missing line, of the first process")
	}
	if err := rec.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var lines []recording.Line
	for line := range bytes.Lines(text) {
		var l recording.Line
		if err := json.Unmarshal(line, &l); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, l)
	}
	var raw recording.Line
	if err := json.Unmarshal(sent[0], &raw); err != nil {
		t.Fatal(err)
	}
	if len(lines) != 2 || !slices.Equal(lines[0].HashIDs, lines[1].HashIDs) || lines[0].Conversation != lines[1].Conversation || lines[0].Timestamp < 1000 || lines[1].Timestamp > 1100 {
		t.Fatalf("%s", text)
	}
	if slices.Contains(lines[0].HashIDs, raw.HashIDs[0]) || lines[0].Conversation == raw.Conversation {
		t.Error("the recording contains a sent hash")
	}
	if rec.Add([]byte("{")) == nil {
		t.Error("garbage was taken")
	}
}
