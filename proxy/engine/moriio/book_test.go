package moriio

import (
	"bytes"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/engine/registrations"
	"github.com/pdproxy/pdproxy/proxy/engine/zmtp"
)

func newTestBook() (*book, *bytes.Buffer) {
	var out bytes.Buffer
	return newBook(slog.New(slog.NewTextHandler(&out, nil)), false), &out
}

// A repeated registration creates no second engine, for any value of its counter. A
// registration with other ports replaces the first one.
func TestSameAddressIsOneEngine(t *testing.T) {
	b, _ := newTestBook()
	now := time.Now()
	first := bytesOf(t, oldD)
	if !b.register(message{text: first}, now) {
		t.Fatal("the first one changed nothing")
	}
	again := bytes.Replace(first, []byte("\xa217"), []byte("\xa218"), 1) // its index
	if bytes.Equal(first, again) || b.register(message{text: again}, now) {
		t.Error("the same engine again changed something")
	}
	moved := bytes.Replace(first, []byte("\xcd\x18\x9d"), []byte("\xcd\x18\x9e"), 1) // its handshake port
	if bytes.Equal(first, moved) || !b.register(message{text: moved}, now) {
		t.Error("a registration with another port changed nothing")
	}
	list := b.engines()
	if len(list) != 1 || list[0].KVAddress != "host:10.0.1.7,handshake:6302,notify:61005" {
		t.Errorf("b.engines() = %+v", list)
	}
	if b.register(message{text: bytesOf(t, hello)}, now) || b.register(message{text: bytesOf(t, other)}, now) || b.register(message{text: []byte{0xc1}}, now) {
		t.Error("a message that is not a registration changed the book")
	}
}

// Engines of the two modes have different connectors. So the proxy never pairs
// them, and both stay registered.
func TestModesMix(t *testing.T) {
	b, _ := newTestBook()
	b.register(message{text: bytesOf(t, newP)}, time.Now())
	b.register(message{text: bytesOf(t, oldD)}, time.Now())
	list := b.engines()
	if len(list) != 2 || list[0].Connector != "vllm-moriio-read" || list[1].Connector != "vllm-moriio" {
		t.Errorf("b.engines() = %+v", list)
	}
}

// The log shows for how long the engine was silent, not a time of day.
func TestSilentEngineLeaves(t *testing.T) {
	b, out := newTestBook()
	start := time.Date(2026, 3, 25, 12, 0, 0, 0, time.UTC)
	b.register(message{text: bytesOf(t, newP)}, start)
	b.register(message{text: bytesOf(t, oldD)}, start)
	b.register(message{text: bytesOf(t, newP)}, start.Add(9*time.Second)) // three registrations of the decode engine are lost
	if b.expire(start.Add(Expiry)) {
		t.Error("an engine was removed too early")
	}
	if !b.expire(start.Add(Expiry+500*time.Millisecond)) || len(b.engines()) != 1 {
		t.Errorf("remaining engines: %+v", b.engines())
	}
	if text := out.String(); !strings.Contains(text, "decode@10.0.1.7:8200") || !strings.Contains(text, "silent_for=10.5s") {
		t.Errorf("logged: %s", text)
	}
	if !b.register(message{text: bytesOf(t, oldD)}, start.Add(time.Minute)) || len(b.engines()) != 2 {
		t.Error("the engine did not register again")
	}
}

// A registration of the retired connector gets the name of the replacement in the log.
func TestRetiredConnectorIsRefused(t *testing.T) {
	b, out := newTestBook()
	if b.register(message{text: bytesOf(t, nccl)}, time.Now()) || len(b.engines()) != 0 {
		t.Error("the engine is registered")
	}
	if !strings.Contains(out.String(), `use \"vllm-nixl\"`) {
		t.Errorf("got %s", out)
	}
}

// The book logs a refusal once, even if the engine tries again.
func TestRefusalIsSaidOnce(t *testing.T) {
	b, out := newTestBook()
	for range 3 {
		b.register(message{text: bytesOf(t, other)}, time.Now())
	}
	if n := strings.Count(out.String(), "refused"); n != 1 {
		t.Errorf("%d lines: %s", n, out)
	}
}

