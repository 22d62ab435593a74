package httpguard

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"
)

// TestConns: each address may have a limited share of the connections, so other addresses
// can still connect. A closed connection makes room for another.
func TestConns(t *testing.T) {
	k := NewConns()
	k.most, k.mostOfOne = 6, 4
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ConnState: k.Follow, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) })}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(l) // returns after Close
	}()
	open := func(from string) (served bool, c net.Conn) {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		return err == nil && resp.StatusCode == 204, c
	}
	var conns []net.Conn
	for i, tt := range []struct {
		from string
		want bool
	}{
		{"127.0.0.2", true}, {"127.0.0.2", true}, {"127.0.0.2", true}, {"127.0.0.2", true},
		{"127.0.0.2", false}, // the share of the address is used up
		{"127.0.0.3", true}, {"127.0.0.3", true},
		{"127.0.0.3", false}, // all connections are used up
	} {
		served, c := open(tt.from)
		defer c.Close()
		if served != tt.want {
			t.Errorf("connection %d from %s: served %v", i, tt.from, served)
		}
		conns = append(conns, c)
	}
	conns[0].Close()
	for deadline := time.Now().Add(10 * time.Second); ; {
		if served, c := open("127.0.0.2"); served {
			defer c.Close()
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a connection that was closed made no room")
		}
	}
	server.Close()
	<-done
	for deadline := time.Now().Add(10 * time.Second); len(k.held()) > 0; {
		if time.Now().After(deadline) {
			t.Fatalf("remaining connections: %v", k.held())
		}
	}
}

// held returns the number of connections of each address.
func (k *Conns) held() map[string]int {
	k.mu.Lock()
	defer k.mu.Unlock()
	held := make(map[string]int)
	for from, n := range k.of {
		held[from.String()] = n
	}
	return held
}
