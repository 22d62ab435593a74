package epp

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/epp/grpcserver"
	"github.com/pdproxy/pdproxy/proxy/proxytest"
)

// served is a picker whose requests are answered with 204 after release is closed.
type served struct {
	*Server
	listener *proxytest.PipeListener
	begun    chan struct{} // gets a value for each request
	release  chan struct{}
}

func serve(t *testing.T) *served {
	s := &served{listener: proxytest.NewPipeListener(), begun: make(chan struct{}, 10), release: make(chan struct{})}
	s.Server = New(Options{
		Registry: engine.New(engine.Options{}), Ready: func() bool { return true }, Metadata: func() string { return "" }, Log: slog.New(slog.DiscardHandler),
		Prefix:       func(string) string { return "" },
		MaxExchanges: 100, HeadTimeout: 10 * time.Second, MaxHeader: 64 << 10, MaxBody: 16 << 20, Memory: new(buffer.Budget),
		Handle: func(w http.ResponseWriter, r *http.Request, _ attempt.Gateway) {
			s.begun <- struct{}{}
			<-s.release
			w.WriteHeader(http.StatusNoContent)
		},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, s.listener, func() time.Duration { return 0 }) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if counted := s.options.Memory.Used(); counted != 0 {
			t.Errorf("%d bytes are still counted", counted)
		}
	})
	return s
}

// TestServeAfterTheEnd: a process that is told to end while it starts ends without an error.
func TestServeAfterTheEnd(t *testing.T) {
	for range 50 { // the drain may begin before the service, or after it
		s := serve(t)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		other := New(s.options)
		if err := other.Serve(ctx, proxytest.NewPipeListener(), func() time.Duration { return 0 }); err != nil {
			t.Fatal(err)
		}
	}
}

// dial returns a new connection to the picker.
func (s *served) dial(t *testing.T) *grpc.ClientConn {
	c, err := grpc.NewClient("passthrough:///picker", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return s.listener.Dial() }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// open opens an ext_proc stream without a message.
func open(t *testing.T, c *grpc.ClientConn) extproc.ExternalProcessor_ProcessClient {
	t.Helper()
	st, err := extproc.NewExternalProcessorClient(c).Process(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return st
}

var getRequest = &extproc.ProcessingRequest{Request: &extproc.ProcessingRequest_RequestHeaders{RequestHeaders: &extproc.HttpHeaders{EndOfStream: true, Headers: &core.HeaderMap{Headers: []*core.HeaderValue{
	{Key: ":method", RawValue: []byte("GET")}, {Key: ":path", RawValue: []byte("/")}, {Key: ":authority", RawValue: []byte("x")},
}}}}}

// wantAnswer fails unless the request of a stream is answered.
func wantAnswer(t *testing.T, st extproc.ExternalProcessor_ProcessClient) {
	t.Helper()
	if r, err := st.Recv(); err != nil || r.GetImmediateResponse().GetStatus().GetCode() != 204 {
		t.Errorf("the request got %v, %v", r, err)
	}
}

// watchEnd closes the connection of a watch and returns the error of the watch.
func watchEnd(t *testing.T, c *grpc.ClientConn, w grpc_health_v1.Health_WatchClient) error {
	t.Helper()
	c.Close()
	_, err := w.Recv()
	return err
}

// TestFirstMessageIsLimited: a stream whose first message does not arrive ends after
// HeadTimeout, for each method that reads a message. Streams with a request and watches of the
// health stay.
func TestFirstMessageIsLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t)
		c := s.dial(t)
		running := open(t, c)
		if err := running.Send(getRequest); err != nil {
			t.Fatal(err)
		}
		<-s.begun
		watch, err := grpc_health_v1.NewHealthClient(c).Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if r, err := watch.Recv(); err != nil || r.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
			t.Fatal(r, err)
		}
		begin := time.Now()
		var streams []grpc.ClientStream
		for _, method := range []string{extproc.ExternalProcessor_Process_FullMethodName, grpc_health_v1.Health_Check_FullMethodName, grpc_health_v1.Health_List_FullMethodName} {
			st, err := c.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
			if err != nil {
				t.Fatal(err)
			}
			streams = append(streams, st)
		}
		for i, st := range streams {
			if err := st.RecvMsg(new(extproc.ProcessingResponse)); err == nil {
				t.Errorf("stream %d got a message", i)
			} else if code := status.Code(err); i == 0 && code != codes.DeadlineExceeded {
				t.Errorf("stream %d ended with %v", i, err)
			}
		}
		if d := time.Since(begin); d < 10*time.Second || d > 11*time.Second {
			t.Errorf("the streams ended after %v", d)
		}
		time.Sleep(time.Minute)
		close(s.release)
		wantAnswer(t, running)
		if got := status.Code(watchEnd(t, c, watch)); got != codes.Canceled {
			t.Errorf("the watch ended with %v, before the gateway left", got)
		}
	})
}

