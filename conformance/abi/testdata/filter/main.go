// Command filter is a proxy-wasm guest whose configuration is a script, so that all tests
// can use one module. It uses no SDK, so its behaviour shows the host's.
//
// The configuration is a script. "[name]" begins a section, "callback: command" sets the
// command of a callback; the commands of one callback run in order. A stream uses the
// section named by its request header x-script, else "main". Root callbacks use "main";
// an answer to a call uses the section of the stream that made the call. Every command
// logs a line "section|callback|ctx|result".
package main

import (
	"strconv"
	"strings"
	"unsafe"
)

func main() {}

// command is one line of the script: words, the first of which is the command.
type command struct {
	when  string // "", "eos", "!eos" or a number: only the n-th time
	words []string
}

// call is one running callback.
type call struct {
	ctx    uint32
	script string
	name   string
	size   uint32
	id     uint32
	caller uint32
	end    bool
	nth    int
	result uint32
}

var (
	script  = map[string][]command{} // "section|callback"
	streams = map[uint32]*streamState{}
	callers = map[uint32]uint32{} // call token -> context
	parked  []waiting
	counts  = map[string]int{}
	last    uint64 // the last call's result in an out pointer
	live    int
	root    uint32
	keep    [][]byte // memory for the host, kept alive until the callback ends
	bomb    [][]byte
)

type streamState struct {
	section string
	calls   map[string]int
}

// waiting is a stream for which the guest has requested a resume.
type waiting struct {
	ctx     uint32
	section string
	words   []string
}

// parse reads the script.
func parse(text string) {
	clear(script)
	section := "main"
	for line := range strings.SplitSeq(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if line[0] == '[' {
			section = strings.Trim(line, "[]")
			continue
		}
		name, rest, _ := strings.Cut(line, ":")
		c := command{words: split(rest)}
		if len(c.words) == 0 {
			continue
		}
		switch w := c.words[0]; {
		case w == "eos", w == "!eos", w[0] >= '0' && w[0] <= '9':
			c.when, c.words = w, c.words[1:]
		}
		key := section + "|" + name
		script[key] = append(script[key], c)
	}
}

// split splits at blanks outside quotes.
func split(s string) (words []string) {
	for s = strings.TrimSpace(s); s != ""; s = strings.TrimSpace(s) {
		if s[0] == '"' {
			q, err := strconv.QuotedPrefix(s)
			if err != nil {
				panic("bad quotes: " + s)
			}
			words, s = append(words, q), s[len(q):]
			continue
		}
		end := strings.IndexByte(s, ' ')
		if end < 0 {
			end = len(s)
		}
		words, s = append(words, s[:end]), s[end:]
	}
	return words
}

// stream runs a stream callback and returns its action.
func stream(ctx uint32, name string, size uint32, end bool) uint32 {
	s := streams[ctx]
	if s == nil {
		panic("unknown context")
	}
	if name == "request_headers" {
		if v, ok := header(0, "x-script"); ok {
			s.section = v
		}
	}
	s.calls[name]++
	c := &call{ctx: ctx, script: s.section, name: name, size: size, end: end, nth: s.calls[name]}
	run(c)
	return c.result
}

// run runs the commands of one callback.
func run(c *call) {
	for _, cmd := range script[c.script+"|"+c.name] {
		switch {
		case cmd.when == "eos" && !c.end, cmd.when == "!eos" && c.end:
			continue
		case cmd.when != "" && cmd.when[0] >= '0' && cmd.when[0] <= '9' && cmd.when != strconv.Itoa(c.nth):
			continue
		}
		c.do(cmd.words)
	}
	keep = keep[:0]
}

