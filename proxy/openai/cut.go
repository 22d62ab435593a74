package openai

import "bytes"

// The names under which vLLM reads its transfer parameters from an object.
var transferNames = [...][]byte{[]byte("kv_transfer_params"), []byte("ec_transfer_params")}

// longestTransferName is the maximum length of such a key in a body, in bytes,
// including its quotes: each letter may be an escape of six bytes.
const longestTransferName = 6*len("kv_transfer_params") + 2

// transferName reports whether a raw key with its quotes is one of these names,
// ignoring case.
func transferName(quoted []byte) bool {
	if len(quoted) < 2 || len(quoted) > longestTransferName {
		return false
	}
	var room [longestTransferName]byte
	key := quoted[1 : len(quoted)-1]
	if bytes.IndexByte(key, '\\') >= 0 {
		if !isString(quoted) {
			return false
		}
		key = appendUnescaped(room[:0], key)
	}
	return bytes.EqualFold(key, transferNames[0]) || bytes.EqualFold(key, transferNames[1])
}

// CutTransferParams returns a scanned value without vLLM's transfer parameters at any
// depth, or the value itself if there are none. keep names a member of the value that
// stays unchanged, because the caller replaces it; "" for none.
func CutTransferParams(value []byte, keep string) []byte {
	if !holdsTransferParams(value, keep) {
		return value
	}
	return appendCut(make([]byte, 0, len(value)), value, keep)
}

// holdsTransferParams reports whether CutTransferParams has something to cut. It copies nothing.
func holdsTransferParams(value []byte, keep string) bool {
	c := cutter{raw: value, outer: skipSpace(value, 0), keep: keep, probe: true}
	c.value(c.outer)
	return c.cut
}

// appendCut appends a value as CutTransferParams returns it. The value must be valid JSON; it may
// have any size and is read once. All other bytes stay unchanged.
func appendCut(dst, value []byte, keep string) []byte {
	c := cutter{raw: value, out: dst, outer: skipSpace(value, 0), keep: keep}
	c.value(c.outer)
	return append(c.out, value[c.from:]...)
}

// cutter copies a value without some members of its objects.
type cutter struct {
	raw   []byte
	out   []byte
	from  int    // start of the uncopied rest of raw
	outer int    // index of the outermost object's opening brace
	keep  string // a member of the outermost object that stays unchanged; "" for none
	cut   bool   // a member was cut
	probe bool   // only set cut
}

// drop omits raw[start:end].
func (c *cutter) drop(start, end int) {
	if c.cut = true; !c.probe {
		c.out = append(c.out, c.raw[c.from:start]...)
	}
	c.from = end
}

// value reads the value at i and returns the index after it.
func (c *cutter) value(i int) int {
	if i < len(c.raw) {
		switch c.raw[i] {
		case '{':
			return c.object(i)
		case '[':
			return c.array(i)
		}
	}
	return skipValue(c.raw, i)
}

func (c *cutter) array(i int) int {
	for i = skipSpace(c.raw, i+1); i < len(c.raw) && c.raw[i] != ']'; {
		if i = skipSpace(c.raw, c.value(i)); i >= len(c.raw) || c.raw[i] != ',' {
			break
		}
		i = skipSpace(c.raw, i+1)
	}
	return min(i+1, len(c.raw))
}

// object cuts a member together with one comma, as [Object.Append] does.
func (c *cutter) object(i int) int {
	keeps := i == c.outer && c.keep != ""
	kept := -1 // end of the last member that stays
	for i = skipSpace(c.raw, i+1); i < len(c.raw)-1 && c.raw[i] == '"'; {
		at, end := i, skipString(c.raw, i)
		i = skipSpace(c.raw, skipSpace(c.raw, end)+1) // after the colon
		out := false
		switch {
		case keeps && keyEqual(c.raw[at+1:end-1], c.keep):
			i = skipValue(c.raw, i)
		case transferName(c.raw[at:end]):
			i, out = skipValue(c.raw, i), true
		default:
			i = c.value(i)
		}
		end = i
		i = skipSpace(c.raw, i)
		more := i < len(c.raw) && c.raw[i] == ','
		if more {
			i = skipSpace(c.raw, i+1)
		}
		switch {
		case !out:
			kept = end
		case kept >= 0: // with the preceding comma
			c.drop(max(kept, c.from), end)
		case more: // with the following comma
			c.drop(at, i)
		default:
			c.drop(at, end)
		}
		if !more {
			break
		}
	}
	return min(i+1, len(c.raw))
}
