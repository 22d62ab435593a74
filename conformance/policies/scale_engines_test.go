package policies

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
	"github.com/pdproxy/pdproxy/internal/dev/usage"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/engine/kvevents"
)

const (
	batchesPerSecond = 2000 // of all engines together
	batchBlocks      = 16   // stored and removed by a batch
	placesPerSecond  = 500
	engineTime       = 3 * time.Second
)

// BenchmarkScaleEngines has engines that publish KV events over TCP, together 2,000 batches a
// second. Each batch stores 16 blocks and removes the 16 blocks of the engine's batch before. An
// event is one block. The benchmark reports the CPU time per event, without the publishers'
// thread. Then it also places 500 requests a second, and reports the time from the write of a batch
// to the end of its changes of the index, and the time of a placement.
func BenchmarkScaleEngines(b *testing.B) {
	for _, n := range []int{4, 16, 64, 256, 1000, 4000} {
		b.Run(fmt.Sprintf("kv_aware/%d", n), func(b *testing.B) { benchEngines(b, n) })
	}
}

func benchEngines(b *testing.B, n int) {
	s := newScaled(b, "kv_aware", 1, n)
	f := newEngineFleet(b, s, n)
	before := usage.ProcessTime()
	publisher := f.publish(b, engineTime)
	cpu := usage.ProcessTime() - before - publisher
	b.ReportMetric(float64(cpu.Nanoseconds())/float64(2*batchBlocks*len(f.delays)), "cpu-ns/event")
	f.delays = f.delays[:0]
	stop, placed := make(chan struct{}), make(chan []time.Duration)
	go func() { placed <- s.paced(b, stop) }()
	f.publish(b, engineTime)
	close(stop)
	places := <-placed
	b.ReportMetric(usage.QuantileMicros(f.delays, 0.5), "delay-p50-µs")
	b.ReportMetric(usage.QuantileMicros(f.delays, 0.99), "delay-p99-µs")
	b.ReportMetric(usage.QuantileMicros(places, 0.5), "place-p50-µs")
	b.ReportMetric(usage.QuantileMicros(places, 0.99), "place-p99-µs")
	b.ReportMetric(0, "ns/op") // the work has a fixed length
}

// paced places requests at a fixed rate until stop is closed, and returns their times.
func (s *scaled) paced(b *testing.B, stop chan struct{}) (times []time.Duration) {
	tick := time.NewTicker(time.Second / placesPerSecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return times
		case <-tick.C:
		}
		began := time.Now()
		s.place(b, 1)
		times = append(times, time.Since(began))
	}
}

// engineFleet is the engines' side: one listener for the publishers of all engines, which have
// an address of 127.0.0.0/8 each.
type engineFleet struct {
	conns []net.Conn // by engine
	seqs  []int      // of the next batch, by engine

	mu     sync.Mutex
	sent   map[string]time.Time // of the batch in flight, by engine; guarded by mu
	delays []time.Duration      // guarded by mu
}

func addressOf(engine int) string { return fmt.Sprintf("127.1.%d.%d", engine/250, engine%250+1) }

// newEngineFleet returns when a manager follows the events of n engines, which are the targets of
// s in order.
func newEngineFleet(b *testing.B, s *scaled, n int) *engineFleet {
	b.Helper()
	f := &engineFleet{conns: make([]net.Conn, n), seqs: make([]int, n), sent: map[string]time.Time{}}
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	_, port, _ := net.SplitHostPort(l.Addr().String())
	m := kvevents.New(kvevents.Options{Index: s.index, Hooks: kvevents.Hooks{Applied: f.applied, Malformed: func(string, int) { b.Error("a batch is malformed") }}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); m.Run(ctx) }()
	b.Cleanup(func() { cancel(); <-done })
	pool, _ := s.registry.Snapshot().Pool("m0")
	for i, r := range pool.Ready {
		source := kvevents.Source{Name: addressOf(i), Model: "m0", Targets: r.KV[r.Rank : r.Rank+1], Publishers: []engine.KVEndpoints{{Events: "tcp://" + addressOf(i) + ":" + port}}, BlockTokens: blockTokens}
		if err := m.Follow(source); err != nil {
			b.Fatal(err)
		}
	}
	for range n {
		c, err := l.Accept()
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.Close() })
		if err := subscribed(c); err != nil {
			b.Fatal(err)
		}
		ip := c.LocalAddr().(*net.TCPAddr).IP.To4()
		f.conns[int(ip[2])*250+int(ip[3])-1] = c
	}
	return f
}

