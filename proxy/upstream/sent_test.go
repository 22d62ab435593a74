package upstream

import (
	"bytes"
	"sync/atomic"
	"testing"
	"testing/synctest"
)

// Sent comes when the engine has taken the whole request, before it answers, and
// not for a request that never left.
func TestSent(t *testing.T) {
	both(t, func(t *testing.T, newClient func(Options) Client) {
		synctest.Test(t, func(t *testing.T) {
			read, answer := make(chan struct{}), make(chan struct{})
			e := newEngine(t, func(c *duplex, _ int) {
				<-read
				c.next()
				<-answer
				c.say(okAnswer)
				c.next()
			})
			var sent atomic.Int32
			req := &Request{Method: "POST", Path: "/", Body: [][]byte{bytes.Repeat([]byte("x"), 64<<10)}, Sent: func() { sent.Add(1) }}
			done := make(chan struct{})
			client := e.client(t, newClient, nil)
			go func() {
				defer close(done)
				ask(t, client, req)
			}()
			synctest.Wait()
			if n := sent.Load(); n != 0 {
				t.Errorf("called %d times while nothing was read", n)
			}
			close(read)
			synctest.Wait()
			if n := sent.Load(); n != 1 {
				t.Errorf("called %d times when all was read", n)
			}
			close(answer)
			<-done
			if n := sent.Load(); n != 1 {
				t.Errorf("called %d times in all", n)
			}
		})
	})
}