// TestWatchEnds: a client that watches the health sees the end, and delays no drain.
func TestWatchEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t)
		l := proxytest.NewPipeListener()
		picker := New(s.options)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- picker.Serve(ctx, l, func() time.Duration { return time.Hour }) }()
		watch, err := grpc_health_v1.NewHealthClient((&served{listener: l}).dial(t)).Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: serviceReady})
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []grpc_health_v1.HealthCheckResponse_ServingStatus{grpc_health_v1.HealthCheckResponse_SERVING, grpc_health_v1.HealthCheckResponse_NOT_SERVING} {
			if r, err := watch.Recv(); err != nil || r.GetStatus() != want {
				t.Errorf("got %v, %v, want %v", r, err, want)
			}
			cancel()
		}
		if _, err := watch.Recv(); status.Code(err) != codes.Unavailable {
			t.Errorf("the watch ended with %v", err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestUnusedStreamsAreShared: a gateway that opens streams without messages gets at most its
// share of them, and takes no stream from another gateway.
func TestUnusedStreamsAreShared(t *testing.T) {
	s := serve(t)
	close(s.release)
	flood, honest := s.dial(t), s.dial(t)
	refused := make(chan error, grpcserver.MaxUnused)
	var wg sync.WaitGroup
	for range grpcserver.MaxUnused + 50 {
		st := open(t, flood)
		wg.Go(func() { // ends with the stream
			if _, err := st.Recv(); status.Code(err) == codes.ResourceExhausted {
				refused <- err
			}
		})
	}
	for range 50 {
		<-refused
	}
	for range 10 {
		st := open(t, honest)
		if err := st.Send(getRequest); err != nil {
			t.Fatal(err)
		}
		<-s.begun
		wantAnswer(t, st)
	}
	if r, err := grpc_health_v1.NewHealthClient(honest).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil || r.GetStatus() != grpc_health_v1.HealthCheckResponse_SERVING {
		t.Errorf("the health check got %v, %v", r, err)
	}
	if _, err := grpc_health_v1.NewHealthClient(flood).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the health check of the flood got %v", err)
	}
	flood.Close()
	wg.Wait()
}

// TestIdleGatewaysMakeRoom: a new connection closes the connection that has been idle for the
// longest time, but none with a request.
func TestIdleGatewaysMakeRoom(t *testing.T) {
	s := serve(t)
	running := open(t, s.dial(t))
	if err := running.Send(getRequest); err != nil {
		t.Fatal(err)
	}
	<-s.begun
	var idle []net.Conn
	for range 600 { // more than one address may have
		c, err := s.listener.Dial()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		idle = append(idle, c)
	}
	for _, c := range idle[:50] {
		c.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := io.Copy(io.Discard, c); err != nil {
			t.Fatal("an old idle connection is still open:", err)
		}
	}
	close(s.release)
	wantAnswer(t, running)
}
