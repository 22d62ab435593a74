package zmtp

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
)

// TestForeignPeers: for invalid bytes from the peer of a SUB, the handshake ends with an
// error that names the reason, and the connection is closed.
func TestForeignPeers(t *testing.T) {
	for _, tt := range []struct{ name, sends, want string }{
		{"nothing", ``, "EOF"},
		{"HTTP", `"HTTP/1.1 400 Bad Request" 0d0a "Connection: close and that is all there is to say" 0d0a0d0a`, ErrMechanism.Error()},
		{"ZMTP 2", strings.Replace(greetingNull, "03 00", "01 00", 1), ErrMechanism.Error()},
		{"another mechanism", greetingPlain, ErrMechanism.Error()},
		{"a mechanism that begins alike", strings.Replace(greetingNull, `"NULL" 00`, `"NULLS"`, 1), ErrMechanism.Error()},
		{"a greeting that is cut", greetingNull[:60], ErrMechanism.Error()},
		{"no READY", greetingNull, "EOF"},
		{"a message", greetingNull + `00 01 "x"`, "a message instead of READY"},
		{"another command", greetingNull + `04 05 04 "PONG"`, "another command than READY"},
		{"an empty command", greetingNull + `04 00`, "another command than READY"},
		{"a command that is cut", greetingNull + `04 02 09 "P"`, "another command than READY"},
		{"a command with more", greetingNull + `05 06 05 "READY"`, errFlags.Error()},
		{"unknown flags", greetingNull + `08 00`, errFlags.Error()},
		{"an error", greetingNull + `04 0a 05 "ERROR" 03 "bad"`, `refuses the connection: "bad"`},
		{"an error without a reason", greetingNull + `04 06 05 "ERROR"`, `refuses the connection: ""`},
		{"another socket", greetingNull + strings.Replace(readyPub, `"PUB"`, `"REP"`, 1), `a socket of type "REP" does not suit SUB`},
		{"a name that is cut", greetingNull + `04 0c 05 "READY" 0b "Socke"`, errMetadata.Error()},
		{"a name without an end", greetingNull + `04 09 05 "READY" 01 "a" 00`, errMetadata.Error()},
		{"an empty name", greetingNull + `04 0b 05 "READY" 00 00000000`, errMetadata.Error()},
		{"a value that is cut", greetingNull + `04 0d 05 "READY" 01 "a" 00000002 "b"`, errMetadata.Error()},
		{"a value of 4 GiB", greetingNull + `04 0d 05 "READY" 01 "a" ffffffff "b"`, errMetadata.Error()},
		{"a long command", greetingNull + `06 7fffffffffffffff`, ErrLimit.Error()},
		{"a header that is cut", greetingNull + `06`, io.ErrUnexpectedEOF.Error()},
		{"a long header that is cut", greetingNull + `06 00`, io.ErrUnexpectedEOF.Error()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			peer := &scripted{in: bytes.NewReader(unhex(t, tt.sends))}
			if _, err := open(t.Context(), peer, "", options(Sub)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got error %v, want %s", err, tt.want)
			}
			if !peer.closed {
				t.Error("the connection is open")
			}
		})
	}
}

// TestMetadata: the handshake accepts unknown properties, property names in another
// letter case, and a missing socket type.
func TestMetadata(t *testing.T) {
	for _, ready := range []string{
		`04 06 05 "READY"`,
		`04 1a 05 "READY" 0b "SOCKET-type" 00000004 "XPUB"`,
		`04 21 05 "READY" 0b "Socket-Type" 00000003 "PUB" 03 "X-a" 00000000`,
	} {
		if _, err := open(t.Context(), &scripted{in: bytes.NewReader(unhex(t, greetingNull+ready))}, "", options(Sub)); err != nil {
			t.Errorf("%s: open = %v, want nil", ready, err)
		}
	}
}

