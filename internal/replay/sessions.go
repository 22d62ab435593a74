package replay

import (
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/internal/plot"
	"github.com/pdproxy/pdproxy/proxy/coordinator/turns"
)

// SessionLab plays sessions on one fleet, for one retain policy after another. The turns of a session are a
// closed loop: a turn comes after the end of the answer before it.
type SessionLab struct {
	lab      *Lab
	sessions []*session // by begin
}

// Setting is a row of a SessionLab.
type Setting struct {
	Retain string       // name of the retain policy
	Decide turns.Decide // the policy
	Stable bool         // the filter stable_prefix is on
}

// Run plays the sessions. p places the requests.
func (l *SessionLab) Run(p Placer, s Setting) *SessionRow { return l.play(p, s).row() }

// play runs all events.
func (l *SessionLab) play(p Placer, s Setting) *sessionRun {
	r := &sessionRun{run: l.lab.newRun(p), setting: s}
	r.retention = newRetention(r.run, s.Decide)
	for _, s := range l.sessions {
		r.clock.at(s.begin, func() { r.begin(s, 0, nil) })
	}
	r.poll()
	for r.clock.next() {
	}
	return r
}

// sessionRun is one run of a SessionLab.
type sessionRun struct {
	*run
	setting Setting
	played  []*job
}

// begin begins turn i of a session, and the turns after it. ended is called at the end of the session.
func (r *sessionRun) begin(s *session, i int, ended func()) {
	t := &s.turns[i]
	j := &job{Request: t.Request, turn: t, text: s.number, arrived: r.clock.now}
	r.played = append(r.played, j)
	if s.volatile && !r.setting.Stable {
		r.change(j)
	}
	next := func() {
		switch {
		case i+1 < len(s.turns):
			r.clock.at(max(r.clock.now+t.gap, j.arrived+t.apart), func() { r.begin(s, i+1, ended) })
		case ended != nil:
			ended()
		}
	}
	j.after = next
	if t.child != nil {
		j.after = func() { r.begin(t.child, 0, next) }
	}
	j.kept = r.retention.take(j)
	j.lease = r.view.place(r.placer, &j.Request, r.clock.now)
	r.ranks[j.lease.prefill].add(j)
}

// change gives a prompt a first block that no other prompt has. As the id of a block stands for all blocks
// before it too, all ids are those of this prompt alone.
func (r *sessionRun) change(j *job) {
	number := uint64(len(r.played))
	j.text = 1<<31 | uint32(number)
	ids := make([]uint64, len(j.HashIDs))
	for i, id := range j.HashIDs {
		ids[i] = own(1<<40|number, id)
	}
	j.HashIDs = ids
}

// row computes the figures of the run.
func (r *sessionRun) row() *SessionRow {
	row := &SessionRow{
		Retain: r.setting.Retain, Stable: r.setting.Stable, Pulled: r.retention.pulled,
		Transferred: r.transferred + int64(r.retention.pulledTokens),
		ToDecode:    float64(r.transferred) * r.cfg.Model.KVBytes, ToPrefill: float64(r.retention.pulledTokens) * r.cfg.Model.KVBytes,
		HeldSeconds: r.retention.held, Results: r.retention.results,
	}
	var prompts int64
	for _, j := range r.played {
		row.ttft = append(row.ttft, j.first-j.arrived)
		prompts += int64(j.InputLength)
		row.EndedSeconds = max(row.EndedSeconds, j.ended.Seconds())
	}
	slices.Sort(row.ttft)
	row.TTFTP50, row.TTFTP95 = millis(plot.Quantile(row.ttft, .5)), millis(plot.Quantile(row.ttft, .95))
	row.HitRatio = float64(r.found) / float64(prompts)
	for _, d := range r.decode {
		row.Waits += d.waits
	}
	return row
}

// gaps returns the number of the pauses between turns, and how many of them are below a second.
func (l *SessionLab) gaps() (all, quick int) {
	var add func(s *session)
	add = func(s *session) {
		for i := range s.turns {
			t := &s.turns[i]
			if i < len(s.turns)-1 {
				if all++; max(t.gap, t.apart) < time.Second && t.child == nil {
					quick++
				}
			}
			if t.child != nil {
				add(t.child)
			}
		}
	}
	for _, s := range l.sessions {
		add(s)
	}
	return all, quick
}
