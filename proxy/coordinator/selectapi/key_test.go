package selectapi

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/state/kvindex"
)

func packed(t testing.TB, text string) []byte {
	t.Helper()
	b, err := appendMsgpack(nil, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// heldBody returns the memory of a request with that body and without a limit.
func heldBody(body []byte) *held {
	return &held{memory: new(buffer.Budget), body: &buffer.Buffer{B: body}}
}

func TestReadKey(t *testing.T) {
	for _, tt := range []struct {
		key  string
		want routingKey
	}{
		{`null`, routingKey{}},
		{`true`, routingKey{}},
		{`1.5`, routingKey{}},
		{`"conv"`, routingKey{conversation: "conv"}},
		{`-7`, routingKey{conversation: "-7"}},
		{`[]`, routingKey{}},
		{`[1,2,2147483647]`, routingKey{tokens: []uint32{1, 2, 2147483647}}},
		{`[1,2147483648]`, routingKey{hashes: []uint64{1, 2147483648}}},
		{`[[18446744073709551615,1],[2]]`, routingKey{hashes: []uint64{18446744073709551615, 1}}},
		{`["0643a36c50b99c020f02","ff"]`, routingKey{hashes: []uint64{451384073273318402, 255}}},
		{`["xyz"]`, routingKey{}},
		{`[1,-1]`, routingKey{}},
		{`[1,null]`, routingKey{}},
		{`[[[1]]]`, routingKey{}},
		{`{}`, routingKey{}},
		{`{"conversation_id":"c","conv_key":3,"num_tokens":9}`, routingKey{conversation: "c", numTokens: 9}},
		{`{"conversation_id":4,"conv_key":18446744073709551615}`, routingKey{conversation: "conv_key:18446744073709551615"}},
		{`{"conv_key":null,"num_tokens":1e3}`, routingKey{}},
		{`{"num_tokens":999999999999}`, routingKey{numTokens: maxPrompt}},
		{`{"num_tokens":-1}`, routingKey{}},
		{`{"block_hashes_by_algo":{"v2_sha256":[["aa"]],"v1_block_key":[[5,6]]}}`, routingKey{hashes: []uint64{5, 6}}},
		{`{"block_hashes_by_algo":{"v2_sha256":[["aa"]]}}`, routingKey{}},
		{`{"block_hashes":[1,2],"token_ids":[7]}`, routingKey{hashes: []uint64{1, 2}, tokens: []uint32{7}}},
	} {
		if got, err := readKey(packed(t, tt.key), "v1_block_key", heldBody(nil)); err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf(`%s: readKey(packed(tt.key), "v1_block_key") = %+v, %v, want %+v`, tt.key, got, err, tt.want)
		}
	}
}

// chosen makes a selection with a key and finishes it. It returns the chosen server and
// the part of the prompt that the server held.
func (w *world) chosen(t *testing.T, role, key string, id int) (server string, match int64) {
	t.Helper()
	var a struct {
		Server string
		Info   struct {
			Match int64 `json:"match_length"`
		}
	}
	answer := w.post(t, "/select", fmt.Sprintf(`{"role":%q,"routing_key":%s,"req_id":%d}`, role, key, id), 200)
	if err := json.Unmarshal([]byte(answer), &a); err != nil {
		t.Fatal(err)
	}
	w.post(t, "/finish", fmt.Sprintf(`{"role":%q,"req_id":%d}`, role, id), 200)
	return a.Server, a.Info.Match
}

// TestConversations: each phase of a conversation stays on its server. The conversation
// is known by its id or by the hash of its beginning.
func TestConversations(t *testing.T) {
	w := newWorld(t, "conversation", nil, "prefill 10.0.0.1:7001", "prefill 10.0.0.2:7001", "prefill 10.0.0.3:7001", "decode 10.0.1.1:7101", "decode 10.0.1.2:7101", "decode 10.0.1.3:7101")
	home, n := map[string]string{}, 0
	for turn := range 4 {
		for c := range 9 {
			key := fmt.Sprintf(`"conv-%d"`, c)
			if c%2 == 1 {
				key = fmt.Sprintf(`{"block_hashes_by_algo":{"v1_block_key":[[%d]]},"conv_key":%d,"num_tokens":20}`, turn, 1<<40+c)
			}
			for _, role := range []string{"context", "generation"} {
				n++
				server, _ := w.chosen(t, role, key, n)
				if turn > 0 && home[role+fmt.Sprint(c)] != server {
					t.Errorf("turn %d of %s: %s on %s, before on %s", turn, key, role, server, home[role+fmt.Sprint(c)])
				}
				home[role+fmt.Sprint(c)] = server
			}
		}
	}
	if count := len(distinct(home)); count < 4 {
		t.Errorf("9 conversations are on %d servers of 6", count)
	}
	w.idle(t)
}

func distinct(m map[string]string) map[string]bool {
	d := map[string]bool{}
	for _, v := range m {
		d[v] = true
	}
	return d
}

// listed returns n numbers as JSON.
func listed(n int, f func(int) uint64) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, ",%d", f(i))
	}
	return "[" + b.String()[1:] + "]"
}

