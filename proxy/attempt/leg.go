package attempt

import (
	"context"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// leg is one request to an engine. The goroutine that runs the leg owns it until the leg
// has ended.
type leg struct {
	journal.Leg
	target  engine.Target
	try     int           // of its phase, counted from 1
	limit   time.Duration // until the first byte of a decode leg
	kvBound bool          // limit is that of the transfer
	short   bool          // the plan policy's limit bounds its first byte
	attempt *attempt      // nil for an encode leg

	reserved bool      // a retry needs nothing from the retry budget when the leg is given up
	silence  time.Time // start of the silence while no other engine could take the leg; guarded by upstream's call list
	starved  bool      // it was given up because prefill, which has its KV, does not respond
	moved    bool      // it was given up because its engine drains

	// The running request. Later requests reuse its memory.
	request upstream.Request
	fields  []upstream.Field
	body    [1][]byte
}

// legs holds the legs of an exchange, and reuses their memory for the next exchange.
type legs struct {
	mu   sync.Mutex
	list []*leg // guarded by mu
	used int    // how many of list are this exchange's; guarded by mu
}

// beginLeg begins a leg on t, the given try of its phase. Several goroutines of the exchange may
// call beginLeg at the same time.
func (env *Env) beginLeg(phase abi.Phase, t engine.Target, try int, id string) *leg {
	env.legs.mu.Lock()
	if env.legs.used == len(env.legs.list) {
		env.legs.list = append(env.legs.list, new(leg))
	}
	l := env.legs.list[env.legs.used] // without content; its slices may have capacity
	env.legs.used++
	env.legs.mu.Unlock()
	l.target, l.try = t, try
	env.Journal.BeginLeg(&l.Leg, phase, t, try, id)
	return l
}

// legSlack is the space in bytes that the fields of a connector usually need.
const legSlack = 2 << 10

// waits holds the time limits of a leg. The fields have the meaning of SendBy, HeadTimeout,
// IdleTimeout, Linger, KeepLate and Detach of upstream.Request.
type waits struct {
	sendBy             time.Time
	head, idle, linger time.Duration
	keepLate, detach   bool
}

// send sends one leg and waits for the head of the answer.
func (a *attempt) send(ctx context.Context, l *leg, shaped *connector.Leg, w waits) (*upstream.Response, error) {
	env, t := a.env, l.target
	l.fields = append(l.fields[:0], env.Fields...)
	if t.IsRemote() {
		l.fields = slices.DeleteFunc(l.fields, staysHere)
	}
	if t.APIKey != "" {
		l.fields = withKey(l.fields, t.Instance)
	}
	l.fields = append(l.fields, shaped.Header...)
	if e := a.edits[l.Phase]; len(e) > 0 {
		l.fields = editFields(l.fields, e)
	}
	l.body[0] = shaped.Body
	q := &l.request // no assignment of a whole Request: it would need a copy on the stack of each open stream
	q.Method, q.Path, q.Header, q.Body = "POST", t.Prefix+shaped.Path, l.fields, l.body[:]
	q.SendBy, q.HeadTimeout, q.IdleTimeout, q.Linger, q.KeepLate, q.Detach = w.sendBy, w.head, w.idle, w.linger, w.keepLate, w.detach
	q.Once = !a.p.Prefill.IsZero() || env.Route.Restricted && env.Route.CallerCoordinates()
	if l.Phase != abi.Encode {
		l.attempt, q.Control = a, l
	}
	if l.Phase == abi.Decode && !t.IsRemote() {
		q.Hints = env.Client
	}
	if l.Phase == abi.Decode && a.both.sent != nil {
		q.Sent = sync.OnceFunc(func() { close(a.both.sent) })
	}
	resp, err := t.Client.Do(ctx, q)
	clear(l.fields) // keeps the memory, but no reference of the request
	l.fields, l.body, l.request = l.fields[:0], [1][]byte{}, upstream.Request{}
	if err != nil {
		return nil, l.failed(err)
	}
	env.Journal.LegAnswered(&l.Leg, resp.Status)
	if a.c.TRTLLM.PerfMetrics {
		env.Journal.LegTimed(&l.Leg, connector.ReadTiming(resp.Get))
	}
	return resp, nil
}

// readAnswer reads the whole answer of an engine, buffer.MaxAnswer bytes at most, into a buffer that
// memory counts. The whole answer must arrive before the time by; a zero time sets no limit
// beyond the limit of each read. The error is downstream.ErrMemory, buffer.ErrTooLarge or an
// *upstream.Error. After an error the buffer may be nil.
func readAnswer(memory *buffer.Budget, resp *upstream.Response, by time.Time) (*buffer.Buffer, error) {
	b, err := memory.ReadAll(resp, resp.ContentLength, buffer.MaxAnswer, by)
	switch err {
	case buffer.ErrFull:
		err = downstream.ErrMemory
	case os.ErrDeadlineExceeded:
		err = &upstream.Error{Op: upstream.OpBody, Sent: true, Timeout: true, Err: err}
	}
	return b, err
}

// isStream reports whether an answer is a stream of events.
func isStream(resp *upstream.Response) bool {
	return strings.HasPrefix(strings.ToLower(resp.Get("Content-Type")), "text/event-stream")
}

func (a *attempt) legSucceeded(l *leg) {
	l.target.Breaker.Success()
	a.env.Journal.LegSucceeded(&l.Leg, l.target.Spec.Connector)
}

// WithKey returns a copy of fields with the API key of an engine, if it has one.
func WithKey(fields []upstream.Field, i *engine.Instance) []upstream.Field {
	fields = append([]upstream.Field(nil), fields...)
	if i.APIKey == "" {
		return fields
	}
	return withKey(fields, i)
}

// withKey is WithKey for an engine that has a key. It overwrites fields.
func withKey(fields []upstream.Field, i *engine.Instance) []upstream.Field {
	return append(downstream.Without(fields, "Authorization"), upstream.Field{Name: "Authorization", Value: "Bearer " + i.APIKey})
}

// prioritize sets the field "priority" of the next leg, which goes to t: the priority of the
// request's class, with the sign that the engine expects. If the engine has no
// engine.priority, the leg keeps the client's field. There must be a class.
//
// Sources: vLLM entrypoints/openai/protocol.py and core/sched/request_queue.py (lower values
// first); SGLang srv/managers/schedule_policy.py (higher values first, lower ones with
// --schedule-low-priority-values-first).
func (a *attempt) prioritize(t engine.Target) {
	class := a.env.Class
	a.c.Priority = nil
	if t.IsZero() || !a.env.Request.API.Generates() {
		return
	}
	switch t.Spec.Priority {
	case config.LowerFirst:
		a.c.Priority = strconv.AppendInt(nil, int64(-class.Priority), 10)
	case config.HigherFirst:
		a.c.Priority = strconv.AppendInt(nil, int64(class.Priority), 10)
	}
}
