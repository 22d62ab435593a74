package fleet

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/pdproxy/pdproxy/proxy/coordinator"
	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/coordinator/placetest"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
)

// nextVersion makes one end of a connection write as a later version of the same major version
// may: each message has unknown fields at every depth, and messages and calls of unknown kinds
// are among the frames. The frames are parsed and written by this file alone.
type nextVersion struct {
	net.Conn

	mu       sync.Mutex
	greeting int // writes of the greeting that have passed; guarded by mu
	rest     []byte
	frames   int // guarded by mu
}

// The layout of frames in the link: length, class, kind, number, payload.
const (
	frameHead    = 4 + 6
	classMessage = 1
	classCall    = 2
	classAnswer  = 3
)

func (n *nextVersion) Write(b []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.greeting < 2 { // hello, and the rest of the greeting
		n.greeting++
		return n.Conn.Write(b)
	}
	n.rest = append(n.rest, b...)
	var out []byte
	for len(n.rest) >= frameHead {
		size := 4 + int(binary.LittleEndian.Uint32(n.rest))
		if len(n.rest) < size {
			break
		}
		out = n.extend(out, n.rest[:size])
		n.rest = n.rest[size:]
	}
	if _, err := n.Conn.Write(out); err != nil {
		return 0, err
	}
	return len(b), nil
}

// extend appends the frame of the later version.
func (n *nextVersion) extend(out, f []byte) []byte {
	class, kind, number, payload := f[4], f[5], binary.LittleEndian.Uint32(f[6:]), f[frameHead:]
	m := messageOf(class, kind, payload)
	if m == nil {
		return append(out, f...)
	}
	if n.frames++; n.frames%3 == 0 {
		out = appendRaw(out, classMessage, 99, 0, []byte("a message of a later version"))
		out = appendRaw(out, classCall, 98, 1<<31+uint32(n.frames), []byte{0xff, 0xff})
		topic := fleetpb.Append(nil, &fleetpb.Topic{Topic: 77, Value: []byte("?")})
		out = appendRaw(out, classMessage, kindOf(fleetpb.Kind_KIND_TOPIC), 0, topic)
	}
	return appendRaw(out, class, kind, number, withUnknown(payload, m.ProtoReflect().Descriptor()))
}

func appendRaw(out []byte, class, kind uint8, number uint32, payload []byte) []byte {
	out = binary.LittleEndian.AppendUint32(out, uint32(6+len(payload)))
	out = binary.LittleEndian.AppendUint32(append(out, class, kind), number)
	return append(out, payload...)
}

// messageOf returns the message of a frame; nil for a heartbeat and for what this test leaves
// unchanged. Only placements are called in the test.
func messageOf(class, kind uint8, payload []byte) proto.Message {
	switch {
	case class == classAnswer && len(payload) > 0:
		return new(fleetpb.Placed)
	case class != classMessage && class != classCall:
		return nil
	}
	switch fleetpb.Kind(kind) {
	case fleetpb.Kind_KIND_PLACE:
		return new(fleetpb.Place)
	case fleetpb.Kind_KIND_DONE, fleetpb.Kind_KIND_ANSWERED, fleetpb.Kind_KIND_RELEASE, fleetpb.Kind_KIND_CLEANUP:
		return new(fleetpb.LeaseUpdate)
	case fleetpb.Kind_KIND_COMPUTED:
		return new(fleetpb.Computed)
	case fleetpb.Kind_KIND_ADOPT:
		return new(fleetpb.Adoption)
	case fleetpb.Kind_KIND_TOPIC:
		return new(fleetpb.Topic)
	}
	return nil
}

