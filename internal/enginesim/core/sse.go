package core

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
	Text []byte // all output text, cut at a stop string
	Sent int    // bytes already given to the stream
	// tokens were decoded since the last piece.
	tokens []Token
}

// finished adds the newest output token to the text, and sets s.finish when the
// token ends the sequence.
func (s *Sequence) finished(t Token) {
	s.Text.tokens = append(s.Text.tokens, t)
	n := len(s.Output)
	stops := n > s.Req.MinTokens
	if stops && t == TokenEOS && !s.Req.IgnoreEOS {
		s.Finish = "stop"
		return
	}
	if stops && slices.Contains(s.Req.StopTokenIDs, t) {
		s.Finish, s.StopReason = "stop", int(t)
		return
	}
	from := len(s.Text.Text)
	s.Text.Text = append(s.Text.Text, t.Text()...)
	if stops {
		for _, stop := range s.Req.Stop {
			begin := max(0, from-len(stop)+1)
			if i := bytes.Index(s.Text.Text[begin:], []byte(stop)); i >= 0 && stop != "" {
				s.Text.Text = s.Text.Text[:begin+i]
				s.Finish, s.StopReason = "stop", stop
				return
			}
		}
	}
	if n >= s.Limit {
		s.Finish = "length"
	}
}

// take returns the new text for the client. Until the sequence ends, it holds
// back a tail that could begin a stop string.
func (s *Sequence) take() Piece {
	ready := len(s.Text.Text)
	if s.Finish == "" {
		hold := 0
		for _, stop := range s.Req.Stop {
			hold = max(hold, len(stop)-1)
		}
		ready = wholeRunes(s.Text.Text[:max(0, ready-hold)])
	}
	ready = max(ready, s.Text.Sent)
	p := Piece{Text: ValidText(string(s.Text.Text[s.Text.Sent:ready])), Tokens: s.Text.tokens, Finish: s.Finish}
	s.Text.Sent, s.Text.tokens = ready, nil
	return p
}

// AnswerText is the whole text of a finished sequence.
func (s *Sequence) AnswerText() string { return ValidText(string(s.Text.Text)) }

// ValidText replaces broken UTF-8 as a detokenizer does.
func ValidText(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

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

// Start sends the head, once.
func (st *eventStream) Start() {
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
	raw, ok := v.(RawEvent)
	if !ok {
		if named, ok := v.(NamedEvent); ok {
			raw = append(append(append(raw, "event: "...), named.Name...), '\n')
			v = named.Data
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

// RawEvent is an event that is written unchanged.
type RawEvent []byte

// NamedEvent is an event with an event line.
type NamedEvent struct {
	Name string
	Data any
}

// doneEvent ends a stream.
var doneEvent = RawEvent("data: [DONE]\n\n")
