package websocket

import (
	"testing"
	"testing/synctest"
	"time"
)

// TestArriving: arriving waits for the message that arrives. It does not wait for a message that
// was already taken, when read has not yet noted the message's end.
func TestArriving(t *testing.T) {
	message := new(turn)
	for _, tt := range []struct {
		name   string
		reads  func(*session) // what read does after a second
		turn   *turn
		coming bool
	}{
		{"a message", func(s *session) { s.turns <- message; s.arrived() }, message, true},
		{"a refused message", func(s *session) { s.turns <- nil; s.arrived() }, nil, true},
		{"the end of an earlier message", (*session).arrived, nil, false},
		{"the client leaves", func(s *session) { close(s.gone) }, nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &session{turns: make(chan *turn, 2), gone: make(chan struct{}), quiet: make(chan struct{}, 1)}
				s.arrived() // an earlier message
				s.reading.Store(true)
				time.AfterFunc(time.Second, func() { tt.reads(s) })
				if got, coming := s.arriving(); got != tt.turn || coming != tt.coming {
					t.Errorf("got %p, %v, want %p, %v", got, coming, tt.turn, tt.coming)
				}
			})
		})
	}
}
