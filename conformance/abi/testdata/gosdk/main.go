// Command gosdk is a plugin that uses the official Go SDK, in the form in which authors of Envoy
// plugins write theirs. A request header selects its actions.
package main

import (
	"encoding/binary"
	"errors"
	"strconv"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm"
	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"
)

func main() {}

func init() {
	proxywasm.SetPluginContext(func(uint32) types.PluginContext { return &plugin{} })
}

type plugin struct {
	types.DefaultPluginContext
	greeting string
	counter  proxywasm.MetricCounter
	waiting  []uint32
}

// OnPluginStart reads the configuration and requests ticks.
func (p *plugin) OnPluginStart(int) types.OnPluginStartStatus {
	text, err := proxywasm.GetPluginConfiguration()
	if err != nil {
		return types.OnPluginStartStatusFailed
	}
	p.greeting = string(text)
	p.counter = proxywasm.DefineCounterMetric("sdk_requests")
	if err := proxywasm.SetTickPeriodMilliSeconds(5); err != nil {
		return types.OnPluginStartStatusFailed
	}
	return types.OnPluginStartStatusOK
}

// OnTick continues postponed requests.
func (p *plugin) OnTick() {
	for _, id := range p.waiting {
		if err := proxywasm.SetEffectiveContext(id); err == nil {
			_ = proxywasm.ResumeHttpRequest()
		}
	}
	p.waiting = p.waiting[:0]
}

// NewHttpContext makes the context of one stream.
func (p *plugin) NewHttpContext(id uint32) types.HttpContext { return &stream{plugin: p, id: id} }

type stream struct {
	types.DefaultHttpContext
	plugin *plugin
	id     uint32
	mode   string
	total  int
}

// OnHttpRequestHeaders does the actions that the header names.
func (s *stream) OnHttpRequestHeaders(int, bool) types.Action {
	s.plugin.counter.Increment(1)
	s.mode, _ = proxywasm.GetHttpRequestHeader("x-script")
	switch s.mode {
	case "postpone":
		s.plugin.waiting = append(s.plugin.waiting, s.id)
		return types.ActionPause
	case "call":
		_, err := proxywasm.DispatchHttpCall("side", [][2]string{{":method", "GET"}, {":path", "/sdk"}, {":authority", ""}}, nil, nil, 5000, s.answered)
		if err != nil {
			panic(err)
		}
		return types.ActionPause
	case "reply":
		if err := proxywasm.SendHttpResponse(418, [][2]string{{"x-by", "sdk"}}, []byte(s.plugin.greeting), -1); err != nil {
			panic(err)
		}
		return types.ActionPause
	case "panic":
		panic("as asked")
	}
	path, err := proxywasm.GetProperty([]string{"request", "path"})
	if err != nil {
		panic(err)
	}
	_ = proxywasm.AddHttpRequestHeader("x-sdk-path", string(path))
	return types.ActionContinue
}

func (s *stream) answered(headers, size, _ int) {
	body, err := proxywasm.GetHttpCallResponseBody(0, size)
	if err != nil {
		panic(err)
	}
	_ = proxywasm.AddHttpRequestHeader("x-side", strconv.Itoa(headers)+" "+string(body))
	_ = proxywasm.ResumeHttpRequest()
}

// OnHttpRequestBody holds the body until it is complete.
func (s *stream) OnHttpRequestBody(_ int, end bool) types.Action {
	if s.mode == "body" && !end {
		return types.ActionPause
	}
	if s.mode == "body" {
		if err := proxywasm.PrependHttpRequestBody([]byte("\n")); err != nil {
			panic(err)
		}
	}
	return types.ActionContinue
}

// OnHttpResponseHeaders counts in shared data.
func (s *stream) OnHttpResponseHeaders(int, bool) types.Action {
	for {
		value, cas, err := proxywasm.GetSharedData("count")
		n := uint64(0)
		if err == nil {
			n = binary.LittleEndian.Uint64(value)
		}
		err = proxywasm.SetSharedData("count", binary.LittleEndian.AppendUint64(nil, n+1), cas)
		if errors.Is(err, types.ErrorStatusCasMismatch) {
			continue
		}
		if err != nil {
			panic(err)
		}
		_ = proxywasm.AddHttpResponseHeader("x-count", strconv.FormatUint(n+1, 10))
		break
	}
	if s.mode == "body" {
		_ = proxywasm.RemoveHttpResponseHeader("content-length")
	}
	return types.ActionContinue
}

// OnHttpResponseBody counts the bytes, and changes them if the header requests it.
func (s *stream) OnHttpResponseBody(size int, end bool) types.Action {
	s.total += size
	if s.mode == "body" && end {
		_ = proxywasm.AppendHttpResponseBody([]byte(" and " + s.plugin.greeting))
	}
	return types.ActionContinue
}

// OnHttpStreamDone logs the end of the stream.
func (s *stream) OnHttpStreamDone() {
	proxywasm.LogInfof("stream %s done after %d bytes", s.mode, s.total)
}
