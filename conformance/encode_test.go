package conformance

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// picture returns a chat with n images and a sound, each with different content.
func picture(seed string, n, maxTokens int, stream bool) string {
	parts := `{"type":"text","text":"what is it"}`
	for i := range n {
		parts += fmt.Sprintf(`,{"type":"image_url","image_url":{"url":"data:image/png;base64,%s%d"}}`, seed, i)
	}
	parts += fmt.Sprintf(`, {"type": "input_audio", "input_audio":{"data":"%s","format":"wav"}}`, seed)
	return fmt.Sprintf(`{"model":"sim","messages":[{"role":"system","content":"be brief"},{"role":"user","content":[%s]}],"max_tokens":%d,"ignore_eos":true,"stream":%t}`, parts, maxTokens, stream)
}

// vllmConnectors runs a test for each connector of vLLM, for which encoders work.
func vllmConnectors(t *testing.T, run func(t *testing.T, connector string)) {
	eachConnector(t, func(t *testing.T, connector string) {
		if strings.HasPrefix(connector, "vllm-") {
			run(t, connector)
		}
	})
}

// withEncoders describes a fleet whose engines share a directory of encoded parts.
func withEncoders(t *testing.T, encode int, change func(c *config.Config)) fleetOptions {
	dir := t.TempDir()
	return fleetOptions{prefill: 2, decode: 2, encode: encode, config: change,
		engine: func(role string, _ int, c *enginesim.Config) {
			if role != enginesim.RoleBoth {
				c.ECDir = dir
			}
		}}
}

// sum adds up the counters of engines.
func sum(engines []*enginesim.Engine, of func(s enginesim.State) int64) (n int64) {
	for _, e := range engines {
		n += of(e.State())
	}
	return n
}

func encodedOf(s enginesim.State) int64 { return s.Encoded }
func hitsOf(s enginesim.State) int64    { return s.EncoderHits }

// An encoder processes every image and sound once, before prefill, which finds
// the result. The answer equals that of one engine alone.
func TestEncodePrefillDecode(t *testing.T) {
	vllmConnectors(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, withEncoders(t, 2, nil))
		for n, stream := range []bool{false, true} {
			body := picture(fmt.Sprint("p", n), 5, 8, stream)
			a := f.try(chatPath, body)
			f.right(a, chatPath, body)
			if a.header.Get("X-Pdproxy-Prefill") == "" {
				t.Errorf("header %v", a.header)
			}
		}
		body := chat("no picture", 8, false)
		f.right(f.try(chatPath, body), chatPath, body)
		if n := sum(f.encode, encodedOf); n != 12 {
			t.Errorf("got %d parts processed by encoders, want 12", n)
		}
		for _, e := range f.encode {
			if s := e.State(); s.Encoded == 0 {
				t.Error("an encoder had no work")
			}
		}
		if hits, own := sum(f.prefill, hitsOf), sum(f.prefill, encodedOf); hits != 12 || own != 0 {
			t.Errorf("prefill found %d parts and processed %d", hits, own)
		}
		n := sum(f.decode, encodedOf) + sum(f.decode, hitsOf)
		if n != 0 && connector != enginesim.ConnectorVLLMStore { // with this connector decode asks the store afterwards
			t.Errorf("decode read or processed %d parts, want 0", n)
		}
		var rows []struct{ Name, Role, State string }
		f.admin("/v1/engines", &rows)
		roles := 0
		for _, r := range rows {
			if r.Role == "encode" && r.State == "ready" {
				roles++
			}
		}
		if roles != 2 {
			t.Errorf("engines %+v", rows)
		}
	})
}

// The failure table of the encoder's leg.
func TestEncoderFails(t *testing.T) {
	vllmConnectors(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, withEncoders(t, 2, apiFaults))
		fault := func(fail, hang string, engines ...*enginesim.Engine) {
			for _, e := range engines {
				if err := e.SetFault(fail, 0, hang); err != nil {
					t.Fatal(err)
				}
			}
		}
		n := 0
		fresh := func(stream bool) string { n++; return picture(fmt.Sprint("f", n, "-"), 3, 6, stream) }
		for _, kind := range []string{"500", "reset", "close"} {
			fault("1:"+kind, "", f.encode[0])
			before := f.metric("pdproxy_retries_total", `phase="encode"`)
			f.eventually("an encoder's leg is tried again", func() bool {
				body := fresh(true)
				f.right(f.try(chatPath, body), chatPath, body)
				return f.metric("pdproxy_retries_total", `phase="encode"`) > before
			})
		}
		fault("1:500", "", f.encode...)
		if a := f.try(chatPath, fresh(true)); a.status != 502 || !strings.Contains(a.body, "encode leg") {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
		fault("1:400", "", f.encode...)
		if a := f.try(chatPath, fresh(false)); a.status != 400 || !strings.Contains(a.body, "simulated bad request") {
			t.Errorf("got status %d: %s", a.status, a.body)
		}
		if got := sum(f.decode, func(s enginesim.State) int64 { return s.Errors }); got != 0 {
			t.Errorf("%d errors on decode", got)
		}
		fault("", "", f.encode...)
		f.settled()
	})
}

// A call to an encoder that hangs has the time limit of a prefill.
func TestEncoderTimesOut(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, withEncoders(t, 1, func(c *config.Config) {
		c.Timeouts.Prefill = config.Duration(300 * time.Millisecond)
	}))
	f.encode[0].SetFault("", 0, "head")
	if a := f.try(chatPath, picture("hangs", 2, 5, true)); a.status != 504 || !strings.Contains(a.body, "encode leg") {
		t.Errorf("got status %d: %s", a.status, a.body)
	}
	f.encode[0].SetFault("", 0, "")
}

// If the client leaves while an encoder works, the exchange cancels its calls and sends
// no leg to prefill.
func TestClientLeavesTheEncoder(t *testing.T) {
	vllmConnectors(t, func(t *testing.T, connector string) {
		f := startFleet(t, connector, withEncoders(t, 1, nil))
		f.encode[0].SetFault("", 0, "prefill")
		ctx, leave := context.WithCancel(context.Background())
		gone := make(chan answer, 1)
		go func() { gone <- f.post(ctx, f.url, chatPath, picture("left", 3, 5, true)) }()
		f.eventually("the encoder works", func() bool { return f.busy(f.encode) })
		leave()
		if a := <-gone; !errors.Is(a.err, context.Canceled) {
			t.Errorf("the client got %+v", a)
		}
		f.settled()
		f.eventually("the outcome is counted", func() bool { return f.metric("pdproxy_exchanges_total", `outcome="cancelled"`) == 1 })
		if n := sum(f.prefill, func(s enginesim.State) int64 { return s.Requests }); n != 0 {
			t.Errorf("prefill got %d requests", n)
		}
	})
}

// Without a ready encoder prefill processes the images and sounds itself, and a
// fallback is counted.
func TestNoEncoderIsReady(t *testing.T) {
	f := startFleet(t, enginesim.ConnectorVLLMNixl, withEncoders(t, 1, nil))
	f.encode[0].Kill()
	f.eventually("the encoder is down", func() bool { return f.engineState("e0") != "ready" })
	body := picture("alone", 2, 5, false)
	f.right(f.try(chatPath, body), chatPath, body)
	if n := sum(f.prefill, encodedOf); n != 3 {
		t.Errorf("got %d parts processed by prefill, want 3", n)
	}
	if f.metric("pdproxy_fallbacks_total", `what="encode"`, `reason="no_target"`) != 1 {
		t.Error("the fallback is not counted")
	}
}