// do runs one command.
func (c *call) do(w []string) {
	switch w[0] {
	case "call":
		c.host(w[1], w[2:], true)
	case "quiet":
		c.host(w[1], w[2:], false)
	case "sweep":
		c.sweep(w[1], w[2:])
	case "park": // store this stream and a call to make for it at the next wake
		parked = append(parked, waiting{c.ctx, c.script, w[1:]})
	case "wake":
		all := parked
		parked = nil
		for _, p := range all {
			if streams[p.ctx] == nil {
				continue // it has ended
			}
			proxySetEffectiveContext(p.ctx)
			woken := *c
			woken.script = p.section
			woken.host(p.words[0], p.words[1:], true)
		}
	case "incr": // add one to a number in shared data, despite concurrent writers
		c.increment(w[1])
	case "return":
		c.result = uint32(c.number(w[1]))
	case "say":
		text := make([]string, 0, 4)
		for _, v := range w[1:] {
			if v[0] == '$' {
				v = strconv.FormatUint(c.number(v), 10)
			}
			text = append(text, v)
		}
		c.say(strings.Join(text, " "))
	case "bump":
		counts[w[1]]++
		c.say(w[1] + " " + strconv.Itoa(counts[w[1]]))
	case "trap":
		var none *uint32
		_ = *none
	case "loop":
		for {
			counts["loop"]++
		}
	case "spin":
		for n := c.number(w[1]); n > 0; n-- {
			counts["spin"]++
		}
	case "eat":
		for {
			b := make([]byte, 1<<20)
			for i := 0; i < len(b); i += 4096 {
				b[i] = 1
			}
			bomb = append(bomb, b)
		}
	case "recurse":
		last += recurse(1)
	case "exit":
		procExit(uint32(c.number(w[1])))
	case "random":
		b := make([]byte, c.number(w[1]))
		c.say("random=" + strconv.Itoa(int(randomGet(unsafe.Pointer(unsafe.SliceData(b)), uint32(len(b))))) + " " + strconv.Quote(string(b[:min(len(b), 16)])))
	case "environ":
		var n, size uint32
		e := environSizesGet(unsafe.Pointer(&n), unsafe.Pointer(&size))
		c.say("environ=" + strconv.Itoa(int(e)) + " " + strconv.Itoa(int(n)))
	case "clock":
		var now uint64
		e := clockTimeGet(uint32(c.number(w[1])), 1, unsafe.Pointer(&now))
		c.say("clock=" + strconv.Itoa(int(e)) + " " + strconv.FormatUint(now, 10))
	default:
		panic("unknown command " + w[0])
	}
}

//go:noinline
func recurse(n uint64) uint64 {
	var pad [64]uint64
	pad[n%64] = n
	return recurse(n+1) + pad[(n+7)%64]
}

// increment adds one to a number in shared data by compare and swap.
func (c *call) increment(key string) {
	k := uint32(uintptr(unsafe.Pointer(unsafe.StringData(key))))
	for {
		var ptr, size, cas uint32
		n := 0
		if st := proxyGetSharedData(k, uint32(len(key)), uint32(uintptr(unsafe.Pointer(&ptr))), uint32(uintptr(unsafe.Pointer(&size))), uint32(uintptr(unsafe.Pointer(&cas)))); st == 0 {
			n, _ = strconv.Atoi(text(ptr, size))
		}
		b := value(strconv.Quote(strconv.Itoa(n + 1)))
		switch st := proxySetSharedData(k, uint32(len(key)), uint32(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), uint32(len(b)), cas); st {
		case 0:
			c.say("incr " + strconv.Itoa(n+1))
			return
		case 8:
		default:
			c.say("incr failed " + strconv.Itoa(int(st)))
			return
		}
	}
}

func (c *call) say(text string) {
	logLine(c.script + "|" + c.name + "|" + strconv.Itoa(int(c.ctx)) + "|" + text)
}

func logLine(s string) {
	proxyLog(2, uint32(uintptr(unsafe.Pointer(unsafe.StringData(s)))), uint32(len(s)))
}

// header returns a header's value by a host call.
func header(kind uint32, key string) (string, bool) {
	var ptr, size uint32
	st := proxyGetHeaderMapValue(kind, uint32(uintptr(unsafe.Pointer(unsafe.StringData(key)))), uint32(len(key)),
		uint32(uintptr(unsafe.Pointer(&ptr))), uint32(uintptr(unsafe.Pointer(&size))))
	if st != 0 {
		return "", false
	}
	return text(ptr, size), size > 0
}

func text(ptr, size uint32) string {
	if size == 0 {
		return ""
	}
	return strings.Clone(unsafe.String((*byte)(unsafe.Pointer(uintptr(ptr))), size))
}
