package epp

import (
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/pdproxy/pdproxy/proxy/epp/grpcserver"
)

// The services of the health protocol, as the endpoint picker protocol names them. The empty name is
// the whole server.
const (
	serviceLive  = "liveness"
	serviceReady = "readiness"
)

// health is the health service (grpc/health/v1/health.proto). Safe for concurrent use.
type health struct {
	ended <-chan struct{} // closed when the server takes no more calls

	mu      sync.Mutex
	ready   bool          // the picker takes requests; guarded by mu
	changed chan struct{} // closed at the next change of ready; nil: nobody watches; guarded by mu
}

// add adds the methods of the service.
func (h *health) add(methods map[string]grpcserver.Method) {
	methods[grpc_health_v1.Health_Check_FullMethodName] = grpcserver.Method{Serve: h.check}
	methods[grpc_health_v1.Health_List_FullMethodName] = grpcserver.Method{Serve: h.list}
	methods[grpc_health_v1.Health_Watch_FullMethodName] = grpcserver.Method{Serve: h.watch}
}

// set sets whether the picker takes requests.
func (h *health) set(ready bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ready != ready && h.changed != nil {
		close(h.changed)
		h.changed = nil
	}
	h.ready = ready
}

// of returns the status of a service, and a channel that is closed when the status may change.
func (h *health) of(service string) (grpc_health_v1.HealthCheckResponse_ServingStatus, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.changed == nil {
		h.changed = make(chan struct{})
	}
	switch service {
	case "", serviceLive:
		return grpc_health_v1.HealthCheckResponse_SERVING, h.changed
	case serviceReady, serviceProcessor:
		if h.ready {
			return grpc_health_v1.HealthCheckResponse_SERVING, h.changed
		}
		return grpc_health_v1.HealthCheckResponse_NOT_SERVING, h.changed
	}
	return grpc_health_v1.HealthCheckResponse_SERVICE_UNKNOWN, h.changed
}

// serviceOf reads the request of a call.
func serviceOf(s *grpcserver.Stream) (string, error) {
	m, ok := s.Take()
	if !ok {
		return "", status.FromContextError(s.Context().Err()).Err()
	}
	defer m.Release()
	r := new(grpc_health_v1.HealthCheckRequest)
	if err := proto.Unmarshal(m.Data, r); err != nil {
		return "", status.Error(codes.Internal, "the message is no HealthCheckRequest")
	}
	return r.GetService(), nil
}

// send sends a message of the service.
func send(s *grpcserver.Stream, more bool, m proto.Message) error {
	raw, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	return s.Send(more, grpcserver.Parts{raw})
}

func (h *health) check(s *grpcserver.Stream) error {
	service, err := serviceOf(s)
	if err != nil {
		return err
	}
	now, _ := h.of(service)
	if now == grpc_health_v1.HealthCheckResponse_SERVICE_UNKNOWN {
		return status.Error(codes.NotFound, "unknown service")
	}
	return send(s, true, &grpc_health_v1.HealthCheckResponse{Status: now})
}

func (h *health) list(s *grpcserver.Stream) error {
	all := make(map[string]*grpc_health_v1.HealthCheckResponse)
	for _, service := range []string{"", serviceLive, serviceReady, serviceProcessor} {
		now, _ := h.of(service)
		all[service] = &grpc_health_v1.HealthCheckResponse{Status: now}
	}
	return send(s, true, &grpc_health_v1.HealthListResponse{Statuses: all})
}

// watch sends the status at each change until the client leaves, or the server takes no more calls.
func (h *health) watch(s *grpcserver.Stream) error {
	service, err := serviceOf(s)
	if err != nil {
		return err
	}
	last := grpc_health_v1.HealthCheckResponse_UNKNOWN
	for ended := false; ; {
		now, changed := h.of(service)
		if now != last {
			last = now
			if err := send(s, false, &grpc_health_v1.HealthCheckResponse{Status: now}); err != nil {
				return err
			}
		}
		if ended {
			return status.Error(codes.Unavailable, "the picker ends")
		}
		select {
		case <-changed:
		case <-h.ended:
			ended = true
		case <-s.Context().Done():
			return status.FromContextError(s.Context().Err()).Err()
		}
	}
}
