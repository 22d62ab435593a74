package selectapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pdproxy/pdproxy/abi"
)

// TestGolden checks the exact bytes of the requests of TensorRT-LLM's workers, in both
// encodings, and of the answers. 9007199254740993 is 2^53 + 1.
func TestGolden(t *testing.T) {
	const packed = "application/msgpack"
	for _, tt := range []struct {
		name, method, path, body string
		headers                  []string
		status                   int
		want, media              string
	}{
		{
			"select", "POST", "/select",
			`{"role":"context","routing_key":"conv-1","req_id":9007199254740993,"exclude_server":null}`, nil, 200,
			`{"server":"10.0.0.1:7001","info":{"server_info":{"disaggregated_params":{"ctx_info_endpoint":"tcp://10.0.0.1:9","encoded_opaque_state":"AA=="},` +
				`"tokens_per_block":32,"kv_cache_hash_algo":"v1_block_key"},"matches":[0],"match_length":0,"num_tokens":0},"req_id":9007199254740993}`, "application/json",
		},
		{
			"select in MessagePack", "POST", "/select",
			"\x84\xa4role\xaageneration\xabrouting_key\x83\xb4block_hashes_by_algo\x81\xacv1_block_key\x91\x92\x01\xcf\xff\xff\xff\xff\xff\xff\xff\xff" +
				"\xa8conv_key\xc0\xaanum_tokens\x2a\xa6req_id\xcf\x00\x20\x00\x00\x00\x00\x00\x01\xaeexclude_server\xad10.0.0.1:7001",
			[]string{"Content-Type", packed}, 200,
			"\xdf\x00\x00\x00\x03\xa6server\xad10.0.1.1:7101\xa4info\xdf\x00\x00\x00\x04\xabserver_info\xdf\x00\x00\x00\x03" +
				"\xb4disaggregated_params\xdf\x00\x00\x00\x02\xb1ctx_info_endpoint\xb0tcp://10.0.1.1:9\xb4encoded_opaque_state\xa4AA==" +
				"\xb0tokens_per_block\x20\xb2kv_cache_hash_algo\xacv1_block_key" +
				"\xa7matches\xdd\x00\x00\x00\x01\x00\xacmatch_length\x00\xaanum_tokens\x2a\xa6req_id\xd3\x00\x20\x00\x00\x00\x00\x00\x01", packed,
		},
		{"renew", "POST", "/renew", `{"role":"ctx","req_id":9007199254740993}`, nil, 200, `{}`, "application/json"},
		{"renew in MessagePack", "POST", "/renew", "\x82\xa4role\xa3gen\xa6req_id\xcf\x00\x20\x00\x00\x00\x00\x00\x01", nil, 200, "\xdf\x00\x00\x00\x00", packed},
		{"renew of its neighbour", "POST", "/renew", `{"role":"ctx","req_id":9007199254740992}`, nil, 503, `{"error":"no such reservation"}`, "application/json"},
		{"finish", "POST", "/finish", `{"role":"context","req_id":9007199254740993,"success":true}`, nil, 200, `{}`, "application/json"},
		{
			"finish in MessagePack", "POST", "/finish", "\x83\xa4role\xaageneration\xa6req_id\xcf\x00\x20\x00\x00\x00\x00\x00\x01\xa7success\xc2",
			[]string{"Content-Type", "application/octet-stream"}, 200, "\xdf\x00\x00\x00\x00", packed,
		},
		{
			"cluster_info", "GET", "/cluster_info", "", nil, 200,
			`{"is_ready":true,"server_lists":{"context":["10.0.0.1:7001"],"generation":["10.0.1.1:7101"]},` +
				`"routing_key_configs":{"context":{"tokens_per_block":32,"kv_cache_hash_algo":"v1_block_key"},"generation":{"tokens_per_block":32,"kv_cache_hash_algo":"v1_block_key"}}}`, "application/json",
		},
		{
			"version, of TensorRT-LLM's worker", "GET", "/version", "", []string{"Accept", "*/*", "User-Agent", "Python/3.12 aiohttp/3.13.2"}, 200,
			"\xdf\x00\x00\x00\x01\xa7version\xa51.2.3", packed,
		},
		{"version", "GET", "/version", "", []string{"Accept", packed}, 200, "\xdf\x00\x00\x00\x01\xa7version\xa51.2.3", packed},
		{"health", "GET", "/health", "", nil, 200, "", ""},
		{"bad MessagePack", "POST", "/select", "\x84\xa4role", nil, 400, "\xdf\x00\x00\x00\x01\xa5error\xb8invalid MessagePack body", packed},
		{"bad JSON", "POST", "/select", `{"role":`, nil, 400, `{"error":"invalid JSON body"}`, "application/json"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t, "kv_aware", nil, "prefill 10.0.0.1:7001", "decode 10.0.1.1:7101")
			if strings.HasPrefix(tt.name, "renew") || strings.HasPrefix(tt.name, "finish") {
				w.post(t, "/select", `{"role":"context","routing_key":null,"req_id":9007199254740993}`, 200)
				w.post(t, "/select", `{"role":"generation","routing_key":null,"req_id":9007199254740993}`, 200)
			}
			status, answer, media := w.call(t, tt.method, tt.path, tt.body, tt.headers...)
			if status != tt.status || answer != tt.want || media != tt.media {
				t.Errorf("%d %s\n%q\nwant %d %s\n%q", status, media, answer, tt.status, tt.media, tt.want)
			}
		})
	}
}