// With ownHost a peer may register only its own host. Then both the HTTP address
// and the KV address must have the address of the peer.
func TestOwnHost(t *testing.T) {
	for name, tt := range map[string]struct {
		text, from string
		taken      bool
	}{
		"own":            {newP, "10.0.0.5", true},
		"own, IPv6 form": {newP, "::ffff:10.0.0.5", true},
		"own, old form":  {oldD, "10.0.1.7", true},
		"another's":      {newP, "10.0.0.6", false},
		"metadata":       {newP, "169.254.169.254", false},
		"unknown":        {newP, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			b, out := newTestBook()
			b.ownHost = true
			for range 2 {
				b.register(message{text: bytesOf(t, tt.text), from: tt.from}, time.Now())
			}
			if len(b.engines()) == 1 != tt.taken {
				t.Errorf("got %v", b.engines())
			}
			if n := strings.Count(out.String(), "own_host"); (n == 0) != tt.taken || n > 1 {
				t.Errorf("logged: %s", out)
			}
		})
	}
	b, _ := newTestBook()
	b.ownHost = true
	elsewhere := bytes.Replace(bytesOf(t, newP), []byte("host:10.0.0.5"), []byte("host:10.0.0.6"), 1)
	if b.register(message{text: elsewhere, from: "10.0.0.5"}, time.Now()); len(b.engines()) != 0 {
		t.Error("the KV address was another's")
	}
}

// The book logs a refused peer once, whatever the number of tries. The number of lines is
// bounded, and so is the name of an engine.
func TestRefusedPeers(t *testing.T) {
	b, out := newTestBook()
	for n := range 3 * maxEngines {
		m := message{from: fmt.Sprint("10.0.0.", n/4), refused: zmtp.ErrPassword}
		if b.register(m, time.Now()) {
			t.Fatal("a refused peer changed something")
		}
	}
	if n := strings.Count(out.String(), "from 10.0.0.7\""); n != 1 {
		t.Errorf("the refusal was logged %d times", n)
	}
	if n := strings.Count(out.String(), "\n"); n > refusedTexts {
		t.Errorf("%d lines", n)
	}
	long := bytes.Replace(bytesOf(t, newP), []byte("10.0.0.5"), bytes.Repeat([]byte("a"), 300), 1)
	if b.register(message{text: long, from: "10.0.0.5"}, time.Now()) {
		t.Error("a name of 300 bytes was taken")
	}
}

// A book restores the entries of another book and keeps their ends of time. It
// leaves out entries that may not register with this book.
func TestRestoredBook(t *testing.T) {
	start := time.Date(2026, 3, 25, 12, 0, 0, 0, time.UTC)
	first, _ := newTestBook()
	first.register(message{text: bytesOf(t, newP), from: "10.0.0.5"}, start)
	first.register(message{text: bytesOf(t, oldD), from: "10.0.0.9"}, start.Add(4*time.Second))
	now := start.Add(5 * time.Second)
	entries := first.export(now)

	b, out := newTestBook()
	b.restore(entries, now)
	if got, want := b.engines(), first.engines(); !slices.Equal(got, want) || len(got) != 2 {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if b.register(message{text: bytesOf(t, oldD)}, now) || out.Len() > 0 {
		t.Errorf("a repeated registration changed the book: %s", out)
	}
	if b.expire(start.Add(Expiry)) {
		t.Error("an engine was removed too early")
	}
	if !b.expire(start.Add(Expiry+500*time.Millisecond)) || len(b.engines()) != 1 {
		t.Errorf("remaining engines: %+v", b.engines())
	}
	// A restore removes the engines that the new entries do not contain.
	b.restore(entries[:1], now)
	if len(b.engines()) != 1 {
		t.Errorf("remaining engines: %+v", b.engines())
	}
	own, out := newTestBook()
	own.ownHost = true
	own.restore(append(entries, registrations.Entry{Value: []byte("garbage")}), now)
	if list := own.engines(); len(list) != 1 || list[0].Role != "prefill" || !strings.Contains(out.String(), "own_host") {
		t.Errorf("own.engines() = %+v, %s", list, out)
	}
	// Entries of another version may name a longer time. They end after Expiry all the
	// same.
	for i := range entries {
		entries[i].End(now, time.Hour, time.Hour)
	}
	b.restore(entries, now)
	if !b.expire(now.Add(Expiry+time.Millisecond)) || len(b.engines()) != 0 {
		t.Errorf("remaining engines: %+v", b.engines())
	}
}
