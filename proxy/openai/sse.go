package openai

import (
	"bytes"
	"net/http"
)

// maxEvent is the default of EventScanner.Limit in bytes. The longest real events (a
// whole response with its log probabilities) are shorter.
const maxEvent = 1 << 20

// EventScanner splits the reads of one event stream into whole events, and notes facts
// in them without parsing them. The zero value is ready for use. It belongs to one
// goroutine.
//
// Lines end in LF or CRLF, as in the streams of all engines. A stream with bare CR
// would be held back until its end.
type EventScanner struct {
	// Events is the number of events with data, without [DONE].
	Events int64
	// Usages is the number of usage objects.
	Usages int64
	// Done is set when the stream has reported its end: by [DONE], or by the final
	// event of an API with typed events. A stream that ends without it was cut off.
	Done bool
	// Failed is set by an error event. vLLM and SGLang send it inside a 200 stream,
	// vLLM followed by [DONE]: Done alone does not mean success.
	Failed bool
	// Aborted is set by a finish reason of abort: the engine gave up the request.
	// SGLang adds a status.
	Aborted bool
	// Status is the HTTP status of Failed or Aborted.
	Status int
	// Limit is the maximum number of bytes that are held back of an incomplete event;
	// 0: 1 MiB. It must be set before the first Feed.
	Limit int
	// Reasons makes the scanner note the finish reasons. It must be set before the first Feed.
	Reasons bool

	first       int64     // the sequence number of a responses stream's first event
	held, spare []byte    // the start of the incomplete event; spare memory
	mid         bool      // the start of the incomplete event was already returned
	last        [2]byte   // last returned bytes, if mid
	usage       [2][]byte // the first and the last usage object
	usageKey    []byte
	reasons     reasons
}

// Feed takes the bytes of one read and returns the bytes to be written now, which end
// at an event border. It holds the rest back for the next call. The result is valid
// until the next call: it is p or its front, unless bytes were held back. It is empty
// if no event has ended. An event longer than Limit is returned in pieces, and facts in
// it may be missed; see [EventScanner.MidEvent].
func (s *EventScanner) Feed(p []byte) []byte {
	if len(p) == 0 {
		return nil
	}
	if s.mid {
		return s.feedLong(p)
	}
	if len(s.held) == 0 && bytes.HasSuffix(p, []byte("\n\n")) { // nearly all reads end with an event
		s.note(p)
		return p
	}
	border := lastBorder(s.held, p)
	if len(s.held) == 0 {
		s.held = append(s.held, p[border:]...)
		return s.emit(p[:border:border])
	}
	if border == 0 {
		s.held = append(s.held, p...)
		return s.emit(nil)
	}
	whole := append(s.held, p[:border]...)
	s.held, s.spare = append(s.spare[:0], p[border:]...), whole[:0]
	return s.emit(whole)
}

// emit notes the facts in whole events. If the held rest is longer than Limit, it
// appends the rest to them.
func (s *EventScanner) emit(whole []byte) []byte {
	s.note(whole)
	limit := s.Limit
	if limit == 0 {
		limit = maxEvent
	}
	if len(s.held) <= limit {
		return whole
	}
	s.note(s.held)
	s.mid = true
	s.remember(s.held)
	whole = append(whole, s.held...)
	s.held = nil
	return whole
}

// feedLong returns the bytes that belong to an event whose start was already returned.
func (s *EventScanner) feedLong(p []byte) []byte {
	end := 0
	for i, c := range p {
		if c == '\n' && blankBefore(s.last[:], p, i) {
			end = i + 1
			break
		}
	}
	if end == 0 {
		s.remember(p)
		return p
	}
	s.mid = false
	border := end + lastBorder(nil, p[end:])
	s.held = append(s.held[:0], p[border:]...)
	s.note(p[end:border])
	return p[:border]
}

