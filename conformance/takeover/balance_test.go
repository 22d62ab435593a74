package takeover

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/quic-go/quic-go/http3"

	"github.com/pdproxy/pdproxy/internal/enginesim"
)

// spreadWorkers is the number of workers over which the connections of these
// tests spread.
const spreadWorkers = 4

// newSpread is a fleet whose two engines can hold many streams.
func newSpread(t *testing.T, secure bool) *world {
	t.Helper()
	var engines []*enginesim.Engine
	var keys bytes.Buffer
	fmt.Fprint(&keys, "[limits]\nmax_exchanges = 4000\nmax_reading = 4000\nper_client = 4000\n")
	for i := range 2 {
		e := startEngine(t, enginesim.Config{Connector: enginesim.ConnectorNone, Role: enginesim.RoleBoth, DecodeUsPerToken: 1_000_000, MaxRunning: 1000, KVBlocks: 1 << 16})
		engines = append(engines, e)
		fmt.Fprintf(&keys, "[[engine]]\nname = \"e%d\"\nurl = %q\nrole = \"both\"\nconnector = %q\n", i, e.URL(), enginesim.ConnectorNone)
	}
	alone := startEngine(t, enginesim.Config{Connector: enginesim.ConnectorNone, Role: enginesim.RoleBoth})
	w := newWorldOf(t, secure, spreadWorkers, engines, alone, keys.String())
	w.run()
	w.successor(0, func() {})
	w.awaitReady()
	w.eventually("not all workers are ready", func() bool {
		ready := 0
		for slot := range w.children("worker") {
			if h, _, _ := w.dir.LockHolder(fmt.Sprintf("worker-%d.lock", slot)); h.State == "ready" {
				ready++
			}
		}
		return ready == spreadWorkers
	})
	return w
}

// perWorker returns the values of a gauge by worker, in ascending order.
func (w *world) perWorker(name string) []int {
	w.t.Helper()
	resp, err := http.Get("http://" + w.admin + "/metrics")
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	values := map[string]int{}
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		series, value, _ := strings.Cut(lines.Text(), "} ")
		labels, found := strings.CutPrefix(series, name+"{")
		_, process, _ := strings.Cut(labels, `process="`)
		process, _, _ = strings.Cut(process, `"`)
		if n, err := strconv.Atoi(value); found && err == nil && process != "coordinator" {
			values[process] += n
		}
	}
	var list []int
	for _, n := range values {
		list = append(list, n)
	}
	slices.Sort(list)
	return list
}

// visitor is a client with a separate connection.
type visitor struct {
	http.Client
	base string
	body io.ReadCloser // of an open stream; nil: none
}

func (w *world) visitor(protocol string) *visitor {
	v := &visitor{base: "http://" + w.addr}
	var p http.Protocols
	switch protocol {
	case "HTTP/1.1":
		p.SetHTTP1(true)
	case "HTTP/2":
		p.SetUnencryptedHTTP2(true)
	default:
		v.base = "https://" + w.addr
		v.Transport = &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
		return v
	}
	v.Transport = &http.Transport{Protocols: &p}
	return v
}

// come opens the connection, and a stream on it if requested.
func (v *visitor) come(stream bool) error {
	resp, err := v.Get(v.base + "/version")
	if stream && err == nil {
		resp.Body.Close()
		resp, err = v.Post(v.base+path, "application/json", strings.NewReader(`{"model":"sim","prompt":"Say a lot.","max_tokens":4000,"ignore_eos":true,"stream":true}`))
	}
	if err != nil {
		return err
	}
	if resp.StatusCode != 200 {
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		return fmt.Errorf("status %d: %s", resp.StatusCode, text)
	}
	if stream {
		v.body = resp.Body
		return nil
	}
	_, err = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	return err
}

func (v *visitor) leave() {
	if v.body != nil {
		v.body.Close()
	}
	if c, ok := v.Transport.(io.Closer); ok {
		c.Close()
	}
	v.CloseIdleConnections()
}

