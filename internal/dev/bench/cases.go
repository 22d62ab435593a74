package main

import "time"

// benchCase is one load for several kinds of proxies.
type benchCase struct {
	name  string
	kinds []string
	fresh bool // on a new proxy, because memory is measured
	load  load
}

// Case names, as the tables and -only show them.
const (
	caseJSON    = "json"      // unary requests, as many as the proxy can
	caseRate    = "rate2000"  // unary requests, 2,000 per second
	caseSSE100  = "sse100"    // 100 streams x 50 events a second
	caseSSE500  = "sse500"    // 500 of them
	caseHold    = "hold"      // many open slow streams, to measure their memory
	caseHoldMax = "holdmax"   // as many as the descriptors allow
	casePD2k    = "pd2k"      // prefill, then decode with one event; 2 KB prompt
	casePD32k   = "pd32k"     // 32 KB
	casePD256k  = "pd256k"    // 256 KB
	caseSession = "pdsession" // 8 KB prompt, 100 events at 50 a second
	caseJSONStd = "json-h1"   // json with the client of the HTTP/3 cases
	caseJSONH3  = "json-h3"   // json over HTTP/3
	caseSSETLS  = "sse100-tls"
	caseSSEH3   = "sse100-h3"
)

const (
	tokenPeriod = 20 * time.Millisecond // of a fast engine: 50 tokens a second
	slowPeriod  = 5 * time.Second       // period of a stream that stays open
	slowEvents  = 100_000               // more than any run waits for
	sessionLen  = 100                   // number of events
	// spareDescriptors are reserved for listeners, logs and idle connections.
	spareDescriptors = 500
)

// pace holds the durations of the parts of a round.
type pace struct {
	requests time.Duration // closed and open loops
	streams  time.Duration // from first to last event
	hold     time.Duration // with all streams open
}

var (
	fullPace  = pace{requests: 4 * time.Second, streams: 4 * time.Second, hold: 6 * time.Second}
	quickPace = pace{requests: 1500 * time.Millisecond, streams: 1500 * time.Millisecond, hold: 3 * time.Second}
)

// holdCounts returns the numbers of streams of the hold cases. A stream uses
// two descriptors of the proxy.
func holdCounts(descriptors int) (weigh, most int) {
	room := max(1, descriptors/2-spareDescriptors)
	return min(5000, room), min(9500, room)
}

func newCases(p pace, descriptors int) []benchCase {
	events := int(p.streams / tokenPeriod)
	weigh, most := holdCounts(descriptors)
	closed := func(proto string, conns, body, events int) load {
		l := closedLoad(conns, body, events, p.requests)
		l.Proto = proto
		return l
	}
	sse := func(proto string, conns, body, events int) load {
		l := sseLoad(conns, body, events)
		l.Proto = proto
		return l
	}
	hold := func(conns int) load { return holdLoad(conns, slowPeriod, p.hold) }
	const kb = 1 << 10
	pd := []string{aiohttpPD, fastapiPD, pdproxyPD}
	return []benchCase{
		{name: caseJSON, kinds: []string{nginx, reverse, aiohttp, fastapi, pdproxy}, load: closed(protoH1, 32, 2*kb, 0)},
		{name: caseRate, kinds: []string{direct, nginx, pdproxy}, load: openLoad(2000, p.requests)},
		{name: caseSSE100, kinds: []string{direct, nginx, aiohttp, fastapi, pdproxy}, load: sse(protoH1, 100, 2*kb, events)},
		{name: caseSSE500, kinds: []string{direct, nginx, pdproxy}, load: sse(protoH1, 500, 2*kb, events)},
		{name: caseJSONStd, kinds: []string{pdproxy}, load: closed(protoH1Std, 32, 2*kb, 0)},
		{name: caseJSONH3, kinds: []string{pdproxyTLS}, load: closed(protoH3, 32, 2*kb, 0)},
		{name: caseSSETLS, kinds: []string{pdproxyTLS}, load: sse(protoH1TLS, 100, 2*kb, events)},
		{name: caseSSEH3, kinds: []string{pdproxyTLS}, load: sse(protoH3, 100, 2*kb, events)},
		{name: casePD2k, kinds: append(pd, pdproxyNative), load: closed(protoH1, 16, 2*kb, 1)},
		{name: casePD32k, kinds: pd, load: closed(protoH1, 16, 32*kb, 1)},
		{name: casePD256k, kinds: pd, load: closed(protoH1, 8, 256*kb, 1)},
		{name: caseSession, kinds: pd, load: sse(protoH1, 100, 8*kb, sessionLen)},
		{name: caseHold, kinds: []string{nginx, pdproxy}, fresh: true, load: hold(weigh)},
		{name: caseHoldMax, kinds: []string{pdproxy}, fresh: true, load: hold(most)},
	}
}

