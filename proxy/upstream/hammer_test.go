package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestHammer mixes complete, closed and cancelled calls at a cap. It checks that no
// answer reaches another call and that every slot is returned.
func TestHammer(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		for piece := range strings.SplitSeq(string(body), ",") {
			io.WriteString(w, piece)
			if len(body)%3 == 0 {
				w.(http.Flusher).Flush()
			}
		}
	}))
	defer srv.Close()
	cl := New(Options{URL: mustURL(srv.URL), MaxConns: 5, IdleTimeout: time.Minute})
	var wg sync.WaitGroup
	for worker := range 20 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(worker)))
			for i := range 40 {
				hammer(t, cl, random, fmt.Sprintf("%d-%d", worker, i))
			}
		})
	}
	wg.Wait()
	if s := cl.Stats(); s.Open > 5 || s.Waiting != 0 {
		t.Errorf("cl.Stats() = %+v", s)
	}
	for range 10 { // all slots work
		ask(t, cl, get())
	}
	cl.CloseIdle()
	if s := cl.Stats(); s.Open != 0 {
		t.Errorf("%+v after CloseIdle", s)
	}
}

func hammer(t *testing.T, cl Client, random *rand.Rand, id string) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	body := strings.Repeat(id+",", 1+random.IntN(2000))
	req := post(body)
	req.HeadTimeout, req.IdleTimeout = time.Minute, time.Minute
	if random.IntN(3) == 0 {
		req.Linger = time.Second
	}
	if random.IntN(4) == 0 {
		defer time.AfterFunc(time.Duration(random.IntN(500))*time.Microsecond, cancel).Stop()
	}
	resp, err := cl.Do(ctx, req)
	if err != nil {
		if ctx.Err() == nil || !errors.Is(err, context.Canceled) {
			t.Errorf("%s: Do: %v", id, err)
		}
		return
	}
	defer resp.Close()
	want := strings.ReplaceAll(body, ",", "")
	if random.IntN(5) == 0 {
		p := make([]byte, 1+random.IntN(100))
		n, err := io.ReadFull(resp, p)
		if ctx.Err() == nil && (err == nil || err == io.ErrUnexpectedEOF) && !strings.HasPrefix(want, string(p[:n])) {
			t.Errorf("%s: got %q", id, p[:n])
		}
		return
	}
	got, err := io.ReadAll(resp)
	if err == nil && string(got) != want {
		t.Errorf("%s: got %d bytes, want %d", id, len(got), len(want))
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("%s: read: %v", id, err)
	}
}
