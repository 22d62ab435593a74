package http1

import (
	"os"
	"strconv"
	"sync/atomic"
	"testing"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// usualStreams is how many random streams a run without HTTP1_STREAMS compares.
const usualStreams = 10_000

// number returns the number of an environment variable.
func number(t testing.TB, name string, usual int) int {
	t.Helper()
	v, set := os.LookupEnv(name)
	if !set {
		return usual
	}
	n, err := strconv.Atoi(v)
	if err != nil {
		t.Fatalf("%s=%q", name, v)
	}
	return n
}

// TestRandomStreams compares the proxy with net/http and llhttp on random streams that arrive in
// random pieces.
func TestRandomStreams(t *testing.T) { eachReader(t, testRandomStreams) }

func testRandomStreams(t *testing.T, reader string) {
	streams, seed := number(t, "HTTP1_STREAMS", usualStreams), number(t, "HTTP1_SEED", 1)
	proxy, library := onSockets(t, proxyServer(reader)), onSockets(t, netHTTPServer)
	var handled, excused atomic.Int64
	testbed.Parallel(streams, 8, func(n int) {
		seed := uint64(seed + n)
		s := randomStream(seed)
		if otherProtocol(s) {
			return
		}
		l := readLLHTTP(t, s)
		whole := mostRequests(s, l)
		got, err := proxy.send(whole, split(rng(seed), s)...)
		if err != nil {
			t.Errorf("seed %d: %v\n%q", seed, err, s)
			return
		}
		if len(got.messages) == 0 {
			return
		}
		std, err := library.send(len(libraryBodies(s)), s)
		if err != nil {
			t.Errorf("seed %d: net/http: %v\n%q", seed, err, s)
			return
		}
		handled.Add(int64(len(got.messages)))
		e, difference := judge(got, l, std)
		if e != nil {
			excused.Add(1)
		}
		if difference != "" {
			t.Errorf("seed %d: %s\n%q", seed, difference, s)
		}
	})
	t.Logf("%d streams, %d requests accepted, %d streams with a known exception", streams, handled.Load(), excused.Load())
	if handled.Load() < int64(streams)/2 || excused.Load() > int64(streams)/20 {
		t.Error("the streams are of little use")
	}
}