// TestBlocks: a prompt goes to the server that holds its blocks. The engines' events and
// the hashes of whole blocks show this, or earlier selections of the server.
func TestBlocks(t *testing.T) {
	token := func(i int) uint64 { return uint64(1000 + i*i%977) }
	hash := func(i int) uint64 { return 1<<63 + uint64(i)*7 }
	key := fmt.Sprintf(`{"block_hashes_by_algo":{"v1_block_key":[%s]},"num_tokens":%d}`, listed(20, hash), 20*32) // the last hash is of an incomplete block
	t.Run("events", func(t *testing.T) {
		w := newWorld(t, "kv_aware", nil, "prefill 10.0.0.1:7001", "prefill 10.0.0.2:7001", "prefill 10.0.0.3:7001", "decode 10.0.1.1:7101")
		for n, i := range w.reg.Snapshot().Instances {
			i.Spec.KVEvents = "poll"
			i.SetBlockTokens(32)
			if n > 1 {
				continue
			}
			e := kvindex.Stored{BlockTokens: 32, Tier: kvindex.GPU}
			for b := range 6 + 10*n { // the second server has more blocks
				e.Hashes = append(e.Hashes, hash(b))
			}
			for i := range len(e.Hashes) * 32 {
				e.Tokens = append(e.Tokens, uint32(token(i)))
			}
			kvindex.NewFeed(w.index, i.KV[0], "m").Stored(&e)
		}
		for n, key := range []string{key, listed(640, token)} {
			if server, match := w.chosen(t, "context", key, 1+n); server != "10.0.0.2:7001" || match != 16*32 {
				t.Errorf("key %d: %s, %d tokens matched", n, server, match)
			}
		}
		w.idle(t)
	})
	for name, key := range map[string]string{"hashes": key, "tokens": listed(640, token)} {
		t.Run("sent before: "+name, func(t *testing.T) {
			w := newWorld(t, "kv_aware", nil, "prefill 10.0.0.1:7001", "prefill 10.0.0.2:7001", "prefill 10.0.0.3:7001", "decode 10.0.1.1:7101")
			first, _ := w.chosen(t, "context", key, 1)
			for n := range 5 {
				w.chosen(t, "context", listed(640, func(i int) uint64 { return uint64(n*1000 + i) }), 10+n)
			}
			for deadline := time.Now().Add(10 * time.Second); ; {
				server, match := w.chosen(t, "context", key, 2)
				if server == first && match >= 512 {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("on %s, then on %s with %d tokens matched", first, server, match)
				}
			}
			w.idle(t)
		})
	}
}

// FuzzBodies: any body gets an answer in its own encoding. A finish with the same body
// removes all that the body has reserved.
func FuzzBodies(f *testing.F) {
	for _, text := range []string{
		`{"role":"context","routing_key":"c","req_id":9007199254740993,"exclude_server":"10.0.0.1:7001","success":true}`,
		`{"role":"gen","routing_key":[[1,2,3],["ff"]],"req_id":-1,"success":false}`,
		`{"role":"ctx","routing_key":{"block_hashes_by_algo":{"v1_block_key":[[18446744073709551615]]},"conv_key":1,"num_tokens":33},"req_id":0}`,
		`{"role":"gen","routing_key":null,"handle":"x"}`,
	} {
		f.Add([]byte(text))
		f.Add(packed(f, text))
	}
	f.Add([]byte("\xdf\xff\xff\xff\xff\xa1a"))
	f.Add([]byte("\x82\x01\x02\xc4\x04role\xa3ctx"))
	w := newWorld(f, "kv_aware", nil, "prefill 10.0.0.1:7001", "prefill 10.0.0.2:7001", "decode 10.0.1.1:7101")
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, path := range []string{"/select", "/renew", "/finish"} {
			r := request("POST", path, string(body))
			rec := httptest.NewRecorder()
			w.ServeHTTP(rec, r)
			switch rec.Code {
			case 200, 400, 503:
			default:
				t.Fatalf("%s: %d", path, rec.Code)
			}
			text := rec.Body.Bytes()
			if rec.Header().Get("Content-Type") == typeJSON {
				if !json.Valid(text) {
					t.Fatalf("%s: %q", path, text)
				}
			} else if _, err := parse(heldBody(text), inMsgpack); err != nil {
				t.Fatalf("%s: %q", path, text)
			}
			if path != "/select" {
				continue
			}
			if fields, err := parse(heldBody(body), spoken(r, body)); err == nil && rec.Code == 200 && fields.reqID == nil {
				var a struct{ Handle string }
				if err := json.Unmarshal(text, &a); err != nil || a.Handle == "" {
					t.Fatalf("%q", text)
				}
				w.post(t, "/finish", `{"role":"context","handle":"`+a.Handle+`"}`, 200)
				w.post(t, "/finish", `{"role":"generation","handle":"`+a.Handle+`"}`, 200)
			}
		}
		// A body may be a valid selection but a malformed finish.
		for _, l := range w.open.expire(time.Now().Add(2 * Expiry)) {
			l.Release()
		}
		w.idle(t)
	})
}
