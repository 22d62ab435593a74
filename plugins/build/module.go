package build

import (
	"bytes"
	"encoding/binary"
	"errors"
)

// errNotWasm reports that a file is not a WebAssembly module, or is damaged.
var errNotWasm = errors.New("not a WebAssembly module")

// exportSection is the number of the section of exports.
const exportSection = 7

// exports returns the names that a module exports.
func exports(module []byte) ([]string, error) {
	rest, ok := bytes.CutPrefix(module, []byte("\x00asm\x01\x00\x00\x00"))
	if !ok {
		return nil, errNotWasm
	}
	for len(rest) > 0 {
		id := rest[0]
		section, after, ok := sized(rest[1:])
		if !ok {
			return nil, errNotWasm
		}
		if id == exportSection {
			return exportNames(section)
		}
		rest = after
	}
	return nil, nil
}

func exportNames(section []byte) ([]string, error) {
	count, n := binary.Uvarint(section)
	if n <= 0 {
		return nil, errNotWasm
	}
	section = section[n:]
	var names []string
	for range count {
		name, after, ok := sized(section)
		if !ok || len(after) < 2 {
			return nil, errNotWasm
		}
		_, n := binary.Uvarint(after[1:]) // after the kind
		if n <= 0 {
			return nil, errNotWasm
		}
		names = append(names, string(name))
		section = after[1+n:]
	}
	return names, nil
}

// sized splits off bytes that follow their length.
func sized(b []byte) (part, rest []byte, ok bool) {
	size, n := binary.Uvarint(b)
	if n <= 0 || size > uint64(len(b)-n) {
		return nil, nil, false
	}
	return b[n : n+int(size)], b[n+int(size):], true
}
