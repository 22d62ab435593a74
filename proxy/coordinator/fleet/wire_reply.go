package fleet

import (
	"errors"
	"strings"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
)

// maxReplyRecords bounds the records of a Placed: fallbacks, notes and the turn.
const maxReplyRecords = 4096

// appendPlaced appends the result for a; p is nil if err is not. m is memory for it.
func appendPlaced(dst []byte, m *fleetpb.Placed, a *coordinator.PlacementRequest, p *coordinator.Placement, err error) []byte {
	defer m.ResetVT()
	if a.Lookup.Done {
		m.Turn = a.Lookup.Turn.Message()
	}
	if err != nil {
		putError(m, err)
		return fleetpb.AppendFast(dst, m)
	}
	m.Result, m.Flow, m.Scored, m.Scale = fleetpb.Placement_PLACED, uint32(p.Flow), p.Facts.Scored, uint32(p.Facts.Scale)
	own := (*ownNumbers)(nil)
	m.Prefill, _ = putTarget(p.Prefill, own)
	m.Decode, _ = putTarget(p.Decode, own)
	m.Id, m.Policy, m.Matched, m.FirstByteUs = p.ID, p.Policy, p.Matched, microsOf(p.FirstByte)
	b := p.Lease.Charge()
	m.Prompt, m.Queued, m.Tokens = b.Prompt, b.Queued, b.Tokens
	for _, f := range p.Fallbacks {
		to := more(&m.Fallbacks)
		to.What, to.Reason = f.What, f.Reason
	}
	m.Notes = append(m.Notes, p.Notes...)
	m.RowSize, m.Rows = abi.RowSize, abi.AppendRows(m.Rows[:0], p.Facts.Candidates)
	putScores(m, p)
	return fleetpb.AppendFast(dst, m)
}

// putError sets one of the errors of Place.
func putError(m *fleetpb.Placed, err error) {
	var rejected *coordinator.RejectedError
	var none *coordinator.NoTargetError
	var held *coordinator.HeldError
	switch {
	case errors.Is(err, coordinator.ErrUnknownModel):
		m.Result = fleetpb.Placement_UNKNOWN_MODEL
	case errors.Is(err, coordinator.ErrModelNeeded):
		m.Result = fleetpb.Placement_MODEL_NEEDED
	case errors.As(err, &rejected):
		m.Result, m.Status = fleetpb.Placement_REJECTED, uint32(rejected.Status)
	case errors.As(err, &none):
		m.Result, m.Phase = fleetpb.Placement_NO_TARGET, uint32(none.Phase)
	case errors.As(err, &held):
		m.Result, m.LimitUs = fleetpb.Placement_HELD, microsOf(held.Limit)
	}
}

// errAway reports that the coordinator cannot place the request.
var errAway = errors.New("place request: the coordinator cannot place it")

// readPlaced reads an answer into g, charge and a; m is memory for it. It returns an error of
// Place, errAway if the Fallback must place the request, or an ErrGarbage. Nothing aliases b.
func readPlaced(b []byte, m *fleetpb.Placed, a *coordinator.PlacementRequest, g *granted, charge *coordinator.Charge, n Numbers, known names) error {
	defer m.ResetVT()
	if fleetpb.UnmarshalView(b, m, maxReplyRecords) != nil {
		return link.Garbage("a placement")
	}
	if m.Turn != nil {
		g.Turn = conversation.ReadTurn(m.Turn)
		if !a.Lookup.Done {
			a.Found(g.Turn)
		}
	}
	switch m.Result {
	case fleetpb.Placement_PLACED:
		if !g.readPlaced(m, n, known) {
			return errAway
		}
		*charge = coordinator.Charge{Prompt: m.Prompt, Queued: m.Queued, Tokens: m.Tokens}
		return nil
	case fleetpb.Placement_UNKNOWN_MODEL:
		return coordinator.ErrUnknownModel
	case fleetpb.Placement_MODEL_NEEDED:
		return coordinator.ErrModelNeeded
	case fleetpb.Placement_REJECTED:
		if m.Status < 400 || m.Status > 599 {
			m.Status = 0
		}
		return &coordinator.RejectedError{Status: int(m.Status)}
	case fleetpb.Placement_NO_TARGET:
		return &coordinator.NoTargetError{Phase: abi.Phase(min(m.Phase, uint32(abi.Encode))), Model: a.Model}
	case fleetpb.Placement_HELD:
		return &coordinator.HeldError{Limit: durationOf(m.LimitUs)}
	}
	return errAway
}

// readPlaced reads a placement. False: one of its instances or its flow is unknown here.
func (g *granted) readPlaced(m *fleetpb.Placed, n Numbers, known names) bool {
	var one, two bool
	g.Prefill, one = getTarget(m.Prefill, n)
	g.Decode, two = getTarget(m.Decode, n)
	if !one || !two || g.Decode.IsZero() || m.Flow > uint32(abi.FlowDecodeFirst) {
		return false
	}
	g.Flow, g.ID, g.Policy, g.Matched, g.FirstByte = abi.Flow(m.Flow), m.Id, known.of(m.Policy), m.Matched, durationOf(m.FirstByteUs)
	for _, f := range m.Fallbacks {
		g.Fallbacks = append(g.Fallbacks, coordinator.Fallback{What: known.of(f.What), Reason: known.of(f.Reason)})
	}
	for _, note := range m.Notes {
		g.Notes = append(g.Notes, strings.Clone(note))
	}
	g.Facts.Scored, g.Facts.Scale = m.Scored, abi.Scale(m.Scale)
	var rows []abi.Candidate
	if m.RowSize == abi.RowSize { // another version may have other rows, which only the journal shows
		rows = abi.ReadRows(g.Facts.Candidates[:0], m.Rows)
	}
	g.Facts.Candidates, g.Targets = rows[:0], g.Targets[:0]
	var listed []bool // of each row
	for _, c := range rows {
		instance := n.Instance(c.Instance)
		if len(m.LegScores) > 0 {
			listed = append(listed, instance != nil)
		}
		if instance != nil {
			c.Instance = instance.ID
			g.Facts.Candidates = append(g.Facts.Candidates, c)
			g.Targets = append(g.Targets, engine.Target{Instance: instance, Rank: int(c.Rank)})
		}
	}
	g.readScores(m, listed, known)
	return true
}

// unlooked returns t without its homes, whose numbers are those of another coordinator.
func unlooked(t conversation.Turn) conversation.Turn {
	t.Prefill, t.Decode = conversation.Target{}, conversation.Target{}
	return t
}
