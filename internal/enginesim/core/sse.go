package enginesim

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// textBuffer is the detokenizer of one sequence. It finds stop strings and
// holds back text that may become one.
type textBuffer struct {
	text []byte // all output text, cut at a stop string
	sent int    // bytes already given to the stream
	// tokens were decoded since the last piece.
	tokens []token
}

// finished adds the newest output token to the text, and sets s.finish when the
// token ends the sequence.
func (s *sequence) finished(t token) {
	s.text.tokens = append(s.text.tokens, t)
	n := len(s.output)
	stops := n > s.req.MinTokens
	if stops && t == tokenEOS && !s.req.IgnoreEOS {
		s.finish = "stop"
		return
	}
	if stops && slices.Contains(s.req.StopTokenIDs, t) {
		s.finish, s.stopReason = "stop", int(t)
		return
	}
	from := len(s.text.text)
	s.text.text = append(s.text.text, t.text()...)
	if stops {
		for _, stop := range s.req.Stop {
			begin := max(0, from-len(stop)+1)
			if i := bytes.Index(s.text.text[begin:], []byte(stop)); i >= 0 && stop != "" {
				s.text.text = s.text.text[:begin+i]
				s.finish, s.stopReason = "stop", stop
				return
			}
		}
	}
	if n >= s.limit {
		s.finish = "length"
	}
}

// take returns the new text for the client. Until the sequence ends, it holds
// back a tail that could begin a stop string.
func (s *sequence) take() piece {
	ready := len(s.text.text)
	if s.finish == "" {
		hold := 0
		for _, stop := range s.req.Stop {
			hold = max(hold, len(stop)-1)
		}
		ready = wholeRunes(s.text.text[:max(0, ready-hold)])
	}
	ready = max(ready, s.text.sent)
	p := piece{Text: validText(string(s.text.text[s.text.sent:ready])), Tokens: s.text.tokens, Finish: s.finish}
	s.text.sent, s.text.tokens = ready, nil
	return p
}

// answerText is the whole text of a finished sequence.
func (s *sequence) answerText() string { return validText(string(s.text.text)) }

// validText replaces broken UTF-8 as a detokenizer does.
func validText(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// eventStream writes one answer as server-sent events; sequences of one request
// share it.
type eventStream struct {
	mu     sync.Mutex
	w      http.ResponseWriter
	rc     *http.ResponseController
	head   bool // the 200 head was sent
	events int
	// before is called before each event with the number of events already
	// written. An error ends the stream (faults).
	before func(events int) error
	err    error
	// idle sends a comment when the stream was idle for keepAlive; nil without
	// keep-alives.
	idle      *time.Timer
	keepAlive time.Duration
}

// keepAliveComment is vLLM's comment in idle streams.
const keepAliveComment = ": keep-alive\n\n"

// keep starts the keep-alives; finish ends them.
func (st *eventStream) keep(every time.Duration) {
	if every <= 0 {
		return
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.keepAlive = every
	st.idle = time.AfterFunc(every, func() {
		st.mu.Lock()
		defer st.mu.Unlock()
		if st.idle == nil || st.err != nil {
			return
		}
		st.startLocked()
		if _, st.err = io.WriteString(st.w, keepAliveComment); st.err == nil {
			st.err = st.rc.Flush()
		}
		st.idle.Reset(st.keepAlive)
	})
}

// finish ends the keep-alives and waits until none can be sent any more.
func (st *eventStream) finish() {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.idle != nil {
		st.idle.Stop()
		st.idle = nil
	}
}

// start sends the head, once.
func (st *eventStream) start() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.startLocked()
}

func (st *eventStream) startLocked() {
	if st.head {
		return
	}
	st.head = true
	st.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
	st.w.WriteHeader(http.StatusOK)
	st.rc.Flush()
}

// send writes values as events and flushes once.
func (st *eventStream) send(values ...any) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.startLocked()
	for _, v := range values {
		if st.err == nil {
			st.err = st.write(v)
		}
	}
	if len(values) > 0 && st.err == nil {
		st.err = st.rc.Flush()
	}
	if st.idle != nil {
		st.idle.Reset(st.keepAlive)
	}
	return st.err
}

func (st *eventStream) write(v any) error {
	if st.before != nil {
		if err := st.before(st.events); err != nil {
			return err
		}
	}
	st.events++
	raw, ok := v.(rawEvent)
	if !ok {
		if named, ok := v.(namedEvent); ok {
			raw = append(append(append(raw, "event: "...), named.name...), '\n')
			v = named.data
		}
		var err error
		if raw, err = appendJSON(append(raw, "data: "...), v); err != nil {
			return err
		}
		raw = append(raw, "\n\n"...)
	}
	_, err := st.w.Write(raw)
	return err
}

// rawEvent is an event that is written unchanged.
type rawEvent []byte

// namedEvent is an event with an event line.
type namedEvent struct {
	name string
	data any
}

// doneEvent ends a stream.
var doneEvent = rawEvent("data: [DONE]\n\n")
