package http1

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
)

// message is one request as a reader of a stream has understood it.
type message struct {
	method, target string
	proto          string   // such as HTTP/1.1
	host           string   // the header Host, if the target has none
	fields         []string // "name: value" by name, without those of framedBy
	trailers       []string
	body           string // the bytes that have arrived
	headed         bool   // the head was accepted
	whole          bool   // the end of the body was seen
	unread         bool   // the handler has not read the whole body
	own            bool   // the server has answered without the handler, so only method and target are known
	end            int    // index of the byte behind the request; only llhttp knows it
}

// reading is the requests that a reader has found in one stream.
type reading struct {
	messages []message
	refused  string // why the reader refused the stream behind the messages; "": it did not
	closed   bool   // it refused because the last request closes the connection
}

func (r *reading) last() *message { return &r.messages[len(r.messages)-1] }

// whole returns the bodies of the complete requests.
func (r reading) whole() (bodies []string) {
	for _, m := range r.messages {
		if m.whole {
			bodies = append(bodies, m.body)
		}
	}
	return bodies
}

// libraryBodies returns the bodies of the complete requests that net/http's parser finds in a stream.
func libraryBodies(stream []byte) (bodies []string) {
	for in := bufio.NewReader(bytes.NewReader(stream)); ; {
		for len(bodies) > 0 { // the server of net/http skips empty lines between requests
			if b, err := in.Peek(1); err != nil || b[0] != '\r' && b[0] != '\n' {
				break
			}
			in.Discard(1)
		}
		r, err := http.ReadRequest(in)
		if err != nil {
			return bodies
		}
		b, err := io.ReadAll(r.Body)
		if err != nil {
			return bodies
		}
		bodies = append(bodies, string(b))
	}
}

// mostRequests returns how many complete requests a server may find in a stream.
func mostRequests(stream []byte, l reading) int {
	return max(len(l.whole()), len(libraryBodies(stream)))
}

// framedBy are the fields that net/http removes from a header. Their effect is what the tests
// compare.
var framedBy = []string{"host", "content-length", "transfer-encoding", "trailer"}

// add records a line as a header does that does not keep the order of different names.
func (m *message) add(name, value string, trailer bool) {
	name, value = strings.ToLower(name), strings.Trim(value, " \t")
	if name == "host" && !trailer {
		m.host = value
	}
	if !trailer && slices.Contains(framedBy, name) {
		return
	}
	list := &m.fields
	if trailer {
		list = &m.trailers
	}
	at := len(*list)
	for i, line := range *list {
		if n, _, _ := strings.Cut(line, ": "); n > name {
			at = i
			break
		}
	}
	*list = slices.Insert(*list, at, name+": "+value)
}

func (m *message) addAll(h http.Header, trailer bool) {
	for name, values := range h {
		for _, v := range values {
			m.add(name, v, trailer)
		}
	}
}

// String describes a message as testdata/streams.txt does.
func (m message) String() string {
	s := fmt.Sprintf("%s %s", m.method, m.target)
	for _, line := range m.fields {
		if !strings.HasPrefix(line, "x-long: ") {
			s += fmt.Sprintf(" %q", line)
		}
	}
	switch {
	case m.own:
		return s + " not handled"
	case !m.whole && !m.unread:
		return s + " broken"
	case m.whole || m.body != "":
		s += fmt.Sprintf(" body %q", m.body)
	}
	for _, line := range m.trailers {
		s += fmt.Sprintf(" trailer %q", line)
	}
	return s
}

// differs compares a request that a server accepted with the same request of another reader.
// It returns "" if both are the same request.
func (m message) differs(other reading, n int) string {
	if n >= len(other.messages) || !other.messages[n].headed {
		if other.refused == "" {
			return "is not a whole head"
		}
		return "is refused: " + other.refused
	}
	o := other.messages[n]
	switch {
	case m.method != o.method || m.target != o.target:
		return fmt.Sprintf("is %s %s", o.method, o.target)
	case m.own || o.own:
		return ""
	case m.proto != o.proto:
		return "is " + o.proto
	case strings.HasPrefix(m.target, "/") && m.host != o.host:
		return fmt.Sprintf("has the host %q, want %q", o.host, m.host)
	case !slices.Equal(m.fields, o.fields):
		return fmt.Sprintf("has the fields %q, want %q", o.fields, m.fields)
	case m.whole && !o.whole && other.refused != "":
		return "has a body that is refused: " + other.refused
	case m.whole && (!o.whole && !o.unread || m.body != o.body):
		return fmt.Sprintf("has the body %q (whole: %t), want %q", o.body, o.whole, m.body)
	case m.whole && !o.unread && !slices.Equal(m.trailers, o.trailers):
		return fmt.Sprintf("has the trailers %q, want %q", o.trailers, m.trailers)
	case !strings.HasPrefix(o.body, m.body) && !strings.HasPrefix(m.body, o.body):
		return fmt.Sprintf("has the body %q, want %q", o.body, m.body)
	}
	return ""
}

// compare returns the first difference between the requests that a server accepted and the same
// requests of another reader, with the index of the request; "" if there is none.
func (r reading) compare(other reading) (difference string, n int) {
	for n, m := range r.messages {
		if d := m.differs(other, n); d != "" {
			return d, n
		}
		if o := other.messages[n]; n+1 < len(r.messages) && !o.whole && !o.unread {
			return "has no end: " + other.refused, n
		}
	}
	return "", 0
}
