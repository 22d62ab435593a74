package enginesim

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// TestManyStreams: hundreds of simultaneous streams over few slots are all
// complete.
func TestManyStreams(t *testing.T) {
	e := startEngine(t, Config{MaxRunning: 100, DecodeUsPerToken: 200, KVBlocks: 600})
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 300}}
	defer client.CloseIdleConnections()
	var wg sync.WaitGroup
	for i := range 300 {
		wg.Go(func() {
			resp, err := client.Post(e.URL()+core.RouteCompletions, "application/json", strings.NewReader(completion(words(i%20, 50), `"max_tokens":20,"stream":true`)))
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			raw, err := io.ReadAll(resp.Body)
			if n := strings.Count(string(raw), "data: "); err != nil || n != 21 || !strings.HasSuffix(string(raw), "data: [DONE]\n\n") {
				t.Errorf("%d events, %v", n, err)
			}
		})
	}
	wg.Wait()
	if s := e.State(); s.OutputTokens != 6000 || s.BlocksUsed != 0 || s.Aborted != 0 {
		t.Errorf("state %+v", s)
	}
}

// TestKeepAlive: comments come before the first event and between events.
func TestKeepAlive(t *testing.T) {
	e := startEngine(t, Config{SSEKeepAlive: time.Millisecond, DecodeUsPerToken: 1000, Hang: core.HangPrefill})
	until := func(br *bufio.Reader, want string) {
		t.Helper()
		for {
			line, err := br.ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if line = strings.TrimSpace(line); strings.HasPrefix(line, want) {
				return
			} else if line != "" && line != ": keep-alive" && !strings.HasPrefix(line, "data: {") {
				t.Fatalf("line %q", line)
			}
		}
	}
	read := func() *bufio.Reader {
		resp, err := http.Post(e.URL()+core.RouteCompletions, "application/json", strings.NewReader(completion("x", `"max_tokens":20000,"stream":true`)))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		return bufio.NewReader(resp.Body)
	}
	until(read(), ": keep-alive")
	e.SetFault("", 0, "")
	br := read()
	until(br, "data: ")
	e.SetFault("", 0, core.HangDecode)
	until(br, ": keep-alive")
}

// TestHalfClose: a client that closes its writing side counts as gone.
func TestHalfClose(t *testing.T) {
	e := startEngine(t, Config{Hang: core.HangDecode})
	conn, err := net.Dial("tcp", e.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	req, _ := http.NewRequest(http.MethodPost, e.URL()+core.RouteCompletions, strings.NewReader(completion("x", "")))
	req.Write(conn)
	eventually(t, "a running request", func() bool { return e.State().RequestsRunning == 1 })
	conn.(*net.TCPConn).CloseWrite()
	if raw, err := io.ReadAll(conn); err != nil || len(raw) > 0 {
		t.Errorf("io.ReadAll(conn) = %q, %v", raw, err)
	}
	if s := e.State(); s.Aborted != 1 {
		t.Errorf("state %+v", s)
	}
}

// TestStreamHangs: a stream hangs after its first events until its client leaves.
func TestStreamHangs(t *testing.T) {
	e := startEngine(t, Config{Hang: core.HangStream})
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.URL()+core.RouteCompletions, strings.NewReader(completion("hello", `"stream":true`)))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	for range 2 * core.StreamEventsBeforeFault {
		if _, err := br.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
	}
	leave()
	eventually(t, "an abort", func() bool { s := e.State(); return s.Aborted == 1 && s.BlocksUsed == 0 })
}

// TestRunEnds: Run ends with an error when a request kills the engine.
func TestRunEnds(t *testing.T) {
	e := newBare(t, Config{DieAfter: 1})
	ended := make(chan error, 1)
	go func() { ended <- e.Run(t.Context()) }()
	eventually(t, "an address", func() bool { return e.Addr() != "" })
	post(t, e.URL()+core.RouteCompletions, completion("x", `"max_tokens":1`))
	if _, err := try(t.Context(), e.URL()+core.RouteCompletions, completion("x", "")); err == nil {
		t.Error("the second request was answered")
	}
	if err := <-ended; err == nil {
		t.Error("Run ended without an error")
	}
	if _, err := net.Dial("tcp", e.Addr()); err == nil {
		t.Error("still listening")
	}
}

// TestCloseAfterKill: to close a dead engine takes no time.
func TestCloseAfterKill(t *testing.T) {
	e := startEngine(t, Config{DecodeUsPerToken: 2000})
	postAside(t, e.URL()+core.RouteCompletions, completion("x", `"max_tokens":5000,"stream":true`))
	eventually(t, "a running request", func() bool { return e.State().RequestsRunning == 1 })
	e.Kill()
	start := time.Now()
	e.Close()
	if time.Since(start) > core.CloseGrace {
		t.Error("close waited for a dead engine")
	}
}