// subscribed does the part of a ZeroMQ publisher (ZMTP 3.0) until the subscription has arrived.
func subscribed(c net.Conn) error {
	hello := "\xff" + strings.Repeat("\x00", 8) + "\x7f\x03\x00NULL" + strings.Repeat("\x00", 48)
	ready := "\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
	if _, err := io.WriteString(c, hello+"\x04"+string(rune(len(ready)))+ready); err != nil {
		return err
	}
	head := make([]byte, 64+2)
	if _, err := io.ReadFull(c, head); err != nil {
		return err
	}
	_, err := io.CopyN(io.Discard, c, int64(head[65])+3) // READY, and a subscription to every topic
	return err
}

// applied notes the delay of an engine's batch.
func (f *engineFleet) applied(engine string, _ int) {
	now := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.delays = append(f.delays, now.Sub(f.sent[engine]))
}

// publish sends batches at the fixed rate, and returns the CPU time of its thread.
func (f *engineFleet) publish(b *testing.B, length time.Duration) time.Duration {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before, begin := usage.ThreadTime(), time.Now()
	total := int(length.Seconds() * batchesPerSecond)
	var message []byte
	for k := range total {
		time.Sleep(time.Until(begin.Add(time.Duration(k) * time.Second / batchesPerSecond)))
		engine := k % len(f.conns)
		message = appendBatch(message[:0], engine, f.seqs[engine])
		f.seqs[engine]++
		f.mu.Lock()
		f.sent[addressOf(engine)] = time.Now()
		f.mu.Unlock()
		if _, err := f.conns[engine].Write(message); err != nil {
			b.Fatal(err)
		}
	}
	used := usage.ThreadTime() - before
	testbed.Eventually(b, "all batches are applied", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.delays) == total
	})
	return used
}

// appendBatch appends the message of an engine's batch: topic, number and batch in the format of
// vLLM (vllm/distributed/kv_events.py KVEventBatch, BlockStored and BlockRemoved). It stores a
// chain of its own and removes that of the batch before.
func appendBatch(b []byte, engine, seq int) []byte {
	hash := func(b []byte, seq, i int) []byte {
		return binary.BigEndian.AppendUint64(append(b, 0xcf), uint64(engine)<<40|uint64(seq+1)<<8|uint64(i))
	}
	str := func(b []byte, s string) []byte { return append(append(b, 0xa0|byte(len(s))), s...) }
	hashes := func(b []byte, seq int) []byte {
		b = append(b, 0xdc, 0, batchBlocks)
		for i := range batchBlocks {
			b = hash(b, seq, i)
		}
		return b
	}
	batch := append([]byte{0x92, 0xcb, 0x41, 0xd9, 0xa3, 0xc2, 0xe0, 0, 0, 0}, 0x92)
	batch = hashes(str(append(batch, 0x96), "BlockStored"), seq)
	batch = append(batch, 0xc0, 0xdc, batchBlocks*blockTokens>>8, batchBlocks*blockTokens&0xff)
	for i := range batchBlocks * blockTokens {
		batch = binary.BigEndian.AppendUint32(append(batch, 0xce), uint32(engine*7919+seq*104729+i))
	}
	batch = append(batch, blockTokens, 0xc0)
	batch = hashes(str(append(batch, 0x92), "BlockRemoved"), seq-1)
	b = append(b, 1, 2, 'k', 'v', 1, 8)
	b = binary.BigEndian.AppendUint64(b, uint64(seq))
	b = binary.BigEndian.AppendUint64(append(b, 2), uint64(len(batch)))
	return append(b, batch...)
}
