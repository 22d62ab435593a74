//go:build linux

package fleet

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/access"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
)

// In these benchmarks the coordinator is a separate process: this test binary, started
// again. Workers reach it by a Unix socket ("wire") or TCP ("tcp"). CPU figures are for
// both processes.

// coordinatorAt is the environment variable with the network, the address and the fleet
// that TestCoordinatorProcess serves. It is set only in the coordinator's process.
const coordinatorAt = "PDPROXY_TEST_COORDINATOR"

// benchFleets are the targets of the benchmarks. "aggregated" has 8 targets that serve
// whole requests, so no id is minted. "pair" has 4 targets for each of the two phases.
var benchFleets = map[string][]string{
	"aggregated": {"b both one 8"},
	"pair":       {"p prefill two 4", "d decode two 4"},
}

// TestCoordinatorProcess is the coordinator's process in the benchmarks. It runs until
// its standard input ends. Without coordinatorAt it tests nothing.
func TestCoordinatorProcess(t *testing.T) {
	where := strings.Fields(os.Getenv(coordinatorAt))
	if len(where) == 0 {
		return
	}
	network, address, fleet := where[0], where[1], where[2]
	w := newWorld(t, benchFleets[fleet]...)
	w.SetDecider(placetest.Builtin(t, "auto", "least_load"))
	l, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	fmt.Println("serving", l.Addr())
	certs, err := access.NewCredentials(access.Options{})
	if err != nil {
		t.Fatal(err)
	}
	gate := access.NewGate(access.GateOptions{Credentials: certs, Log: placetest.Quiet()})
	if err := NewServer(ServerOptions{Gate: gate, Local: w.Local, Log: placetest.Quiet(), Epoch: 1}).Serve(ctx, l); err != nil {
		t.Fatal(err)
	}
}

// coordinatorProcess starts a coordinator's process. It returns the address, and a
// function for the CPU time of both processes.
func coordinatorProcess(b *testing.B, network, fleet string) (address string, cpu func() time.Duration) {
	b.Helper()
	address = "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(b.TempDir(), "s")
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestCoordinatorProcess$")
	cmd.Env = append(os.Environ(), coordinatorAt+"="+network+" "+address+" "+fleet)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		stdin.Close()
		cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	address, serving := strings.CutPrefix(strings.TrimSpace(line), "serving ")
	if !serving {
		b.Fatalf("output of the coordinator process = %q, %v", line, err)
	}
	return address, func() time.Duration { return usage.ProcessTime() + processCPU(b, cmd.Process.Pid) }
}

// processCPU returns the CPU time of another process: the sum over its threads.
func processCPU(b *testing.B, pid int) time.Duration {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	var sum time.Duration
	for _, task := range tasks {
		if text, err := os.ReadFile(task); err == nil {
			ns, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
			if err != nil {
				b.Fatal(err)
			}
			sum += time.Duration(ns)
		}
	}
	return sum
}

// benchClient returns a connected worker of the fleet.
func benchClient(b *testing.B, fleet, network, address string) *Client {
	b.Helper()
	w := newWorld(b, benchFleets[fleet]...)
	c := w.newClient(b, network, address)
	c.o.Fallback = c.o.Fallback.(placetest.Uncounted).Local
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); c.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-done })
	w.use(c)
	w.connected(b)
	return c
}

// placers runs a benchmark with a coordinator in this process and over each network.
func placers(b *testing.B, fleet string, run func(b *testing.B, c coordinator.Coordinator, cpu func() time.Duration)) {
	b.Run(fleet+"/local", func(b *testing.B) {
		w := newWorld(b, benchFleets[fleet]...)
		w.SetDecider(placetest.Builtin(b, "auto", "least_load"))
		run(b, w.Local, usage.ProcessTime)
	})
	for name, network := range map[string]string{"wire": "unix", "tcp": "tcp"} {
		b.Run(fleet+"/"+name, func(b *testing.B) {
			address, cpu := coordinatorProcess(b, network, fleet)
			run(b, benchClient(b, fleet, network, address), cpu)
		})
	}
}

// placeOnce makes the coordinator calls of an exchange with one leg, or with two.
func placeOnce(b *testing.B, c coordinator.Coordinator, a *coordinator.PlacementRequest) {
	p, err := c.Place(context.Background(), a)
	if err != nil {
		b.Error(err)
		return
	}
	if len(p.Fallbacks) > 0 {
		b.Errorf("got fallbacks %v", p.Fallbacks)
	}
	p.Recycle()
	if !p.Prefill.IsZero() {
		p.Lease.PrefillDone()
	}
	p.Lease.Answered(true)
	p.Lease.Release()
}

// BenchmarkWireAlone places one request after the other. Each makes one call and sends
// the two or three messages of a lease.
func BenchmarkWireAlone(b *testing.B) {
	for _, fleet := range []string{"aggregated", "pair"} {
		placers(b, fleet, func(b *testing.B, c coordinator.Coordinator, cpu func() time.Duration) {
			a := placetest.NewPlacementRequest()
			before := cpu()
			b.ReportAllocs()
			for b.Loop() {
				placeOnce(b, c, a)
			}
			b.ReportMetric(float64(cpu()-before)/float64(b.N), "cpu-ns/op")
		})
	}
}

