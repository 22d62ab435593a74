package attempt

import (
	"context"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// waits holds the time limits of a leg. The fields have the meaning of SendBy, HeadTimeout,
// IdleTimeout, Linger and KeepLate of upstream.Request.
type waits struct {
	sendBy             time.Time
	head, idle, linger time.Duration
	keepLate           bool
}

// WithKey returns a copy of fields with the API key of an engine, if it has one.
func WithKey(fields []upstream.Field, i *engine.Instance) []upstream.Field {
	return withKey(append([]upstream.Field(nil), fields...), i)
}

// withKey is WithKey and overwrites fields.
func withKey(fields []upstream.Field, i *engine.Instance) []upstream.Field {
	if i.APIKey == "" {
		return fields
	}
	return append(downstream.Without(fields, "Authorization"), upstream.Field{Name: "Authorization", Value: "Bearer " + i.APIKey})
}

// send sends one leg and waits for the head of the answer.
func (a *attempt) send(ctx context.Context, l *leg, shaped *connector.Leg, w waits) (*upstream.Response, error) {
	env, t := a.env, l.target
	fields := appendClientFields(l.fields[:0], env.Fields, t)
	l.fields = append(withKey(fields, t.Instance), shaped.Header...)
	if e := a.edits[l.Phase]; len(e) > 0 {
		l.fields = editFields(l.fields, e)
	}
	l.body[0] = shaped.Body
	q := &l.request // no assignment of a whole Request: it would need a copy on the stack of each open stream
	q.Method, q.Path, q.Header, q.Body = "POST", t.Prefix+shaped.Path, l.fields, l.body[:]
	q.SendBy, q.HeadTimeout, q.IdleTimeout, q.Linger, q.KeepLate = w.sendBy, w.head, w.idle, w.linger, w.keepLate
	q.Once = !a.p.Prefill.IsZero() || env.Route.CallerCoordinates()
	if l.Phase != abi.Encode {
		a.watch(l)
		q.Control, q.Detach = l, l.Phase == abi.Prefill && waitsForLateAnswer(a.conn)
	}
	if l.Phase == abi.Decode && !t.IsRemote() {
		q.Hints = env.Client
	}
	if l.Phase == abi.Decode && a.both.sent != nil {
		q.Sent = sync.OnceFunc(func() { close(a.both.sent) })
	}
	resp, err := t.Client.Do(ctx, q)
	l.free()
	if err != nil {
		return nil, l.failed(err)
	}
	env.Journal.LegAnswered(l.Leg, resp.Status)
	if a.timed() {
		env.Journal.LegTimed(l.Leg, connector.ReadTiming(resp.Get))
	}
	return resp, nil
}
