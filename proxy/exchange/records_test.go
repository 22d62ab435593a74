package exchange_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy"
	"github.com/pdproxy/pdproxy/proxy/accesslog"
	"github.com/pdproxy/pdproxy/proxy/proxytest/world"
	"github.com/pdproxy/pdproxy/proxy/recording"
)

// TestAccessLog: each ended request has one line, with its outcome and without its text.
func TestAccessLog(t *testing.T) { synctest.Test(t, testAccessLog) }

func testAccessLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.jsonl")
	access, err := accesslog.Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w := world.New(t, world.Setup{Engines: []*world.Engine{{Serve: func(c *world.Conn, _ int) { c.JSON(200, world.Unary) }}}, Options: func(d *proxy.Options) { d.AccessLog = access }})
	w.Post("/v1/completions", `{"model":"m","prompt":"a secret","max_tokens":3}`, "X-Request-Id", "good")
	w.Post("/v1/completions", `{"model":"m","prompt":"a secret","max_tokens":"many"}`, "X-Request-Id", "bad")
	synctest.Wait()
	if err := access.Close(); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(text, []byte("secret")) {
		t.Errorf("the log contains the text of a prompt: %s", text)
	}
	byID := map[string]accesslog.Entry{}
	for line := range bytes.Lines(text) {
		var e accesslog.Entry
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		byID[e.RequestID] = e
	}
	good, bad := byID["good"], byID["bad"]
	if good.Status != 200 || good.Outcome != "ok" || good.Model != "m" || good.Legs != 1 || good.Decode == "" || good.FirstByteMS == nil || good.PromptTokens == 0 {
		t.Errorf("line of a successful request: %+v", good)
	}
	if bad.Status != 400 || bad.Outcome == "ok" || bad.Legs != 0 || bad.FirstByteMS != nil {
		t.Errorf("line of a rejected request: %+v", bad)
	}
	if len(byID) != 2 {
		t.Errorf("got %d lines, want 2: %s", len(byID), text)
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
