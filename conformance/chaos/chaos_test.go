//go:build linux

package chaos

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"
)

const (
	// late is the additional time that a request may take, compared with a run without faults.
	late = time.Second
	// hops is the number of processes in a request's path, compared with two of
	// a request to one engine alone. A delay of the machine that affects that
	// one request affects this one as many times.
	hops = 2
	// settled is the time after which nothing may remain of the requests that
	// have ended.
	settled = 5 * time.Second
	// holds is how long a fault lasts.
	holds = 3 * time.Second
	// noticed is the time in which the proxies must notice that an engine is
	// stopped or cut off: three probes of 200 ms and their intervals, by the
	// configuration. Waiting requests are then retried elsewhere. The fault
	// lasts longer.
	noticed, engineHolds = 750 * time.Millisecond, 4 * time.Second
	// lost is the time in which a request must be answered whose engine's host
	// has lost power: half a minute until its connection is closed, and the
	// same again for the KV that another engine pulls from there.
	lost = 65 * time.Second
	// resent is how long after the end of a cut TCP may send a lost packet
	// again, because its waits double.
	resent = 2 * holds
	// leased is the time in which an engine frees blocks that are not fetched
	// (30 s).
	leased = 35 * time.Second
	// slow is the additional time of a round trip to a slow host. A request
	// makes at most six: those of the client, of prefill and of decode, each
	// with one for a new connection.
	slow, trips = 200 * time.Millisecond, 6
	// probed is the time limit of a probe where a link is slow. With a new
	// connection a probe needs two round trips, and a shorter limit would make
	// the engine unhealthy.
	probed, patiently = 200 * time.Millisecond, 500 * time.Millisecond
)

// fault is a failure of a role.
type fault struct {
	name       string
	short      bool // part of the short form
	begin, end func()
	holds      time.Duration // 0: holds
	trips      time.Duration // round trips over a slow link that a request needs; probes get more time then
	// held selects the requests that the fault itself delays. They are answered
	// correctly when it is over. nil: none.
	held func(o *outcome, began time.Time, lasts time.Duration) bool
	// anew selects the requests that begin anew because of the fault: their
	// computation is repeated. nil: none.
	anew func(o *outcome, began time.Time) bool
	// broken selects the requests that may break together with their process,
	// and their largest number.
	broken func(o *outcome) bool
	most   func() int
	// unread reports that prefill's answer may have been on its way to the process that dies. No
	// other process knows its blocks, so they wait for the engine's own lease.
	unread bool
	// refused selects the requests that no process accepts during the fault. nil: none.
	refused func(o *outcome, began time.Time, lasts time.Duration) bool
}

// at reports whether a request was running when a fault began, or began within
// a time after that.
func at(o *outcome, began time.Time, within time.Duration) bool {
	return o.ended.After(began) && o.began.Before(began.Add(within))
}

// pinned reports whether a request has to wait for an unresponsive engine: its
// stream comes from there and has begun, or its KV is being fetched from there.
func pinned(o *outcome, engine string) bool {
	return o.c.stream && o.decode == engine || o.prefill == engine
}

// again reports whether a request may have been computed in part when its
// decode stopped answering.
func again(o *outcome, began time.Time) bool { return !o.c.stream && at(o, began, noticed) }

// TestChaos makes every role fail in every way, one after the other.
func TestChaos(t *testing.T) {
	w := newWorld(t)
	l := newLoad(w)
	l.start()
	time.Sleep(6 * time.Second) // the time in which usual durations are measured
	outcomes, _ := l.stop()
	usual := w.usual(outcomes)
	long := os.Getenv("PDPROXY_CHAOS") != ""
	for _, f := range w.faults(l) {
		if !long && !f.short {
			continue
		}
		t.Run(f.name, func(t *testing.T) { w.suffer(t, l, &f, usual) })
	}
}

// usual is the longest time of each prompt without faults.
func (w *world) usual(outcomes []*outcome) (longest [prompts]time.Duration) {
	for _, o := range outcomes {
		if o.err != nil {
			w.t.Errorf("without any fault: %s", o)
		}
		longest[o.prompt] = max(longest[o.prompt], o.took())
	}
	w.t.Logf("%d requests without faults, the longest of each prompt %v", len(outcomes), longest)
	return longest
}

