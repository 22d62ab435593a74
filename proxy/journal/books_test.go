package journal

import (
	"context"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/coordinator"
)

func TestRunning(t *testing.T) {
	var l Running
	if got, _ := json.Marshal(l.List(origin)); string(got) != "[]" {
		t.Errorf("list without a running request = %s", got)
	}
	young, old := &view{requestID: "young", start: at(20)}, &view{requestID: "old", start: at(0)}
	l.add(young)
	l.add(old)
	old.placed.Store(&coordinator.Placement{Flow: abi.FlowPrefillFirst, Prefill: targetNamed("p0"), Decode: targetNamed("d0")})
	got, _ := json.Marshal(l.List(at(25)))
	const want = `[{"request_id":"old","age_ms":25,"flow":"prefill_first","prefill":"p0","decode":"d0"},` +
		`{"request_id":"young","age_ms":5,"flow":"","prefill":"","decode":""}]`
	if string(got) != want || l.Len() != 2 {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	l.remove(old)
	l.remove(old)
	l.remove(young)
	if l.Len() != 0 {
		t.Errorf("%d requests remain", l.Len())
	}
}

func TestRunningWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l Running
		l.Wait(t.Context()) // returns at once, because nothing runs
		a, b := &view{}, &view{}
		l.add(a)
		l.add(b)
		time.AfterFunc(time.Second, func() { l.remove(a) })
		time.AfterFunc(2*time.Second, func() { l.remove(b) })
		begin := time.Now()
		l.Wait(t.Context())
		if d := time.Since(begin); d != 2*time.Second {
			t.Errorf("waited %v for the last one", d)
		}
		l.add(a)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		l.Wait(ctx)
		if d := time.Since(begin); d != 62*time.Second {
			t.Errorf("waited %v, want until the context's end", d)
		}
	})
}
