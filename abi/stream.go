package abi

import (
	"context"
	"strings"
	"sync"
	"time"
)

// StreamFacts are the proxy's facts of one exchange, as filters see them in the
// properties pdproxy.*, upstream.* and request.id. Empty and zero fields are
// not known (yet).
type StreamFacts struct {
	RequestID string // x-request-id of the exchange
	Tenant    string // of the client's API key or token, known when the body is read; "" without keys
	Model     string // as the client requested it
	Stream    bool   // the client requested events
	Flow      Flow
	Prefill   StreamTarget // FlowAggregated has none
	Decode    StreamTarget
	DisaggID  uint64
	Attempts  int32 // placements so far

	// Times since the arrival of the request; 0: not yet, or never.
	Placed      time.Duration // the first placement was made
	PrefillDone time.Duration // prefill had answered
	FirstByte   time.Duration // the first byte of the answer was sent
	End         time.Duration

	PromptTokens int64 // estimate, exact only for prompts sent as token ids
	// Usage as the engine reported it, at the end of the answer.
	InputTokens, OutputTokens, CachedTokens int64
}

// StreamTarget is one target of an exchange.
type StreamTarget struct {
	Engine  string // name in the configuration
	Address string // host:port of the engine's HTTP address
	Rank    int32
}

// The limits of the notes that a filter, or one decision of a policy, may add
// to an exchange's explanation.
const (
	MaxNotes    = 16
	MaxNoteSize = 512 // bytes; the rest is cut off
)

// StreamInfo connects the proxy, which fills in the facts of an exchange, and
// the filters, which read them and leave notes. It travels in the request's
// context. Its methods are safe for concurrent use; on a nil StreamInfo they do
// nothing.
type StreamInfo struct {
	mu    sync.Mutex
	facts StreamFacts
	notes []string
}

// Update calls set to change the facts. set must not block and must not keep
// the pointer.
func (s *StreamInfo) Update(set func(*StreamFacts)) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	set(&s.facts)
}

// Facts returns a copy of the current facts.
func (s *StreamInfo) Facts() StreamFacts {
	if s == nil {
		return StreamFacts{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.facts
}

// AddNote adds a line to the exchange's explanation, and reports whether there
// was room for it.
func (s *StreamInfo) AddNote(note string) bool {
	if s == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.notes) == MaxNotes {
		return false
	}
	s.notes = append(s.notes, strings.Clone(note[:min(len(note), MaxNoteSize)]))
	return true
}

// Notes returns the notes in their order of arrival.
func (s *StreamInfo) Notes() []string {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.notes...)
}

type streamInfoKey struct{}

// WithStreamInfo returns ctx with s in it.
func WithStreamInfo(ctx context.Context, s *StreamInfo) context.Context {
	return context.WithValue(ctx, streamInfoKey{}, s)
}

// StreamInfoFrom returns the StreamInfo of ctx, nil if there is none.
func StreamInfoFrom(ctx context.Context) *StreamInfo {
	s, _ := ctx.Value(streamInfoKey{}).(*StreamInfo)
	return s
}
