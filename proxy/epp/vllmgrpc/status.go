package vllmgrpc

import (
	"net/http"

	"google.golang.org/grpc/codes"
)

// Status returns the gRPC status of an answer with an HTTP status, for a client of gRPC.
func Status(http int) codes.Code {
	for _, s := range statuses {
		if s.http == http {
			return s.grpc
		}
	}
	if http >= 500 {
		return codes.Internal
	}
	return codes.InvalidArgument
}

// HTTPStatus returns the HTTP status that means the same as a gRPC status other than OK.
func HTTPStatus(grpc int) int {
	for _, s := range statuses {
		if int(s.grpc) == grpc {
			return s.http
		}
	}
	return http.StatusInternalServerError
}

// statuses has the usual HTTP status of a gRPC status first.
var statuses = []struct {
	grpc codes.Code
	http int
}{
	{codes.InvalidArgument, http.StatusBadRequest},
	{codes.FailedPrecondition, http.StatusBadRequest},
	{codes.OutOfRange, http.StatusBadRequest},
	{codes.Unauthenticated, http.StatusUnauthorized},
	{codes.PermissionDenied, http.StatusForbidden},
	{codes.NotFound, http.StatusNotFound},
	{codes.Aborted, http.StatusConflict},
	{codes.AlreadyExists, http.StatusConflict},
	{codes.ResourceExhausted, http.StatusTooManyRequests},
	{codes.ResourceExhausted, http.StatusRequestEntityTooLarge},
	{codes.Unimplemented, http.StatusNotImplemented},
	{codes.Unimplemented, http.StatusMethodNotAllowed},
	{codes.Unimplemented, http.StatusUnsupportedMediaType},
	{codes.Unavailable, http.StatusServiceUnavailable},
	{codes.Unavailable, http.StatusBadGateway},
	{codes.DeadlineExceeded, http.StatusGatewayTimeout},
	{codes.DeadlineExceeded, http.StatusRequestTimeout},
	{codes.Canceled, 499}, // nginx: the client has closed the request
}