// suffer causes a fault under load and checks the results of the requests.
func (w *world) suffer(t *testing.T, l *load, f *fault, usual [prompts]time.Duration) {
	lasts := cmp.Or(f.holds, holds)
	if f.trips > 0 {
		w.probeFor(patiently)
		defer w.probeFor(probed)
	}
	l.start()
	time.Sleep(time.Second) // requests are in every phase
	began := time.Now()
	f.begin()
	most := 0
	if f.most != nil {
		most = f.most()
	}
	time.Sleep(lasts)
	f.end()
	time.Sleep(time.Second) // of requests after the fault
	outcomes, stalls := l.stop()
	stopped := time.Now()

	var held, broken, refused int
	var longest, longestHeld, longestAgain time.Duration
	for _, o := range outcomes {
		slack := hops * stalled(o, stalls)
		limit := usual[o.prompt] + late + f.trips + slack
		isHeld := f.held != nil && f.held(o, began, lasts)
		if isHeld {
			limit += lasts + resent
		}
		extra := max(0, o.took()-usual[o.prompt]-slack)
		if f.anew != nil && f.anew(o, began) {
			limit += usual[o.prompt]
			extra = max(0, extra-usual[o.prompt])
		}
		switch {
		case o.err != nil && f.refused != nil && f.refused(o, began, lasts):
			refused++
		case o.err != nil && f.broken != nil && f.broken(o):
			broken++
			if o.broke {
				longestAgain = max(longestAgain, o.again)
				if o.againErr != nil || o.again > usual[o.prompt]+late+slack {
					t.Errorf("the second try of %s took %v: %v", o, o.again, o.againErr)
				}
			}
		case o.err != nil:
			t.Errorf("lost: %s", o)
		case o.took() > limit:
			t.Errorf("late: %s; usually %v, the machine stalled for %v", o, usual[o.prompt], stalled(o, stalls))
		case isHeld && extra > late:
			held++
			t.Logf("held: %s", o)
			longestHeld = max(longestHeld, extra)
		default:
			longest = max(longest, extra)
		}
	}
	if broken > most {
		t.Errorf("%d requests broke, of %d that the process can have had", broken, most)
	}
	left := w.rest(true)
	for ; left != "" && time.Since(stopped) < settled; left = w.rest(true) {
		time.Sleep(50 * time.Millisecond)
	}
	if f.unread && w.rest(false) == "" {
		for ; left != "" && time.Since(stopped) < leased; left = w.rest(true) {
			time.Sleep(time.Second)
		}
	}
	if left != "" {
		t.Errorf("%v after the last request, these remain: %s", settled, left)
	}
	nothing := time.Since(stopped)
	await(t, "the fleet is whole", w.whole)
	t.Logf("%v: %d requests: %d failed, successful again within %v; %d refused; %d delayed, by %v at most; delay of the other requests %v; nothing remains after %v; complete after %v",
		lasts, len(outcomes), broken, longestAgain.Round(time.Millisecond), refused, held, longestHeld.Round(time.Millisecond), longest.Round(time.Millisecond), nothing.Round(time.Millisecond), time.Since(stopped).Round(time.Millisecond))
}