// TestRefused: a malformed request gets the same answer as from TensorRT-LLM's
// coordinator.
func TestRefused(t *testing.T) {
	w := newWorld(t, "least_load", nil, "prefill 10.0.0.1:7001", "decode 10.0.1.1:7101")
	for _, tt := range []struct {
		path, body string
		status     int
		want       string
	}{
		{"/select", `{"role":"context","req_id":1}`, 400, "must include"},
		{"/select", `{"routing_key":null,"req_id":1}`, 400, "must include"},
		{"/select", `{"role":"context"}`, 400, "must include"},
		{"/select", "\x82\xa4role\xa3ctx\xabrouting_key\xc0", 400, "must include"},
		{"/select", `[]`, 400, "must include"},
		{"/select", `7`, 400, "must include"},
		{"/select", ``, 400, "invalid JSON"},
		{"/select", `{"role":"context","routing_key":1,"req_id":1} x`, 400, "invalid JSON"},
		{"/select", `{"role":"prefill","routing_key":"","req_id":1}`, 400, `invalid role: "prefill"`},
		{"/select", `{"role":7,"routing_key":"","req_id":1}`, 400, "invalid role"},
		{"/select", `{"role":"context","routing_key":"","req_id":true}`, 400, "req_id must be an integer"},
		{"/select", `{"role":"context","routing_key":"","req_id":"1"}`, 400, "req_id must be an integer"},
		{"/select", `{"role":"context","routing_key":"","req_id":1.0}`, 400, "req_id must be an integer"},
		{"/select", `{"role":"context","routing_key":"","req_id":null}`, 400, "req_id must be an integer"},
		{"/select", `{"role":"context","routing_key":"","req_id":1,"exclude_server":1}`, 400, "exclude_server must be a string"},
		{"/select", `{"role":"gen","routing_key":"","req_id":1,"exclude_server":"10.0.1.1:7101"}`, 503, "no generation server is available beside 10.0.1.1:7101"},
		{"/finish", `{"role":"context"}`, 400, "must include"},
		{"/finish", `{"req_id":1}`, 400, "must include"},
		{"/finish", `{"role":"context","req_id":1,"success":1}`, 400, "success must be a boolean"},
		{"/finish", `{"handle":7}`, 400, "handle must be a string"},
		{"/finish", `{"role":"context","req_id":false}`, 400, "req_id must be an integer"},
		{"/finish", `{"role":"context","req_id":1}`, 200, "{}"},
		{"/renew", `{"role":"context"}`, 400, "must include"},
		{"/renew", `{"role":"x","req_id":1}`, 400, "invalid role"},
		{"/renew", `{"role":"context","req_id":1}`, 503, "no such reservation"},
	} {
		status, answer, _ := w.call(t, "POST", tt.path, tt.body)
		if status != tt.status || !strings.Contains(strings.ReplaceAll(answer, `\"`, `"`), tt.want) {
			t.Errorf(`%s %q: w.call("POST", tt.path, tt.body) = %d %q, want %d %s`, tt.path, tt.body, status, answer, tt.status, tt.want)
		}
	}
	if status, _, _ := w.call(t, "POST", "/select", `{"x":"`+strings.Repeat("y", maxBody)+`"}`); status != 413 {
		t.Errorf("a body without end: %d", status)
	}
	w.idle(t)
}