// TestPassword: with a password, the handshake accepts only a peer that sends the
// password.
func TestPassword(t *testing.T) {
	const initiate = `04 1f 08 "INITIATE" 0b "Socket-Type" 00000006 "DEALER"`
	for _, tt := range []struct {
		name, sends string
		want        error  // expected error; nil: any error, or none if in is set
		in          bool   // the peer is accepted
		sent        string // bytes sent after the greeting
	}{
		{"right", greetingPlain + `04 13 05 "HELLO" 04 "vllm" 07 "hunter2"` + initiate, nil, true, ""},
		{"right, no name", greetingPlain + `04 0f 05 "HELLO" 00 07 "hunter2"` + initiate, nil, true, ""},
		{"wrong", greetingPlain + `04 13 05 "HELLO" 04 "vllm" 07 "hunter3"` + initiate, ErrPassword, false, `04 15 05 "ERROR" 0e "wrong password"`},
		{"longer", greetingPlain + `04 10 05 "HELLO" 00 08 "hunter22"` + initiate, ErrPassword, false, `04 15 05 "ERROR" 0e "wrong password"`},
		{"empty", greetingPlain + `04 0c 05 "HELLO" 04 "vllm" 00` + initiate, ErrPassword, false, `04 15 05 "ERROR" 0e "wrong password"`},
		{"no text", greetingPlain + `04 06 05 "HELLO"` + initiate, errHello, false, ""},
		{"no second text", greetingPlain + `04 0b 05 "HELLO" 04 "vllm"` + initiate, errHello, false, ""},
		{"more", greetingPlain + `04 10 05 "HELLO" 00 07 "hunter2" 00` + initiate, errHello, false, ""},
		{"no HELLO", greetingPlain + initiate, nil, false, ""},
		{"no INITIATE", greetingPlain + `04 13 05 "HELLO" 04 "vllm" 07 "hunter2"` + aMessage, nil, false, ""},
		{"another socket", greetingPlain + `04 13 05 "HELLO" 04 "vllm" 07 "hunter2"` + strings.ReplaceAll(initiate, "DEALER", "PULLER"), nil, false, ""},
		{"NULL", greetingNull + readyDealer, ErrMechanism, false, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			peer := &scripted{in: bytes.NewReader(unhex(t, tt.sends))}
			_, err := Accept(t.Context(), peer, "hunter2", options(Router))
			if (err == nil) != tt.in || tt.want != nil && !errors.Is(err, tt.want) || peer.closed == tt.in {
				t.Errorf("got error %v, closed %v", err, peer.closed)
			}
			if sent := peer.out.Bytes()[greetingLen:]; tt.sent != "" && !bytes.Equal(sent, unhex(t, tt.sent)) {
				t.Errorf("sent %q", sent)
			}
			if peer.out.Bytes()[32] != 1 {
				t.Error("the greeting does not set as-server")
			}
		})
	}
}

// TestPing: a PING gets an answer with its context, between and within messages. Other
// commands and malformed PINGs are ignored.
func TestPing(t *testing.T) {
	for _, tt := range []struct{ name, sends, sent string }{
		{"no context", `04 07 04 "PING" 000a`, `04 05 04 "PONG"`},
		{"context", `04 09 04 "PING" 000a "ab"`, `04 07 04 "PONG" "ab"`},
		{"the longest context", `04 17 04 "PING" 000a "0123456789abcdef"`, `04 15 04 "PONG" "0123456789abcdef"`},
		{"a context too long", `04 18 04 "PING" 000a "0123456789abcdefg"`, ``},
		{"no time to live", `04 06 04 "PING" 00`, ``},
		{"PONG", `04 05 04 "PONG"`, ``},
		{"SUBSCRIBE", `04 0c 09 "SUBSCRIBE" "kv"`, ``},
		{"empty", `04 00`, ``},
	} {
		t.Run(tt.name, func(t *testing.T) {
			peer := &scripted{in: bytes.NewReader(unhex(t, greetingNull+readyDealer+tt.sends+`01 00`+tt.sends+`00 01 "z"`))}
			c, err := open(t.Context(), peer, "", options(Dealer))
			if err != nil {
				t.Fatal(err)
			}
			peer.out.Reset()
			if frames, err := c.Receive(0); err != nil || text(frames) != `"" "z"` {
				t.Fatalf("c.Receive(0) = %q, %v", frames, err)
			}
			if !bytes.Equal(peer.out.Bytes(), unhex(t, tt.sent+tt.sent)) {
				t.Errorf("sent %q", peer.out.Bytes())
			}
		})
	}
}