// remember keeps the last two returned bytes.
func (s *EventScanner) remember(p []byte) {
	if len(p) == 1 {
		s.last[0], s.last[1] = s.last[1], p[0]
		return
	}
	copy(s.last[:], p[len(p)-2:])
}

// Finish notes the regular end of the stream and returns the bytes that the scanner still
// holds back. The caller writes them unchanged. If the stream is complete, these bytes
// are at most a last line without its blank line. Do not call Finish after a broken
// stream, because an incomplete event is useless to the client.
func (s *EventScanner) Finish() []byte {
	if s.mid {
		return nil
	}
	rest := s.held
	s.note(rest)
	s.held = nil
	return rest
}

// MidEvent reports whether the returned bytes end inside an event. An event of the
// proxy must then be preceded by a blank line.
func (s *EventScanner) MidEvent() bool { return s.mid }

// Held returns the memory for held-back bytes, in bytes.
func (s *EventScanner) Held() int { return cap(s.held) + cap(s.spare) }

// Usage returns the numbers of the stream's last usage object, completed by those of
// the first one (a messages stream has one at each end). ok is false if there was none.
func (s *EventScanner) Usage() (u Usage, ok bool) {
	if s.Usages == 0 {
		return noUsage, false
	}
	u = usageOf(s.usage[1])
	first := usageOf(s.usage[0])
	if u.Prompt < 0 {
		u.Prompt = first.Prompt
	}
	if u.Completion < 0 {
		u.Completion = first.Completion
	}
	if u.Cached < 0 {
		u.Cached = first.Cached
	}
	return u, u != noUsage
}

// FinishReasons is FinishReasons for the stream so far.
func (s *EventScanner) FinishReasons() []string { return s.reasons.list() }

// Begin notes the sequence number of the first event of a responses stream; head is the
// start of the stream. It is called once, before the first Feed.
func (s *EventScanner) Begin(head []byte) {
	if rest, ok := after(head, sequenceNumber); ok {
		v, _ := Find(rest)
		s.first, _ = Int64(v)
	}
}

// NextSequence returns the sequence number of the next event of a responses stream, whose
// events are numbered without a gap.
func (s *EventScanner) NextSequence() int64 { return s.first + s.Events }

// EventEnd returns the number of bytes through the end of the first event; 0 if it does not end.
// A blank line ends an event: LF or CRLF directly after another LF.
func EventEnd(p []byte) int {
	for i := 0; ; {
		n := bytes.IndexByte(p[i:], '\n')
		if n < 0 {
			return 0
		}
		i += n + 1
		if i < len(p) && p[i] == '\n' {
			return i + 1
		}
		if i+1 < len(p) && p[i] == '\r' && p[i+1] == '\n' {
			return i + 2
		}
	}
}

// lastBorder returns the index in p after the last blank line of held and p together
// that p completes; 0 if there is none.
func lastBorder(held, p []byte) int {
	for end := len(p); end > 0; {
		i := bytes.LastIndexByte(p[:end], '\n')
		if i < 0 {
			return 0
		}
		if blankBefore(held, p, i) {
			return i + 1
		}
		end = i
	}
	return 0
}

// blankBefore reports whether the line that ends at p[i] is blank and not the first
// line: LF or CRLF directly after another LF.
func blankBefore(held, p []byte, i int) bool {
	before := func(n int) byte {
		if i >= n {
			return p[i-n]
		}
		if n -= i; n <= len(held) {
			return held[len(held)-n]
		}
		return 0
	}
	return before(1) == '\n' || before(1) == '\r' && before(2) == '\n'
}

// The names searched for in data. They cannot occur in generated text, where a
// backslash precedes each quote.
var (
	finishReason   = []byte(`"finish_reason"`)
	sequenceNumber = []byte(`"sequence_number"`)
	usageName      = []byte(`"usage"`)
	metaInfo       = []byte(`"meta_info"`)
)

