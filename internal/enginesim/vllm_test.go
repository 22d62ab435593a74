package enginesim

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/vllm"
)

// pair is a prefill and a decode engine.
type pair struct{ p, d *Engine }

func startPair(t *testing.T, connector string, change ...func(*Config)) pair {
	t.Helper()
	start := func(role string) *Engine {
		cfg := Config{Connector: connector, Role: role, KVBlocks: 256}
		for _, c := range change {
			c(&cfg)
		}
		return startEngine(t, cfg)
	}
	return pair{p: start(RolePrefill), d: start(RoleDecode)}
}

// TestDecodeClosedRightAfterWriting: a decode leg whose client has closed its connection
// already when the engine reads the leg frees prefill's blocks.
func TestDecodeClosedRightAfterWriting(t *testing.T) {
	pd := startPair(t, ConnectorVLLMNixl, func(c *Config) { c.Lease = time.Hour })
	for i := range 10 {
		prompt := words(40+i, 100)
		p := post(t, pd.p.URL()+core.RouteCompletions, completion(prompt, `"max_tokens":1,`+prefillParams))
		req, _ := http.NewRequest(http.MethodPost, pd.d.URL()+core.RouteCompletions, strings.NewReader(completion(prompt, `"kv_transfer_params":`+p.params(t))))
		conn, err := net.Dial("tcp", pd.d.Addr())
		if err != nil {
			t.Fatal(err)
		}
		req.Write(conn)
		conn.Close()
		eventually(t, "free blocks", func() bool { return pd.p.State().BlocksPinned == 0 })
	}
}

