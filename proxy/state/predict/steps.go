package predict

// chunks are the numbers of tokens that engines compute in one step, as far as a model
// distinguishes them. The values are those that the configurations of engines use for
// prefill; all are powers of two. 0 means that each prompt has a step of its own.
var chunks = [...]int64{0, 2048, 4096, 8192, 16384}

// steps are the planned steps of a target for one chunk size: an engine computes prompts
// in the order of their arrival, and each step has at most a chunk of tokens of one or more
// prompts. A prompt is done at the end of the step that computes its last token, together
// with the whole work of this step. Times are in ns. The zero value is empty.
type steps struct {
	list    []step
	first   int64    // number of the first step in list
	shift   int64    // to be added to the times in list
	total   Features // work of all steps
	synced  Features // the same to the end of the step that ended last
	since   int64    // end of this step, or arrival of the first prompt
	dropped int64    // number after the last step that had work of a dropped prompt
}

// step is one planned step.
type step struct {
	begin, end int64
	room       int64    // tokens that it does not use
	total      Features // work of all steps to its end
}

// add plans a prompt at now and returns the number of the step of its last token.
func (s *steps) add(chunk int64, p Prompt, streams Streams, w *Features, now int64) int64 {
	from, left := p.span()
	if len(s.list) == 0 {
		s.since, s.synced = now, s.total
	}
	once := Features{1, 0, 0, float64(streams.Requests)}
	for {
		n := len(s.list)
		if n == 0 || s.list[n-1].room == 0 || s.list[n-1].begin+s.shift <= now {
			begin := now
			if n > 0 {
				begin = max(begin, s.list[n-1].end+s.shift)
			}
			room := chunk
			if chunk == 0 {
				room = left
			}
			s.list = append(s.list, step{begin: begin - s.shift, end: begin - s.shift, room: room})
			n++
		}
		last := &s.list[n-1]
		tokens := min(last.room, left)
		x := once
		x[1], x[2] = float64(tokens)*perTokens, attention(from, tokens)
		last.room -= tokens
		micros := 0.0
		for i := range x {
			s.total[i] += x[i]
			micros += w[i] * x[i]
		}
		last.end += int64(min(micros*1000, longest*1000))
		last.total = s.total
		if left, from, once = left-tokens, from+tokens, (Features{}); left <= 0 {
			return s.first + int64(n-1)
		}
	}
}

// last returns the end and the begin of the last step, and the tokens that it still
// accepts until it begins.
func (s *steps) last() (end, begin, room int64) {
	if len(s.list) == 0 {
		return 0, 0, 0
	}
	l := &s.list[len(s.list)-1]
	return l.end + s.shift, l.begin + s.shift, l.room
}

// done notes that a step ended at now, and moves the later steps accordingly. It returns
// the work since the step before, its time in ns, 0 if this is no sample, and the planned
// end of the step.
func (s *steps) done(number, now int64) (x Features, took, end int64) {
	at := number - s.first
	if at < 0 {
		return x, 0, s.since // the step has ended already
	}
	l := &s.list[at]
	end = l.end + s.shift
	if took = now - s.since; s.first < s.dropped {
		took = 0
	}
	for i := range x {
		x[i] = l.total[i] - s.synced[i]
	}
	s.shift += now - end
	s.since, s.synced = now, l.total
	s.list = s.list[:copy(s.list, s.list[at+1:])]
	s.first = number + 1
	return x, took, end
}

// drop notes that the prompt that ends in a step will not be computed. The plan keeps its
// time until the next step ends.
func (s *steps) drop(number int64) {
	if number >= s.first {
		s.dropped = max(s.dropped, number+1)
	}
}

// clear empties the plan.
func (s *steps) clear() {
	s.first += int64(len(s.list))
	s.list, s.shift, s.total, s.synced = s.list[:0], 0, Features{}, Features{}
}