// BenchmarkWirePaced places 5,000 times a second, from 8 goroutines.
func BenchmarkWirePaced(b *testing.B) {
	const callers, each = 8, 625
	for _, fleet := range []string{"aggregated", "pair"} {
		placers(b, fleet, func(b *testing.B, c coordinator.Coordinator, cpu func() time.Duration) {
			took := make([][]time.Duration, callers)
			var running sync.WaitGroup
			before, began := cpu(), time.Now()
			for i := range callers {
				running.Go(func() {
					a := placetest.NewPlacementRequest()
					for n := i; n < b.N; n += callers {
						at := began.Add(time.Duration(n) * time.Second / (callers * each))
						time.Sleep(time.Until(at))
						start := time.Now()
						p, err := c.Place(context.Background(), a)
						took[i] = append(took[i], time.Since(start))
						if err != nil || len(p.Fallbacks) > 0 {
							b.Error(err)
							return
						}
						p.Recycle()
						p.Lease.Answered(true)
						p.Lease.Release()
					}
				})
			}
			running.Wait()
			all := slices.Concat(took...)
			b.ReportMetric(float64(len(all))/time.Since(began).Seconds(), "placements/s")
			b.ReportMetric(usage.QuantileMicros(all, 0.5), "p50-µs")
			b.ReportMetric(usage.QuantileMicros(all, 0.99), "p99-µs")
			b.ReportMetric(float64(cpu()-before)/float64(b.N), "cpu-ns/op")
		})
	}
}

// BenchmarkWireWorkers has 64 workers with 16 exchanges each. They place on one
// coordinator as fast as possible.
func BenchmarkWireWorkers(b *testing.B) {
	for name, network := range map[string]string{"wire": "unix", "tcp": "tcp"} {
		b.Run(name, func(b *testing.B) { benchWorkers(b, network) })
	}
}

// BenchmarkScaleWorkers has 1 to 64 workers on one coordinator, over a Unix socket. First 16
// exchanges of each worker place as fast as possible. Then all workers together place 2,000 times
// a second. The CPU time is that of the coordinator's process.
func BenchmarkScaleWorkers(b *testing.B) {
	for n := 1; n <= 64; n *= 2 {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			const each, length, rate = 16, 2 * time.Second, 2000
			address, cpu := coordinatorProcess(b, "unix", "aggregated")
			clients := make([]*Client, n)
			for i := range clients {
				clients[i] = benchClient(b, "aggregated", "unix", address)
			}
			coordinator := func() time.Duration { return cpu() - usage.ProcessTime() }
			before := coordinator()
			placed := len(placeFor(b, clients, n*each, length, 0))
			b.ReportMetric(float64(placed)/length.Seconds(), "placements/s")
			b.ReportMetric(float64((coordinator()-before).Nanoseconds())/1e3/float64(placed), "cpu-µs/placement")
			took := placeFor(b, clients, n, length, time.Second*time.Duration(n)/rate)
			b.ReportMetric(usage.QuantileMicros(took, 0.5), "p50-µs")
			b.ReportMetric(usage.QuantileMicros(took, 0.99), "p99-µs")
			b.ReportMetric(0, "ns/op") // the work has a fixed length
		})
	}
}

// placeFor places for some time from several goroutines, each with a pause between the starts of
// two placements, and returns the time of each placement. A placement that had to wait for the one
// before counts from its planned start.
func placeFor(b *testing.B, clients []*Client, callers int, length, pause time.Duration) (all []time.Duration) {
	took := make([][]time.Duration, callers)
	var running sync.WaitGroup
	end := time.Now().Add(length)
	for i := range callers {
		running.Go(func() {
			a := placetest.NewPlacementRequest()
			due := time.Now().Add(pause * time.Duration(i) / time.Duration(callers))
			for ; due.Before(end); due = due.Add(pause) {
				if pause == 0 {
					due = time.Now()
				}
				from := due
				if wait := time.Until(due); wait > 0 {
					time.Sleep(wait)
					from = time.Now()
				}
				placeOnce(b, clients[i%len(clients)], a)
				took[i] = append(took[i], time.Since(from))
			}
		})
	}
	running.Wait()
	return slices.Concat(took...)
}

func benchWorkers(b *testing.B, network string) {
	const workers, each = 64, 16
	address, cpu := coordinatorProcess(b, network, "aggregated")
	clients := make([]*Client, workers)
	for i := range clients {
		clients[i] = benchClient(b, "aggregated", network, address)
	}
	before, began := cpu(), time.Now()
	var running sync.WaitGroup
	for i := range workers * each {
		running.Go(func() {
			a := placetest.NewPlacementRequest()
			for range b.N / (workers * each) {
				placeOnce(b, clients[i%workers], a)
			}
		})
	}
	running.Wait()
	placed := float64(b.N / (workers * each) * workers * each)
	b.ReportMetric(placed/time.Since(began).Seconds(), "placements/s")
	b.ReportMetric(float64(cpu()-before)/placed, "cpu-ns/placement")
}
