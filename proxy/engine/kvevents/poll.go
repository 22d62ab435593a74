package kvevents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"syscall"
	"time"
)

const (
	// pollMin is the pause after a poll with events, pollMax the longest pause for an
	// idle engine, pollFailed the pause after an engine did not answer.
	pollMin    = 50 * time.Millisecond
	pollMax    = time.Second
	pollFailed = 5 * time.Second
	// pollTimeout bounds one poll. An engine without events may answer late: older ones
	// wait for 2 s.
	pollTimeout = 15 * time.Second
	// maxAnswer bounds an answer in bytes. An engine's queue may hold all of its
	// blocks, at about 70 bytes for each token.
	maxAnswer = 256 << 20
	// keepAnswer bounds the answer buffer that is kept for the next answer, in bytes.
	keepAnswer = 4 << 20
)

// poller drains the event queue of one TensorRT-LLM instance, for all of its ranks. An
// answer empties the queue, so no other client may read it. Source: TensorRT-LLM
// serve/openai_server.py get_kv_cache_events.
type poller struct {
	ranks     []*rank
	url       string // of /kv_cache_events
	key       string // "" for none
	transport http.RoundTripper
	events    drained
	answer    bytes.Buffer
	block     int // tokens of a block if configured, else 0
}

// session polls until the context ends.
func (p *poller) session(ctx context.Context) error {
	wait := pollMin
	for {
		n, err := p.poll(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		for _, r := range p.ranks {
			r.connect(err)
		}
		switch {
		case err != nil:
			wait = min(2*wait, pollFailed)
		case n > 0:
			wait = pollMin
		default:
			wait = min(2*wait, pollMax)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}

// poll makes one poll and applies its events. It returns the number of events.
func (p *poller) poll(ctx context.Context) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url, http.NoBody)
	if err != nil {
		return 0, err
	}
	if p.key != "" {
		req.Header.Set("Authorization", "Bearer "+p.key)
	}
	resp, err := p.transport.RoundTrip(req)
	if err != nil {
		if errors.Is(err, syscall.ECONNREFUSED) {
			p.restarted(ResyncRestart) // no process listens, so the next answer will come from a new process
		}
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("poll %s: status %d", p.url, resp.StatusCode)
	}
	if p.answer.Reset(); p.answer.Cap() > keepAnswer {
		p.answer = bytes.Buffer{}
	}
	_, err = p.answer.ReadFrom(io.LimitReader(resp.Body, maxAnswer+1))
	if err == nil && p.answer.Len() > maxAnswer {
		err = fmt.Errorf("more than %d bytes", maxAnswer)
	}
	if err != nil {
		p.lost() // the engine does not repeat the drained events
		return 0, fmt.Errorf("poll %s: %w", p.url, err)
	}
	return p.apply()
}

func (p *poller) apply() (int, error) {
	e := &p.events
	e.blocks, e.refused, e.malformed, e.unknownRanks = 0, 0, 0, 0
	n, err := e.decode(p.answer.Bytes())
	if err != nil {
		e.malformed++
		p.lost()
	}
	if n == 0 && err == nil {
		return 0, nil
	}
	for i, r := range p.ranks {
		r.heard(e.ranks[i].filter.block)
		if i == 0 { // the counters belong to the engine, not to a rank
			r.count(e.blocks, e.refused, e.malformed+e.unknownRanks)
		}
	}
	return n, err
}

// lost clears the feeds: an answer was drained but could not be read.
func (p *poller) lost() {
	for i := range p.ranks {
		if r := &p.events.ranks[i]; r.known {
			r.to.Cleared()
			p.ranks[i].resync(ResyncUnreadable)
		}
	}
}

// restarted clears the feeds and all learned values: the engine is a new process.
func (p *poller) restarted(reason string) {
	for i := range p.ranks {
		if r := &p.events.ranks[i]; r.known {
			r.to.Cleared()
			p.ranks[i].resync(reason)
			*r = drainedRank{to: r.to, filter: eventFilter{block: p.block, fixed: p.block > 0}}
		}
	}
}