// metric is one value of a result.
type metric struct {
	unit string
	of   func(*result) float64
}

var (
	cpuRequest = metric{"µs CPU/request", func(r *result) float64 { return r.CPURequest }}
	cpuEvent   = metric{"µs CPU/event", func(r *result) float64 { return r.CPUEvent }}
	eventP50   = metric{"µs", func(r *result) float64 { return r.Event.P50 * 1000 }}
	requestP99 = metric{"µs", func(r *result) float64 { return r.Request.P99 * 1000 }}
	firstP50   = metric{"ms", func(r *result) float64 { return r.First.P50 }}
	streamRSS  = metric{"KB", func(r *result) float64 { return r.StreamRSS }}
	open       = metric{"streams", func(r *result) float64 { return float64(r.Open) }}
)

// place identifies where a value is measured.
type place struct{ kind, name string }

// goal is one line of the comparison: pdproxy's value divided by a peer's, and
// the largest allowed ratio. 0 means no goal.
type goal struct {
	what       string
	metric     metric
	mine, peer place
	must, aim  float64
}

func goals() []goal {
	pass := func(name string) place { return place{pdproxy, name} }
	pd := func(name string) place { return place{pdproxyPD, name} }
	return []goal{
		{"request, saturated", cpuRequest, pass(caseJSON), place{nginx, caseJSON}, 2, 1.4},
		{"request, saturated", cpuRequest, pass(caseJSON), place{reverse, caseJSON}, 0.5, 0.3},
		{"request, saturated", cpuRequest, pass(caseJSON), place{aiohttp, caseJSON}, 1. / 8, 1. / 12},
		{"request, saturated", cpuRequest, pass(caseJSON), place{fastapi, caseJSON}, 1. / 40, 1. / 55},
		{"request p99 at 2,000/s", requestP99, pass(caseRate), place{nginx, caseRate}, 2, 1.4},
		{"event, 500 streams x 50/s", cpuEvent, pass(caseSSE500), place{nginx, caseSSE500}, 1.35, 1.1},
		{"event, 100 streams x 50/s", cpuEvent, pass(caseSSE100), place{aiohttp, caseSSE100}, 0.65, 0.5},
		{"event, 100 streams x 50/s", cpuEvent, pass(caseSSE100), place{fastapi, caseSSE100}, 0.25, 0.18},
		{"event latency p50, 100 streams", eventP50, pass(caseSSE100), place{nginx, caseSSE100}, 1.3, 1.1},
		{"first event p50, 500 at once", firstP50, pass(caseSSE500), place{nginx, caseSSE500}, 3.5, 2.5},
		{"PD request, 2 KB", cpuRequest, pd(casePD2k), place{aiohttpPD, casePD2k}, 1. / 7, 1. / 10},
		{"PD request, 2 KB", cpuRequest, pd(casePD2k), place{fastapiPD, casePD2k}, 1. / 30, 1. / 45},
		{"PD request, 32 KB", cpuRequest, pd(casePD32k), place{aiohttpPD, casePD32k}, 0, 0},
		{"PD request, 32 KB", cpuRequest, pd(casePD32k), place{fastapiPD, casePD32k}, 0, 0},
		{"PD request, 256 KB", cpuRequest, pd(casePD256k), place{aiohttpPD, casePD256k}, 1. / 3, 1 / 5.5},
		{"PD request, 256 KB", cpuRequest, pd(casePD256k), place{fastapiPD, casePD256k}, 1. / 6, 1 / 9.5},
		{"PD session, 8 KB + 100 events", cpuRequest, pd(caseSession), place{aiohttpPD, caseSession}, 0.7, 0.55},
		{"PD session, 8 KB + 100 events", cpuRequest, pd(caseSession), place{fastapiPD, caseSession}, 0.22, 0.17},
		{"PD request, 2 KB: Wasm over native", cpuRequest, pd(casePD2k), place{pdproxyNative, casePD2k}, 1.3, 1.15},
		{"RSS of an open stream", streamRSS, pass(caseHold), place{nginx, caseHold}, 2.8, 1.2},
		{"HTTP/3 request over own H1", cpuRequest, place{pdproxyTLS, caseJSONH3}, pass(caseJSONStd), 3, 2.4},
		{"HTTP/3 event over own H1+TLS", cpuEvent, place{pdproxyTLS, caseSSEH3}, place{pdproxyTLS, caseSSETLS}, 2, 1.7},
	}
}
