package upstream

import (
	"bytes"
	"math"
	"strings"
)

// head is the parsed head of an answer.
type head struct {
	status    int
	fields    []Field // in the order of the answer; they share the head's memory
	length    int64   // Content-Length, -1 without one
	chunked   bool
	keepAlive bool // the engine keeps the connection open

	sawClose, sawKeepAlive bool // options in Connection
}

// headEnd returns the size of the head at the start of b, including the empty line, or
// 0 if b does not hold all of it. The first from bytes have been searched before.
func headEnd(b []byte, from int) int {
	for i := max(from-2, 0); ; i++ {
		j := bytes.IndexByte(b[i:], '\n')
		if j < 0 {
			return 0
		}
		i += j
		if rest := b[i+1:]; len(rest) > 0 && rest[0] == '\n' {
			return i + 2
		} else if len(rest) > 1 && rest[0] == '\r' && rest[1] == '\n' {
			return i + 3
		}
	}
}

// parseHead parses the head of an answer. raw ends with the empty line. If the standard
// leaves a choice, parseHead rejects a head that two parsers could frame differently. A
// line may end with LF alone, as RFC 9112, 2.2 permits.
func parseHead(raw string) (head, error) {
	h := head{length: -1, fields: make([]Field, 0, max(strings.Count(raw, "\n")-2, 0))}
	line, rest := cutLine(raw)
	minor, ok := h.parseStatus(line)
	if !ok {
		return h, errStatusLine
	}
	for {
		if line, rest = cutLine(rest); line == "" {
			break
		}
		if err := h.parseField(line); err != nil {
			return h, err
		}
	}
	if h.chunked && h.length >= 0 {
		return h, errTwoFramings
	}
	if h.chunked && minor == '0' {
		return h, errCoding
	}
	h.keepAlive = !h.sawClose && (minor != '0' || h.sawKeepAlive)
	return h, nil
}

// parseStatus parses "HTTP/1.1 200 OK" and returns the minor version.
func (h *head) parseStatus(line string) (minor byte, ok bool) {
	const version = "HTTP/1."
	if len(line) < len("HTTP/1.1 200") || line[:len(version)] != version {
		return 0, false
	}
	minor = line[len(version)]
	code, reason := line[len("HTTP/1.1 "):len("HTTP/1.1 200")], line[len("HTTP/1.1 200"):]
	if minor != '0' && minor != '1' || line[len("HTTP/1.1")] != ' ' || reason != "" && reason[0] != ' ' {
		return 0, false
	}
	for i := range len(code) {
		if code[i] < '0' || code[i] > '9' {
			return 0, false
		}
		h.status = h.status*10 + int(code[i]-'0')
	}
	return minor, h.status >= 100 && isFieldValue(reason)
}

func (h *head) parseField(line string) error {
	if line[0] == ' ' || line[0] == '\t' {
		return errFolded
	}
	i := strings.IndexByte(line, ':')
	if i < 0 || !isToken(line[:i]) || !isFieldValue(line[i+1:]) {
		return errFieldLine
	}
	f := Field{Name: line[:i], Value: strings.Trim(line[i+1:], " \t")}
	h.fields = append(h.fields, f)
	switch {
	case sameName(f.Name, "Content-Length"):
		return h.setLength(f.Value)
	case sameName(f.Name, "Transfer-Encoding"):
		if h.chunked || !sameName(f.Value, "chunked") {
			return errCoding
		}
		h.chunked = true
	case sameName(f.Name, "Connection"):
		for option := range strings.SplitSeq(f.Value, ",") {
			option = strings.Trim(option, " \t")
			h.sawClose = h.sawClose || sameName(option, "close")
			h.sawKeepAlive = h.sawKeepAlive || sameName(option, "keep-alive")
		}
	}
	return nil
}

func (h *head) setLength(value string) error {
	n := int64(0)
	for i := range len(value) {
		c := value[i]
		if c < '0' || c > '9' || n > (math.MaxInt64-9)/10 {
			return errLength
		}
		n = n*10 + int64(c-'0')
	}
	if value == "" {
		return errLength
	}
	if h.length >= 0 && h.length != n {
		return errLengths
	}
	h.length = n
	return nil
}

// cutLine splits s after its first line end. line has no CR LF.
func cutLine(s string) (line, rest string) {
	i := strings.IndexByte(s, '\n')
	return strings.TrimSuffix(s[:i], "\r"), s[i+1:]
}

// sameName compares two field names or options, ignoring case.
func sameName(a, b string) bool { return len(a) == len(b) && strings.EqualFold(a, b) }
