package epp

import (
	"context"
	"io"
	"math"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

// bytesCodec passes encoded messages.
type bytesCodec struct{}

// Name implements encoding.CodecV2.
func (bytesCodec) Name() string { return "proto" }

// Marshal implements encoding.CodecV2.
func (bytesCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

// Unmarshal implements encoding.CodecV2.
func (bytesCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// serveCalls serves all methods at an address.
func serveCalls(t *testing.T, address string, handle func(method string, s grpc.ServerStream) error) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.ForceServerCodecV2(bytesCodec{}), grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(s)
		return handle(method, s)
	}))
	done := make(chan struct{})
	go func() { // ends with Stop
		defer close(done)
		_ = s.Serve(l) // nil after Stop
	}()
	t.Cleanup(func() {
		s.Stop()
		<-done
	})
}

// limits is a rate limit service that permits all. Source: envoy/service/ratelimit/v3/rls.proto.
type limits struct {
	port int
	hits chan uint64 // gets the tokens of each call that adds some
}

func newLimits(t *testing.T) *limits {
	address := free(t)
	l := &limits{port: portOf(address), hits: make(chan uint64, 10)}
	serveCalls(t, address, func(_ string, s grpc.ServerStream) error {
		var m []byte
		if err := s.RecvMsg(&m); err != nil {
			return err
		}
		if n := hitsOf(m); n > 0 {
			l.hits <- n
		}
		ok := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 1) // overall_code OK
		return s.SendMsg(&ok)
	})
	return l
}

// next waits for the tokens of the next call that adds some.
func (l *limits) next(t *testing.T) uint64 {
	t.Helper()
	select {
	case n := <-l.hits:
		return n
	case <-time.After(patience):
		t.Fatal("the rate limit service was not called")
		return 0
	}
}

// hitsOf returns the hits_addend of a RateLimitRequest, or that of its descriptor: descriptors (2)
// with hits_addend (3), a UInt64Value, and hits_addend (3).
func hitsOf(m []byte) (hits uint64) {
	each(m, func(number protowire.Number, value []byte, n uint64) {
		switch {
		case number == 3 && value == nil:
			hits = max(hits, n)
		case number == 2:
			each(value, func(number protowire.Number, value []byte, _ uint64) {
				if number == 3 {
					each(value, func(_ protowire.Number, _ []byte, n uint64) { hits = max(hits, n) })
				}
			})
		}
	})
	return hits
}

// each calls f for the varints and the fields with a length of a message.
func each(m []byte, f func(number protowire.Number, value []byte, n uint64)) {
	for len(m) > 0 {
		number, kind, n := protowire.ConsumeTag(m)
		if n < 0 {
			return
		}
		size := protowire.ConsumeFieldValue(number, kind, m[n:])
		if size < 0 {
			return
		}
		switch field := m[n : n+size]; kind {
		case protowire.VarintType:
			v, _ := protowire.ConsumeVarint(field)
			f(number, nil, v)
		case protowire.BytesType:
			v, _ := protowire.ConsumeBytes(field)
			f(number, v, 0)
		}
		m = m[n+size:]
	}
}

// proto returns a message with texts, messages and numbers in its fields.
func proto(fields ...any) (m []byte) {
	for i := 0; i+1 < len(fields); i += 2 {
		number := protowire.Number(fields[i].(int))
		switch v := fields[i+1].(type) {
		case string:
			m = protowire.AppendString(protowire.AppendTag(m, number, protowire.BytesType), v)
		case []byte:
			m = protowire.AppendBytes(protowire.AppendTag(m, number, protowire.BytesType), v)
		case int:
			m = protowire.AppendVarint(protowire.AppendTag(m, number, protowire.VarintType), uint64(v))
		}
	}
	return m
}

// call calls a method behind the gateway, and returns all messages of the answer.
func call(t *testing.T, conn *grpc.ClientConn, method string, request []byte) (answer [][]byte, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := conn.NewStream(metadata.AppendToOutgoingContext(ctx, "x-mine", "stays"), &grpc.StreamDesc{ServerStreams: true}, method, grpc.ForceCodecV2(bytesCodec{}))
	if err != nil {
		return nil, err
	}
	if err := s.SendMsg(&request); err != nil && err != io.EOF { // EOF: the answer tells why
		return nil, err
	}
	if err := s.CloseSend(); err != nil {
		return nil, err
	}
	for {
		var m []byte
		if err := s.RecvMsg(&m); err == io.EOF {
			return answer, nil
		} else if err != nil {
			return answer, err
		}
		answer = append(answer, m)
	}
}