// note notes the facts in whole events.
func (s *EventScanner) note(p []byte) {
	counted, typed, ends := false, false, false
	for len(p) > 0 {
		var field, value []byte
		switch field, value, p = nextField(p); string(field) {
		case "":
			if value == nil { // a blank line ends the event
				counted, typed, ends = false, false, false
			}
		case "data":
			if s.noteData(value, typed) && !counted {
				counted = true
				s.Events++
			}
			if ends {
				s.reasons.noteTyped(value)
			}
		case "event":
			typed, ends = true, s.Reasons && endsText(value)
			s.noteType(value)
		}
	}
}

// nextField splits off the first line and splits it into field and value. The field of a comment
// is empty (HTML standard, section 9.2.6); the value of a blank line is nil.
func nextField(p []byte) (field, value, rest []byte) {
	line, rest, _ := bytes.Cut(p, []byte{'\n'})
	field, value, _ = bytes.Cut(bytes.TrimSuffix(line, []byte{'\r'}), []byte{':'})
	return field, bytes.TrimPrefix(value, []byte{' '}), rest
}

// noteType notes an event's type: responses end with response.completed or
// response.incomplete, messages with message_stop; both fail with error.
func (s *EventScanner) noteType(name []byte) {
	switch string(name) {
	case "message_stop", "response.completed", "response.incomplete":
		s.Done = true
	case "response.failed":
		s.Done, s.Failed = true, true
		s.setStatus(http.StatusInternalServerError)
	case "error":
		s.Failed = true
		s.setStatus(http.StatusInternalServerError)
	}
}

// setStatus keeps the first status that is not the default.
func (s *EventScanner) setStatus(status int) {
	if s.Status == 0 || s.Status == http.StatusInternalServerError {
		s.Status = status
	}
}

// noteData notes a line of data; typed: the event of the line has a type. It reports
// whether the line is more than [DONE].
//
// Of the usage objects it keeps the first and the last one. SGLang's native stream has a
// meta_info in each event instead. The first event with one of the two decides which
// one is searched for.
func (s *EventScanner) noteData(data []byte, typed bool) bool {
	if string(bytes.TrimSpace(data)) == "[DONE]" {
		s.Done = true
		return false
	}
	if raw, ok := errorObject(data); ok {
		s.Failed = true
		s.setStatus(errorStatus(raw))
		return true
	}
	if !typed { // typed events have no finish reason, but may repeat the client's metadata
		status, aborted, ended := abortStatus(data)
		if aborted {
			s.Aborted = true
			s.setStatus(status)
		}
		if ended && s.Reasons {
			s.reasons.note(data)
		}
	}
	var usage Cursor
	if s.usageKey != nil {
		usage.Text, _ = after(data, s.usageKey)
	} else {
		for _, key := range [...][]byte{usageName, metaInfo} {
			if rest, ok := after(data, key); ok {
				usage.Text, s.usageKey = rest, key
				break
			}
		}
	}
	if usage.Peek() != '{' {
		return true
	}
	if v := usage.Skip(); len(v) > 0 {
		s.Usages++
		if s.usage[0] == nil {
			s.usage[0] = bytes.Clone(v)
		}
		s.usage[1] = append(s.usage[1][:0], v...)
	}
	return true
}

// after returns the bytes from the value of the first member with a key on. The key is given with
// its quotes. after searches for the bytes behind the first quote: JSON has many quotes, and
// stopping at each would take several times as long.
func after(data, key []byte) (rest []byte, ok bool) {
	for {
		i := bytes.Index(data, key[1:])
		if i < 0 {
			return nil, false
		}
		behind := i + len(key) - 1
		if j := skipSpace(data, behind); i > 0 && data[i-1] == '"' && j < len(data) && data[j] == ':' {
			return data[skipSpace(data, j+1):], true
		}
		data = data[behind-1:] // the closing quote of the key may also be the opening quote of a string
	}
}
