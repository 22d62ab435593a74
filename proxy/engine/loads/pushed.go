package loads

import (
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// Source of the wire format: SGLang srt/managers/scheduler_components/load_publisher.py. A message
// has a topic, a number and a LoadStat. The engine sends a changed load at once, and an unchanged
// one every second.
const (
	loadTopic = "load"
	// pushSilence is the time without a message after which the connection is made again. An engine
	// in a long step sends none, and a host that has died sends none.
	pushSilence = 30 * time.Second
	// pushRetry is the pause before the next connection. The polls go on in the meantime.
	pushRetry = 5 * time.Second
	// maxPush and maxPushFrames bound a message.
	maxPush       = 4 << 10
	maxPushFrames = 4
)

// pushes are the connections to the publishers of one instance. One goroutine owns them. The zero
// value has no connection.
type pushes struct {
	endpoints []string // of the ranks
	cancel    context.CancelFunc
}

// follow connects to the publishers that the instance announces, one for each of its counters. The
// goroutines end with ctx or with stop, and running waits for them.
func (p *pushes) follow(ctx context.Context, i *engine.Instance, running *sync.WaitGroup) {
	endpoints := announced(i)
	if slices.Equal(endpoints, p.endpoints) {
		return
	}
	p.stop()
	p.endpoints = endpoints
	ctx, p.cancel = context.WithCancel(ctx)
	for rank, at := range endpoints {
		if at != "" {
			running.Go(func() { listen(ctx, at, &i.Load[rank]) })
		}
	}
}

// announced returns where the ranks publish their loads; nil if they do not, or if the ranks are not
// those of the counters.
func announced(i *engine.Instance) (list []string) {
	ranks := i.Facts().KVEvents.Ranks
	if len(ranks) != len(i.Load) || ranks[0].Loads == "" {
		return nil
	}
	sources, _ := i.KVSources() // the log has the error already, with that of the KV events
	for _, s := range sources {
		list = append(list, s.Loads)
	}
	return list
}

// stop ends the connections.
func (p *pushes) stop() {
	if p.cancel != nil {
		p.cancel()
	}
	*p = pushes{}
}

// listen passes the loads that a rank publishes to its counter, until ctx ends.
func listen(ctx context.Context, endpoint string, to *load.Counter) {
	for ctx.Err() == nil {
		_ = session(ctx, endpoint, to) // its end shows nothing that the polls do not show
		select {
		case <-ctx.Done():
		case <-time.After(pushRetry):
		}
	}
}

// CheckPushed connects to a publisher of loads, and returns why the connection fails. ctx bounds it.
func CheckPushed(ctx context.Context, endpoint string) error {
	c, err := subscribe(ctx, endpoint)
	if err != nil {
		return err
	}
	return c.Close()
}

func subscribe(ctx context.Context, endpoint string) (*zmtp.Conn, error) {
	return zmtp.Dial(ctx, endpoint, zmtp.Options{Socket: zmtp.Sub, MaxMessage: maxPush, MaxFrames: maxPushFrames, ReadBuffer: maxPush})
}

// session applies the messages of one connection. It never returns nil.
func session(ctx context.Context, endpoint string, to *load.Counter) error {
	c, err := subscribe(ctx, endpoint)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Subscribe(loadTopic); err != nil {
		return err
	}
	for {
		frames, err := c.Receive(pushSilence)
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if r, err := ReadPushed(frames); err == nil {
			apply(r, to)
		}
	}
}

// apply reports a published load. It keeps what only a poll reports: the usage of the memory, with
// the requests that wait for memory, and the adapters. Before the first poll nothing is known of
// these, so the load is not used.
func apply(r load.Report, to *load.Counter) {
	polled, ok := to.Reported()
	if !ok {
		return
	}
	r.At, r.Every, r.Usage, r.Adapters = time.Now(), polled.Every, polled.Usage, polled.Adapters
	to.Report(r, to.Mark())
}

// errPushed reports a message that is no LoadStat.
var errPushed = errors.New("no LoadStat")

// ReadPushed reads a message of SGLang's publisher: its load as an array ["LoadStat",
// num_running_reqs, num_waiting_reqs, num_tokens, max_total_num_tokens, attn_dp_rank,
// num_waiting_uncached_tokens, num_total_tokens, ...]. Older engines send the first six members.
// Later members are ignored.
func ReadPushed(frames [][]byte) (load.Report, error) {
	if len(frames) != 3 || string(frames[0]) != loadTopic || len(frames[1]) != binary.Size(uint64(0)) {
		return load.Report{}, errPushed
	}
	n, b, err := msgp.ReadArrayHeaderBytes(frames[2])
	if err != nil || n < 6 {
		return load.Report{}, errPushed
	}
	tag, b, err := msgp.ReadStringZC(b)
	if err != nil || string(tag) != "LoadStat" {
		return load.Report{}, errPushed
	}
	const rank = 4 // may be nil
	values := [7]int64{5: -1}
	for i := range min(n-1, uint32(len(values))) {
		if i == rank {
			b, err = msgp.Skip(b)
		} else {
			values[i], b, err = msgp.ReadInt64Bytes(b)
		}
		if err != nil {
			return load.Report{}, errPushed
		}
	}
	r := load.Report{
		Running: requests(float64(values[0])), Waiting: requests(float64(values[1])),
		Tokens: tokens(float64(max(values[2], values[6]))), Capacity: tokens(float64(values[3])), Queued: -1,
	}
	if values[5] >= 0 {
		r.Queued = tokens(float64(values[5]))
	}
	return r, nil
}
