package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"syscall"
	"testing"
)

// Both clients distinguish a connection that this host could not open from one that the
// engine refused.
func TestLocalFailure(t *testing.T) {
	dialing := func(ip string, err error) error {
		return &net.OpError{Op: "dial", Net: "tcp", Addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 80}, Err: os.NewSyscallError("connect", err)}
	}
	tests := []struct {
		err  error
		want bool
	}{
		{dialing("10.0.0.1", syscall.EMFILE), true},
		{dialing("10.0.0.1", syscall.ENFILE), true},
		{dialing("10.0.0.1", syscall.ENOBUFS), true},
		{dialing("::1", syscall.ENOMEM), true},
		{dialing("10.0.0.1", syscall.EADDRNOTAVAIL), true},
		{dialing("::1", syscall.EADDRNOTAVAIL), false}, // this host has no IPv6, so no engine is there
		{fmt.Errorf("lookup engine: %w", syscall.EMFILE), true},
		{dialing("10.0.0.1", syscall.ECONNREFUSED), false},
		{dialing("10.0.0.1", syscall.EHOSTUNREACH), false},
		{errors.New("other"), false},
	}
	u := &url.URL{Scheme: "http", Host: "engine.test"}
	for _, tt := range tests {
		o := Options{URL: u, Dial: func(context.Context, string, string) (net.Conn, error) { return nil, tt.err }}
		_, err := New(o).Do(t.Context(), &Request{Path: "/"})
		var ue *Error
		if !errors.As(err, &ue) || ue.Op != OpDial || ue.Sent || ue.Local != tt.want {
			t.Errorf("%v: %#v, want local %v", tt.err, err, tt.want)
		}
	}
}
