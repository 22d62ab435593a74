package predict

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

var epoch = time.Unix(1700000000, 0)

// TestLearn: a model finds the line of its samples, also after the line has changed, and
// reports its error.
func TestLearn(t *testing.T) {
	var m Model
	random := rand.New(rand.NewPCG(1, 2))
	check := func(fixed, slope, within float64) {
		t.Helper()
		for range 3000 {
			x := Features{1, 1 + 99*random.Float64()}
			said, _ := m.Predict(&x)
			m.Learn(&x, (fixed+slope*x[1])*(0.95+0.1*random.Float64()), said)
		}
		x := Features{1, 50}
		if got, _ := m.Predict(&x); math.Abs(got-(fixed+slope*50)) > within*(fixed+slope*50) {
			t.Errorf("predicted %v, want %v", got, fixed+slope*50)
		}
	}
	x := Features{1, 50}
	if got, _ := m.Predict(&x); got != 0 {
		t.Errorf("predicted %v without samples", got)
	}
	check(20_000, 5000, 0.03)
	check(100, 40_000, 0.03)
	if err, known := m.Error(); !known || err < 0.01 || err > 0.1 {
		t.Errorf("error %v %v of samples that deviate by 0.025 on average", err, known)
	}
}

// TestOutlier: one stall changes a prediction little.
func TestOutlier(t *testing.T) {
	var m Model
	x := Features{1, 10}
	for range 200 {
		said, _ := m.Predict(&x)
		m.Learn(&x, 50_000, said)
	}
	said, _ := m.Predict(&x)
	m.Learn(&x, 3600e6, said)
	if got, _ := m.Predict(&x); math.Abs(got-50_000) > 5000 {
		t.Errorf("predicted %v after a stall", got)
	}
}

// TestQueue: predictions for a queue of prompts that one server computes in turn.
func TestQueue(t *testing.T) {
	var e Engine
	var q Target
	random := rand.New(rand.NewPCG(3, 4))
	now, free := epoch, epoch
	type waiting struct {
		*Prefill
		end time.Time
	}
	var line []waiting
	off, n := 0.0, 0
	for i := range 4000 {
		now = now.Add(time.Duration(random.IntN(40)) * time.Millisecond)
		for len(line) > 0 && !line[0].end.After(now) {
			line[0].Done(line[0].end)
			line = line[1:]
		}
		p := Prompt{Tokens: 100 + random.Int64N(3000), Cached: random.Int64N(100)}
		said := q.Predict(&e, abi.RolePrefill, p, Streams{}, now)
		if free.Before(now) {
			free = now
		}
		free = free.Add(2*time.Millisecond + time.Duration(p.Tokens-p.Cached)*10*time.Microsecond)
		line = append(line, waiting{q.Begin(&e, p, Streams{}, now), free})
		if i > 500 {
			want := float64(free.Sub(now)) / 1000
			off += math.Abs(float64(said.Prefill)-want) / want
			n++
			if said.Wait > said.Prefill || said.Start != 0 || said.Token != 0 {
				t.Fatalf("prediction %+v", said)
			}
		}
	}
	if off/float64(n) > 0.05 {
		t.Errorf("mean error %v", off/float64(n))
	}
	for _, w := range line {
		w.Drop()
		w.Drop()
		w.Done(now)
	}
	if q.requests != 0 || q.free.Load() != 0 {
		t.Error("the queue is not empty")
	}
}

// server computes prompts in steps of a chunk of tokens, in order of arrival, and tells the
// queue of each end. Times are in µs.
type server struct {
	chunk  int64
	line   []job
	now    int64
	ends   int64 // of the running step; 0: idle
	ending []*Prefill
}

type job struct {
	*Prefill
	from, to int64
	begun    bool
}

const perToken = 40

// until runs the steps that begin before a time.
func (s *server) until(at int64) {
	for {
		if s.ends > 0 {
			if s.ends > at {
				return
			}
			for _, k := range s.ending {
				k.Done(epoch.Add(time.Duration(s.ends) * time.Microsecond))
			}
			s.now, s.ends, s.ending = s.ends, 0, nil
		}
		if len(s.line) == 0 {
			s.now = at
			return
		}
		left, took := s.chunk, int64(0)
		for left > 0 && len(s.line) > 0 {
			j := &s.line[0]
			if !j.begun {
				j.begun = true
				took += 3000
			}
			n := min(left, j.to-j.from)
			took, j.from, left = took+n*perToken+n*(2*j.from+n)/120_000, j.from+n, left-n
			if j.from == j.to {
				s.ending = append(s.ending, j.Prefill)
				s.line = s.line[1:]
			}
		}
		s.ends = s.now + took
	}
}

