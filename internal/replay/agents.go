package replay

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"
)

// turn is one request of a session and the pause after its answer.
type turn struct {
	Request
	tool  string        // that the answer calls; "": the answer is for the user
	gap   time.Duration // the least time from the end of the answer, or of the sub-agent, to the next turn
	apart time.Duration // the least time from its arrival to that of the next turn
	child *session      // sub-agent that begins at the end of the answer; nil: none
}

// session is the turns of one agent or user. Each prompt begins with the prompt and the answer of the turn
// before.
type session struct {
	number   uint32        // from 1
	begin    time.Duration // of a session that is no sub-agent
	volatile bool          // the client changes a text at the beginning of each prompt
	turns    []turn
}

// tool is a tool of agents: the share of turns that call it, and the logarithmic normal distribution
// of its times.
type tool struct {
	name   string
	share  float64
	median time.Duration
	sigma  float64
}

// tools are close to public figures about coding agents: 86 % of all turns return within a second, and
// the other times have a heavy tail. The rest of the turns end with an answer for the user.
var tools = []tool{
	{"read", 0.48, 60 * time.Millisecond, 0.8},
	{"edit", 0.32, 40 * time.Millisecond, 0.8},
	{"shell", 0.10, 1500 * time.Millisecond, 1.6},
	{"search", 0.06, 800 * time.Millisecond, 0.6},
	{taskTool, 0.01, 50 * time.Millisecond, 0.5},
}

const (
	taskTool     = "task" // starts a sub-agent
	userMedian   = 45 * time.Second
	userSigma    = 1.2
	leaveShare   = 0.4   // of the answers for the user after which the session ends
	agentPrompt  = 6_000 // tokens of instructions and tools, the same for all agents of a kind
	agentKinds   = 4
	agentLimit   = 48_000 // tokens of the longest prompt
	meanAnswer   = 220
	meanResult   = 700 // tokens of a tool's result
	meanQuestion = 400
)

// agents draws sessions.
type agents struct {
	random      *rand.Rand
	volatile    volatile
	blockTokens int
	sessions    uint32
}

// session draws a session. parent is that of the agent that starts a sub-agent, at the given turn.
func (a *agents) session(parent *session) *session {
	a.sessions++
	s := &session{number: a.sessions}
	if parent != nil {
		s.volatile = parent.volatile
	} else {
		s.volatile = a.volatile.draw(s.number)
	}
	id := uint64(s.number)
	kind := 1 + uint64(a.random.IntN(agentKinds))
	tokens := agentPrompt + a.about(meanQuestion)
	for tokens <= agentLimit {
		t := turn{Request: a.request(id, kind, tokens), gap: a.lognormal(userMedian, userSigma)}
		x := a.random.Float64()
		for _, tool := range tools {
			if x -= tool.share; x < 0 {
				t.tool, t.gap = tool.name, a.lognormal(tool.median, tool.sigma)
				break
			}
		}
		if parent != nil && (t.tool == "" || t.tool == taskTool) { // the answer of a sub-agent ends it
			t.tool = ""
			s.turns = append(s.turns, t)
			break
		}
		if t.tool == taskTool {
			t.child = a.session(s)
		}
		s.turns = append(s.turns, t)
		if t.tool == "" && a.random.Float64() < leaveShare {
			break
		}
		tokens += t.OutputLength + a.about(meanResult)
	}
	return s
}

// request returns the request of a turn. Whole blocks of the common prompt belong to the kind of
// agent, and other blocks to the session. A partial last block belongs to the turn.
func (a *agents) request(id, kind uint64, tokens int) Request {
	ids := make([]uint64, (tokens+a.blockTokens-1)/a.blockTokens)
	for i := range ids {
		owner, block := id<<8, uint64(i)
		if (i+1)*a.blockTokens <= agentPrompt {
			owner = kind
		}
		if (i+1)*a.blockTokens > tokens {
			block |= uint64(tokens) << 16
		}
		ids[i] = own(owner, 1<<61|block)
	}
	return Request{Line: Line{InputLength: tokens, OutputLength: a.about(meanAnswer), HashIDs: ids, Conversation: strconv.FormatUint(id, 10)}}
}

// about draws a number with that mean, from 1.
func (a *agents) about(mean float64) int { return 1 + int(a.random.ExpFloat64()*mean) }

func (a *agents) lognormal(median time.Duration, sigma float64) time.Duration {
	return time.Duration(float64(median) * math.Exp(sigma*a.random.NormFloat64()))
}

// NewAgents draws that many sessions of agents with cfg.Seed and returns their lab. The sessions
// begin at random times, so that their prefill work takes cfg.Load of the capacity of the fleet if each
// turn computes only the tokens that are new in its session.
func NewAgents(cfg Config, sessions int) (*SessionLab, error) {
	if sessions < 1 {
		return nil, errors.New("set up agents: there is at least one session")
	}
	a := &agents{random: rand.New(rand.NewPCG(cfg.Seed, 285)), volatile: volatile{cfg.Volatile, cfg.Seed}, blockTokens: max(1, cfg.BlockTokens)}
	l := &SessionLab{}
	t := &Trace{Name: fmt.Sprintf("agents, seed %d", cfg.Seed)}
	var work time.Duration
	for range sessions {
		s := a.session(nil)
		l.sessions = append(l.sessions, s)
		work += s.work(&cfg, t)
	}
	var err error
	if l.lab, err = New(cfg, t); err != nil {
		return nil, err
	}
	span := float64(work) / float64(cfg.Prefill*cfg.Ranks) / cfg.Load
	for _, s := range l.sessions {
		s.begin = time.Duration(a.random.Float64() * span)
	}
	slices.SortStableFunc(l.sessions, func(a, b *session) int { return cmp.Compare(a.begin, b.begin) })
	return l, nil
}

// work adds the requests of a session and its sub-agents to t, and returns the time in which prefill
// computes them if each turn computes only its new tokens.
func (s *session) work(cfg *Config, t *Trace) (sum time.Duration) {
	known := 0
	for i := range s.turns {
		q := &s.turns[i]
		t.Requests = append(t.Requests, q.Request)
		t.Blocks += len(q.HashIDs)
		sum += cfg.Model.work(known, q.InputLength)
		known = q.InputLength
		if q.child != nil {
			sum += q.child.work(cfg, t)
		}
	}
	return sum
}
