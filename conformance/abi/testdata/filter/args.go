package main

import (
	"encoding/binary"
	"strconv"
	"strings"
	"unsafe"
)

// Arguments of a host call as the script writes them:
//
//	7 -1 0xff $ctx $size $id $caller $last $live $root $end $end-1   one number
//	"text" fill:N {k=v,k2=v2} pairs:N null    pointer and size of a value
//	out out8                                  where the host writes a number
//	ret                                       where the host writes pointer and size
//
// The results follow the status in the log line.

// slots is the memory where the host writes; it never moves.
var slots [16]uint64

// argument is one word with its resolved value.
type argument struct {
	numbers []uint64
	kind    byte // 'n' number, 'v' value, 'o' out, 'O' out8, 'r' ret
	slot    int
}

func (c *call) arguments(words []string) (args []argument) {
	slot := 0
	take := func(kind byte, n int) argument {
		a := argument{kind: kind, slot: slot}
		for range n {
			slots[slot] = 0
			a.numbers = append(a.numbers, uint64(uintptr(unsafe.Pointer(&slots[slot]))))
			slot++
		}
		return a
	}
	for _, w := range words {
		switch {
		case w == "out":
			args = append(args, take('o', 1))
		case w == "out8":
			args = append(args, take('O', 1))
		case w == "ret":
			args = append(args, take('r', 2))
		case w == "null":
			args = append(args, argument{kind: 'v', numbers: []uint64{0, 0}})
		case w[0] == '"' || w[0] == '{' || strings.HasPrefix(w, "fill:") || strings.HasPrefix(w, "pairs:"):
			b := value(w)
			args = append(args, argument{kind: 'v', numbers: []uint64{uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), uint64(len(b))}})
		default:
			args = append(args, argument{kind: 'n', numbers: []uint64{c.number(w)}})
		}
	}
	return args
}

// value returns the bytes of a value and keeps them alive until the callback ends.
func value(w string) (b []byte) {
	defer func() { keep = append(keep, b) }()
	switch {
	case w[0] == '"':
		s, _ := strconv.Unquote(w)
		return []byte(s)
	case w[0] == '{':
		var kv [][2]string
		if w = strings.Trim(w, "{}"); w != "" {
			for pair := range strings.SplitSeq(w, ",") {
				k, v, _ := strings.Cut(pair, "=")
				kv = append(kv, [2]string{k, v})
			}
		}
		return pairs(kv)
	case strings.HasPrefix(w, "fill:"):
		n, _ := strconv.Atoi(w[5:])
		return []byte(strings.Repeat("x", n))
	}
	n, _ := strconv.Atoi(strings.TrimPrefix(w, "pairs:"))
	kv := make([][2]string, n)
	for i := range kv {
		kv[i] = [2]string{"x-pair-" + strconv.Itoa(i), strconv.Itoa(i)}
	}
	return pairs(kv)
}

// pairs serializes a header map.
func pairs(kv [][2]string) []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(kv)))
	for _, p := range kv {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p[0])))
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p[1])))
	}
	for _, p := range kv {
		b = append(append(b, p[0]...), 0)
		b = append(append(b, p[1]...), 0)
	}
	return b
}

// number resolves a word that stands for one number.
func (c *call) number(w string) uint64 {
	if w[0] != '$' {
		n, err := strconv.ParseInt(w, 0, 64)
		if err != nil {
			panic("bad number " + w)
		}
		return uint64(n)
	}
	name, less, _ := strings.Cut(w[1:], "-")
	minus, _ := strconv.ParseUint(less, 10, 64)
	var n uint64
	switch name {
	case "ctx":
		n = uint64(c.ctx)
	case "size":
		n = uint64(c.size)
	case "id":
		n = uint64(c.id)
	case "caller":
		n = uint64(c.caller)
	case "nth":
		n = uint64(c.nth)
	case "last":
		n = last
	case "live":
		n = uint64(live)
	case "root":
		n = uint64(root)
	case "end":
		n = uint64(memoryEnd())
	case "eos":
		if c.end {
			n = 1
		}
	default:
		panic("bad variable " + w)
	}
	return n - minus
}

// host calls a host function with the arguments of the script.
func (c *call) host(name string, words []string, loud bool) {
	args := c.arguments(words)
	status := c.invoke(name, args)
	if name == "proxy_http_call" && status == 0 {
		callers[uint32(slots[args[len(args)-1].slot])] = c.ctx
	}
	line := name + "=" + strconv.Itoa(int(int32(status)))
	for _, a := range args {
		switch a.kind {
		case 'o':
			last = uint64(uint32(slots[a.slot]))
			line += " " + strconv.FormatUint(last, 10)
		case 'O':
			last = slots[a.slot]
			line += " " + strconv.FormatUint(last, 10)
		case 'r':
			line += " " + strconv.Quote(text(uint32(slots[a.slot]), uint32(slots[a.slot+1])))
		}
	}
	if loud {
		c.say(line)
	}
}

func (c *call) invoke(name string, args []argument) uint32 {
	var a []uint64
	for _, arg := range args {
		a = append(a, arg.numbers...)
	}
	h, ok := hostcalls[name]
	if !ok || h.args != len(a) {
		panic("bad call of " + name + " with " + strconv.Itoa(len(a)) + " arguments")
	}
	return h.call(a)
}

// sweep calls a host function once for each way in which one of its pointers or
// sizes can be invalid, while the others are valid.
func (c *call) sweep(name string, words []string) {
	for i := range c.arguments(words) {
		for n := 0; ; n++ {
			args := c.arguments(words)
			bad := wrong(args[i], n)
			if bad == nil {
				break
			}
			args[i].numbers = bad
			status := c.invoke(name, args)
			c.say(name + "=" + strconv.Itoa(int(int32(status))) + " argument " + strconv.Itoa(i) + " wrong " + strconv.Itoa(n))
		}
	}
}

// wrong returns the n-th invalid value of an argument for the present memory
// size, nil when there are no more.
func wrong(a argument, n int) []uint64 {
	end := uint64(memoryEnd())
	outs := []uint64{end - 1, end - 3, end, 0xffffffff, 0xfffffffd}
	var all [][]uint64
	switch a.kind {
	case 'v':
		all = [][]uint64{{end - 1, 2}, {end, 1}, {0xffffffff, 1}, {0xffffffff, 0xffffffff}, {a.numbers[0], 0xffffffff}, {0, 0xffffffff}, {0xfffffff0, 0x20}, {1, end}}
	case 'o':
		for _, p := range outs {
			all = append(all, []uint64{p})
		}
	case 'O':
		for _, p := range append(outs, end-7) {
			all = append(all, []uint64{p})
		}
	case 'r':
		for _, p := range outs {
			all = append(all, []uint64{p, a.numbers[1]}, []uint64{a.numbers[0], p})
		}
	}
	if n >= len(all) {
		return nil
	}
	return all[n]
}
