package loads

import (
	"bytes"
	"encoding/hex"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// ninth is the second frame of a message.
var ninth = []byte{0, 0, 0, 0, 0, 0, 0, 9}

// pushed returns a message of SGLang with this hexadecimal payload.
func pushed(t testing.TB, text string) [][]byte {
	t.Helper()
	payload, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return [][]byte{[]byte("load"), ninth, payload}
}

// The payloads are those of msgspec for LoadStat.
const (
	stat      = "a84c6f616453746174" // "LoadStat"
	wholeStat = "9b" + stat + "03" + "02" + "cd1000" + "ce00010000" + "01" + "cd0200" + "cd1400" + "cd0100" + "cf0000000100000000" + "ce000f4240"
	olderStat = "96" + stat + "03" + "02" + "cd1000" + "ce00010000" + "c0"
)

func TestReadPushed(t *testing.T) {
	for _, tt := range []struct {
		name   string
		frames [][]byte
		want   load.Report
		bad    bool
	}{
		{name: "0.5.23", frames: pushed(t, wholeStat), want: load.Report{Running: 3, Waiting: 2, Tokens: 5120, Capacity: 65536, Queued: 512}},
		{name: "an older engine", frames: pushed(t, olderStat), want: load.Report{Running: 3, Waiting: 2, Tokens: 4096, Capacity: 65536, Queued: -1}},
		{name: "negative numbers", frames: pushed(t, "96"+stat+"ff"+"ff"+"ff"+"ff"+"c0"), want: load.Report{Queued: -1}},
		{name: "huge numbers", frames: pushed(t, "96"+stat+"d37fffffffffffffff"+"00"+"d37fffffffffffffff"+"00"+"c0"), want: load.Report{Running: 1 << 18, Tokens: 1 << 40, Queued: -1}},
		{name: "another tag", frames: pushed(t, "96"+"a84c6f61645374617a"+"0102030405"), bad: true},
		{name: "no tag", frames: pushed(t, "96010203040506"), bad: true},
		{name: "text for a number", frames: pushed(t, "96"+stat+"a133"+"02030405"), bad: true},
		{name: "too few members", frames: pushed(t, "95"+stat+"01020304"), bad: true},
		{name: "cut", frames: pushed(t, wholeStat[:40]), bad: true},
		{name: "a map", frames: pushed(t, "81a130a131"), bad: true},
		{name: "empty", frames: [][]byte{[]byte("load"), ninth, nil}, bad: true},
		{name: "another topic", frames: [][]byte{[]byte("kv"), ninth, pushed(t, wholeStat)[2]}, bad: true},
		{name: "no number", frames: [][]byte{[]byte("load"), pushed(t, wholeStat)[2]}, bad: true},
		{name: "no frame", bad: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ReadPushed(tt.frames)
			if tt.bad != (err != nil) || got != tt.want {
				t.Errorf("got %+v, %v, want %+v", got, err, tt.want)
			}
		})
	}
}

// TestPushedLoadKeepsWhatPollsReport: a published load changes the foreign load at once. The usage of
// the memory stays that of the last poll. Nothing is used before the first poll.
func TestPushedLoadKeepsWhatPollsReport(t *testing.T) {
	var c load.Counter
	push := load.Report{Running: 4, Waiting: 3, Tokens: 900, Capacity: 1000, Queued: 100}
	apply(push, &c)
	if r, ok := c.Reported(); ok {
		t.Fatalf("used before the first poll: %+v", r)
	}
	c.Report(load.Report{At: time.Now(), Every: time.Second, Running: 1, Usage: 1, Queued: -1}, c.Mark())
	apply(push, &c)
	r, _ := c.Reported()
	if r.Running != 4 || r.Waiting != 3 || r.Queued != 100 || r.Usage != 1 || r.Every != time.Second {
		t.Errorf("report %+v", r)
	}
	if v := c.View(time.Now()); v.Requests != 7 || v.Queued != 100 {
		t.Errorf("foreign load %+v, want 7 requests and 100 queued tokens", v)
	}
}

func FuzzReadPushed(f *testing.F) {
	for _, text := range []string{wholeStat, olderStat, "96" + stat + "ff02030405", "95" + stat, ""} {
		f.Add(pushed(f, text)[2])
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		before := bytes.Clone(payload)
		r, err := ReadPushed([][]byte{[]byte("load"), ninth, payload})
		if !bytes.Equal(before, payload) {
			t.Error("the message has changed")
		}
		if err == nil && (r.Running < 0 || r.Waiting < 0 || r.Tokens < 0 || r.Capacity < 0 || r.Queued < -1) {
			t.Errorf("negative values: %+v", r)
		}
	})
}
