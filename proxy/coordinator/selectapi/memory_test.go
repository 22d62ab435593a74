package selectapi

import (
	"encoding/binary"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// wideBodies returns bodies of about n bytes that become much memory when they are read.
func wideBodies(n int) map[string]string {
	json := func(key, part, last string) string {
		return `{"role":"context","req_id":1,` + key + strings.Repeat(part, n/len(part)) + last
	}
	packed := func(key, part string, each int) string {
		count := binary.BigEndian.AppendUint32(nil, uint32(n/len(part)*each))
		return "\x83\xa4role\xa7context\xa6req_id\x01\xabrouting_key" + key + "\xdd" + string(count) + strings.Repeat(part, n/len(part))
	}
	return map[string]string{
		"tokens":             json(`"routing_key":[`, `1,`, `1]}`),
		"hashes":             json(`"routing_key":{"block_hashes":[`, `1,`, `1]}}`),
		"floats":             json(`"routing_key":[`, `1e1,`, `1]}`),
		"floats beside":      json(`"routing_key":1,"x":[`, `1e1,`, `1]}`),
		"empty lists":        json(`"routing_key":1,"x":[`, `[],`, `1]}`),
		"empty objects":      json(`"routing_key":1,"x":[`, `{},`, `1]}`),
		"members":            json(`"routing_key":{`, `"":1,`, `"a":1}}`),
		"conversation":       json(`"routing_key":"`, `c`, `"}`),
		"escapes":            json(`"routing_key":"`, `\n`, `"}`),
		"excluded server":    json(`"routing_key":1,"exclude_server":"`, `s`, `"}`),
		"algorithms":         json(`"routing_key":{"block_hashes_by_algo":{`, `"v1_block_key":[[1,2]],`, `"a":[]}}}`),
		"many lists":         json(`"routing_key":{`, `"token_ids":[1,2,3,4,5],`, `"a":1}}`),
		"packed tokens":      packed("", "\x01", 1),
		"packed hashes":      packed("\x81\xacblock_hashes", "\x01", 1),
		"packed empty lists": packed("", "\x90", 1),
	}
}

// TestMemory: bodies of all shapes use little more than Options.Memory, for any number of
// concurrent requests. Ordinary requests go on meanwhile or afterwards, and nothing stays counted.
func TestMemory(t *testing.T) {
	const limit = 3 << 20 / 2
	for _, place := range []string{"kv_aware", "conversation"} {
		w := newWorld(t, place, func(o *Options) { o.Memory = limit }, "prefill 10.0.0.1:7001", "prefill 10.0.0.2:7001", "decode 10.0.1.1:7101")
		for name, body := range wideBodies(256 << 10) {
			peak := int64(0)
			var watching, working sync.WaitGroup
			done := make(chan struct{})
			watching.Go(func() {
				for {
					select {
					case <-done:
						return
					default:
						peak = max(peak, w.memory.Used())
						time.Sleep(100 * time.Microsecond)
					}
				}
			})
			for range 6 {
				working.Go(func() {
					rec := httptest.NewRecorder()
					w.ServeHTTP(rec, request("POST", "/select", body))
					if rec.Code != 200 && rec.Code != 400 && rec.Code != 503 {
						t.Errorf("%s: status %d", name, rec.Code)
					}
				})
			}
			working.Wait()
			close(done)
			watching.Wait()
			if peak > limit+1<<20 { // pooled buffers may be larger than the room that was taken
				t.Errorf("%s: %d bytes counted, want %d at most", name, peak, limit)
			}
			if used := w.memory.Used(); used != 0 {
				t.Errorf("%s: %d bytes stay counted", name, used)
			}
			if rec := httptest.NewRecorder(); true {
				if w.ServeHTTP(rec, request("POST", "/finish", body)); rec.Code != 413 {
					t.Errorf("%s: /finish: status %d, want 413", name, rec.Code)
				}
			}
		}
		w.post(t, "/select", `{"role":"context","req_id":2,"routing_key":[1,2,3]}`, 200)
		w.post(t, "/finish", `{"role":"context","req_id":2}`, 200)
		w.post(t, "/finish", `{"role":"context","req_id":1}`, 200)
		w.idle(t)
	}
}

// TestCountedMemory: the memory that one request allocates is counted.
func TestCountedMemory(t *testing.T) {
	w := newWorld(t, "kv_aware", nil, "prefill 10.0.0.1:7001", "decode 10.0.1.1:7101")
	const n = 256 << 10
	for name, body := range wideBodies(n) {
		m := heldBody([]byte(body))
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		f, err := parse(m, spoken(request("POST", "/select", body), []byte(body)))
		if err == nil && f.key != nil {
			q, _ := f.selection(inJSON)
			key, _ := readKey(q.key, "v1_block_key", m)
			_ = key
		}
		runtime.ReadMemStats(&after)
		allocated, counted := int64(after.TotalAlloc-before.TotalAlloc), m.memory.Used()
		if allocated > counted+64<<10 || counted > 12*n {
			t.Errorf("%s: %d bytes allocated, %d counted", name, allocated, counted)
		}
		m.release()
		if used := m.memory.Used(); used != 0 {
			t.Errorf("%s: %d bytes stay counted", name, used)
		}
	}
	w.idle(t)
}
