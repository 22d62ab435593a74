package replay

import (
	"errors"
	"fmt"
	"time"
)

// Config is the fleet and its load.
type Config struct {
	Prefill       int     // prefill instances
	Ranks         int     // of each of them
	Decode        int     // decode instances
	BlocksPerRank int     // KV blocks of each prefill rank
	BlockTokens   int     // tokens of a block: those of the trace
	Load          float64 // share of the prefill capacity that the trace uses at the ideal hit ratio
	Volatile      float64 // share of sessions whose client changes a text at the beginning of each prompt; traces without sessions ignore it
	Seed          uint64
	Model         Model
}

// Lab plays one trace on one fleet, for one policy after another.
type Lab struct {
	cfg   Config
	trace *Trace
	scale float64 // factor of arrival times
}

// New returns the lab. The error names the invalid setting or the request of
// the trace that does not fit.
func New(cfg Config, t *Trace) (*Lab, error) {
	switch {
	case cfg.Prefill < 1 || cfg.Ranks < 1 || cfg.Decode < 1:
		return nil, errors.New("set up fleet: it needs a prefill instance, a rank and a decode instance")
	case cfg.BlocksPerRank < 1 || cfg.BlockTokens < 1:
		return nil, errors.New("set up fleet: blocks and tokens of a block are above 0")
	case !(cfg.Load > 0):
		return nil, errors.New("set up fleet: the load is above 0")
	case !(cfg.Volatile >= 0 && cfg.Volatile <= 1):
		return nil, errors.New("set up fleet: the share of volatile sessions is between 0 and 1")
	}
	decode := cfg.Model.DecodeTokens / cfg.BlockTokens
	for i := range t.Requests {
		q := &t.Requests[i]
		if n := len(q.HashIDs); n > cfg.BlocksPerRank {
			return nil, fmt.Errorf("set up fleet: a prompt of %d blocks on ranks of %d", n, cfg.BlocksPerRank)
		}
		if n := cfg.blocks(q); n > decode {
			return nil, fmt.Errorf("set up fleet: a request of %d blocks on decode instances of %d", n, decode)
		}
	}
	l := &Lab{cfg: cfg, trace: t, scale: 1}
	recorded := t.Requests[len(t.Requests)-1].Arrival - t.Requests[0].Arrival
	if recorded > 0 {
		var work time.Duration
		for i := range t.Requests {
			q := &t.Requests[i]
			work += cfg.Model.work(q.InputLength-q.uncached(q.Ideal, cfg.BlockTokens), q.InputLength)
		}
		span := float64(work) / float64(cfg.Prefill*cfg.Ranks) / cfg.Load
		l.scale = span / float64(recorded)
	}
	return l, nil
}

// Speed is the ratio of the recorded to the simulated times of arrival.
func (l *Lab) Speed() float64 { return 1 / l.scale }

// job is one request in the simulation.
type job struct {
	Request
	lease lease

	begun    bool
	held     int // blocks found when prefill began
	position int // tokens of the prompt that are computed or were found

	// Of a request of a session:
	turn  *turn
	text  uint32    // of the beginning of the prompt: equal in all turns of a session, unless it is volatile
	kept  *keptTurn // KV of the previous turn that prefill pulls; nil: none
	after func()    // is called at the end of the answer; nil: nothing

	arrived, prefilled, first, ended time.Duration
}

// run is one policy's run over the trace.
type run struct {
	cfg    *Config
	placer Placer
	clock  clock
	view   *view
	ranks  []*rank
	decode []*batch
	jobs   []job
	left   int

	retention *retention // nil: decode instances retain nothing

	hits        int   // blocks
	found       int64 // tokens of prompts that prefill did not compute
	transferred int64 // tokens of KV that decode fetched
	steps       []weighted
	queue       []sample
	between     time.Duration // interval between two samples of the queue
}

// weighted is a decode step with the number of tokens that it made, without the
// first tokens of answers.
type weighted struct {
	took   time.Duration
	tokens int
}

// sample is the number of waiting requests at one time.
type sample struct {
	at              time.Duration
	prefill, decode int
	most            int // the most at one prefill rank
}

