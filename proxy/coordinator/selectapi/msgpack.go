package selectapi

import (
	"encoding/binary"
	"errors"
	"strconv"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// headerMsgpack with the value 1 marks a body as MessagePack although its Content-Type is
// JSON. With this Content-Type the body reaches the worker's own decoder. Source:
// TensorRT-LLM serve/openai_server.py, _MsgspecRequest.
const headerMsgpack = "X-Trtllm-Msgpack"

// Code points of MessagePack for objects and arrays with a 32-bit count. The count is
// known only at the end of the object or array.
const (
	map32   = 0xdf
	array32 = 0xdd
)

// maxPackDepth bounds the nesting of values.
const maxPackDepth = 256

var errNoMsgpack = errors.New("the body has no form in MessagePack")

// appendMsgpack appends the JSON of a body as MessagePack. For a body that is not JSON or
// has an integer beyond 64 bits it returns dst and an error.
func appendMsgpack(dst, body []byte) ([]byte, error) {
	p := packer{in: body, out: dst}
	p.value(0)
	if p.space(); p.bad || p.at != len(p.in) {
		return dst, errNoMsgpack
	}
	return p.out, nil
}

// packer writes each value while it reads it.
type packer struct {
	in  []byte
	at  int
	out []byte
	bad bool
}

func (p *packer) space() {
	for p.at < len(p.in) && (p.in[p.at] == ' ' || p.in[p.at] == '\n' || p.in[p.at] == '\t' || p.in[p.at] == '\r') {
		p.at++
	}
}

// next skips white space and returns the next byte, without reading it; 0 at the end.
func (p *packer) next() byte {
	if p.space(); p.at < len(p.in) {
		return p.in[p.at]
	}
	return 0
}

// take reads the next byte if it is c, and reports whether it was.
func (p *packer) take(c byte) bool {
	if p.next() != c || c == 0 {
		return false
	}
	p.at++
	return true
}

func (p *packer) fail() { p.bad = true }

func (p *packer) value(depth int) {
	switch c := p.next(); {
	case p.bad || depth > maxPackDepth:
		p.fail()
	case c == '{':
		p.members(map32, '}', depth)
	case c == '[':
		p.members(array32, ']', depth)
	case c == '"':
		p.str()
	case c == 't' && p.word("true"):
		p.out = msgp.AppendBool(p.out, true)
	case c == 'f' && p.word("false"):
		p.out = msgp.AppendBool(p.out, false)
	case c == 'n' && p.word("null"):
		p.out = msgp.AppendNil(p.out)
	default:
		p.number()
	}
}

// members writes an object or an array, and fills in the count at its end.
func (p *packer) members(code, end byte, depth int) {
	p.at++
	count := len(p.out) + 1
	p.out = append(p.out, code, 0, 0, 0, 0)
	n := uint32(0)
	for !p.take(end) && !p.bad {
		if n > 0 && !p.take(',') {
			p.fail()
		}
		if code == map32 {
			if p.next() != '"' {
				p.fail()
				return
			}
			if p.str(); !p.take(':') {
				p.fail()
			}
		}
		p.value(depth + 1)
		n++
	}
	binary.BigEndian.PutUint32(p.out[count:], n)
}

// str writes a string with its escapes decoded.
func (p *packer) str() {
	start, escaped := p.at, false
	for p.at++; p.at < len(p.in) && p.in[p.at] != '"'; p.at++ {
		if p.in[p.at] == '\\' {
			escaped = true
			p.at++
		}
	}
	if p.at >= len(p.in) {
		p.fail()
		return
	}
	p.at++
	raw := p.in[start:p.at]
	if !escaped {
		p.out = msgp.AppendStringFromBytes(p.out, raw[1:len(raw)-1])
		return
	}
	s, ok := openai.String(raw)
	if !ok {
		p.fail()
	}
	p.out = msgp.AppendString(p.out, s)
}

func (p *packer) word(w string) bool {
	if len(p.in)-p.at < len(w) || string(p.in[p.at:p.at+len(w)]) != w {
		return false
	}
	p.at += len(w)
	return true
}

// number writes an integer of up to 64 bits, signed or unsigned, as an integer, and any
// other number as a float.
func (p *packer) number() {
	start, whole := p.at, true
	for ; p.at < len(p.in); p.at++ {
		switch c := p.in[p.at]; {
		case c >= '0' && c <= '9' || c == '-':
			continue
		case c == '.' || c == 'e' || c == 'E' || c == '+':
			whole = false
			continue
		}
		break
	}
	text := string(p.in[start:p.at])
	if !whole {
		x, err := strconv.ParseFloat(text, 64)
		if err != nil {
			p.fail()
		}
		p.out = msgp.AppendFloat64(p.out, x)
		return
	}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		p.out = msgp.AppendInt64(p.out, n)
		return
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		p.fail()
	}
	p.out = msgp.AppendUint64(p.out, n)
}
