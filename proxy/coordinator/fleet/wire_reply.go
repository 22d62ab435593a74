package fleet

import (
	"errors"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// Results of a call for a placement.
const (
	replyPlaced = iota
	replyUnknownModel
	replyModelNeeded
	replyRejected
	replyNoTarget
	replyHeld
	replyAway // the coordinator cannot place; the worker does it
)

// Flags of a reply.
const (
	replyLooked = 1 << iota
	replyScored
	replyFlags
)

// appendReply appends the result for a; p is nil if err is not.
func appendReply(dst []byte, a *coordinator.Ask, p *coordinator.Placement, err error) []byte {
	flags := 0
	if a.Lookup.Done {
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
		dst = wire.AppendUint(wire.AppendUint(dst, t.ID), t.Rank)
	}
	dst = wire.AppendUint(dst, p.ID)
	dst = wire.AppendText(dst, p.Policy)
	dst = wire.AppendInt(dst, p.Matched)
	dst = appendDuration(dst, p.FirstByte)
	b := p.Lease.Charge()
	dst = wire.AppendInt(wire.AppendInt(wire.AppendInt(dst, b.Prompt), b.Queued), b.Tokens)
	dst = wire.AppendUint(dst, len(p.Fallbacks))
	for _, f := range p.Fallbacks {
		dst = wire.AppendText(wire.AppendText(dst, f.What), f.Reason)
	}
	dst = wire.AppendUint(dst, len(p.Notes))
	for _, note := range p.Notes {
		dst = wire.AppendText(dst, note)
	}
	return abi.AppendRows(dst, p.Facts.Candidates)
}

func appendTurn(dst []byte, a *coordinator.Ask) []byte {
	if a.Lookup.Done {
		return a.Lookup.Turn.Append(dst)
	}
	return dst
}

// appendError appends one of the errors of Place.
func appendError(dst []byte, err error, flags int) []byte {
	var rejected *coordinator.RejectedError
	var none *coordinator.NoTargetError
	var held *coordinator.HeldError
	switch {
	case errors.Is(err, coordinator.ErrUnknownModel):
		return append(dst, replyUnknownModel, byte(flags))
	case errors.Is(err, coordinator.ErrModelNeeded):
		return append(dst, replyModelNeeded, byte(flags))
	case errors.As(err, &rejected):
		return append(wire.AppendUint(append(dst, replyRejected), rejected.Status), byte(flags))
	case errors.As(err, &none):
		return append(dst, replyNoTarget, byte(none.Phase), byte(flags))
	}
	if errors.As(err, &held) {
		return append(appendDuration(append(dst, replyHeld), held.Limit), byte(flags))
	}
	return append(dst, replyAway, byte(flags))
}

// errAway reports that the coordinator cannot place the request.
var errAway = errors.New("place request: the coordinator cannot place it")

// readReply reads a reply into g, charge and a. It returns an error of Place, errAway if the
// Fallback must place the request, or an ErrGarbage.
func readReply(b []byte, a *coordinator.Ask, g *granted, charge *coordinator.Charge, n Numbers, known names) error {
	r := newReader(b)
	code := r.UintUpTo(replyAway)
	var err error
	switch code {
	case replyUnknownModel:
		err = coordinator.ErrUnknownModel
	case replyModelNeeded:
		err = coordinator.ErrModelNeeded
	case replyRejected:
		err = &coordinator.RejectedError{Status: int(r.UintUpTo(599))}
	case replyNoTarget:
		err = &coordinator.NoTargetError{Phase: abi.Phase(r.UintUpTo(uint64(abi.Encode))), Model: a.Model}
	case replyHeld:
		err = &coordinator.HeldError{Limit: r.duration()}
	case replyAway:
		err = errAway
	}
	flags := r.UintUpTo(replyFlags - 1)
	if flags&replyLooked != 0 {
		turn := conversation.ReadTurn(&r.Reader)
		if !r.Failed() && !a.Lookup.Done {
			a.Found(turn)
		}
		g.Turn = turn
	}
	if err != nil && r.Done() {
		return err
	}
	lost := g.readPlaced(&r, charge, n, known)
	g.Facts.Scored = flags&replyScored != 0
	switch {
	case r.Failed() || err != nil:
		return link.Garbage("a placement")
	case lost:
		return errAway
	}
	return nil
}

// readPlaced reads a placement. lost: one of its instances is unknown here.
func (g *granted) readPlaced(r *reader, charge *coordinator.Charge, n Numbers, known names) (lost bool) {
	g.Flow = abi.Flow(r.UintUpTo(uint64(abi.FlowDecodeFirst)))
	var one, two bool
	g.Prefill, one = r.target(n)
	g.Decode, two = r.target(n)
	g.ID = r.Uint()
	g.Policy = known.of(r.Text())
	g.Matched = r.Int()
	g.FirstByte = r.duration()
	*charge = coordinator.Charge{Prompt: r.Int(), Queued: r.Int(), Tokens: r.Int()}
	for range r.List(2) {
		g.Fallbacks = append(g.Fallbacks, coordinator.Fallback{What: known.of(r.Text()), Reason: known.of(r.Text())})
	}
	for range r.List(1) {
		g.Notes = append(g.Notes, string(r.Text()))
	}
	if r.Len()%abi.RowSize != 0 {
		r.Fail()
	}
	rows := abi.ReadRows(g.Facts.Candidates[:0], r.Rest())
	g.Facts.Candidates, g.Targets = rows[:0], g.Targets[:0]
	for _, c := range rows {
		if instance := n.Instance(c.Instance); instance != nil {
			c.Instance = instance.ID
			g.Facts.Candidates = append(g.Facts.Candidates, c)
			g.Targets = append(g.Targets, engine.Target{Instance: instance, Rank: int(c.Rank)})
		}
	}
	return !one || !two || g.Decode.IsZero()
}

// unlooked returns t without its homes, whose numbers are those of another coordinator.
func unlooked(t conversation.Turn) conversation.Turn {
	t.Prefill, t.Decode = conversation.Target{}, conversation.Target{}
	return t
}
