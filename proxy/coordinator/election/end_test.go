package election

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// TestEndBlamesNothing: a coordinator that waits for etcd, or for its turn, and then ends or
// resigns, logs no trouble of etcd.
func TestEndBlamesNothing(t *testing.T) {
	for name, end := range map[string]func(e *Election, cancel func()){
		"the process ends":       func(_ *Election, cancel func()) { cancel() },
		"the coordinator leaves": func(e *Election, cancel func()) { e.Resign(); time.AfterFunc(50*time.Millisecond, cancel) },
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			reached := make(chan struct{}, 100)
			go func() { // ends with l
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					defer c.Close()
					reached <- struct{}{}
				}
			}()
			var out bytes.Buffer
			e := New(Options{
				Etcd: clientv3.Config{Endpoints: []string{l.Addr().String()}},
				Name: "f", Address: "10.0.0.1:7000", Node: "a", TTL: 2 * time.Second, Log: slog.New(slog.NewTextHandler(&out, nil)),
			})
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan struct{})
			go func() {
				defer close(done)
				e.Run(ctx)
			}()
			<-reached
			<-reached // the follower and the candidate
			end(e, cancel)
			<-done
			if out.Len() > 0 {
				t.Errorf("logged: %s", out.String())
			}
		})
	}
}