// TestReservations: an open reservation is counted, holds load and has the id of the
// request. A duplicate replaces the reservation. A second finish does nothing.
func TestReservations(t *testing.T) {
	w := newWorld(t, "least_load", nil, "prefill 10.0.0.1:7001", "decode 10.0.1.1:7101")
	load := func(n int) int64 { return w.reg.Snapshot().Instances[n].Load[0].Tokens() }
	const both = `"routing_key":{"num_tokens":100},"req_id":18446744073709551615`
	w.post(t, "/select", `{"role":"ctx",`+both+`}`, 200)
	w.post(t, "/select", `{"role":"gen",`+both+`}`, 200)
	if w.local.Open() != 2 || load(0) != 100 || load(1) <= 100 {
		t.Errorf("%d leases, %d and %d tokens", w.local.Open(), load(0), load(1))
	}
	w.post(t, "/select", `{"role":"context",`+both+`}`, 200)
	if w.local.Open() != 2 || load(0) != 100 {
		t.Errorf("after a duplicate: %d leases, %d tokens", w.local.Open(), load(0))
	}
	w.post(t, "/select", `{"role":"ctx",`+both+`,"exclude_server":"10.0.0.1:7001"}`, 503)
	if w.local.Open() != 1 || load(0) != 0 {
		t.Errorf("the earlier reservation remains after a duplicate without a server: %d leases, %d tokens", w.local.Open(), load(0))
	}
	for range 2 {
		w.post(t, "/finish", `{"role":"generation","req_id":18446744073709551615}`, 200)
	}
	w.idle(t)
}

// TestHandles: in the older form of the API this process makes the ids.
func TestHandles(t *testing.T) {
	w := newWorld(t, "least_load", nil, "prefill 10.0.0.1:7001", "decode 10.0.1.1:7101")
	var first, second struct{ Server, Handle string }
	for _, into := range []any{&first, &second} {
		answer := w.post(t, "/select", `{"role":"gen","routing_key":null}`, 200)
		if err := json.Unmarshal([]byte(answer), into); err != nil || strings.Contains(answer, "req_id") {
			t.Fatal(answer, err)
		}
	}
	if first.Handle == "" || first.Handle == second.Handle || first.Server != "10.0.1.1:7101" || w.Open() != 2 {
		t.Errorf("%+v, %+v, %d open", first, second, w.Open())
	}
	w.post(t, "/finish", `{"handle":"`+first.Handle+`","success":true}`, 200)
	w.post(t, "/finish", `{"role":"gen","handle":"another"}`, 200)
	if w.Open() != 1 {
		t.Errorf("%d open", w.Open())
	}
	w.post(t, "/finish", `{"role":"gen","handle":"`+second.Handle+`"}`, 200)
	w.idle(t)
}

// TestExpiry: an unfinished reservation expires. A renewed reservation does not.
func TestExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "least_load", nil, "prefill 10.0.0.1:7001", "decode 10.0.1.1:7101")
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { w.Run(ctx) })
		w.post(t, "/select", `{"role":"ctx","routing_key":null,"req_id":1}`, 200)
		w.post(t, "/select", `{"role":"gen","routing_key":null,"req_id":1}`, 200)
		time.Sleep(Expiry - time.Second)
		w.post(t, "/renew", `{"role":"ctx","req_id":1}`, 200)
		time.Sleep(3 * time.Second)
		if w.Open() != 1 || w.local.Open() != 1 || w.seen.count("reservation/expired") != 1 {
			t.Errorf("%d reservations, %d leases", w.Open(), w.local.Open())
		}
		w.post(t, "/renew", `{"role":"gen","req_id":1}`, 503)
		time.Sleep(Expiry)
		w.idle(t)
		w.post(t, "/select", `{"role":"ctx","routing_key":null,"req_id":2}`, 200)
		cancel()
		synctest.Wait()
		w.idle(t)
		w.post(t, "/select", `{"role":"ctx","routing_key":null,"req_id":2}`, 503) // no goroutine would let the reservation expire
		w.idle(t)
	})
}

// TestServers: only TensorRT-LLM instances that a worker can reach and that serve one
// model are chosen.
func TestServers(t *testing.T) {
	w := newWorld(t, "least_load", nil, "both 10.0.0.1:7001", "both [fd00::1]:7002", "decode 10.0.0.2/x")
	status, answer, _ := w.call(t, "GET", "/cluster_info", "")
	const list = `["10.0.0.1:7001","[fd00::1]:7002"]`
	if status != 200 || !strings.Contains(answer, `"server_lists":{"context":`+list+`,"generation":`+list+`}`) || strings.Contains(answer, "routing_key_configs") {
		t.Errorf("%d %s", status, answer)
	}
	for range 3 {
		if answer := w.post(t, "/select", `{"role":"gen","routing_key":null,"req_id":1,"exclude_server":"10.0.0.1:7001"}`, 200); !strings.Contains(answer, "[fd00::1]:7002") {
			t.Error(answer)
		}
	}
	w = newWorld(t, "least_load", nil, "prefill 10.0.0.1:7001 m", "decode 10.0.0.2:7001 n")
	w.post(t, "/select", `{"role":"gen","routing_key":null,"req_id":1}`, 503)
	w = newWorld(t, "least_load", nil, "prefill 10.0.0.1:7001")
	if status, _, _ := w.call(t, "GET", "/health", ""); status != 503 {
		t.Errorf("healthy without a generation server: %d", status)
	}
	w.post(t, "/select", `{"role":"gen","routing_key":null,"req_id":1}`, 503)
	w.post(t, "/select", `{"role":"ctx","routing_key":null,"req_id":1}`, 200)
}

