package balance

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/pdproxy/pdproxy/proxy/privatedir"
	"github.com/pdproxy/pdproxy/proxy/privatedir/privatedirtest"
	"github.com/pdproxy/pdproxy/proxy/takeover"
)

// join makes a worker with a copy of the socket.
func join(t *testing.T, dir *privatedir.Dir, slot int, socket net.Listener) (*Worker, net.Listener) {
	t.Helper()
	s, err := takeover.FromListener("public", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer s.File.Close()
	own, err := s.Listener()
	if err != nil {
		t.Fatal(err)
	}
	w, l, err := Join(dir, slot, own)
	if err != nil {
		own.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return w, l
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// serve accepts until l is closed, and counts.
func serve(t *testing.T, w *Worker, l net.Listener) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			t.Error(err)
			return
		}
		w.Connection(1)
		t.Cleanup(func() { c.Close() })
		c.Write([]byte("x"))
	}
}

// dial opens n connections and waits until each is accepted.
func dial(t *testing.T, l net.Listener, n int) {
	t.Helper()
	var wg sync.WaitGroup
	for range n {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		wg.Go(func() {
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// TestEven: a burst is divided among the running workers. A worker that has joined but
// does not accept delays no connection, for any number of its connections.
func TestEven(t *testing.T) {
	for _, stopped := range []int{0, 1} {
		t.Run(fmt.Sprint("stopped ", stopped), func(t *testing.T) {
			dir, socket := privatedirtest.Open(t), listen(t)
			var running sync.WaitGroup
			defer running.Wait()
			var workers []*Worker
			for slot := range 4 + stopped {
				w, l := join(t, dir, slot, socket)
				if slot >= 4 {
					continue
				}
				workers = append(workers, w)
				running.Go(func() { serve(t, w, l) })
				defer l.Close()
			}
			for n := 100; n <= 300; n += 100 {
				dial(t, socket, 100)
				sum := int64(0)
				for i, w := range workers {
					has := w.own.connections.Load()
					sum += has
					if part := int64(n / 4); stopped == 0 && 10*has > 13*part {
						t.Errorf("worker %d has %d of %d", i, has, n)
					}
				}
				if sum != int64(n) {
					t.Errorf("the workers count %d connections of %d", sum, n)
				}
			}
		})
	}
}

// TestAhead: a worker with more connections leaves the next connection to others.
func TestAhead(t *testing.T) {
	type has struct{ connections, exchanges int64 }
	tests := []struct {
		name    string
		workers []has // the first one is asked
		waiting int
		want    bool
	}{
		{"alone", []has{{50, 50}}, 1, false},
		{"the first connection", []has{{0, 0}, {0, 0}}, 1, false},
		{"one more", []has{{1, 0}, {0, 0}}, 1, true},
		{"one less", []has{{0, 0}, {1, 0}}, 1, false},
		{"a part of a burst", []has{{49, 0}, {0, 0}}, 100 - 49, false},
		{"the part of a burst", []has{{50, 0}, {0, 0}}, 100 - 50, true},
		{"nearly equal", []has{{101, 0}, {100, 0}}, 1, false},
		{"a sixteenth", []has{{120, 0}, {100, 0}}, 1, true},
		{"equal, with more streams", []has{{2, 200}, {2, 0}}, 1, true},
		{"equal, with fewer streams", []has{{2, 0}, {2, 200}}, 1, false},
		{"streams count little", []has{{80, 8000}, {100, 0}}, 1, false},
		{"streams of a burst that began first", []has{{100, 0}, {100, 100}, {0, 0}, {0, 0}}, 200, true},
		{"the least of many", []has{{5, 0}, {9, 0}, {7, 0}, {6, 0}}, 1, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir, socket := privatedirtest.Open(t), listen(t)
			var first *Worker
			for slot, h := range tt.workers {
				w, _ := join(t, dir, slot, socket)
				w.Connection(h.connections)
				w.Exchange(h.exchanges)
				if slot == 0 {
					first = w
				}
			}
			if _, ahead := first.ahead(tt.waiting); ahead != tt.want {
				t.Errorf("ahead: %v, want %v", ahead, tt.want)
			}
		})
	}
}

// TestOthersThatDoNotCount: a worker does not wait for a worker that has left, has another
// socket, or does not use its head starts. A worker that accepts again counts again.
func TestOthersThatDoNotCount(t *testing.T) {
	dir, socket := privatedirtest.Open(t), listen(t)
	w, _ := join(t, dir, 0, socket)
	w.Connection(10)
	ahead := func() bool { _, yes := w.ahead(1); return yes }
	if join(t, dir, 1, listen(t)); ahead() {
		t.Error("a worker waits for a worker of another socket")
	}
	other, l := join(t, dir, 2, socket)
	if !ahead() {
		t.Fatal("a worker does not wait for a worker without connections")
	}
	for range maxMissed {
		if !ahead() {
			t.Fatal("a worker stops waiting too early")
		}
		w.begin()
		p, _ := w.ahead(1)
		w.end(p)
	}
	if ahead() {
		t.Error("a worker waits for a suspended worker")
	}
	other.own.looks.Add(1)
	if !ahead() {
		t.Error("a worker does not wait for a resumed worker")
	}
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	other.own.pid.Store(int64(dead.Process.Pid))
	w.begin()
	p, _ := w.ahead(1)
	if w.end(p); ahead() {
		t.Error("a worker waits for a dead worker")
	}
	other.own.looks.Add(1)
	if l.Close(); ahead() {
		t.Error("a worker waits for a worker that has left")
	}
	if next, _ := join(t, dir, 2, socket); next.own.connections.Load() != 0 || !ahead() {
		t.Error("the next worker of the slot begins with the old number of connections, or is not ahead")
	}
}

// TestClose: Close ends an Accept that leaves connections to others.
func TestClose(t *testing.T) {
	dir, socket := privatedirtest.Open(t), listen(t)
	w, l := join(t, dir, 0, socket)
	join(t, dir, 1, socket)
	w.Connection(10)
	failed := make(chan error)
	go func() {
		c, err := l.Accept()
		if err == nil {
			c.Close()
		}
		failed <- err
	}()
	for w.own.looks.Load() < 2 { // it has begun
		time.Sleep(time.Millisecond)
	}
	l.Close()
	if err := <-failed; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept: %v", err)
	}
	if err := l.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the second Close: %v", err)
	}
}

// TestLayout: a worker does not use a file of another layout or size, and does not change it.
func TestLayout(t *testing.T) {
	good := make([]byte, unsafe.Sizeof(table{}))
	other := slices.Clone(good)
	binary.NativeEndian.PutUint64(other[16:], 7)
	for _, tt := range []struct {
		name string
		file []byte
		want string // in the error; "": none
	}{
		{"before the layout had a number", good, ""},
		{"another layout", other, "layout 7"},
		{"longer", append(slices.Clone(good), 0), "bytes"},
		{"shorter", good[:100], "bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := privatedirtest.Open(t)
			if err := dir.WriteFile(fileName, tt.file); err != nil {
				t.Fatal(err)
			}
			w, l, err := Join(dir, 0, listen(t))
			if tt.want == "" {
				if err != nil || w.all.layout.Load() != layout {
					t.Fatalf("Join: %v", err)
				}
				l.Close()
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("Join: %v, want an error with %q", err, tt.want)
			}
			if after, err := dir.ReadFile(fileName, 1<<20); err != nil || !bytes.Equal(after, tt.file) {
				t.Errorf("the file has changed, or cannot be read: %v", err)
			}
		})
	}
}

func TestNoEntryIsLeft(t *testing.T) {
	if _, _, err := Join(privatedirtest.Open(t), slots, listen(t)); err == nil {
		t.Error("Join accepted more workers than there are slots")
	}
}

func BenchmarkAhead(b *testing.B) {
	w := &Worker{all: new(table), socket: 1}
	w.own = &w.all.entries[0]
	w.all.used.Store(4)
	for i := range 4 {
		w.all.entries[i].socket.Store(1)
		w.all.entries[i].connections.Store(50)
	}
	for b.Loop() {
		w.ahead(1)
	}
}
