package enginesim

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"net"
	"reflect"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
	"github.com/pdproxy/pdproxy/internal/enginesim/vllm"
)

// FuzzReadSide: a broken frame gives an error; a valid frame is read as it was
// written.
func FuzzReadSide(f *testing.F) {
	var whole bytes.Buffer
	core.WriteSide(&whole, core.SideMessage{Op: vllm.NixlRead, Engine: "e", Key: "k", Blocks: []core.BlockID{1, 2}, Fields: map[string]string{"a": "b"}, Payload: []byte{1, 2, 3}})
	f.Add(whole.Bytes())
	f.Add(whole.Bytes()[:9])
	f.Add([]byte{255, 255, 255, 255})
	f.Add([]byte{0, 0, 0, 2, '{', '}', 1, 0, 0, 0, 9})
	f.Add([]byte{0, 0, 0, 1, 'x', 0, 0, 0, 0})
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := core.ReadSide(bufio.NewReader(bytes.NewReader(raw)))
		if err != nil {
			return
		}
		var again bytes.Buffer
		if err := core.WriteSide(&again, m); err != nil {
			t.Fatal(err)
		}
		back, err := core.ReadSide(bufio.NewReader(&again))
		if err != nil || !reflect.DeepEqual(back, m) {
			t.Fatalf("%+v is read back as %+v, %v", m, back, err)
		}
	})
}

// TestSideChannelCalls: connections are reused, also after a rejection. A
// peer's end is an error. A caller can leave a call that hangs.
func TestSideChannelCalls(t *testing.T) {
	pd := startPair(t)
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
			t.Errorf("%s: from.call(addr, m) = %v, want %v", m.Op, err, core.ErrPeer)
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
