package main

import (
	"context"
	"fmt"
	"net/http"
	"time"
)

// faultCase is one fault.
type faultCase struct {
	name  string
	what  string
	pairs int // prefill engines, and as many decode engines
	slow  bool
	run   func(context.Context, *trial) error
}

var faultCases = []faultCase{
	{name: "decode killed", pairs: 2, what: "2 prefill and 2 decode engines, 40 streams; one decode engine gets SIGKILL in the middle; then 40 requests", run: func(ctx context.Context, t *trial) error {
		streams := t.begin(ctx, 40, true, 0)
		pause(ctx, 700*time.Millisecond)
		t.decode[0].kill()
		t.Clients = streams()
		t.Later = t.begin(ctx, 40, false, 0)()
		return nil
	}},
	{name: "prefill killed", pairs: 2, what: "20 requests a second for 4 s; one prefill engine gets SIGKILL after 1.5 s", run: func(ctx context.Context, t *trial) error {
		before := t.begin(ctx, 30, false, 50*time.Millisecond)
		pause(ctx, 1500*time.Millisecond)
		t.prefill[0].kill()
		after := t.begin(ctx, 50, false, 50*time.Millisecond)
		t.Clients, t.Later = before(), after()
		return nil
	}},
	{name: "only decode dead", pairs: 1, what: "one engine of each kind; decode gets SIGKILL; then 20 requests at once, and 20 a second later", run: func(ctx context.Context, t *trial) error {
		pause(ctx, 3*time.Second) // a proxy that has just started has not probed the engine yet
		t.decode[0].kill()
		t.Clients = t.begin(ctx, 20, false, 0)()
		pause(ctx, time.Second)
		t.Later = t.begin(ctx, 20, false, 0)()
		return nil
	}},
	{name: "only decode answers 500", pairs: 1, what: "the same, but decode answers 500 to each request, as vLLM does when its engine core has died, and frees nothing", run: failing("500")},
	{name: "only decode has no room", pairs: 1, what: "the same, but decode refuses each request for lack of room; vLLM makes prefill free the blocks when it does so", run: failing("busy")},
	{name: "client leaves in prefill", pairs: 1, slow: true, what: "20 clients leave after 0.3 s; a prompt takes 2 s", run: leaving(300*time.Millisecond, "")},
	{name: "client leaves before the first token", pairs: 1, what: "decode has the KV and computes no token; 20 clients leave after 1 s", run: leaving(time.Second, "decode")},
	{name: "client leaves a stuck decode engine", pairs: 1, what: "decode accepts connections, reads no request, and so frees nothing; 20 clients leave after 1 s", run: leaving(time.Second, "head")},
	{name: "client leaves mid-stream", pairs: 1, what: "20 clients leave after 0.7 s of a stream of 1.2 s", run: leaving(700*time.Millisecond, "")},
	{name: "decode restarted", pairs: 2, what: "a decode engine gets SIGKILL and starts again at its address 0.5 s later; then 40 requests, 10 a second",
		run: restarting(func(t *trial) *sim { return t.decode[0] })},
	{name: "prefill restarted", pairs: 2, what: "the same for a prefill engine; after so short a time, SGLang's decode engines have missed too few heartbeats to drop the addresses of the old process",
		run: restarting(func(t *trial) *sim { return t.prefill[0] })},
}

// restarting kills an engine and starts it again at its address.
func restarting(of func(*trial) *sim) func(context.Context, *trial) error {
	return func(ctx context.Context, t *trial) error {
		t.Clients = t.begin(ctx, 10, false, 0)()
		e := of(t)
		e.kill()
		pause(ctx, 500*time.Millisecond)
		if err := e.launch(ctx, t, e.addr); err != nil {
			return err
		}
		t.Later = t.begin(ctx, 40, false, 100*time.Millisecond)()
		return nil
	}
}

// failing makes the only decode engine fail all requests.
func failing(kind string) func(context.Context, *trial) error {
	return func(ctx context.Context, t *trial) error {
		if err := t.fault(ctx, "fail", "1:"+kind); err != nil {
			return err
		}
		t.Clients = t.begin(ctx, 20, false, 0)()
		pause(ctx, time.Second)
		t.Later = t.begin(ctx, 20, false, 0)()
		return nil
	}
}

// leaving makes all clients leave at the same time. hang is the fault of decode, if any.
func leaving(after time.Duration, hang string) func(context.Context, *trial) error {
	return func(ctx context.Context, t *trial) error {
		if err := t.fault(ctx, "hang", hang); err != nil {
			return err
		}
		left, cancel := context.WithTimeout(ctx, after)
		defer cancel()
		t.Clients = t.begin(left, 20, true, 0)()
		return nil
	}
}

// fault sets a fault of the first decode engine.
func (t *trial) fault(ctx context.Context, what, value string) error {
	a, err := post(ctx, "http://"+t.decode[0].addr+"/sim/fault", "", fmt.Appendf(nil, `{%q:%q}`, what, value))
	if err == nil && a.status != http.StatusOK {
		err = fmt.Errorf("status %d: %.200s", a.status, a.body)
	}
	if err != nil {
		return fmt.Errorf("set the fault %s %s: %w", what, value, err)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