// come makes that many clients connect, each gap after the previous one, and
// returns when all are served.
func (w *world) come(protocol string, n int, gap time.Duration, stream bool) (all []*visitor) {
	w.t.Helper()
	var wg sync.WaitGroup
	for range n {
		v := w.visitor(protocol)
		all = append(all, v)
		wg.Go(func() {
			if err := v.come(stream); err != nil {
				w.t.Error(err)
			}
		})
		time.Sleep(gap)
	}
	wg.Wait()
	return all
}

// most waits until a gauge has that sum, and returns the ratio of the largest
// worker's value to its even part.
func (w *world) most(name string, n int) float64 {
	w.t.Helper()
	var values []int
	w.eventually(fmt.Sprintf("%s is not %d", name, n), func() bool {
		values = w.perWorker(name)
		sum := 0
		for _, v := range values {
			sum += v
		}
		return len(values) == spreadWorkers && sum == n
	})
	w.t.Logf("%s: %v", name, values)
	return float64(values[len(values)-1]*spreadWorkers) / float64(max(1, n))
}

// rounds is the number of tries of a test of the spread. On a busy machine a worker may
// get no processor time while all connections arrive. Then the others serve them.
const rounds = 3

// TestSpread: connections spread evenly over the workers, in whatever pattern
// they arrive, and so do their streams. For HTTP/3 the kernel assigns addresses
// to workers at random; a worker gets 1.6 times its part once in a million
// times.
func TestSpread(t *testing.T) {
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2", "HTTP/3"} {
		t.Run(protocol, func(t *testing.T) {
			w, most := newSpread(t, protocol == "HTTP/3"), 1.3
			if protocol == "HTTP/3" {
				most = 1.6
			}
			for _, tt := range []struct {
				name   string
				n      int
				gap    time.Duration
				stream bool
			}{
				{"at once", 200, 0, false},
				{"in a second", 200, 5 * time.Millisecond, false},
				{"streams at once", 400, 0, true},
				{"streams in a second", 400, 2500 * time.Microsecond, true},
			} {
				if protocol == "HTTP/3" && tt.gap == 0 {
					continue // a worker that gets no processor time rejects connections as soon as 32 handshakes have ended
				}
				t.Run(tt.name, func(t *testing.T) {
					defer func(outer *testing.T) { w.t = outer }(w.t)
					w.t = t
					var share float64
					for range rounds {
						all := w.come(protocol, tt.n, tt.gap, tt.stream)
						share = w.most("pdproxy_worker_connections_open", tt.n)
						if tt.stream {
							share = max(share, w.most("pdproxy_worker_exchanges_open", tt.n))
						}
						for _, v := range all {
							v.leave()
						}
						w.most("pdproxy_worker_connections_open", 0)
						if share <= most {
							return
						}
					}
					t.Errorf("one worker has %.2f times its share, %d times in a row", share, rounds)
				})
			}
		})
	}
}

// TestSpreadWithout: no connection waits for a worker that is killed or stopped.
func TestSpreadWithout(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			w := newSpread(t, false)
			w.expected = "a process "                            // has ended
			for _, v := range w.come("HTTP/1.1", 40, 0, false) { // each worker has received some
				v.leave()
			}
			pid := w.children("worker")[0]
			syscall.Kill(pid, signal)
			w.eventually("the worker still runs", func() bool { return !runs(pid) })
			for _, v := range w.come("HTTP/1.1", 300, 0, false) {
				v.leave()
			}
			if signal == syscall.SIGSTOP {
				syscall.Kill(pid, syscall.SIGCONT)
			}
		})
	}
}

// runs reports whether a thread of a process is neither stopped nor ended. A signal reaches the
// threads of a process on a busy machine some time after the call that sends it. Until then they
// accept connections.
func runs(pid int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if len(threads) == 0 {
		return syscall.Kill(pid, 0) == nil
	}
	return slices.ContainsFunc(threads, func(path string) bool {
		stat, err := os.ReadFile(path)
		_, state, _ := strings.Cut(string(stat), ") ")
		return err == nil && !strings.HasPrefix(state, "T") && !strings.HasPrefix(state, "Z")
	})
}
