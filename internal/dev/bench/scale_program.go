package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

const (
	scaleEvents = 2000 // events a second of all open streams together
	scaleRate   = 200  // requests a second with many engines
)

// streams measures open streams through one engine. All streams together have the same number of
// events a second.
func (s *scale) streams(ctx context.Context, out io.Writer) error {
	if err := s.startBackend(ctx); err != nil {
		return err
	}
	defer s.backend.stop()
	_, most := holdCounts(s.programs.descriptors)
	for _, n := range []int{100, 300, 1000, 3000, 5000, most} {
		proc, err := s.programs.start(ctx, pdproxy, s.backend.addr)
		if err != nil {
			return err
		}
		l := holdLoad(n, time.Duration(n)*time.Second/scaleEvents, 8*time.Second)
		l.Addr, l.PIDs = proc.addr, []int{proc.cmd.Process.Pid}
		r, _, err := s.runLoad(ctx, &l)
		proc.stop()
		if err != nil {
			return err
		}
		if r.Open < n {
			return fmt.Errorf("only %d of %d streams are open: %s", r.Open, n, r.FirstError)
		}
		fmt.Fprintf(out, "BenchmarkStreams/%d 1 %.1f kB/stream %.1f cpu-µs/event\n", n, r.StreamRSS, r.CPUEvent)
	}
	return nil
}

// engines measures a proxy with many engines, which have an address of 127.0.0.0/8 each and share
// one backend: its start, its probes without load, and requests at a fixed rate.
func (s *scale) engines(ctx context.Context, out io.Writer) error {
	addr, err := freeAddr()
	if err != nil {
		return err
	}
	_, port, _ := net.SplitHostPort(addr)
	if s.backend, err = launch(ctx, s.programs.dir, "backend", s.core, s.programs.self, "backend", "-listen", "0.0.0.0:"+port); err != nil {
		return err
	}
	defer s.backend.stop()
	if err := s.backend.await(func() error { return accepts(addr) }); err != nil {
		return err
	}
	for _, n := range []int{4, 64, 256, 1000, 4000} {
		if err := s.manyEngines(ctx, out, n, port); err != nil {
			return fmt.Errorf("%d engines: %w", n, err)
		}
	}
	return nil
}

func (s *scale) manyEngines(ctx context.Context, out io.Writer, n int, port string) error {
	addr, err := freeAddr()
	if err != nil {
		return err
	}
	var entries strings.Builder
	for i := range n {
		entries.WriteString(engineEntry(fmt.Sprint("e", i), fmt.Sprintf("127.1.%d.%d:%s", i/250, i%250+1, port), "both", "none"))
	}
	conf, err := pdproxyFile(s.programs.dir, fmt.Sprint("engines-", n), addr, entries.String())
	if err != nil {
		return err
	}
	began := time.Now()
	proc, err := launch(ctx, s.programs.dir, fmt.Sprint("engines-", n), s.programs.core, s.programs.pdproxy, "run", conf)
	if err != nil {
		return err
	}
	defer proc.stop()
	if err := proc.await(func() error { return healthy(ctx, pdproxy, addr) }); err != nil {
		return err
	}
	took, pids := time.Since(began), []int{proc.cmd.Process.Pid}
	started, err := usageOf(pids)
	if err != nil {
		return err
	}
	const idle = 10 * time.Second // two intervals of the probes
	time.Sleep(idle)
	rested, err := usageOf(pids)
	if err != nil {
		return err
	}
	l := openLoad(scaleRate, 5*time.Second)
	l.Addr, l.PIDs = addr, pids
	r, _, err := s.runLoad(ctx, &l)
	if err != nil {
		return err
	}
	if r.Errors > 0 {
		return fmt.Errorf("%d requests failed: %s", r.Errors, r.FirstError)
	}
	used, err := usageOf(pids)
	if err != nil {
		return err
	}
	probes := rested.minus(started).CPU.Seconds() / idle.Seconds() // cores
	fmt.Fprintf(out, "BenchmarkEngines/%d 1 %.2f start-s %.2f start-cpu-s %.1f idle-cpu-ms/s %.0f rss-MB %.2f p50-ms %.2f p99-ms %.0f cpu-µs/request\n",
		n, took.Seconds(), started.CPU.Seconds(), probes*1e3, float64(used.RSS)/(1<<20),
		r.Request.P50, r.Request.P99, r.CPURequest-probes*1e6*r.Seconds/float64(r.Requests))
	return nil
}