// TestSideChannelCalls: connections are reused, also after a rejection. A
// peer's end is an error. A caller can leave a call that hangs.
func TestSideChannelCalls(t *testing.T) {
	pd := startPair(t, ConnectorVLLMNixl)
	from := pd.d.Ranks[0].Side
	addr := pd.p.Ranks[0].Side.Listener.Addr().String()
	open := func() int {
		from.Mu.Lock()
		defer from.Mu.Unlock()
		return len(from.Conns)
	}
	handshake := core.SideMessage{Op: vllm.NixlHandshake, Engine: pd.p.ID()}
	for range 3 {
		if _, err := from.Call(t.Context(), addr, handshake); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range []core.SideMessage{
		{Op: vllm.NixlHandshake, Engine: "another engine"}, {Op: "what", Engine: pd.p.ID()}, {Op: vllm.NixlRead, Key: "k", Fields: map[string]string{"epoch": "1"}},
	} {
		if _, err := from.Call(t.Context(), addr, m); !errors.Is(err, core.ErrPeer) {
			t.Errorf("%s: from.Call(addr, m) = %v, want %v", m.Op, err, core.ErrPeer)
		}
	}
	if n := open(); n != 1 {
		t.Errorf("%d connections for calls in a row", n)
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	ctx, leave := context.WithCancel(t.Context())
	go func() {
		if conn, err := silent.Accept(); err == nil {
			defer conn.Close()
			conn.Read(make([]byte, 1))
			leave()
			<-ctx.Done()
		}
	}()
	if _, err := from.Call(ctx, silent.Addr().String(), handshake); !errors.Is(err, context.Canceled) {
		t.Errorf("error of the cancelled call: %v", err)
	}
	pd.p.Kill()
	if _, err := from.Call(t.Context(), addr, handshake); err == nil || errors.Is(err, core.ErrPeer) {
		t.Errorf("dead peer: %v", err)
	}
	if n := open(); n != 0 {
		t.Errorf("%d connections remain", n)
	}
	pd.d.Close()
	if _, err := from.Call(t.Context(), addr, handshake); err == nil {
		t.Error("call of a closed engine")
	}
}

// moriioOf returns an engine's connector.
func moriioOf(e *Engine) *vllm.MoRIIO { return e.Proto.(*vllm.VLLM).Connector.(*vllm.MoRIIO) }

// TestMoRIIONotificationsThatEnd: a message that makes the notification listener of vLLM
// raise ends the engine.
func TestMoRIIONotificationsThatEnd(t *testing.T) {
	for name, message := range map[string]string{
		"no block":          "83a474797065ad72656d6f74655f626c6f636b73ab7472616e736665725f6964a178b1626c6f636b5f6e6f746966795f6c69737490",
		"another's message": "82a474797065aa77726974655f646f6e65ab7472616e736665725f6964a178",
		"not a map":         "c0",
	} {
		t.Run(name, func(t *testing.T) {
			pd := startPair(t, ConnectorVLLMMoRIIO)
			m := moriioOf(pd.p)
			c, err := pd.d.DialPeer(t.Context(), net.JoinHostPort(m.Host, strconv.Itoa(m.Notify)))
			if err != nil {
				t.Fatal(err)
			}
			defer pd.d.HangUp(c)
			raw, _ := hex.DecodeString(message)
			c.Send(raw)
			select {
			case <-pd.p.Died():
			case <-time.After(20 * time.Second):
				t.Error("the engine still runs")
			}
		})
	}
}

// TestReleaseBeforePrefillEnds: a release that arrives before prefill has finished frees
// its blocks when prefill finishes.
func TestReleaseBeforePrefillEnds(t *testing.T) {
	pd := startPair(t, ConnectorVLLMMoRIIO, func(c *Config) { c.PrefillUsPerToken = 2000 })
	id := fmt.Sprintf("___prefill_addr_%s___decode_addr_%s_%032x", pd.p.KVAddress(), pd.d.KVAddress(), 1)
	done := make(chan answer, 1)
	go func() {
		a, _ := try(t.Context(), pd.p.URL()+core.RouteCompletions, completion(words(9, 50), `"max_tokens":1,"kv_transfer_params":{"transfer_id":"tx-1",`+
			`"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_dp_size":1,"remote_tp_size":1}`), "X-Request-Id", id)
		done <- a
	}()
	m := moriioOf(pd.p)
	moriioOf(pd.d).Release(&vllm.MoRIIOLeg{Transfer: "tx-1", Peer: vllm.MoRIIOPeer{Host: m.Host, Handshake: m.Handshake, Notify: m.Notify}})
	if a := <-done; a.status != http.StatusOK {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	eventually(t, "prefill holds nothing", func() bool { return pd.p.State().BlocksUsed == 0 })
}

// TestMooncakeAsk: the bytes are Python msgpack's encoding of a MooncakeXferMetadata.
func TestMooncakeAsk(t *testing.T) {
	// {"remote_hostname": "10.0.1.7", "remote_port": 15000, "remote_tp_size": 1,
	// "remote_tp_rank": 0, "req_blocks": {"cmpl-a-0-1": ("xfer-a", [[3, 4, 300]])},
	// "kv_caches_base_addr": [4096], "block_lens": [16], "kv_block_lens": [16]}
	const python = "88af72656d6f74655f686f73746e616d65a831302e302e312e37ab72656d6f74655f706f7274cd3a98ae72656d6f74655f74705f73697a6501ae72656d6f74655f74705f72616e6b00aa7265715f626c6f636b7381aa636d706c2d612d302d3192a6786665722d6191930304cd012cb36b765f6361636865735f626173655f6164647291cd1000aa626c6f636b5f6c656e739110ad6b765f626c6f636b5f6c656e739110"
	raw, err := hex.DecodeString(python)
	if err != nil {
		t.Fatal(err)
	}
	ask := vllm.MooncakeAsk{Host: "10.0.1.7", Port: 15000, Request: "cmpl-a-0-1", Transfer: "xfer-a", Blocks: []core.BlockID{3, 4, 300}, BlockLen: 16}
	if got := hex.EncodeToString(ask.Encode()); got != python {
		t.Errorf("encoded %s", got)
	}
	back, err := vllm.DecodeAsk(raw)
	if err != nil || fmt.Sprint(back) != fmt.Sprint(ask) {
		t.Errorf("DecodeAsk(raw) = %+v, %v", back, err)
	}
	if _, err := vllm.DecodeAsk(vllm.PackMap("remote_hostname", "x")); err == nil {
		t.Error("half a message is read")
	}
}
