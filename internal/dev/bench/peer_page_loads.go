package main

import (
	"slices"
	"strings"
)

var (
	requestFigures = []column{
		{kase: "one", key: figCPU, head: "1 connection, CPU µs", less: true},
		{kase: "many", key: figCPU, head: "64 connections, CPU µs", less: true},
		{kase: "rate300", key: figCPU, head: "300/s, CPU µs", less: true},
		{kase: "many", key: figRate, head: "one core, requests/s"},
		{kase: "two", key: figRate, head: "two cores shared with load and engine, requests/s"},
	}
	latencyFigures = []column{
		{kase: "rate300", key: figP50, head: "300/s, added p50", less: true, minus: noProxy},
		{kase: "rate1000", key: figP50, head: "1,000/s, added p50", less: true, minus: noProxy},
		{kase: "rate1000", key: figP99, head: "added p99", less: true, minus: noProxy},
		{kase: "rate1000", key: figP999, head: "added p99.9", less: true, minus: noProxy},
	}
	streamFigures = []column{
		{kase: "sse100", key: figCPU, head: "100 streams, CPU µs/event", less: true},
		{kase: "sse500", key: figCPU, head: "500 streams, CPU µs/event", less: true},
		{kase: "sse100", key: figEventP50, head: "100 streams, added event p50, µs", less: true, minus: noProxy},
		{kase: "sse500", key: figFirstP50, head: "500 at once, first event p50, ms", less: true},
		{kase: "sse500", key: figFirstP99, head: "p99, ms", less: true},
	}
	pairFigures = []column{
		{kase: "pd2k", key: figCPU, head: "2 KB, CPU µs", less: true},
		{kase: "pd32k", key: figCPU, head: "32 KB, CPU µs", less: true},
		{kase: "pd256k", key: figCPU, head: "256 KB, CPU µs", less: true},
		{kase: "pd2k", key: figRate, head: "2 KB, requests/s"},
		{kase: "pd2k", key: figP99, head: "2 KB, p99 µs", less: true},
	}
	unaryFigures = []column{
		{kase: "unary2k", key: figCPU, head: "CPU µs", less: true},
		{kase: "unary2k", key: figRate, head: "requests/s"},
		{kase: "unary2k", key: figP50, head: "p50 µs", less: true},
	}
	memoryFigures = []column{
		{kase: "start", key: figStart, head: "start to first answer, ms", less: true},
		{kase: "start", key: figIdle, head: "RSS then, MB", less: true},
		{kase: "many", key: figRSS, head: "RSS after 64 connections, MB", less: true},
		{kase: "hold", key: figStream, head: "RSS an open stream, KB", less: true},
		{kase: "hold", key: figRSS, head: "RSS with 2,000 open streams, MB", less: true},
	}
)

// behind lists every figure in which a peer is better than pdproxy.
func (p *page) behind() {
	p.say("## Where pdproxy is not first\n\nEach figure of this page in which a peer of the same work is more than 5 %% better.\n")
	var rows [][]string
	for _, f := range slices.Concat(requestFigures, latencyFigures, streamFigures, pairFigures, unaryFigures, memoryFigures) {
		for _, work := range []string{workPass, workVLLM, workSGLang} {
			mine := p.own(work)
			var better []string
			for _, q := range p.Peers {
				ratio, ok := p.ratio(q.Name, mine, f)
				if ok && q.Work == work && q.Name != noProxy && (f.less && ratio < 0.95 || !f.less && ratio > 1.05) {
					better = append(better, q.Name+" ×"+twoDigits(ratio))
				}
			}
			if better != nil {
				rows = append(rows, []string{worksText[work] + ": " + f.head, strings.Join(better, ", ")})
			}
		}
	}
	if rows == nil {
		p.say("There is none.\n")
		return
	}
	p.table([]string{"figure", "better peers, peer / pdproxy"}, rows)
}

func (p *page) requests() {
	p.say("## Requests\n\nRequests of 2 KB, answers of 1 KB, one engine.\n")
	p.bars("benchmarks-requests.svg", "CPU of a request of 2 KB on 64 connections", "µs", []string{workPass}, requestFigures[1])
	p.compared([]string{workPass}, "", requestFigures...)
}

func (p *page) latency() {
	p.say("## Latency\n\nIn µs, more than without a proxy, to the end of the answer. sglang-router does not set TCP_NODELAY towards clients, which costs streamed answers on kept connections up to 40 ms.\n")
	p.bars("benchmarks-latency.svg", "Added median latency at 1,000 requests a second", "µs", []string{workPass}, latencyFigures[1])
	p.compared([]string{workPass}, "", latencyFigures...)
}

func (p *page) streams() {
	p.say("## Streams\n\nStreams that start at the same time, 50 events of 200 bytes a second each.\n")
	p.bars("benchmarks-events.svg", "CPU of an event with 500 streams", "µs", []string{workPass}, streamFigures[1])
	p.bars("benchmarks-first.svg", "Time to the first event, 500 requests at once, median", "ms", []string{workPass}, streamFigures[3])
	p.compared([]string{workPass}, "", streamFigures...)
}

func (p *page) pairs() {
	p.say("## Prefill and decode\n\nA request has a prefill and a decode leg; the answer has one event. 16 connections, as fast as the proxy can.\n")
	p.curves("benchmarks-pd.svg", "CPU of a request with prefill and decode, by size of the prompt")
	p.compared([]string{workVLLM, workSGLang}, "", pairFigures...)
	p.say("Unary answers of 16 tokens to requests of 2 KB, beside Dynamo, whose frontend tokenizes each prompt (here one token for a byte, an upper bound) and whose mocker refuses the fields of the streamed load:\n")
	p.compared([]string{workVLLM, workDynamo}, "pdproxy, vLLM PD", unaryFigures...)
}

func (p *page) memory() {
	p.say("## Memory, start and size\n\nThe RSS of a process counts shared libraries too. The kernel's socket buffers are not in it. Sizes on disk are in the first table.\n")
	p.bars("benchmarks-memory.svg", "RSS of an open stream, 2,000 open", "KB", []string{workPass, workVLLM, workSGLang}, memoryFigures[3])
	p.compared([]string{workPass, workVLLM, workSGLang}, "", memoryFigures...)
}
