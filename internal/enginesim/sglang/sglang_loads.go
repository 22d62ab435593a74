package sglang

import (
	"context"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// Source of this file: srt/managers/scheduler_components/load_publisher.py.

const (
	loadTopic = "load"
	// loadStep is the time between two looks at the load. The engine looks at every fifth step of its
	// scheduler.
	loadStep = 20 * time.Millisecond
	// loadHeartbeat is the time after which an unchanged load is sent again.
	loadHeartbeat = time.Second
)

// loadStat are the numbers of a LoadStat, in the order of the wire, without attn_dp_rank.
type loadStat struct {
	running, waiting, used, capacity, uncached, total, maxRunning int
}

// wire returns the message: an array with a tag, which is never shortened. The last two numbers
// are the uncached tokens and the time of all prefills, which the simulator does not count.
func (l *loadStat) wire(rank int) []byte {
	b := msgp.AppendString(msgp.AppendArrayHeader(nil, 11), "LoadStat")
	for _, n := range []int{l.running, l.waiting, l.used, l.capacity, rank, l.uncached, l.total, l.maxRunning, 0, 0} {
		b = core.AppendInt(b, int64(n))
	}
	return b
}

// startLoads publishes the load of each rank until the engine ends. The engine's mutex is held.
func (g *SGLang) startLoads() error {
	if g.e.Cfg.KVEvents.Loads == "" {
		return nil
	}
	feeds, err := g.e.StartFeeds(g.e.Cfg.KVEvents.Loads, loadTopic)
	if err != nil {
		return err
	}
	g.loadsAt = feeds[0].Endpoint()
	for i, feed := range feeds {
		g.e.Spawn(func(ctx context.Context) { g.publishLoads(ctx, g.e.Ranks[i], feed.Send) })
	}
	return nil
}

// publishLoads sends a changed load at once, and an unchanged one at each heartbeat.
func (g *SGLang) publishLoads(ctx context.Context, rk *core.Rank, send func([]byte)) {
	tick := time.NewTicker(loadStep)
	defer tick.Stop()
	var last loadStat
	var sent time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := g.loadStat(rk)
		if now == last && time.Since(sent) < loadHeartbeat {
			continue
		}
		last, sent = now, time.Now()
		send(now.wire(rk.Index))
	}
}

func (g *SGLang) loadStat(rk *core.Rank) loadStat {
	l := rk.Load()
	waiting, uncached := g.waiting(rk, l)
	return loadStat{
		running: l.Running, waiting: waiting, used: l.UsedTokens, capacity: l.TotalTokens, uncached: uncached,
		total: l.UsedTokens + l.QueuedTokens, maxRunning: g.e.Cfg.MaxRunning,
	}
}

// LoadsEndpoint returns where rank 0 publishes its load, "tcp://host:port"; empty if it does not,
// and before Start.
func (g *SGLang) LoadsEndpoint() string { return g.loadsAt }
