package http1

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// The client gets the same answers as from net/http, except for the framing of answers between 2
// and 4 KiB, whose length this server still knows.
func TestAnswers(t *testing.T) {
	long := strings.Repeat("0123456789", 2000)
	write := func(w http.ResponseWriter, parts ...string) {
		for _, p := range parts {
			if p == "" {
				http.NewResponseController(w).Flush()
			} else {
				io.WriteString(w, p)
			}
		}
	}
	status := func(w http.ResponseWriter, status int, lines ...string) {
		for i := 0; i < len(lines); i += 2 {
			w.Header().Add(lines[i], lines[i+1])
		}
		w.WriteHeader(status)
	}
	handlers := []func(http.ResponseWriter, *http.Request){
		func(http.ResponseWriter, *http.Request) {},
		func(w http.ResponseWriter, _ *http.Request) { write(w, "hello") },
		func(w http.ResponseWriter, _ *http.Request) { write(w, "<html>", "more") },
		func(w http.ResponseWriter, _ *http.Request) { write(w, "a", "", "b", "", "", "c") },
		func(w http.ResponseWriter, _ *http.Request) { write(w, "", "b") },
		func(w http.ResponseWriter, _ *http.Request) { write(w, long) },
		func(w http.ResponseWriter, _ *http.Request) {
			write(w, "x", long, "y", long, "", long[:4000], long[:200])
		},
		func(w http.ResponseWriter, _ *http.Request) {
			for range 3000 {
				write(w, "0123456")
			}
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 200, "Content-Length", "5", "Content-Type", "a/b")
			write(w, "he", "llo")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 201, "Content-Length", fmt.Sprint(len(long)))
			write(w, long)
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 200, "Content-Length", "5")
			write(w, "hello", "too much")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 200, "Content-Length", "9")
			write(w, "short")
		},
		func(w http.ResponseWriter, _ *http.Request) { status(w, 200, "Content-Length", "0") },
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 200, "Transfer-Encoding", "chunked")
			write(w, "hello", "")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 204, "X", "y")
			write(w, "hello")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 304, "Content-Type", "a/b", "Content-Length", "7", "Etag", "z")
		},
		func(w http.ResponseWriter, _ *http.Request) { status(w, 299, "X", "a", "X", "b") },
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 200, "X", "a\r\nSet-Cookie: b", "Y\r\nZ", "c", "A b", "d")
			write(w, "hello")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header()["Date"], w.Header()["Content-Type"] = nil, nil
			write(w, "hello")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 200, "Date", "then", "Content-Encoding", "gzip")
			write(w, "hello")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 200, "Connection", "close")
			write(w, "hello")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 103, "Link", "</x>")
			status(w, 100)
			w.Header().Del("Link")
			status(w, 200)
			w.Header().Set("Late", "x")
			status(w, 500)
			write(w, "hello")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			status(w, 200, "Trailer", "X-A, x-b")
			write(w, "hello")
			w.Header().Set("X-A", "1")
			w.Header().Set("X-B", "2")
			w.Header().Set("X-C", "3")
			w.Header().Set(http.TrailerPrefix+"X-D", "4")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			write(w, "hello", "", "more")
			w.Header().Set(http.TrailerPrefix+"X-D", "4")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", long)
			write(w, "hello", "", "more")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", long[:3700])
			write(w, long[:140], "", "more")
		},
		func(w http.ResponseWriter, _ *http.Request) {
			write(w, "hello", "")
			panic(http.ErrAbortHandler)
		},
		func(w http.ResponseWriter, _ *http.Request) { panic("unexpected") },
		func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			write(w, fmt.Sprintf("%s %v", b, err))
		},
		func(w http.ResponseWriter, r *http.Request) {
			r.Body.Close()
			_, err := r.Body.Read(make([]byte, 1))
			write(w, fmt.Sprint(err != nil))
		},
	}
	requests := []string{
		"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "HEAD / HTTP/1.1\r\nHost: a\r\n\r\n", "GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
		"GET / HTTP/1.0\r\n\r\n", "GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "HEAD / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
		post, coded + "2\r\nhi\r\n0\r\n\r\n", postHead + "Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
	}
	for i, h := range handlers {
		for _, request := range requests {
			all := request + get
			handler := http.HandlerFunc(h)
			method, _, _ := strings.Cut(request, " ")
			got, rest := answers(t, serveScript(newServer(handler), all), method)
			want, _ := answers(t, serveScript(&http.Server{Handler: handler, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}, all), method)
			if !slices.Equal(got, want) || rest != "" {
				t.Errorf("handler %d, %.40q:\ngot  %.300q\nwant %.300q\n%q", i, request, got, want, rest)
			}
		}
	}
}

