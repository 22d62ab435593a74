package filter

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// slowBody is a request body whose chunks the test sends one by one.
func slowBody(t *testing.T, srv *httptest.Server, section string) (*io.PipeWriter, <-chan *http.Response) {
	t.Helper()
	r, w := io.Pipe()
	req, err := http.NewRequest("POST", srv.URL+"/x", r)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Script", section)
	answers := make(chan *http.Response, 1)
	go func() {
		resp, err := srv.Client().Do(req)
		if err != nil {
			close(answers)
			return
		}
		answers <- resp
	}()
	return w, answers
}

func readAll(t *testing.T, resp *http.Response) string {
	t.Helper()
	if resp == nil {
		t.Fatal("no answer")
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestChunksComeThroughOneByOne(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[s]
request_body: say $size $eos
request_body: call proxy_get_buffer_bytes 0 0 100 ret`))
	came := make(chan string)
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		b := make([]byte, 100)
		for {
			n, err := r.Body.Read(b)
			if n > 0 {
				came <- string(b[:n])
			}
			if err != nil {
				close(came)
				return
			}
		}
	})
	body, answers := slowBody(t, srv, "s")
	for _, chunk := range []string{"one", "two", "three"} {
		io.WriteString(body, chunk)
		if got := <-came; got != chunk {
			t.Fatalf("next got %q, want %q", got, chunk)
		}
	}
	body.Close()
	if _, more := <-came; more {
		t.Fatal("next got more")
	}
	readAll(t, <-answers)
	want := []string{
		`request_body 3 0`, `request_body proxy_get_buffer_bytes=0 "one"`,
		`request_body 3 0`, `request_body proxy_get_buffer_bytes=0 "two"`,
		`request_body 5 0`, `request_body proxy_get_buffer_bytes=0 "three"`,
		`request_body 0 1`, `request_body proxy_get_buffer_bytes=0 ""`,
	}
	if got := w.callbacks("f"); !slices.Equal(got, want) {
		t.Fatalf("got  %q\nwant %q", got, want)
	}
}

func TestPausedBodyIsShownWhole(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[s]
request_body: say $size $eos
request_body: !eos return 1`))
	srv := w.serve(echo)
	body, answers := slowBody(t, srv, "s")
	for i, chunk := range []string{"one", "two", "three"} {
		io.WriteString(body, chunk)
		w.log.wait(t, i+1, "request_body")
	}
	body.Close()
	resp := <-answers
	if got := readAll(t, resp); got != "onetwothree" {
		t.Fatalf("got %q", got)
	}
	want := []string{"request_body 3 0", "request_body 6 0", "request_body 11 0", "request_body 11 1"}
	if got := w.callbacks("f"); !slices.Equal(got, want) {
		t.Fatalf("got  %q\nwant %q", got, want)
	}
}

func TestSplice(t *testing.T) {
	cases := []struct{ name, args, want string }{
		{"prepend", `0 0 "<<"`, "<<hello"},
		{"append", `99 0 ">>"`, "hello>>"},
		{"append with a size", `5 10 ">>"`, "hello>>"},
		{"replace", `0 100 "bye"`, "bye"},
		{"replace exactly", `0 5 "bye"`, "bye"},
		{"splice", `1 3 "--"`, "h--o"},
		{"insert", `2 0 "--"`, "he--llo"},
		{"empty", `0 5 ""`, ""},
		{"longer than the chunk", `0 100 fill:70000`, strings.Repeat("x", 70000)},
	}
	// Each case has two sections of a shared script, one for each direction.
	w, script := newWorld(t), ""
	for i, tt := range cases {
		script += fmt.Sprintf(`[q%d]
request_body: eos call proxy_set_buffer_bytes 0 %s
[a%d]
response_headers: call proxy_get_header_map_value 2 "content-length" ret
response_body: 1 call proxy_set_buffer_bytes 1 %s
`, i, tt.args, i, tt.args)
	}
	w.start(spec("f", script))
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		rw.Header().Set("X-Length", fmt.Sprint(r.ContentLength, r.Header["Content-Length"]))
		rw.Header().Set("Content-Length", fmt.Sprint(len(b)))
		rw.Write(b)
	})
	for i, tt := range cases {
		t.Run(tt.name, func(t *testing.T) {
			resp, got := do(t, srv, fmt.Sprintf("q%d", i), "hello")
			if got != tt.want || resp.Header.Get("X-Length") != "-1 []" {
				t.Errorf("request: got %.20q, length %s", got, resp.Header.Get("X-Length"))
			}
			resp, got = do(t, srv, fmt.Sprintf("a%d", i), "hello")
			if got != tt.want || resp.ContentLength != int64(len(tt.want)) {
				t.Errorf("answer: got %.20q, length %d", got, resp.ContentLength)
			}
			w.log.wait(t, i+1, `proxy_get_header_map_value=0 "5"`)
		})
	}
}

