package core

import (
	"bytes"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

// textBuffer is the detokenizer of one sequence. It finds stop strings and
// holds back text that may become one.
type textBuffer struct {
	kind Detokenizer
	Text []byte // all output text, cut at a stop string
	// whole is the length of the text up to the last token that ended with a letter.
	whole int
	Sent  int // bytes already given to the stream
	// lost: the first letter belongs to the prompt's last token and is dropped.
	lost bool
	// tokens were decoded since the last piece.
	tokens []Token
}

// prime prepares the buffer for an answer to a prompt. Only a prompt that ends inside a letter
// has an effect.
func (b *textBuffer) prime(o StreamOptions, prompt string) {
	b.kind = o.Detokenizer
	open := prompt[wholeRunes([]byte(prompt)):]
	switch {
	case open == "":
	case b.kind == DecodeAfterPrompt:
		b.Text = []byte(prompt)
	case b.kind == DecodeDifference:
		b.Text, b.lost = []byte(open), true
	}
}

// add appends the text of a token and moves whole.
func (b *textBuffer) add(t Token) {
	b.Text = append(b.Text, t.Text()...)
	if wholeRunes(b.Text) < len(b.Text) {
		return
	}
	if b.lost {
		_, n := utf8.DecodeRune(b.Text)
		b.Text, b.lost = b.Text[n:], false
	}
	b.whole = len(b.Text)
}

// cut ends the text at n bytes.
func (b *textBuffer) cut(n int) { b.Text, b.whole = b.Text[:n], min(b.whole, n) }

// searched is the text in which stop strings are searched.
func (b *textBuffer) searched() []byte {
	if b.kind == DecodeAfterPrompt {
		return b.Text[:b.whole]
	}
	return b.Text
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
	from := len(s.Text.searched())
	s.Text.add(t)
	text := s.Text.searched()
	if stops {
		for _, stop := range s.Req.Stop {
			begin := max(0, min(from, len(text))-len(stop)+1)
			if i := bytes.Index(text[begin:], []byte(stop)); i >= 0 && stop != "" {
				s.Text.cut(begin + i)
				s.Finish, s.StopReason = "stop", stop
				return
			}
		}
	}
	if n >= s.Limit {
		s.Finish = "length"
	}
}

// held reports whether the engine sends no event yet, because the text may end with the begin of
// a stop string.
func (s *Sequence) held() bool {
	if s.Text.kind != DecodeDifference || s.Finish != "" {
		return false
	}
	for _, stop := range s.Req.Stop {
		for n := min(len(stop), len(s.Text.Text)); n > 0; n-- {
			if bytes.HasSuffix(s.Text.Text, []byte(stop[:n])) {
				return true
			}
		}
	}
	return false
}

// take returns the new text for the client. Until the sequence ends, it holds
// back a tail that could begin a stop string.
func (s *Sequence) take() Piece {
	b := &s.Text
	ready := b.ready(s.Finish != "", s.Req.Stop)
	ready = max(ready, b.Sent)
	p := Piece{Text: ValidText(string(b.Text[b.Sent:ready])), Tokens: b.tokens, Finish: s.Finish}
	b.Sent, b.tokens = ready, nil
	return p
}

// ready returns the length of the text that the client may have.
func (b *textBuffer) ready(done bool, stop []string) int {
	if b.kind == DecodeDifference {
		switch {
		case b.lost:
			return 0
		case done:
			return len(b.Text)
		}
		return b.whole + 1 + bytes.LastIndexByte(b.Text[b.whole:], ' ')
	}
	ready := b.whole
	if b.kind == DecodeAlone {
		ready = len(b.Text)
		if !done {
			ready = wholeRunes(b.Text)
		}
	}
	if done {
		return ready
	}
	hold := 0
	for _, s := range stop {
		hold = max(hold, utf8.RuneCountInString(s)-1)
	}
	for ; hold > 0 && ready > 0; hold-- {
		_, n := utf8.DecodeLastRune(b.Text[:ready])
		ready -= n
	}
	return ready
}

// AnswerText is the whole text of a finished sequence.
func (s *Sequence) AnswerText() string {
	return ValidText(string(s.Text.Text[:s.Text.ready(true, nil)]))
}

// TokenTexts returns the text of each token of an output. A token that ends inside a letter has
// none; the token that ends the letter has the whole letter, as in vLLM's log probabilities
// (v1/engine/logprobs.py).
func TokenTexts(tokens []Token) []string {
	texts := make([]string, len(tokens))
	begin := 0
	var text []byte
	for i, t := range tokens {
		text = append(text, t.Text()...)
		if wholeRunes(text) == len(text) {
			texts[i], begin = ValidText(string(text[begin:])), len(text)
		}
	}
	return texts
}

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
