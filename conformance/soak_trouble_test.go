package conformance

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// troubles are the faults of an engine. A single word is an action on the process. "hang
// PHASE" and "fail KIND" are faults of the simulator.
var troubles = []string{
	"kill", "kill", "restart", "restart", "die", "shutdown", "leave", "leave",
	"hang head", "hang prefill", "hang decode", "hang stream", "hang connect",
	"fail 500", "fail 503", "fail 429", "fail reset", "fail close", "fail cut", "fail slow",
}

// troublesOf adds the faults that have an effect only in one phase.
func troublesOf(role string) []string {
	if role == enginesim.RolePrefill {
		return append(slices.Clone(troubles), "fail garbage", "fail no-params")
	}
	return append(slices.Clone(troubles), "fail load", "fail sse-error")
}

// soakRecovery is the time in which probes and circuits must find that an
// engine is healthy again.
const soakRecovery = time.Second

// trouble makes engines fail and heals them until ctx ends. Both engines of a
// phase are in trouble only for short times, and never in a brief soak: there
// the detection of one such time would take most of the soak.
func (s *soak) trouble(ctx context.Context, rng *rand.Rand) {
	next := time.Now()
	for tick := time.NewTicker(20 * time.Millisecond); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		now := time.Now()
		for _, sl := range s.slots {
			if !sl.ends.IsZero() && now.After(sl.ends) {
				s.heal(sl)
			}
			s.checkAlive(sl)
		}
		if now.Before(next) {
			continue
		}
		next = now.Add(50*time.Millisecond + upTo(rng, 400*time.Millisecond))
		sl := s.slots[rng.IntN(len(s.slots))]
		length := 100*time.Millisecond + upTo(rng, 2900*time.Millisecond)
		if slices.ContainsFunc(s.slots, func(o *slot) bool {
			return o != sl && o.role == sl.role && (!o.ends.IsZero() || s.brief && now.Before(o.well))
		}) {
			if s.brief {
				continue
			}
			length = min(length, 400*time.Millisecond)
		}
		if sl.ends.IsZero() {
			sl.ends = now.Add(length)
			s.begin(sl, troublesOf(sl.role)[rng.IntN(len(troublesOf(sl.role)))], rng)
		}
	}
}

// begin starts one trouble of a healthy engine.
func (s *soak) begin(sl *slot, what string, rng *rand.Rand) {
	e := *sl.engine
	rate := []string{"0.2", "0.5", "1"}[rng.IntN(3)]
	s.note(sl, what+" rate "+rate)
	s.tally.add("trouble: " + what)
	var word, of string
	fmt.Sscan(what, &word, &of)
	var err error
	switch word {
	case "kill":
		sl.dies = true
		e.Kill()
	case "restart":
		e.Kill()
		s.restart(sl)
		sl.ends, sl.well = time.Time{}, time.Now().Add(soakRecovery)
	case "die":
		sl.dies = true
		err = e.SetFault("", 1+rng.IntN(10), "")
	case "shutdown":
		sl.closed = true
		go e.Close() // restart waits for it
	case "leave":
		sl.away = true
		s.reload()
	case "hang":
		err = e.SetFault("", 0, of)
	case "fail":
		err = e.SetFault(rate+":"+of, 0, "")
	}
	if err != nil {
		s.t.Error(err)
	}
}

// heal ends the trouble of an engine. An engine that is dead, or may die soon,
// is replaced at its address.
func (s *soak) heal(sl *slot) {
	s.note(sl, "healed")
	sl.ends, sl.well = time.Time{}, time.Now().Add(soakRecovery)
	if sl.closed || sl.dies || dead(*sl.engine) {
		s.restart(sl)
	} else if err := (*sl.engine).SetFault("", 0, ""); err != nil {
		s.t.Error(err)
	}
	sl.dies, sl.closed = false, false
	if sl.away {
		sl.away = false
		s.reload()
	}
}

// reload gives the proxy a configuration without the engines that are away.
func (s *soak) reload() {
	next := s.config
	next.Engines = nil
	for i, spec := range s.config.Engines {
		if !slices.ContainsFunc(s.slots, func(sl *slot) bool { return sl.away && sl.name == spec.Name }) {
			next.Engines = append(next.Engines, s.config.Engines[i])
		}
	}
	if err := s.fleet.reload(&next); err != nil {
		s.t.Errorf("reload: %v", err)
	}
}

func (s *soak) healAll() {
	for _, sl := range s.slots {
		s.heal(sl)
	}
}

// restart replaces a dead engine by a new one.
func (s *soak) restart(sl *slot) {
	old := *sl.engine
	old.Close()
	s.past.add(old.State())
	e, err := enginesim.New(sl.cfg)
	if err == nil {
		err = e.Start()
	}
	if err != nil {
		s.t.Errorf("restart %s: %v", sl.name, err)
		s.found.Add(1000)
		return
	}
	*sl.engine = e
}

func dead(e *enginesim.Engine) bool {
	select {
	case <-e.Died():
		return true
	default:
		return false
	}
}

// checkAlive asserts that an engine that was not killed is alive.
func (s *soak) checkAlive(sl *slot) {
	if dead(*sl.engine) && !sl.dies {
		s.t.Errorf("engine %s died by itself: %s", sl.name, strings.Join(s.log.with("engine core died"), "\n"))
		s.found.Add(1)
		s.restart(sl)
	}
}

// note writes the trouble into the proxy's log, so that both can be read together.
func (s *soak) note(sl *slot, what string) {
	fmt.Fprintf(s.log, "time=%s trouble engine=%s %s\n", time.Now().Format("2006-01-02T15:04:05.000Z07:00"), sl.name, what)
}
