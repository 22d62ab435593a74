package moriio

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func newTestBook() (*book, *bytes.Buffer) {
	var out bytes.Buffer
	return newBook(slog.New(slog.NewTextHandler(&out, nil))), &out
}

// A registration that comes again is no second engine, whatever its counter
// says; one with other ports takes the place of the first.
func TestSameAddressIsOneEngine(t *testing.T) {
	b, _ := newTestBook()
	now := time.Now()
	first := bytesOf(t, oldD)
	if !b.take(first, now) {
		t.Fatal("the first one changed nothing")
	}
	again := bytes.Replace(first, []byte("\xa217"), []byte("\xa218"), 1) // its index
	if bytes.Equal(first, again) || b.take(again, now) {
		t.Error("the same engine again changed something")
	}
	moved := bytes.Replace(first, []byte("\xcd\x18\x9d"), []byte("\xcd\x18\x9e"), 1) // its handshake port
	if bytes.Equal(first, moved) || !b.take(moved, now) {
		t.Error("another port changed nothing")
	}
	list := b.engines()
	if len(list) != 1 || list[0].KVAddress != "host:10.0.1.7,handshake:6302,notify:61005" {
		t.Errorf("%+v", list)
	}
	if b.take(bytesOf(t, hello), now) || b.take(bytesOf(t, nccl), now) || b.take([]byte{0xc1}, now) {
		t.Error("what is no registration changed something")
	}
}

// Engines of the two modes are of two connectors, so that nobody pairs them, and
// none of them harms the other.
func TestModesMix(t *testing.T) {
	b, _ := newTestBook()
	b.take(bytesOf(t, newP), time.Now())
	b.take(bytesOf(t, oldD), time.Now())
	list := b.engines()
	if len(list) != 2 || list[0].Connector != "vllm-moriio-read" || list[1].Connector != "vllm-moriio" {
		t.Errorf("%+v", list)
	}
}

// What is logged of the silence is the time that passed, not the time of day.
func TestSilentEngineLeaves(t *testing.T) {
	b, out := newTestBook()
	start := time.Date(2026, 3, 25, 12, 0, 0, 0, time.UTC)
	b.take(bytesOf(t, newP), start)
	b.take(bytesOf(t, oldD), start)
	b.take(bytesOf(t, newP), start.Add(9*time.Second)) // three of the other's are lost
	if b.expire(start.Add(Expiry)) {
		t.Error("an engine was taken out too early")
	}
	if !b.expire(start.Add(Expiry+500*time.Millisecond)) || len(b.engines()) != 1 {
		t.Errorf("left are %+v", b.engines())
	}
	if text := out.String(); !strings.Contains(text, "decode@10.0.1.7:8200") || !strings.Contains(text, "silent_for=10.5s") {
		t.Errorf("logged: %s", text)
	}
	if !b.take(bytesOf(t, oldD), start.Add(time.Minute)) || len(b.engines()) != 2 {
		t.Error("it did not come back")
	}
}

// A refusal is logged once, however often it comes again.
func TestRefusalIsSaidOnce(t *testing.T) {
	b, out := newTestBook()
	for range 3 {
		b.take(bytesOf(t, nccl), time.Now())
	}
	if n := strings.Count(out.String(), "refused"); n != 1 {
		t.Errorf("%d lines: %s", n, out)
	}
}
