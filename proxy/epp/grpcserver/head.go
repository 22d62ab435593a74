package grpcserver

import (
	"bytes"
	"math"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// call has the facts of the head of a stream.
type call struct {
	path    string
	timeout time.Duration // 0: none
	refusal string        // HTTP status of the answer to a request that is no gRPC call; "": it is one
}

const contentType = "application/grpc"

// callOf reads the head of a stream. It returns false if the head is malformed. The framer has checked
// the order and the names of the lines.
func callOf(f *http2.MetaHeadersFrame) (c call, ok bool) {
	var method, scheme, kind string
	for _, l := range f.Fields {
		switch l.Name {
		case ":method":
			method = l.Value
		case ":scheme":
			scheme = l.Value
		case ":path":
			c.path = l.Value
		case "content-type":
			kind = l.Value
		case "grpc-timeout":
			if c.timeout = timeoutOf(l.Value); c.timeout <= 0 {
				return c, false
			}
		case "te":
			if l.Value != "trailers" {
				return c, false
			}
		case "connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade":
			return c, false // RFC 9113, section 8.2.2
		}
	}
	if f.Truncated {
		return c, true
	}
	rest, grpc := strings.CutPrefix(kind, contentType)
	switch {
	case method == "" || scheme == "" || c.path == "":
		return c, false
	case method != "POST":
		c.refusal = "405"
	case !grpc || rest != "" && rest[0] != '+' && rest[0] != ';':
		c.refusal = "415"
	}
	return c, true
}

// timeoutOf reads a grpc-timeout: at most eight digits and a unit. It returns 0 for a malformed one.
func timeoutOf(text string) time.Duration {
	const digits = 8
	if len(text) < 2 || len(text) > digits+1 {
		return 0
	}
	n, err := strconv.ParseUint(text[:len(text)-1], 10, 32)
	unit := map[byte]time.Duration{'H': time.Hour, 'M': time.Minute, 'S': time.Second, 'm': time.Millisecond, 'u': time.Microsecond, 'n': time.Nanosecond}[text[len(text)-1]]
	if err != nil || unit == 0 {
		return 0
	}
	if int64(n) > math.MaxInt64/int64(unit) {
		return math.MaxInt64
	}
	return max(1, time.Duration(n)*unit)
}

// errMetadata is the status of a stream with too many header lines.
var errMetadata = status.Error(codes.ResourceExhausted, "the metadata is too long")

// headBlock is the head of an answer.
var headBlock = block(":status", "200", "content-type", contentType)

// okBlock are the trailers of a stream without an error.
var okBlock = block("grpc-status", "0")

// endBlock returns the lines that end a stream with a status. only: they are the whole answer.
func endBlock(err error, only bool) []byte {
	if err == nil && !only {
		return okBlock
	}
	var lines []string
	if only {
		lines = []string{":status", "200", "content-type", contentType}
	}
	st := status.Convert(err)
	lines = append(lines, "grpc-status", strconv.Itoa(int(st.Code())))
	if text := st.Message(); text != "" {
		lines = append(lines, "grpc-message", escape(text))
	}
	return block(lines...)
}

// block encodes pairs of names and values without the table of the connection, so that no block
// depends on an earlier one.
func block(lines ...string) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for i := 0; i+1 < len(lines); i += 2 {
		_ = e.WriteField(hpack.HeaderField{Name: lines[i], Value: lines[i+1], Sensitive: true}) // a Buffer returns no error
	}
	return b.Bytes()
}

// maxText bounds the text of a status, in bytes.
const maxText = 1 << 10

// escape encodes the text of a status: all but the visible characters of ASCII, and the percent sign.
func escape(text string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for _, c := range []byte(text[:min(len(text), maxText)]) {
		if c >= ' ' && c <= '~' && c != '%' {
			b.WriteByte(c)
			continue
		}
		b.Write([]byte{'%', hex[c>>4], hex[c&15]})
	}
	return b.String()
}

// header appends the head of an answer, or the end of a stream. The caller holds o.mu.
func (o *output) header(id uint32, fragment []byte, end bool) {
	_ = o.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: fragment, EndHeaders: true, EndStream: end}) // Write of output returns no error
}
