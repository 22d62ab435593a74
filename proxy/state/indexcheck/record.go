package indexcheck

// class is the class of one observation.
type class uint8

const (
	cold  class = iota // nothing: too little was cached
	agree              // index and engine agree about the cached tokens
	over               // more was predicted
	under              // the engine reported more than its events account for
)

// entry is one observation in the window.
type entry struct {
	rank                int
	predicted, reported int
	class               class
	exact               bool
	blind               bool // no event reported any block of the prompt
	fresh               bool // events had come since the rank's observation before
}

// ring has the last observations; a new one replaces the oldest.
type ring struct {
	entries []entry
	next    int // the oldest one, once all are in use
}

func (r *ring) add(e entry, most int) {
	if len(r.entries) < most {
		r.entries = append(r.entries, e)
		return
	}
	r.entries[r.next] = e
	r.next = (r.next + 1) % most
}

// record is the state of one engine.
type record struct {
	all     ring
	ranks   map[int]*rankRecord
	since   int // observations since the verdict changed
	verdict Verdict
}

type rankRecord struct {
	ring
	stored uint64 // at the last observation
}

func newEntry(o *Observation) entry {
	e := entry{rank: o.Rank, predicted: o.Predicted, reported: o.Reported, exact: o.Exact, blind: o.Held == 0}
	slack := o.slack()
	switch {
	case o.Predicted-o.Reported > slack:
		e.class = over
	case o.Exact && o.Reported-o.Held > slack:
		e.class = under
	case !o.Exact && o.Reported-o.Predicted > slack: // others may use the engine too
	case o.Reported > slack:
		e.class = agree
	}
	return e
}

// observe adds an observation; changed: the verdict has changed.
func (r *record) observe(o *Observation) (v Verdict, changed bool) {
	rank := r.ranks[o.Rank]
	if rank == nil {
		rank = new(rankRecord)
		r.ranks[o.Rank] = rank
	}
	e := newEntry(o)
	e.fresh = o.Stored != rank.stored
	rank.stored = o.Stored
	r.all.add(e, window)
	rank.add(e, rankWindow)
	r.since++

	next, ok := r.judge(o.Rank)
	if !ok {
		return Verdict{}, false
	}
	before := r.verdict
	if before.Reason != Agrees && next.Reason != Agrees && (next.Rank == before.Rank || r.since < window) {
		// The trouble was already reported. At its start and its end, the observations of one
		// trouble look like those of another trouble. So the name stays until the trouble is over,
		// or until a whole window shows that it affects more or fewer ranks.
		next.Reason, next.Rank = before.Reason, before.Rank
	}
	r.verdict = next
	if before.Reason == next.Reason && before.Rank == next.Rank {
		return Verdict{}, false
	}
	r.since = 0
	return next, true
}

// judge evaluates the windows. False: they are not informative enough for a change.
func (r *record) judge(rank int) (v Verdict, ok bool) {
	engine := r.verdict.Engine
	whole := count(&r.all)
	if reason := whole.reason(engineLeast, engineShare); reason != Agrees {
		return whole.verdict(engine, All, reason), true
	}
	part := count(&r.ranks[rank].ring)
	if reason := part.reason(rankLeast, rankShare); reason != Agrees && r.othersAgree(rank) {
		return part.verdict(engine, rank, reason), true
	}
	if r.verdict.Reason != Agrees {
		of := whole
		if r.verdict.Rank != All {
			of = count(&r.ranks[r.verdict.Rank].ring)
		}
		if of.informative() < calmLeast || of.against()*100 >= of.informative()*calmShare {
			return Verdict{}, false
		}
	}
	return whole.verdict(engine, All, Agrees), true
}

// othersAgree reports whether the engine has other ranks, and none of them disagrees.
func (r *record) othersAgree(rank int) bool {
	n, against := 0, 0
	for i := range r.all.entries {
		if e := &r.all.entries[i]; e.rank != rank && e.class != cold {
			n++
			if e.class != agree {
				against++
			}
		}
	}
	return n >= rankLeast && against*100 < n*calmShare
}

// counts sums up the informative entries of a window.
type counts struct {
	sums
	late                sums // of the latest entries
	predicted, reported int
}

type sums struct {
	agree, over, under int
	underBlind         int // number of observations in under for which no event reported a block of the prompt
	underFresh         int // number in under with events since the previous observation
	overGuess          int // number in over without events for the rank, of which the engine reported no cached token
}

// count sums up a window.
func count(r *ring) (c counts) {
	for i := range r.entries {
		// From the youngest on, so that the latest are known.
		e := &r.entries[(r.next-1-i+2*len(r.entries))%len(r.entries)]
		if e.class == cold {
			continue
		}
		c.predicted += e.predicted
		c.reported += e.reported
		c.add(e)
		if c.informative() <= latest {
			c.late.add(e)
		}
	}
	return c
}

func (s *sums) add(e *entry) {
	switch e.class {
	case agree:
		s.agree++
	case over:
		s.over++
		if !e.exact && e.reported == 0 {
			s.overGuess++
		}
	case under:
		s.under++
		if e.blind {
			s.underBlind++
		}
		if e.fresh {
			s.underFresh++
		}
	}
}

func (s *sums) informative() int { return s.agree + s.over + s.under }
func (s *sums) against() int     { return s.over + s.under }

// reason returns the reason if a share of the requests disagrees. The latest ones
// determine it, because earlier ones may be from before the trouble.
func (c *counts) reason(least, share int) Reason {
	n, late := c.informative(), &c.late
	never := late.agree*20 <= late.informative() // hardly once did the two agree
	switch {
	case n < least:
		return Agrees
	case c.under*100 >= n*share:
		// With the token ids of another tokenizer no block is found, although events
		// arrive.
		if never && late.underBlind*10 >= late.under*9 && late.underFresh*2 >= late.under {
			return TokenizerMismatch
		}
		return MissingEvents
	case c.over*100 >= n*share:
		// If blocks from events were found, the token ids are right, so a wrong index is
		// an old index. If no guess was ever right, the guesses were made for other token
		// ids than the engine computes.
		if never && late.overGuess*10 >= late.over*9 {
			return TokenizerMismatch
		}
		return StaleIndex
	}
	return Agrees
}

func (c *counts) verdict(engine string, rank int, reason Reason) Verdict {
	return Verdict{Engine: engine, Rank: rank, Reason: reason,
		Requests: c.informative(), Against: c.against(), Predicted: c.predicted, Reported: c.reported}
}
