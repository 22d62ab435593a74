package replay

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
)

// NewConversations finds the sessions of a trace and returns their lab. A session begins at its time in the
// trace, in the scale of the load. Its other turns keep the recorded time since the turn before, because users
// and tools are not faster in a busier fleet; a turn never comes before the end of the answer before it. A
// conversation without a name gets one: the proxy proves the tokens of a chat only for clients that name the
// conversation.
func NewConversations(cfg Config, t *Trace) (*SessionLab, error) {
	lab, err := New(cfg, t)
	if err != nil {
		return nil, err
	}
	l := &SessionLab{lab: lab, sessions: conversationsOf(t, cfg.BlockTokens)}
	v := volatile{cfg.Volatile, cfg.Seed}
	turns := 0
	for _, s := range l.sessions {
		s.volatile = v.draw(s.number)
		s.begin = time.Duration(float64(s.turns[0].Arrival-t.Requests[0].Arrival) * lab.scale)
		turns += len(s.turns) - 1
		for i := range s.turns {
			if q := &s.turns[i]; q.Conversation == "" {
				q.Conversation = strconv.Itoa(int(s.number))
			}
		}
	}
	if turns == 0 {
		return nil, errors.New("find conversations: no request of the trace continues another one")
	}
	return l, nil
}

// conversationsOf returns the sessions of a trace, in the order in which they begin. A request is the next turn
// of an earlier one if it begins with all whole blocks of that prompt, is long enough to contain its answer too,
// has the same conversation if the client named it, and no other request is the next turn. Of several earlier
// requests the one with the longest prompt counts, and then the latest. A prompt whose last whole block is in
// more than maxTurns requests is the beginning of many sessions, and has no next turn.
func conversationsOf(t *Trace, blockTokens int) (sessions []*session) {
	shared, open := sharedBlocks(t), make(openTurns)
	for i := range t.Requests {
		q := &t.Requests[i]
		s, found := open.take(q)
		if found {
			s.turns[len(s.turns)-1].apart = q.Arrival - s.turns[len(s.turns)-1].Arrival
		} else {
			s = &session{number: uint32(len(sessions) + 1)}
			sessions = append(sessions, s)
		}
		s.turns = append(s.turns, turn{Request: *q})
		if n := q.whole(blockTokens); n > 0 && !shared[q.HashIDs[n-1]] {
			open[q.HashIDs[n-1]] = append(open[q.HashIDs[n-1]], s)
		}
	}
	return sessions
}

// openTurns has the sessions by the last whole block of the prompt of their last turn.
type openTurns map[uint64][]*session

// take removes and returns the session whose next turn is q.
func (o openTurns) take(q *Request) (s *session, found bool) {
	for _, id := range slices.Backward(q.HashIDs) {
		list := o[id]
		for i, s := range slices.Backward(list) {
			if last := &s.turns[len(s.turns)-1]; q.Conversation == last.Conversation && q.InputLength >= last.InputLength+last.OutputLength {
				o[id] = slices.Delete(list, i, i+1)
				return s, true
			}
		}
	}
	return nil, false
}

// sharedBlocks returns the blocks that are a prefix of several conversations.
func sharedBlocks(t *Trace) map[uint64]bool {
	shared, uses := make(map[uint64]bool), make(map[uint64]int)
	for i := range t.Requests {
		for _, id := range t.Requests[i].HashIDs {
			if uses[id]++; uses[id] > maxTurns {
				shared[id] = true
			}
		}
	}
	return shared
}

// volatile chooses the sessions whose client changes a text at the beginning of each prompt, as the billing
// header of a coding agent does. A larger share contains the sessions of a smaller one.
type volatile struct {
	share float64
	seed  uint64
}

func (v volatile) draw(session uint32) bool {
	return rand.New(rand.NewPCG(v.seed, uint64(session))).Float64() < v.share
}