// TestGuards: the API needs the token. A coordinator that does not lead refuses requests.
func TestGuards(t *testing.T) {
	leads := false
	leading := func(do func()) bool {
		if leads {
			do()
		}
		return leads
	}
	w := newWorld(t, "least_load", func(o *Options) { o.Token, o.Leading = "secret", leading }, "prefill 10.0.0.1:7001", "decode 10.0.1.1:7101")
	if status, _, _ := w.call(t, "GET", "/health", ""); status != 503 {
		t.Errorf("a standby is healthy: %d", status)
	}
	const body = `{"role":"ctx","routing_key":null,"req_id":1}`
	for _, path := range []string{"/select", "/finish", "/renew"} {
		for _, header := range []string{"", "Bearer other", "secret"} {
			if status, answer, _ := w.call(t, "POST", path, body, "Authorization", header); status != 401 {
				t.Errorf("%s with %q: %d %s", path, header, status, answer)
			}
		}
	}
	if status, answer, _ := w.call(t, "POST", "/select", body, "Authorization", "Bearer secret"); status != 503 || !strings.Contains(answer, "does not lead") {
		t.Errorf("w.call = %d, %s", status, answer)
	}
	leads = true
	if status, _, _ := w.call(t, "POST", "/select", body, "Authorization", "Bearer secret"); status != 200 {
		t.Error(status)
	}
	if status, _, _ := w.call(t, "GET", "/health", ""); status != 200 {
		t.Error(status)
	}
}

// TestGone: a worker that no longer waits for its answer leaves no reservation.
func TestGone(t *testing.T) {
	w := newWorld(t, "least_load", nil, "prefill 10.0.0.1:7001", "decode 10.0.1.1:7101")
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r := request("POST", "/select", `{"role":"ctx","routing_key":null,"req_id":1}`).WithContext(ctx)
	w.ServeHTTP(httptest.NewRecorder(), r)
	w.idle(t)
}

// TestFull: the number of open reservations is bounded.
func TestFull(t *testing.T) {
	w := newWorld(t, "least_load", nil, "prefill 10.0.0.1:7001", "decode 10.0.1.1:7101")
	for n := range maxOpen {
		w.open.byID[reservationID{abi.Decode, true, fmt.Sprint(n)}] = nil
	}
	w.post(t, "/select", `{"role":"ctx","routing_key":null,"req_id":1}`, 503)
	if w.local.Open() != 0 || w.seen.count("reservation/full") != 1 {
		t.Errorf("got %d leases", w.local.Open())
	}
}

// TestHammer: many workers send duplicates, and finish out of order. No load is held
// twice, and none is left.
func TestHammer(t *testing.T) {
	w := newWorld(t, "conversation", nil, "prefill 10.0.0.1:7001", "prefill 10.0.0.2:7001", "decode 10.0.1.1:7101", "decode 10.0.1.2:7101")
	ctx, cancel := context.WithCancel(context.Background())
	var running, workers sync.WaitGroup
	running.Go(func() { w.Run(ctx) })
	for g := range 8 {
		workers.Go(func() {
			for n := range 150 {
				role := [...]string{"context", "generation"}[(g+n)%2]
				id := n % 40 // all workers share the ids
				w.call(t, "POST", "/select", fmt.Sprintf(`{"role":%q,"routing_key":"c%d","req_id":%d}`, role, n%7, id))
				w.call(t, "POST", "/renew", fmt.Sprintf(`{"role":%q,"req_id":%d}`, role, id))
				if n%3 != 0 {
					w.call(t, "POST", "/finish", fmt.Sprintf(`{"role":%q,"req_id":%d,"success":%t}`, role, id, n%2 == 0))
				}
				if n%20 == 0 {
					w.call(t, "GET", "/cluster_info", "")
				}
			}
		})
	}
	workers.Wait()
	if w.local.Open() != w.Open() || w.Open() > 80 {
		t.Errorf("%d leases for %d reservations", w.local.Open(), w.Open())
	}
	cancel()
	running.Wait()
	w.idle(t)
}
