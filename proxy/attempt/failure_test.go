package attempt

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/journal"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

func targetNamed(name string) engine.Target {
	return engine.Target{Instance: &engine.Instance{Spec: config.Engine{Name: name}}}
}

func TestFailureOfALeg(t *testing.T) {
	tests := []struct {
		name   string
		err    error
		reason string
		code   int
		sent   bool
	}{
		{"never sent", &upstream.Error{Op: upstream.OpDial, Err: io.EOF}, "dial", 502, false},
		{"sent", &upstream.Error{Op: upstream.OpHead, Sent: true, Err: io.EOF}, "head", 502, true},
		{"timed out", &upstream.Error{Op: upstream.OpBody, Sent: true, Timeout: true, Err: os.ErrDeadlineExceeded}, "timeout", 504, true},
		{"dial timed out", &upstream.Error{Op: upstream.OpDial, Timeout: true, Err: os.ErrDeadlineExceeded}, "timeout", 504, false},
		{"of another kind", buffer.ErrTooLarge, "reset", 502, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := (&leg{Leg: journal.Leg{Phase: abi.Prefill}, target: targetNamed("p0")}).failed(tt.err)
			if e.Reason != tt.reason || e.Code != tt.code || e.sent != tt.sent || maybeSent(e) != tt.sent {
				t.Errorf("got reason %s, code %d, sent %v; want %s, %d, %v", e.Reason, e.Code, e.sent, tt.reason, tt.code, tt.sent)
			}
			if !errors.Is(e, tt.err) || !strings.HasPrefix(e.Error(), "prefill leg on engine p0 failed: "+tt.reason+": ") {
				t.Errorf("error text %q", e)
			}
		})
	}
	if e := (&Error{Phase: abi.Decode, Target: targetNamed("d0"), Reason: "status_500"}); e.Error() != "decode leg on engine d0 failed: status_500" {
		t.Errorf("error text %q", e)
	}
}

// TestOutermostFailureOfALeg: a leg that the failure of the other leg ended is judged by its
// own failure, although that contains the failure of the other leg.
func TestOutermostFailureOfALeg(t *testing.T) {
	peer := &Error{Phase: abi.Prefill, Reason: "status_503", Status: 503, Code: 502, sent: true}
	ended := &failure{Phase: abi.Decode, Reason: "reset", Code: 502, sent: true, err: peer}
	for _, err := range []error{ended, fmt.Errorf("relay: %w", ended), (*Error)(ended)} {
		if e := asLegError(err); e == nil || e.Phase != abi.Decode || answeredWithError(err) {
			t.Errorf("asLegError(%v) = %v, want decode's failure", err, e)
		}
	}
	if e := asLegError(fmt.Errorf("cause: %w", peer)); e != peer {
		t.Errorf("asLegError returned %v, want %v", e, peer)
	}
	if e := asLegError(errPeerLeg); e != nil {
		t.Errorf("asLegError(errPeerLeg) = %v, want nil", e)
	}
}