// The interval at which the proxy polls the engines for their use of memory, and the
// number of samples of the queue while requests arrive.
const (
	pollEvery = time.Second
	samples   = 240
)

// Run plays the trace with the decisions of p. name is that of the row.
func (l *Lab) Run(name string, p Placer) *Result { return l.result(name, l.play(p)) }

// play runs all events.
func (l *Lab) play(p Placer) *run {
	r := l.newRun(p)
	r.jobs = make([]job, len(l.trace.Requests))
	begin := l.trace.Requests[0].Arrival
	for i := range r.jobs {
		j := &r.jobs[i]
		j.Request = l.trace.Requests[i]
		j.arrived = time.Duration(float64(j.Arrival-begin) * l.scale)
	}
	r.between = max(r.jobs[len(r.jobs)-1].arrived/samples, time.Millisecond)
	r.arrive(0)
	r.poll()
	r.observe()
	for r.clock.next() {
	}
	return r
}

// newRun returns a run of an idle fleet.
func (l *Lab) newRun(p Placer) *run {
	r := &run{cfg: &l.cfg, placer: p, view: newView(&l.cfg), left: len(l.trace.Requests)}
	for i := range l.cfg.Prefill * l.cfg.Ranks {
		r.ranks = append(r.ranks, &rank{run: r, row: i, cache: newCache(l.cfg.BlocksPerRank)})
	}
	for i := range l.cfg.Decode {
		r.decode = append(r.decode, &batch{
			run: r, row: len(r.ranks) + i, ends: make(map[int][]*job),
			cache: newCache(l.cfg.Model.DecodeTokens / l.cfg.BlockTokens),
		})
	}
	return r
}

// arrive adds the arrival of the i-th request and of those after it.
func (r *run) arrive(i int) {
	if i == len(r.jobs) {
		return
	}
	j := &r.jobs[i]
	r.clock.at(j.arrived, func() {
		j.lease = r.view.place(r.placer, &j.Request, r.clock.now)
		r.ranks[j.lease.prefill].add(j)
		r.arrive(i + 1)
	})
}

func (r *run) prefilled(j *job) {
	j.prefilled = r.clock.now
	r.view.prefilled(&j.lease, r.clock.now)
	r.decode[j.lease.decode-len(r.ranks)].add(j)
}

func (r *run) firstToken(j *job) {
	j.first = r.clock.now
	r.view.streaming(&j.lease, j.InputLength, j.first-j.prefilled, j.first-j.arrived)
}

func (r *run) finished(j *job) {
	j.ended = r.clock.now
	r.view.finished(&j.lease, j.OutputLength-1, j.ended-j.first)
	r.left--
	if j.after != nil {
		j.after()
	}
}

// poll does the proxy's periodic work: it reads the reports of the engines and maintains the
// index.
func (r *run) poll() {
	if r.left == 0 {
		return
	}
	for i, p := range r.ranks {
		t := &r.view.targets[i]
		t.usage = float32(p.cache.pinned()) / float32(p.cache.capacity)
		t.said.Waiting = int32(p.waiting())
		t.said.Running = int32(len(p.queue)) - t.said.Waiting
	}
	for _, d := range r.decode {
		t := &r.view.targets[d.row]
		t.usage = float32(d.cache.pinned()) / float32(d.cache.capacity)
		t.said.Waiting, t.said.Running = int32(len(d.waiting)), int32(d.running)
		if r.retention != nil {
			r.retention.report(d)
		}
	}
	r.view.index.Tend(epoch.Add(r.clock.now))
	r.clock.after(pollEvery, r.poll)
}

func (r *run) observe() {
	if r.left == 0 {
		return
	}
	s := sample{at: r.clock.now}
	for _, p := range r.ranks {
		n := p.waiting()
		s.prefill += n
		s.most = max(s.most, n)
	}
	for _, d := range r.decode {
		s.decode += len(d.waiting)
	}
	r.queue = append(r.queue, s)
	r.clock.after(r.between, r.observe)
}
