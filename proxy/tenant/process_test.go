package tenant

import (
	"bufio"
	"context"
	"log/slog"
	"os"
	"os/exec"
	"testing"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
)

// asTaker is an environment variable. It names the folder with which this program takes
// requests until one is refused. The program writes a byte for each.
const asTaker = "PDPROXY_TEST_TAKER"

// taken is the tenant of the takers.
var taken = New(Tenant{Name: "t", Limits: Limits{Requests: 5000, Exchanges: 8}})

func TestMain(m *testing.M) {
	path := os.Getenv(asTaker)
	if path == "" {
		os.Exit(m.Run())
	}
	dir, err := privatedir.OpenExisting(path)
	if err != nil {
		panic(err)
	}
	l := NewLedger(dir, slog.Default(), newClock().time)
	for {
		a := l.Take(context.Background(), taken, 0)
		switch a.Refused {
		case Admitted:
			os.Stdout.Write([]byte{'.'})
			l.Settle(taken, Spent{})
		case Requests:
			return
		}
	}
}

// Processes that run at the same time, and some that are killed at any moment, get exactly the
// budget together. The places of those that were killed become free.
func TestKilledProcesses(t *testing.T) {
	dir := privatedirtest.Open(t)
	const killed, processes = 3, 5
	counts := make(chan int, processes)
	for n := range processes {
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), asTaker+"="+dir.Name())
		out, err := c.StdoutPipe()
		if err == nil {
			err = c.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			admitted, in := 0, bufio.NewReader(out)
			for {
				if _, err := in.ReadByte(); err != nil {
					break
				}
				if admitted++; n < killed && admitted == 100*(n+1) {
					_ = c.Process.Kill() // it may have ended
				}
			}
			_ = c.Wait() // killed, it says
			counts <- admitted
		}()
	}
	sum := 0
	for range processes {
		sum += <-counts
	}
	if limit := int(taken.Limits.Requests); sum > limit || sum < limit-killed { // one may have died before it wrote its byte
		t.Errorf("%d requests are admitted, want %d", sum, limit)
	}
	l := newLedger(t, dir, newClock())
	if a := l.Take(context.Background(), taken, 0); a.Refused != Requests || a.Requests.Remaining != 0 {
		t.Errorf("afterwards: %+v", a)
	}
	one := New(Tenant{Name: "t", Limits: Limits{Exchanges: 1}}) // the same tenant with another limit
	if a := l.Take(context.Background(), one, 0); a.Refused != Admitted {
		t.Errorf("a place of a killed process is taken: %+v", a)
	}
}