// withUnknown returns an encoded message with unknown fields of each wire type, also in its
// nested messages.
func withUnknown(b []byte, d protoreflect.MessageDescriptor) []byte {
	var out []byte
	for len(b) > 0 {
		number, kind, tag := protowire.ConsumeTag(b)
		size := protowire.ConsumeFieldValue(number, kind, b[tag:])
		f := d.Fields().ByNumber(number)
		if f.Message() != nil {
			value, _ := protowire.ConsumeBytes(b[tag:])
			out = protowire.AppendBytes(protowire.AppendTag(out, number, kind), withUnknown(value, f.Message()))
		} else {
			out = append(out, b[:tag+size]...)
		}
		b = b[tag+size:]
	}
	out = protowire.AppendVarint(protowire.AppendTag(out, 1000, protowire.VarintType), 1<<63)
	out = protowire.AppendFixed64(protowire.AppendTag(out, 1001, protowire.Fixed64Type), 7)
	out = protowire.AppendFixed32(protowire.AppendTag(out, 1002, protowire.Fixed32Type), 7)
	return protowire.AppendBytes(protowire.AppendTag(out, 1003, protowire.BytesType), []byte("\xff later"))
}

// TestNextVersion: a coordinator and a worker of which one, or both, are of a later version
// place under load. No request is placed without the coordinator, and no lease remains.
func TestNextVersion(t *testing.T) {
	for name, later := range map[string]struct{ worker, coordinator bool }{
		"worker": {true, false}, "coordinator": {false, true}, "both": {true, true},
	} {
		t.Run(name, func(t *testing.T) { bubbleNext(t, later.worker, later.coordinator) })
	}
}

func bubbleNext(t *testing.T, worker, served bool) {
	pair := func(t *testing.T, w *wired) {
		var running sync.WaitGroup
		for i := range 8 {
			running.Go(func() {
				for n := range 100 {
					a := placetest.NewPlacementRequest()
					a.Key.Conversation.ID = fmt.Sprint(i, n%5)
					a.Request.Prompt = "\xff hello"
					p, err := w.client.Place(context.Background(), a)
					if err != nil {
						t.Error(err)
						return
					}
					if here(p) || p.Prefill.IsZero() || p.Decode.IsZero() || len(p.Facts.Candidates) == 0 {
						t.Errorf("request %d.%d: fallbacks %v, targets %v and %v", i, n, p.Fallbacks, p.Prefill, p.Decode)
					}
					p.Lease.RegisterOrphanCleanup([]byte("owed"))
					p.Lease.PrefillDone()
					p.Lease.Computed(coordinator.CacheReport{Block: 16, Prompt: 100, Cached: 10})
					p.Lease.Answered(true)
					p.Lease.Release()
				}
			})
		}
		running.Wait()
		later(2 * link.Linger)
		w.holds(t, 0)
		w.Idle(t)
		s := w.client.session.Load()
		if answer, err := s.link.Call(t.Context(), 97, []byte{0xff}, nil, time.Second); err != nil || len(answer) > 64 {
			t.Errorf("an unknown call is answered with %q, %v", answer, err)
		}
		w.pipes.fall(true) // its lease is moved when the worker reconnects
		p := w.Must(t, placetest.NewPlacementRequest())
		w.client.Redial()
		w.pipes.fall(false)
		later(2 * time.Second)
		w.holds(t, 1)
		p.Lease.Release()
		later(2 * link.Linger)
		w.holds(t, 0)
		if rows := w.server.Workers(); len(rows) != 1 || rows[0].Number != 2 {
			t.Errorf("the worker reconnected in between: %+v", rows)
		}
	}
	at := func(t *testing.T) *pipes {
		p := newPipes(t)
		if served {
			p.served = func(nc net.Conn) net.Conn { return &nextVersion{Conn: nc} }
		}
		return p
	}
	synctest.Test(t, func(t *testing.T) {
		pair(t, newWiredAt(t, at(t), func(_ *ServerOptions, co *ClientOptions) {
			if dial := co.Dial; worker {
				co.Dial = func(ctx context.Context) (net.Conn, error) {
					nc, err := dial(ctx)
					if err != nil {
						return nil, err
					}
					return &nextVersion{Conn: nc}, nil
				}
			}
		}, "p prefill", "d decode"))
	})
}