// play sends prompts to a server at random times and returns the share of near
// predictions.
func play(e *Engine, q *Target, s *server, random *rand.Rand, prompts int) float64 {
	good := 0
	for range prompts {
		at := s.now + random.Int64N(900_000)
		s.until(at)
		p := Prompt{Tokens: 200 + random.Int64N(400)<<random.IntN(7), Cached: random.Int64N(200)}
		now := epoch.Add(time.Duration(at) * time.Microsecond)
		said := float64(q.Predict(e, abi.RolePrefill, p, Streams{}, now).Prefill)
		k := q.Begin(e, p, Streams{}, now)
		alone := server{chunk: s.chunk, line: append([]job(nil), s.line...), now: s.now, ends: s.ends}
		for i := range alone.line {
			alone.line[i].Prefill = &Prefill{}
		}
		s.line = append(s.line, job{Prefill: k, from: p.Cached, to: p.Tokens})
		alone.line = append(alone.line, job{Prefill: &Prefill{}, from: p.Cached, to: p.Tokens})
		for alone.ends > 0 || len(alone.line) > 0 {
			alone.until(max(alone.ends, alone.now))
		}
		if s.ends == 0 {
			s.until(at)
		}
		if real := float64(alone.now - at); math.Abs(said-real) <= Near*real {
			good++
		}
	}
	return float64(good) / float64(prompts)
}

// TestChunks: the models find the chunk size of an engine, and predict the ends of its
// steps, also after the engine has changed.
func TestChunks(t *testing.T) {
	var e Engine
	var q Target
	random, s := rand.New(rand.NewPCG(5, 6)), &server{}
	for _, chunk := range []int64{2048, 8192, 16384, 2048} {
		s.chunk = chunk
		play(&e, &q, s, random, 1500)
		share := play(&e, &q, s, random, 500)
		if got := chunks[e.chunk.Load()]; got != chunk || share < 0.9 {
			t.Errorf("chunk %d: found %d, %v are near", chunk, got, share)
		}
	}
}

// begun returns an engine that has learned 10 ms for each 1,000 tokens, and a target with
// that many prompts of 1,000 tokens.
func begun(prompts int) (*Engine, *Target, []*Prefill) {
	e, q := new(Engine), new(Target)
	for i := range int64(200) {
		tokens := 500 + i%10*200
		new(Target).Begin(e, Prompt{Tokens: tokens}, Streams{}, epoch).Done(epoch.Add(time.Duration(tokens) * 10 * time.Microsecond))
	}
	var line []*Prefill
	for range prompts {
		line = append(line, q.Begin(e, Prompt{Tokens: 1000}, Streams{}, epoch))
	}
	return e, q, line
}

// valid fails the test if a prediction is not finite or negative.
func valid(t *testing.T, e *Engine, q *Target, now time.Time) abi.Prediction {
	t.Helper()
	said := q.Predict(e, abi.RoleBoth, Prompt{Tokens: 1000}, Streams{}, now)
	for _, v := range []float32{said.Prefill, said.PrefillError, said.Wait} {
		if !(v >= 0) || math.IsInf(float64(v), 0) {
			t.Fatalf("prediction %+v", said)
		}
	}
	if said.Prefill < said.Wait {
		t.Fatalf("the prompt ends before the queue: %+v", said)
	}
	return said
}

// TestReordered: prompts that end in another order than they began leave an empty queue
// and valid predictions.
func TestReordered(t *testing.T) {
	for seed := range uint64(20) {
		e, q, line := begun(50)
		rand.New(rand.NewPCG(seed, 7)).Shuffle(len(line), func(i, j int) { line[i], line[j] = line[j], line[i] })
		for i, k := range line {
			now := epoch.Add(time.Duration(i) * 10 * time.Millisecond)
			k.Done(now)
			valid(t, e, q, now)
		}
		if said := valid(t, e, q, epoch.Add(time.Second)); q.requests != 0 || said.Wait != 0 {
			t.Errorf("seed %d: %d requests, %+v", seed, q.requests, said)
		}
	}
}

// TestDropInQueue: a prompt that is dropped in the queue keeps its time in the plan until
// the next prompt has ended. No sample is learned from it, and nothing of it remains.
func TestDropInQueue(t *testing.T) {
	e, q, line := begun(5)
	before := valid(t, e, q, epoch)
	line[2].Drop()
	if after := valid(t, e, q, epoch); after.Wait != before.Wait {
		t.Errorf("wait %v, before the drop %v", after.Wait, before.Wait)
	}
	for i, k := range []*Prefill{line[0], line[1], line[3], line[4]} {
		now := epoch.Add(time.Duration(i+1) * 10 * time.Millisecond)
		k.Done(now)
		valid(t, e, q, now)
	}
	if said := valid(t, e, q, epoch.Add(40*time.Millisecond)); q.requests != 0 || said.Wait != 0 || math.Abs(float64(said.Prefill)-10_000) > 2000 {
		t.Errorf("%d requests, %+v", q.requests, said)
	}
}

