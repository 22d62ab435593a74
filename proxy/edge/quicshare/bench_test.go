package quicshare

import (
	"net"
	"sync"
	"testing"

	"golang.org/x/net/ipv4"

	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// BenchmarkReadBatch measures the cost that quicshare adds to reading a member's own
// packets, in batches of eight.
func BenchmarkReadBatch(b *testing.B) {
	type reader interface {
		ReadBatch([]ipv4.Message, int) (int, error)
	}
	c, err := Listen(privatedirtest.Open(b), "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	own := short([]byte{0, 2, 3, 4, 5, 6, 7})
	to, err := net.DialUDP("udp", nil, c.LocalAddr().(*net.UDPAddr))
	if err != nil {
		b.Fatal(err)
	}
	defer to.Close()
	for _, r := range []struct {
		name string
		reader
	}{{"plain", c.batch}, {"member", c}} {
		b.Run(r.name, func(b *testing.B) {
			ms := make([]ipv4.Message, 8)
			for i := range ms {
				ms[i] = room()
			}
			b.ReportAllocs()
			for range b.N {
				b.StopTimer()
				for range ms {
					if _, err := to.Write(own); err != nil {
						b.Fatal(err)
					}
				}
				b.StartTimer()
				for got := 0; got < len(ms); {
					n, err := r.ReadBatch(ms, 0)
					if err != nil {
						b.Fatal(err)
					}
					got += n
				}
			}
		})
	}
}

// BenchmarkForward measures what eight forwarded packets cost both processes: two
// system calls, two copies, and waking the reader.
func BenchmarkForward(b *testing.B) {
	dir := privatedirtest.Open(b)
	from, err := Listen(dir, "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer from.Close()
	to, err := Listen(dir, from.LocalAddr().String())
	if err != nil {
		b.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(to.Run)
	defer running.Wait()
	defer to.Close()
	ms, got := make([]ipv4.Message, 8), make([]ipv4.Message, 8)
	for i := range ms {
		ms[i] = message("127.0.0.1:1", long([]byte{to.member.number, 2, 3, 4, 5, 6, 7}), nil)
		got[i] = room()
	}
	b.ReportAllocs()
	for b.Loop() {
		if from.keepOwn(ms, nil) != 0 {
			b.Fatal("kept a packet of another member")
		}
		for n := 0; n < len(ms); {
			k, err := to.ReadBatch(got, 0)
			if err != nil {
				b.Fatal(err)
			}
			n += k
		}
	}
}