func TestHeldHeadersSeeTheBody(t *testing.T) {
	w := newWorld(t)
	s := spec("f", `[s]
request_headers: return 1
request_body: say $size $eos
request_body: !eos return 1
request_body: eos call proxy_replace_header_map_value 0 "x-route" "by-body"
request_body: eos call proxy_set_buffer_bytes 0 0 0 "new "
[first]
request_headers: return 1
response_headers: return 1
response_body: say $size $eos
response_body: !eos return 1
response_body: eos call proxy_replace_header_map_value 2 ":status" "299"`)
	s.HoldHeaders = true
	w.start(s)
	w.start(spec("later", "[s]\nrequest_headers: call proxy_get_header_map_value 0 \"x-route\" ret"))
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("X-Route", r.Header.Get("X-Route"))
		rw.Header().Set("X-Header-Length", r.Header.Get("Content-Length"))
		echo(rw, r)
	})
	resp, got := do(t, srv, "s", "hello")
	if got != "new hello" || resp.Header.Get("X-Length") != "9" || resp.Header.Get("X-Header-Length") != "9" || resp.Header.Get("X-Route") != "by-body" {
		t.Errorf("got %q %v", got, resp.Header)
	}
	w.log.wait(t, 1, `later: s|request_headers|2|proxy_get_header_map_value=0 "by-body"`)
	if resp, got = do(t, srv, "first", "hello"); resp.StatusCode != 299 || got != "hello" {
		t.Errorf("got %d %q", resp.StatusCode, got)
	}
}

func TestHeldBodiesAreLimited(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[q]
request_body: return 1
[a]
response_body: return 1`))
	srv := w.serve(echo)
	big := strings.Repeat("y", 1<<20+1)
	if resp, body := do(t, srv, "q", big); resp.StatusCode != 413 || !strings.Contains(body, "body_too_large") {
		t.Errorf("got %d %.100s", resp.StatusCode, body)
	}
	if resp, body := do(t, srv, "a", big); resp.StatusCode != 500 || !strings.Contains(body, "answer_too_large") {
		t.Errorf("got %d %.100s", resp.StatusCode, body)
	}
}

// bytesHeld is a Memory with room for some bytes.
type bytesHeld struct{ room, used, most atomic.Int64 }

func (m *bytesHeld) Take(n int64) bool {
	used := m.used.Add(n)
	if used > m.room.Load() {
		m.used.Add(-n)
		return false
	}
	m.most.Store(max(m.most.Load(), used))
	return true
}

func (m *bytesHeld) Release(n int64) { m.used.Add(-n) }

func TestHeldBodiesAreCounted(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[q]
request_body: !eos return 1
[a]
response_body: !eos return 1`))
	memory := new(bytesHeld)
	w.chain.Set(w.plugins, Limits{MaxBody: 1 << 20, Memory: memory})
	srv := w.serve(echo)
	big := strings.Repeat("y", 1<<19)
	for _, section := range []string{"q", "a"} {
		for _, room := range []int64{1 << 20, 100 << 10} {
			memory.room.Store(room)
			memory.most.Store(0)
			resp, body := do(t, srv, section, big)
			if room == 1<<20 && (resp.StatusCode != 200 || body != big) {
				t.Errorf("%s: %d, %d bytes", section, resp.StatusCode, len(body))
			}
			if room < 1<<20 && (resp.StatusCode != 503 || !strings.Contains(body, "memory_limit")) {
				t.Errorf("%s without memory: %d %.100s", section, resp.StatusCode, body)
			}
			if section == "q" && memory.most.Load() < 64<<10 {
				t.Errorf("%s: at most %d bytes are counted", section, memory.most.Load())
			}
			for range 1000 { // the stream ends after its answer
				if memory.used.Load() == 0 {
					break
				}
				time.Sleep(time.Millisecond)
			}
			if n := memory.used.Load(); n != 0 {
				t.Errorf("%s: %d bytes are counted of nothing", section, n)
			}
		}
	}
}

