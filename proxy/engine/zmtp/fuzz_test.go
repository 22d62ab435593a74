package zmtp

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// FuzzConn: for any bytes of a peer, reading ends with the connection. Messages are
// within the limits and consist of received bytes. The memory is proportional to the
// received bytes.
func FuzzConn(f *testing.F) {
	files, err := filepath.Glob("testdata/libzmq/*")
	if err != nil || len(files) == 0 {
		f.Fatal("no recordings", err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		for kind := range byte(4) {
			f.Add(kind, b)
		}
	}
	for _, s := range []string{
		greetingNull + `04 09 05 "READY" 01 "a" 00`,
		greetingNull + readyPub + `06 7fffffffffffffff`,
		greetingNull + readyPub + `02 0000000000000003 "abc" 04 00`,
		greetingNull + readyPub + `03 0000000000100000 "abc"`,
		greetingNull + readyPub + `01 00 04 09 04 "PING" 000a "ab" 00 01 "z"`,
		greetingPlain + `04 13 05 "HELLO" 04 "vllm" 07 "hunter3"`,
	} {
		f.Add(byte(0), unhex(f, s))
	}
	f.Fuzz(func(t *testing.T, kind byte, sends []byte) {
		password := ""
		if kind%4 == 3 {
			password = "hunter2"
		}
		o := options([]Socket{Sub, Dealer, Router, Router}[kind%4])
		c, err := open(t.Context(), &scripted{in: bytes.NewReader(sends)}, password, o)
		if err != nil {
			return
		}
		defer c.Close()
		for total := 0; ; {
			frames, err := c.Receive(0)
			if err != nil {
				break
			}
			size := 0
			for _, frame := range frames {
				size += len(frame)
			}
			total += size
			if len(frames) == 0 || len(frames) > o.MaxFrames || size > o.MaxMessage || total > len(sends) {
				t.Fatalf("%d frames of %d bytes; %d of %d", len(frames), size, total, len(sends))
			}
		}
		if got := cap(c.message.bytes) + cap(c.command); got > 4*(len(sends)+firstStep) {
			t.Fatalf("%d bytes of memory for %d that were sent", got, len(sends))
		}
	})
}
