package edge

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
)

// FuzzFraming sends any bytes over a connection to net/http's server, with the guard and
// without it. The handler gets the same requests in both cases until the first request
// with ambiguous framing, and no request from there on. The answers on a connection
// without such a request are the same byte for byte.
func FuzzFraming(f *testing.F) {
	for _, s := range framingStreams {
		_, all, _ := parseFramingStream(s.bytes)
		if s.name != "HTTP/2" {
			f.Add([]byte(all), uint16(len(all)/2), uint16(len(all)))
		}
	}
	f.Fuzz(func(t *testing.T, in []byte, cut, cut2 uint16) {
		if bytes.HasPrefix(in, []byte(http2Preface)) || len(in) > 16<<10 {
			return // HTTP/2 has frames of its own
		}
		clear, doubtful := framings(in)
		synctest.Test(t, func(t *testing.T) {
			cuts := []int{int(min(cut, cut2)), int(max(cut, cut2))}
			got, sent := serveStream(string(in), true, cuts...)
			want, answers := serveStream(string(in), false, cuts...)
			if !doubtful {
				sent, status := cutRefusal(t, sent)
				answers, wantStatus := cutPlainRefusal(answers)
				if fmt.Sprint(got) != fmt.Sprint(want) || sent != answers || status != wantStatus {
					t.Fatalf("the handler got %q, without the guard %q;\nthe client %q, without %q", got, want, sent, answers)
				}
				return
			}
			if len(got) > clear {
				t.Fatalf("the handler got %q, want at most the first %d requests", got, clear)
			}
			if fmt.Sprint(got) != fmt.Sprint(want[:min(len(got), len(want))]) {
				t.Fatalf("the handler got %q, want %q as without the guard", got, want)
			}
		})
	})
}

// framings reads a connection as net/http does, and checks each raw head. doubtful
// reports that one of the requests must not pass, or that the guard closes the connection
// at a place where net/http might continue. clear is the number of requests before that
// one.
func framings(in []byte) (clear int, doubtful bool) {
	src := bytes.NewReader(in)
	br := bufio.NewReaderSize(src, 4<<10)
	for {
		for { // limits like those of net/http's server, or larger
			b, err := br.Peek(1)
			if err != nil {
				return clear, false
			}
			if b[0] != '\r' && b[0] != '\n' {
				break
			}
			br.Discard(1)
		}
		begin := len(in) - src.Len() - br.Buffered()
		r, err := http.ReadRequest(br)
		end := len(in) - src.Len() - br.Buffered()
		if doubtfulHead(in[begin:end]) {
			return clear, true
		}
		if err != nil {
			// net/http rejects this head. The guard may close the connection before it
			// has read the reason.
			return clear, bytes.Contains(bytes.ToLower(in[begin:]), []byte("content-length")) || bytes.Contains(bytes.ToLower(in[begin:]), []byte("transfer-encoding"))
		}
		_, err = io.Copy(io.Discard, r.Body)
		if err != nil {
			return clear + 1, len(r.TransferEncoding) > 0 // perhaps a chunk with an impossible size
		}
		clear++
	}
}

// doubtfulHead finds a head with both framings, or with framing that servers interpret
// differently. Its rules are written independently of the guard.
func doubtfulHead(head []byte) bool {
	lines := strings.Split(string(head), "\n")
	var lengths []string
	codings, folded := 0, false
	for i, line := range lines[1:] {
		name, value, _ := strings.Cut(line, ":")
		switch {
		case strings.HasPrefix(line, " "), strings.HasPrefix(line, "\t"):
			before, _, _ := strings.Cut(lines[i], ":")
			folded = folded || strings.EqualFold(before, "content-length") || strings.EqualFold(before, "transfer-encoding")
		case strings.EqualFold(name, "content-length"):
			lengths = append(lengths, strings.TrimSpace(value))
			folded = folded || len(line) > len(framing{}.line)
		case strings.EqualFold(name, "transfer-encoding"):
			codings++
		}
	}
	old := !strings.HasSuffix(strings.TrimSuffix(lines[0], "\r"), "HTTP/1.1")
	for _, l := range lengths {
		if l != lengths[0] || strings.Trim(l, "0123456789") != "" || l == "" {
			return true
		}
	}
	return folded || codings > 0 && (old || len(lengths) > 0)
}
