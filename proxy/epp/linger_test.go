package epp

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestLinger: a picker that ends serves until no gateway is connected, or none has sent a request for
// some time, within a limit.
func TestLinger(t *testing.T) {
	const quiet, limit = 5 * time.Second, 30 * time.Second
	for _, tt := range []struct {
		name     string
		requests time.Duration // one each second until then
		leaves   time.Duration // when the only connection closes; 0: never
		taken    time.Duration // when a successor serves; 0: never
		want     time.Duration
	}{
		{"no request comes", 0, 0, 0, quiet},
		{"gateways send for some time", 12 * time.Second, 0, 0, 12*time.Second + quiet},
		{"a gateway does not move", time.Hour, 0, 0, limit},
		{"the gateway leaves", time.Hour, 3 * time.Second, 0, 3 * time.Second},
		{"nobody is connected", 0, time.Nanosecond, 0, 0},
		{"a successor serves", time.Hour, 0, 2 * time.Second, 2 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := serve(t)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				c := s.dial(t)
				c.Connect()
				synctest.Wait()
				if tt.leaves > 0 {
					time.AfterFunc(tt.leaves, func() { c.Close() })
				}
				if tt.taken > 0 {
					time.AfterFunc(tt.taken, cancel)
				}
				begin := time.Now()
				sent := make(chan struct{})
				go func() {
					defer close(sent)
					for time.Since(begin) < tt.requests && ctx.Err() == nil {
						time.Sleep(time.Second)
						s.requested.Store(time.Now().UnixNano())
					}
				}()
				time.Sleep(time.Nanosecond)
				synctest.Wait() // the connection has ended if it ends at once
				s.Linger(ctx, quiet, limit)
				if took := time.Since(begin).Truncate(healthCheck); took != tt.want {
					t.Errorf("took %s, want %s", took, tt.want)
				}
				cancel()
				<-sent
			})
		})
	}
}