func TestTrailers(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[s]
request_headers: say $eos
request_body: say $size $eos
request_trailers: call proxy_get_header_map_value 1 "x-sum" ret
request_trailers: call proxy_add_header_map_value 1 "x-more" "m"
response_body: say $size $eos
response_trailers: call proxy_get_header_map_value 3 "x-end" ret
response_trailers: call proxy_replace_header_map_value 3 "x-end" "changed"
[begin]
request_body: eos call proxy_add_header_map_value 1 "x-new" "2"
response_body: !eos call proxy_add_header_map_value 3 "x-back" "1"
response_body: eos call proxy_add_header_map_value 3 "x-back" "2"`))
	w.start(spec("g", `[begin]
request_body: say $size $eos
request_trailers: say $size`))
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		rw.Header().Set("Trailer", "X-End")
		rw.Write(b)
		rw.Write([]byte(fmt.Sprint(r.Trailer["X-Sum"], r.Trailer["X-More"], r.Trailer["X-New"])))
		if r.Header.Get("X-Script") == "s" {
			rw.Header().Set("X-End", "over")
		}
	})
	send := func(section string, trailer http.Header) (*http.Response, string) {
		req, _ := http.NewRequest("POST", srv.URL, struct{ io.Reader }{strings.NewReader("hello")})
		req.Trailer = trailer
		req.Header.Set("X-Script", section)
		resp, err := srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		return resp, readAll(t, resp)
	}
	resp, got := send("s", http.Header{"X-Sum": {"42"}})
	if got != "hello[42] [m] []" || resp.Trailer.Get("X-End") != "changed" {
		t.Errorf("got %q, trailer %v", got, resp.Trailer)
	}
	calls := slices.DeleteFunc(w.callbacks("f"), func(c string) bool { return c == "request_body 0 0" })
	want := []string{
		"request_headers 0", "request_body 5 0", `request_trailers proxy_get_header_map_value=0 "42"`, "request_trailers proxy_add_header_map_value=0",
		"response_body 5 0", "response_body 11 0", `response_trailers proxy_get_header_map_value=0 "over"`, "response_trailers proxy_replace_header_map_value=0",
	}
	if !slices.Equal(calls, want) {
		t.Errorf("got  %q\nwant %q", calls, want)
	}
	resp, got = send("begin", nil)
	if got != "hello[] [] [2]" || resp.Trailer.Get("X-Back") != "2" {
		t.Errorf("got %q, trailer %v", got, resp.Trailer)
	}
	// The end of the body may arrive with its last bytes or after them.
	g := slices.DeleteFunc(w.callbacks("g"), func(c string) bool { return c == "request_body 0 0" })
	if !slices.Equal(g, []string{"request_body 5 0", "request_trailers 1"}) {
		t.Errorf("got  %q", g)
	}
}

func TestAnswersWithoutBody(t *testing.T) {
	w := newWorld(t)
	w.start(spec("f", `[main]
response_headers: say $eos
response_body: say $size $eos`))
	srv := w.serve(func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/204":
			rw.WriteHeader(204)
		case "/zero":
			rw.Header().Set("Content-Length", "0")
			rw.WriteHeader(200)
		case "/head":
			rw.Header().Set("Content-Length", "5")
			rw.Write([]byte("hello"))
		}
	})
	for _, tt := range []struct{ method, path string }{{"GET", "/204"}, {"GET", "/zero"}, {"GET", "/nothing"}, {"HEAD", "/head"}} {
		req, _ := http.NewRequest(tt.method, srv.URL+tt.path, nil)
		resp, err := srv.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if body := readAll(t, resp); body != "" || tt.path == "/head" && resp.ContentLength != 5 {
			t.Errorf("%s: got %q, length %d", tt.path, body, resp.ContentLength)
		}
	}
	if got := w.callbacks("f"); !slices.Equal(got, slices.Repeat([]string{"response_headers 1"}, 4)) {
		t.Errorf("got %q", got)
	}
}