// TestGarbage: no numbers and times make a prediction of a target invalid.
func TestGarbage(t *testing.T) {
	numbers := []int64{math.MinInt64, -1, 0, 1, 1000, 1 << 40, math.MaxInt64}
	for _, chunk := range []int32{0, 1, int32(len(chunks) - 1)} {
		for _, tokens := range numbers {
			for _, cached := range numbers {
				e, q, _ := begun(1)
				e.chunk.Store(chunk)
				p := Prompt{Tokens: tokens, Cached: cached}
				k := q.Begin(e, p, Streams{Requests: 1, Tokens: 1}, epoch)
				valid(t, e, q, epoch)
				k.Done(epoch.Add(-time.Hour)) // the clock was set back
				valid(t, e, q, epoch)
				k = q.Begin(e, p, Streams{}, epoch.Add(1e6*time.Hour))
				k.Drop()
				valid(t, e, q, epoch)
			}
		}
	}
}

// TestStreams: the start of streams and their tokens are learned.
func TestStreams(t *testing.T) {
	var table Table
	of := Type{Model: "m", Role: abi.RoleDecode, Hardware: 7}
	e := table.Of(of)
	if table.Of(of) != e || table.Of(Type{Model: "m"}) == e {
		t.Error("types share models, or lose them")
	}
	for i := range int64(200) {
		streams := Streams{Requests: i % 20, Tokens: i % 20 * 1000}
		e.Stream(Prompt{Tokens: 1000}, streams).Started(20 * time.Millisecond)
		e.Streamed(streams, 100, 100*(10*time.Millisecond+time.Duration(streams.Requests)*time.Millisecond))
		e.Streamed(streams, 0, time.Hour)
	}
	got := new(Target).Predict(e, abi.RoleDecode, Prompt{Tokens: 1000}, Streams{Requests: 10, Tokens: 10_000}, epoch)
	if got.Prefill != 0 || math.Abs(float64(got.Start)-20_000) > 500 || math.Abs(float64(got.Token)-21_000) > 500 {
		t.Errorf("prediction %+v", got)
	}
	if said := e.Stream(Prompt{Tokens: 1000}, Streams{}).Said(); said == 0 {
		t.Error("a stream has no prediction")
	}
}

// FuzzLearn: no samples make a prediction negative or not finite.
func FuzzLearn(f *testing.F) {
	f.Add(1.0, 2.0, 3.0, 4.0, uint64(1))
	f.Add(math.NaN(), math.Inf(1), 1e300, 5e-324, uint64(2))
	f.Add(1e11, 1e11, 1e-200, 1e9, uint64(3))
	f.Fuzz(func(t *testing.T, a, b, took, said float64, seed uint64) {
		var m Model
		random := rand.New(rand.NewPCG(seed, 0))
		for i := range 40 {
			x := Features{1, a, b, a * random.Float64()}
			if i%3 == 0 {
				x = Features{1, random.Float64(), 0, 1}
			}
			m.Learn(&x, took*random.Float64(), said)
			m.Learn(&x, 1000*random.Float64(), 0)
		}
		x := Features{1, 1, 1, 1}
		if micros, err := m.Predict(&x); !(micros >= 0) || math.IsInf(micros, 0) || !(err >= 0) || math.IsInf(err, 0) {
			t.Errorf("predicted %v, error %v", micros, err)
		}
	})
}

// BenchmarkPredict64 is the cost of the predictions of one placement with 64 candidates.
func BenchmarkPredict64(b *testing.B) {
	var e Engine
	targets := make([]Target, 64)
	for i := range int64(100) {
		p := Prompt{Tokens: 1000 + i}
		targets[0].Begin(&e, p, Streams{}, epoch).Done(epoch.Add(time.Second))
		e.Stream(p, Streams{}).Started(time.Second)
		e.Streamed(Streams{Requests: i}, 10, time.Second)
	}
	b.ReportAllocs()
	for b.Loop() {
		for i := range targets {
			role := abi.RolePrefill
			if i%2 == 1 {
				role = abi.RoleDecode
			}
			targets[i].Predict(&e, role, Prompt{Tokens: 4000, Cached: 500}, Streams{5, 5000}, epoch)
		}
	}
}
