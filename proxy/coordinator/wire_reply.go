package coordinator

import (
	"errors"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// How a call for a placement ended.
const (
	replyPlaced = iota
	replyUnknownModel
	replyModelNeeded
	replyRejected
	replyNoTarget
	replyAway // the coordinator cannot say: the worker does without it
)

// What a reply says beyond that.
const (
	replyLooked = 1 << iota
	replyScored
	replyFlags
)

// appendReply appends what became of a; p is nil when err is not.
func appendReply(dst []byte, a *Ask, p *Placement, err error) []byte {
	flags := 0
	if a.looked {
		flags |= replyLooked
	}
	if err != nil {
		return appendTurn(appendError(dst, err, flags), a)
	}
	if p.Facts.Scored {
		flags |= replyScored
	}
	dst = appendTurn(append(dst, replyPlaced, byte(flags)), a)
	dst = append(dst, byte(p.Flow))
	for _, t := range [...]engine.Target{p.Prefill, p.Decode} {
		if t.IsZero() {
			dst = append(dst, 0)
			continue
		}
		dst = appendUint(appendUint(dst, t.ID), t.Rank)
	}
	dst = appendUint(dst, p.ID)
	dst = appendText(dst, p.Policy)
	dst = appendInt(dst, p.Matched)
	dst = appendDuration(dst, p.FirstByte)
	b := &p.Lease.burden
	dst = appendInt(appendInt(appendInt(dst, b.prompt), b.queued), b.tokens)
	dst = appendUint(dst, len(p.Fallbacks))
	for _, f := range p.Fallbacks {
		dst = appendText(appendText(dst, f.What), f.Reason)
	}
	dst = appendUint(dst, len(p.Notes))
	for _, note := range p.Notes {
		dst = appendText(dst, note)
	}
	return abi.AppendRows(dst, p.Facts.Candidates)
}

func appendTurn(dst []byte, a *Ask) []byte {
	if a.looked {
		return a.turn.Append(dst)
	}
	return dst
}

// appendError appends one of the errors of Place.
func appendError(dst []byte, err error, flags int) []byte {
	var rejected *RejectedError
	var none *NoTargetError
	switch {
	case errors.Is(err, ErrUnknownModel):
		return append(dst, replyUnknownModel, byte(flags))
	case errors.Is(err, ErrModelNeeded):
		return append(dst, replyModelNeeded, byte(flags))
	case errors.As(err, &rejected):
		return append(appendUint(append(dst, replyRejected), rejected.Status), byte(flags))
	case errors.As(err, &none):
		return append(dst, replyNoTarget, byte(none.Phase), byte(flags))
	}
	return append(dst, replyAway, byte(flags))
}

// errAway says that the coordinator could not place.
var errAway = errors.New("place request: the coordinator cannot place it")

// readReply reads what appendReply wrote into g and a. The errors are those of
// Place; errAway, when it is to be placed here; and garbage.
func readReply(b []byte, a *Ask, g *grant, n Numbers, known names) error {
	r := reader{b: b}
	code := r.most(replyAway)
	var err error
	switch code {
	case replyUnknownModel:
		err = ErrUnknownModel
	case replyModelNeeded:
		err = ErrModelNeeded
	case replyRejected:
		err = &RejectedError{Status: int(r.most(599))}
	case replyNoTarget:
		err = &NoTargetError{Phase: abi.Phase(r.most(uint64(abi.Encode))), Model: a.Model}
	case replyAway:
		err = errAway
	}
	flags := r.most(replyFlags - 1)
	if flags&replyLooked != 0 {
		turn, rest, ok := conversation.ReadTurn(r.b)
		if r.b = rest; !ok {
			r.spoil()
		} else if !a.looked {
			a.turn, a.looked = turn, true
			a.Request.Turn, a.Request.Conversation = turn.Number, string(turn.Key.AppendText(nil))
		}
		g.Turn = turn
	}
	if err != nil && !r.bad && len(r.b) == 0 {
		return err
	}
	lost := g.readPlaced(&r, n, known)
	g.Facts.Scored = flags&replyScored != 0
	switch {
	case r.bad || err != nil:
		return link.Garbage("a placement")
	case lost:
		return errAway
	}
	return nil
}

// readPlaced reads a placement; lost says that it is on an instance that is not
// known here.
func (g *grant) readPlaced(r *reader, n Numbers, known names) (lost bool) {
	g.Flow = abi.Flow(r.most(uint64(abi.FlowDecodeFirst)))
	var one, two bool
	g.Prefill, one = r.target(n)
	g.Decode, two = r.target(n)
	g.ID = r.uint()
	g.Policy = known.of(r.text())
	g.Matched = r.int()
	g.FirstByte = r.duration()
	g.lease.burden = burden{prompt: r.int(), queued: r.int(), tokens: r.int()}
	for range r.list(2) {
		g.Fallbacks = append(g.Fallbacks, Fallback{What: known.of(r.text()), Reason: known.of(r.text())})
	}
	for range r.list(1) {
		g.Notes = append(g.Notes, string(r.text()))
	}
	if len(r.b)%abi.RowSize != 0 {
		r.spoil()
	}
	t := g.table
	t.place.Candidates = abi.ReadRows(t.place.Candidates[:0], r.b)
	t.targets = t.targets[:0]
	kept := t.place.Candidates[:0]
	for i := range t.place.Candidates {
		c := t.place.Candidates[i]
		if instance := n.Instance(c.Instance); instance != nil {
			c.Instance = instance.ID
			kept = append(kept, c)
			t.targets = append(t.targets, engine.Target{Instance: instance, Rank: int(c.Rank)})
		}
	}
	t.place.Candidates = kept
	return !one || !two || g.Decode.IsZero()
}

// unlooked is a turn whose homes are numbers of a coordinator that is not asked
// any more.
func unlooked(t conversation.Turn) conversation.Turn {
	t.Prefill, t.Decode = conversation.Target{}, conversation.Target{}
	return t
}