// faults are all faults.
func (w *world) faults(l *load) (all []fault) {
	a := w.proxies[0]
	var pid int
	// The faults of processes that a supervisor restarts.
	child := func(name string, short bool, of func() int) (kill, stop fault) {
		kill = fault{name: name + " is killed", short: short, begin: func() { pid = of(); syscall.Kill(pid, syscall.SIGKILL) }, end: func() {}}
		stop = fault{name: name + " is stopped", begin: func() { pid = of(); syscall.Kill(pid, syscall.SIGSTOP) }, end: func() { syscall.Kill(pid, syscall.SIGCONT) }}
		return kill, stop
	}
	workerKill, workerStop := child("a worker", true, func() int { return w.busiest(a) })
	killWorker, killed, dead := workerKill.begin, time.Time{}, time.Time{}
	workerKill.begin = func() {
		killed = time.Now()
		killWorker()
		exited(w.t, pid)
		dead = time.Now()
	}
	// The requests that the worker can have had: they began before its sockets were closed.
	workerKill.broken = func(o *outcome) bool {
		return o.c.p == a && o.broke && o.began.Before(dead) && o.ended.After(killed)
	}
	workerKill.most = func() int { return len(l.clients) / 2 }
	workerKill.unread = true
	workerStop.short = true
	workerStop.held = func(o *outcome, began time.Time, lasts time.Duration) bool { // requests of its connections
		return o.c.p == a && (at(o, began, 0) || o.reused && at(o, began, lasts))
	}
	workerHang := workerStop // until its supervisor kills it
	workerHang.name, workerHang.short, workerHang.end, workerHang.holds = "a worker hangs", false, func() {}, 12*time.Second
	workerHang.unread = true
	workerHang.broken, workerHang.most = func(o *outcome) bool { return o.c.p == a && o.broke }, workerKill.most
	leaderKill, leaderStop := child("the coordinator that leads", true, func() int { p, _ := w.leader(); return p.children("coordinator")[0] })
	standbyKill, standbyStop := child("the standby coordinator", false, func() int { _, p := w.leader(); return p.children("coordinator")[0] })
	standbyStop.short = true
	all = append(all, workerKill, workerStop, workerHang, leaderKill, leaderStop, standbyKill, standbyStop)
	// Running requests end well. Only requests that begin before the next supervisor serves fail.
	// The processes drain: net/http closes a new connection whose request it reads during a drain.
	refused := func(o *outcome, began time.Time, lasts time.Duration) bool {
		return o.c.p == a && o.began.After(began) && o.began.Before(began.Add(lasts+time.Second)) &&
			(errors.Is(o.err, syscall.ECONNREFUSED) || errors.Is(o.err, syscall.ECONNRESET) || errors.Is(o.err, io.EOF) && o.began.Before(began.Add(time.Second)))
	}
	// The next supervisor listens at once. Connections wait until one of its workers accepts.
	starts := func(o *outcome, began time.Time, lasts time.Duration) bool {
		return o.c.p == a && o.began.After(began.Add(lasts))
	}
	all = append(all,
		fault{name: "a supervisor is killed", short: true, begin: a.kill, end: a.start, refused: refused, held: starts},
		fault{name: "a supervisor is stopped", begin: func() { a.signal(syscall.SIGSTOP) }, end: func() { a.signal(syscall.SIGCONT) }},
		fault{name: "etcd is killed", short: true, begin: w.etcd.kill, end: w.etcd.start},
		fault{name: "etcd is stopped", begin: func() { w.etcd.signal(syscall.SIGSTOP) }, end: func() { w.etcd.signal(syscall.SIGCONT) }},
		fault{name: "etcd is away for a minute", begin: w.etcd.kill, end: w.etcd.start, holds: time.Minute},
	)
	for i, e := range w.engines[:2] {
		waits := func(o *outcome, began time.Time, _ time.Duration) bool {
			return pinned(o, e.name) && at(o, began, noticed)
		}
		decodes := func(o *outcome) bool { var event errEvent; return o.decode == e.name && errors.As(o.err, &event) }
		all = append(all,
			fault{name: fmt.Sprintf("engine %s is killed", e.name), short: i == 1, begin: e.kill, end: e.start, holds: engineHolds, broken: decodes, most: func() int { return len(l.clients) }},
			fault{name: fmt.Sprintf("engine %s is stopped", e.name), short: i == 0, begin: func() { e.signal(syscall.SIGSTOP) }, end: func() { e.signal(syscall.SIGCONT) }, holds: engineHolds, held: waits, anew: again})
	}
	// A host without power answers nothing, for longer than the proxy waits.
	gone, engines := w.engines[0].host, w.engines[:2]
	restart := func() {
		for _, e := range engines {
			e.kill()
		}
		gone.setLink(false, 0)
		for _, e := range engines {
			e.start()
		}
	}
	all = append(all, fault{name: "the host of p1 and d1 loses its power", holds: 75 * time.Second, begin: func() { gone.setLink(true, 0) }, end: restart,
		held: func(o *outcome, began time.Time, _ time.Duration) bool {
			return at(o, began, noticed) && o.took() < lost && (pinned(o, "p1") || pinned(o, "d1"))
		}, anew: again,
		broken: func(o *outcome) bool {
			var event errEvent
			return o.decode == "d1" && errors.As(o.err, &event)
		}, most: func() int { return len(l.clients) }})
	for _, h := range w.network.hosts {
		var held func(o *outcome, began time.Time, lasts time.Duration) bool
		var anew func(o *outcome, began time.Time) bool
		cut := holds
		// Until its first probes have ended, a host that was cut off knows no
		// healthy engine, and reports that.
		var told func(o *outcome) bool
		var most func() int
		switch {
		case h == w.clients:
			held = func(o *outcome, began time.Time, lasts time.Duration) bool { return at(o, began, lasts) }
		case h == w.proxies[0].host, h == w.proxies[1].host:
			held = func(o *outcome, began time.Time, lasts time.Duration) bool {
				return o.c.p.host == h && at(o, began, lasts)
			}
			told = func(o *outcome) bool {
				var status errStatus
				return o.c.p.host == h && errors.As(o.err, &status) && status.code == http.StatusServiceUnavailable
			}
			most = func() int { return len(l.clients) / 2 }
		case h != w.etcds:
			cut = engineHolds
			anew = again
			held = func(o *outcome, began time.Time, _ time.Duration) bool {
				return at(o, began, noticed) && slices.ContainsFunc(w.engines, func(e *process) bool { return e.host == h && pinned(o, e.name) })
			}
		}
		all = append(all,
			fault{name: "the link of host " + h.name + " is cut", short: h.name == "a" || h.name == "e1", begin: func() { h.setLink(true, 0) }, end: func() { h.setLink(false, 0) }, holds: cut, held: held, anew: anew, broken: told, most: most},
			fault{name: "the link of host " + h.name + " is slow", short: h.name == "e1", begin: func() { h.setLink(false, slow/2) }, end: func() { h.setLink(false, 0) }, trips: trips * slow})
	}
	return all
}