// A value that ends a line cannot add a header line, and the head stays whole.
func TestAnswerBytes(t *testing.T) {
	sent := serveScript(newServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header()["Date"] = nil
		w.Header().Set("X", "a\r\nb: c\n")
		w.Header().Set("Content-Type", "text/event-stream")
		for range 2 {
			io.WriteString(w, "data: 1\n\n")
			http.NewResponseController(w).Flush()
		}
	})), "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
	head, body, _ := strings.Cut(sent, "\r\n\r\n")
	lines := strings.Split(head, "\r\n")
	slices.Sort(lines)
	if want := []string{"Content-Type: text/event-stream", "HTTP/1.1 200 OK", "Transfer-Encoding: chunked", "X: a  b: c "}; !slices.Equal(lines, want) {
		t.Errorf("got head %q", head)
	}
	if body != "9\r\ndata: 1\n\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n" {
		t.Errorf("got body %q", body)
	}
}

// The server reads the rest of a body that no handler has read. An answer behind which no other request
// is served says so.
func TestUnreadBody(t *testing.T) {
	large := strings.Repeat("x", maxRest)
	for _, tt := range []struct {
		name, head, rest string // rest comes a second later
		begun            bool   // the handler has flushed the head
		next             bool   // another request is served
		after            time.Duration
	}{
		{"a length", postHead + "Content-Length: 5\r\n\r\nhel", "lo", false, true, time.Second},
		{"chunks", coded + "5\r\nhel", "lo\r\n0\r\nX: y\r\n\r\n", false, true, time.Second},
		{"behind a flush", postHead + "Content-Length: 5\r\n\r\nhel", "lo", true, true, 0},
		{"all that is read", postHead + "Content-Length: 262144\r\n\r\n", large, false, true, time.Second},
		{"more than is read", postHead + "Content-Length: 262145\r\n\r\n", "", false, false, 0},
		{"more chunks than are read", coded + "40200\r\n", large + "x", false, false, time.Second},
		{"malformed", coded + "5\r\nhelloXX", "", false, false, 0},
		{"no rest", postHead + "Content-Length: 5\r\n\r\nhel", "", false, false, 10 * time.Second},
		{"100 Continue", postHead + "Expect: 100-continue\r\nContent-Length: 5\r\n\r\n", "hello", false, false, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			p := proxytest.NewPipeListener()
			c := serveOn(t, newServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if tt.begun {
					w.(http.Flusher).Flush()
				}
			})), p, p.Dial)()
			begin, sent := time.Now(), make(chan struct{})
			go func() {
				defer close(sent)
				io.WriteString(c, tt.head)
				time.Sleep(time.Second)
				io.WriteString(c, tt.rest)
				if tt.next {
					io.WriteString(c, get)
				}
			}()
			defer func() { c.Close(); <-sent }()
			in := bufio.NewReader(c)
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatalf("%s: %v", tt.name, err)
			}
			if d := time.Since(begin); d != tt.after || resp.Close == tt.next {
				t.Errorf("%s: the answer came after %v, close %t", tt.name, d, resp.Close)
			}
			io.Copy(io.Discard, resp.Body)
			if resp, err = http.ReadResponse(in, nil); (err == nil) != tt.next {
				t.Errorf("%s: %v, %v", tt.name, resp, err)
			}
		})
	}
}