// TestCalls: a client of vLLM's gRPC services behind Envoy, with grpc-go as client and as engine. The
// picker places the calls, counts their tokens, and answers with gRPC statuses.
func TestCalls(t *testing.T) {
	const stream, whole = "/vllm.Inference/GenerateStream", "/vllm.grpc.engine.VllmEngine/Generate"
	p, g := &pool{Name: "small", H2C: true, lines: "server.max_body = \"64KiB\"\n"}, &gateway{Name: "gateway"}
	got := make(chan string, 10)
	for pod := range 2 {
		host := "127.0.9." + strconv.Itoa(pod+1)
		probed, e := endpoint{host, portOf(free(t))}, endpoint{host, portOf(free(t))}
		p.Endpoints, p.probes = append(p.Endpoints, e), append(p.probes, probed)
		servePod(t, probed, nil)
		serveCalls(t, e.String(), func(method string, s grpc.ServerStream) error {
			var m []byte
			if err := s.RecvMsg(&m); err != nil {
				return err
			}
			md, _ := metadata.FromIncomingContext(s.Context())
			got <- method + " " + strings.Join(md["x-mine"], ",") + " " + string(m)
			if method == whole {
				answer := proto(2, proto(1, "\x01\x02", 3, 7, 4, 2, 5, 4))
				return s.SendMsg(&answer)
			}
			if method != stream {
				return status.Error(codes.DataLoss, "of the engine")
			}
			for _, answer := range [][]byte{proto(1, proto(1, 3), 2, proto(2, "a", 3, 1)), proto(2, proto(3, 1, 8, proto(1, 2, 2, 2)))} {
				if err := s.SendMsg(&answer); err != nil {
					return err
				}
			}
			return nil
		})
	}
	p.start(t)
	g.Pools = []*pool{p}
	startGateways(t, g.Pools, g)
	conn, err := grpc.NewClient("passthrough:///127.0.0.1:"+strconv.Itoa(g.Port), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("small"),
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(math.MaxInt32)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ids, text := proto(2, proto(1, "hello", 2, "\x01\x02\x03"), 4, proto(8, 16)), proto(2, "sim", 3, "hello", 8, proto(1, 16))
	for _, tt := range []struct {
		method  string
		request []byte
		answers int
		code    codes.Code
	}{
		{whole, ids, 1, codes.OK},
		{stream, text, 2, codes.OK},
		{"/llama" + stream, text, 0, codes.DataLoss}, // the engine has no such method
		{"/other.Service/Call", text, 0, codes.DataLoss},
	} {
		answer, err := call(t, conn, tt.method, tt.request)
		if status.Code(err) != tt.code || len(answer) != tt.answers {
			t.Errorf("%s: %d messages, %v", tt.method, len(answer), err)
			continue
		}
		if seen := <-got; seen != tt.method+" stays "+string(tt.request) {
			t.Errorf("the engine got %q", seen)
		}
	}
	for name, tt := range map[string]struct {
		method  string
		request []byte
		code    codes.Code
		message string
	}{
		"an unknown model":            {stream, proto(2, "other", 3, "x"), codes.NotFound, "does not exist"},
		"no prompt":                   {stream, proto(2, "sim"), codes.InvalidArgument, "neither a text nor token ids"},
		"transfer parameters":         {whole, proto(3, "x", 8, "{}"), codes.InvalidArgument, "kv_transfer_params"},
		"a method of operators":       {"/vllm.Control/Abort", nil, codes.Unimplemented, "no endpoint"},
		"a message that is too large": {stream, proto(3, strings.Repeat("x", 100_000)), codes.ResourceExhausted, "larger"},
	} {
		if _, err := call(t, conn, tt.method, tt.request); status.Code(err) != tt.code || !strings.Contains(status.Convert(err).Message(), tt.message) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		_, text := get(p.admin + "/metrics")
		if strings.Contains(text, `kind="completion",model="sim"} 4`) || strings.Contains(text, `model="sim",kind="completion"} 4`) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the tokens are not counted:\n%s", text)
		}
	}
}
