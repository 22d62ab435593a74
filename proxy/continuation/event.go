package continuation

import (
	"bytes"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// The members with token ids, as both engines write them: once in an event, and without spaces.
// The text of an answer cannot contain them, because its quotes have a backslash.
var (
	outputMember = []byte(`"token_ids":[`)
	promptMember = []byte(`"prompt_token_ids":[`)
)

// Room makes room for ids before Cut appends them.
type Room interface {
	// Grow returns ids with room for n more; nil if there is none.
	Grow(ids []uint32, n int) []uint32
}

// Cut appends the ids of the output in whole events to ids. Unless keep is set, it removes the
// member from the events, in place. ok is false if a value is not a list of token ids, or if room has
// none for the ids; all and rest then have what came before it. room is not asked while ids has room.
//
// It searches bytes and does not parse.
func Cut(events []byte, ids []uint32, keep bool, room Room) (rest []byte, all []uint32, ok bool) {
	return cut(events, ids, keep, room)
}

// Strip is Cut without the ids.
func Strip(events []byte) (rest []byte) {
	rest, _, _ = cut(events, nil, false, nil)
	return rest
}

// FindPrompt returns the list of the prompt's ids in the start of an answer, with its brackets. Only the
// first event with a choice has the list. It is nil while it has not come whole, or if it is empty.
func FindPrompt(events []byte) (list []byte) {
	at := bytes.Index(events, promptMember)
	if at < 0 {
		return nil
	}
	begin := at + len(promptMember)
	n := bytes.IndexByte(events[begin:], ']')
	if n <= 0 || bytes.IndexByte(events[begin:begin+n], '[') >= 0 {
		return nil
	}
	return events[begin-1 : begin+n+1]
}

// CutPrompt removes the member that FindPrompt has found, in place.
func CutPrompt(events []byte) (rest []byte) {
	at := bytes.Index(events, promptMember)
	end := at + len(promptMember) + bytes.IndexByte(events[at+len(promptMember):], ']') + 1
	if at > 0 && events[at-1] == ',' { // the member is never the first one
		at--
	}
	return append(events[:at], events[end:]...)
}

// MaxIDs returns an upper bound of the number of ids in a list.
func MaxIDs(list []byte) int { return bytes.Count(list, []byte(",")) + 1 }

// CountIDs returns the number of elements of a list that FindPrompt has found in checked JSON; 0 if an
// element is no integer from 0. It does not read the numbers, because a list may be longer than all
// other data of its request.
func CountIDs(list []byte) int {
	for _, c := range []byte(`"-.eEn{`) { // one of these is in every other value
		if bytes.IndexByte(list, c) >= 0 {
			return 0
		}
	}
	return bytes.Count(list, []byte(",")) + 1
}

// ReadIDs appends the ids of a list with its brackets. ok is false if it is no list of token ids; all
// is then ids.
func ReadIDs(ids []uint32, list []byte) (all []uint32, ok bool) {
	end, n, ok := listEnd(list, 0)
	if !ok || end < len(list) {
		return ids, false
	}
	return appendIDs(slices.Grow(ids, n), list[1:]), true
}

// SameIDs reports whether a list with its brackets has these ids.
func SameIDs(list []byte, ids []uint32) bool {
	i := 1
	for _, want := range ids {
		n, end, ok := readID(list, i)
		if !ok || n != want {
			return false
		}
		i = end + 1
	}
	return i > 1 && i == len(list)
}

// cut is Cut; a nil room drops the ids.
func cut(events []byte, ids []uint32, keep bool, room Room) (rest []byte, all []uint32, ok bool) {
	written, read := 0, 0 // events[:written] is the result for events[:read]
	for {
		at := bytes.Index(events[read:], outputMember)
		end := len(events)
		if at >= 0 {
			at += read
			end, ids, ok = take(events, at+len(outputMember)-1, ids, room)
		}
		if at < 0 || !ok || keep {
			written += copy(events[written:], events[read:end])
			if read = end; at < 0 || !ok {
				return events[:written+copy(events[written:], events[read:])], ids, at < 0
			}
			continue
		}
		if at > read && events[at-1] == ',' { // the member is never the first one
			at--
		}
		written += copy(events[written:], events[read:at])
		read = end
	}
}

// take appends the ids of the list that opens at i as cut does, and returns the end of the list.
func take(b []byte, i int, ids []uint32, room Room) (end int, all []uint32, ok bool) {
	end, n, ok := listEnd(b, i)
	if !ok || room == nil {
		return end, ids, ok
	}
	all = ids
	if cap(ids)-len(ids) < n {
		if all = room.Grow(ids, n); all == nil {
			return i, ids, false
		}
	}
	return end, appendIDs(all, b[i+1:end]), true
}

// listEnd returns the end of the list that opens at i, and the number of its ids.
func listEnd(b []byte, i int) (end, n int, ok bool) {
	first := i
	for i++; i < len(b) && b[i] != ']'; n++ {
		if _, i, ok = readID(b, i); !ok {
			return first, 0, false
		}
		if b[i] == ',' {
			if i++; i == len(b) || b[i] == ']' {
				return first, 0, false
			}
		}
	}
	if i >= len(b) {
		return first, 0, false
	}
	return i + 1, n, true
}

// appendIDs appends the ids of a correct list, of which the opening bracket is left out.
func appendIDs(ids []uint32, list []byte) []uint32 {
	for i := 0; i < len(list)-1; i++ {
		var id uint32
		id, i, _ = readID(list, i)
		ids = append(ids, id)
	}
	return ids
}

// readID reads the id at i, which a comma or the end of the list must follow.
func readID(b []byte, i int) (id uint32, end int, ok bool) {
	n, begin := uint64(0), i
	for ; i < len(b) && b[i] >= '0' && b[i] <= '9' && n <= math.MaxUint32; i++ {
		n = 10*n + uint64(b[i]-'0')
	}
	return uint32(n), i, i > begin && n <= math.MaxUint32 && i < len(b) && (b[i] == ',' || b[i] == ']')
}

// Event is one event of a stream of completions or of a chat.
type Event struct {
	IDs  []uint32 // those of the output
	Text string   // of the completion, or content of the chat
	// State is Reasoning or ToolCalls if the event has any of these; else "".
	State Reason
	// Ended: the event has a finish reason.
	Ended bool
	// Offsets are the text offsets of the ids in the log probabilities of a completion, and the
	// offset behind the last one; nil without log probabilities.
	Offsets []int64
}

// ReadEvent reads one event from its "data:" line on. ok is false for an event without a choice, as
// a comment, an error, the usage or [DONE].
func ReadEvent(event []byte) (e Event, ok bool) {
	data, found := bytes.CutPrefix(event, []byte("data:"))
	if !found {
		return e, false
	}
	choices, _ := openai.Find(data, "choices")
	c := openai.Cursor{Text: choices}
	c.Open('[')
	if !c.Next(']') {
		return e, false
	}
	for c.Open('{'); c.Next('}'); {
		switch string(c.Key) {
		case "text":
			e.Text, _ = openai.String(c.Skip())
		case "delta":
			e.readDelta(c.Skip())
		case "logprobs":
			e.readOffsets(c.Skip())
		case "finish_reason":
			e.Ended = !openai.IsNull(c.Skip())
		case "token_ids":
			raw := c.Skip()
			if openai.IsNull(raw) {
				continue
			}
			var good bool
			if e.IDs, good = ReadIDs(nil, raw); !good {
				return Event{}, false
			}
		default:
			c.Skip()
		}
	}
	return e, !c.Bad
}

// readDelta reads the delta of a chat. vLLM's reasoning was "reasoning_content" in older releases.
func (e *Event) readDelta(raw []byte) {
	c := openai.Cursor{Text: raw}
	for c.Open('{'); c.Next('}'); {
		key := string(c.Key)
		v := c.Skip()
		switch {
		case openai.IsNull(v) || string(v) == `""` || string(v) == "[]":
		case key == "content":
			e.Text, _ = openai.String(v)
		case key == "reasoning" || key == "reasoning_content":
			e.State = Reasoning
		case key == "tool_calls":
			e.State = ToolCalls
		}
	}
}

// readOffsets reads the text offsets in letters, and adds the length of the last token.
func (e *Event) readOffsets(raw []byte) {
	offsets, _ := openai.Find(raw, "text_offset")
	if len(offsets) == 0 || offsets[0] != '[' {
		return
	}
	c := openai.Cursor{Text: offsets}
	for c.Open('['); c.Next(']'); {
		n, _ := openai.Int64(c.Skip())
		e.Offsets = append(e.Offsets, n)
	}
	if last := len(e.Offsets) - 1; last >= 0 {
		raw, _ = openai.Find(raw, "tokens", strconv.Itoa(last))
		token, _ := openai.String(raw)
		e.Offsets = append(e.Offsets, e.Offsets[last]+int64(utf8.RuneCountInString(token)))
	}
}
