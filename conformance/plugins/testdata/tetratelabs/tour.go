package main

import (
	"bytes"
	"fmt"
	"runtime"
	"strconv"
	"strings"

	"github.com/tetratelabs/proxy-wasm-go-sdk/proxywasm"
	"github.com/tetratelabs/proxy-wasm-go-sdk/proxywasm/types"
)

// The plugin uses all parts of the SDK: the request header x-do selects the
// action.

type vm struct{ types.DefaultVMContext }

func (*vm) OnVMStart(size int) types.OnVMStartStatus {
	text, _ := proxywasm.GetVMConfiguration()
	proxywasm.LogInfof("vm configuration %q of %d", text, size)
	return types.OnVMStartStatusOK
}

func (*vm) NewPluginContext(uint32) types.PluginContext { return &plugin{} }

type plugin struct {
	types.DefaultPluginContext
	config   string
	queue    uint32
	requests proxywasm.MetricCounter
	bytes    proxywasm.MetricHistogram
	live     proxywasm.MetricGauge
	ticks    int
}

func (p *plugin) OnPluginStart(int) types.OnPluginStartStatus {
	text, err := proxywasm.GetPluginConfiguration()
	if err != nil && err != types.ErrorStatusNotFound {
		proxywasm.LogCriticalf("configuration: %v", err)
		return types.OnPluginStartStatusFailed
	}
	p.config = string(text)
	if p.config == "refuse" {
		return types.OnPluginStartStatusFailed
	}
	p.requests = proxywasm.DefineCounterMetric("tour_requests")
	p.bytes = proxywasm.DefineHistogramMetric("tour_bytes")
	p.live = proxywasm.DefineGaugeMetric("tour_live")
	if p.queue, err = proxywasm.RegisterSharedQueue("tour"); err != nil {
		panic(err)
	}
	if err := proxywasm.SetTickPeriodMilliSeconds(5); err != nil {
		panic(err)
	}
	return types.OnPluginStartStatusOK
}

func (p *plugin) OnTick() {
	if p.ticks++; p.ticks == 3 {
		proxywasm.LogInfo("third tick")
		_ = proxywasm.SetTickPeriodMilliSeconds(0)
	}
}

func (p *plugin) OnQueueReady(id uint32) {
	for {
		item, err := proxywasm.DequeueSharedQueue(id)
		if err != nil {
			return
		}
		proxywasm.LogInfof("from the queue: %s", item)
	}
}

func (p *plugin) OnPluginDone() bool {
	proxywasm.LogInfo("plugin done")
	return true
}

func (p *plugin) NewHttpContext(id uint32) types.HttpContext { return &stream{id: id, plugin: p} }

type stream struct {
	types.DefaultHttpContext
	id     uint32
	plugin *plugin
	do     string
	seen   int
}

func (s *stream) OnHttpRequestHeaders(count int, end bool) types.Action {
	s.plugin.requests.Increment(1)
	s.plugin.live.Add(1)
	s.do, _ = proxywasm.GetHttpRequestHeader("x-do")
	must(proxywasm.AddHttpRequestHeader("x-config", s.plugin.config))
	switch s.do {
	case "reply":
		must(proxywasm.SendHttpResponse(418, [][2]string{{"x-pot", "tea"}}, []byte("short and stout"), -1))
		return types.ActionPause
	case "call":
		_, err := proxywasm.DispatchHttpCall("upstream", [][2]string{
			{":method", "POST"}, {":path", "/check?a=b"}, {":authority", "checker"}, {"x-a", "b"},
		}, []byte("question"), nil, 5000, s.called)
		must(err)
		return types.ActionPause
	case "call nobody":
		_, err := proxywasm.DispatchHttpCall("nobody", [][2]string{
			{":method", "GET"}, {":path", "/"}, {":authority", "x"}}, nil, nil, 5000, s.called)
		must(proxywasm.AddHttpRequestHeader("x-error", fmt.Sprint(err)))
	case "headers":
		all, err := proxywasm.GetHttpRequestHeaders()
		must(err)
		for i := range all {
			if all[i][0] == "x-many" {
				all[i][1] += "+"
			}
		}
		must(proxywasm.ReplaceHttpRequestHeaders(append(all, [2]string{"x-empty", ""})))
		must(proxywasm.RemoveHttpRequestHeader("x-gone"))
		must(proxywasm.ReplaceHttpRequestHeader(":path", "/rewritten?c=d"))
		_, err = proxywasm.GetHttpRequestHeader("x-gone")
		must(proxywasm.AddHttpRequestHeader("x-error", fmt.Sprint(err)))
	case "property":
		path, err := proxywasm.GetProperty([]string{"request", "path"})
		must(err)
		_, err = proxywasm.GetProperty([]string{"no", "such", "thing"})
		must(proxywasm.AddHttpRequestHeader("x-path", string(path)))
		must(proxywasm.AddHttpRequestHeader("x-error", fmt.Sprint(err)))
		must(proxywasm.SetProperty([]string{"tour"}, []byte("mine")))
		mine, err := proxywasm.GetProperty([]string{"tour"})
		must(err)
		must(proxywasm.AddHttpRequestHeader("x-mine", string(mine)))
	case "foreign":
		small, err := proxywasm.CallForeignFunction("compress", bytes.Repeat([]byte("x"), 100000))
		must(err)
		large, err := proxywasm.CallForeignFunction("uncompress", small)
		must(err)
		_, err = proxywasm.CallForeignFunction("no such", nil)
		must(proxywasm.AddHttpRequestHeader("x-foreign", fmt.Sprintf("%d %v", len(large), err)))
	case "count":
		for {
			value, cas, err := proxywasm.GetSharedData("count")
			if err != nil && err != types.ErrorStatusNotFound {
				panic(err)
			}
			n, _ := strconv.Atoi(string(value))
			if err := proxywasm.SetSharedData("count", []byte(strconv.Itoa(n+1)), cas); err == nil {
				break
			} else if err != types.ErrorStatusCasMismatch {
				panic(err)
			}
		}
	case "panic":
		panic("as asked")
	}
	return types.ActionContinue
}

// called continues the request when the upstream answers "yes".
func (s *stream) called(headers, size, trailers int) {
	lines, err := proxywasm.GetHttpCallResponseHeaders()
	if err != nil {
		must(proxywasm.SendHttpResponse(502, nil, []byte(err.Error()), -1))
		return
	}
	body, err := proxywasm.GetHttpCallResponseBody(0, size)
	if err != nil || string(body) != "yes" {
		must(proxywasm.SendHttpResponse(403, lines, body, -1))
		return
	}
	must(proxywasm.AddHttpRequestHeader("x-called", "yes"))
	must(proxywasm.ResumeHttpRequest())
}

func (s *stream) OnHttpRequestBody(size int, end bool) types.Action {
	if s.do != "shout" {
		return types.ActionContinue
	}
	if !end {
		return types.ActionPause
	}
	body, err := proxywasm.GetHttpRequestBody(0, size)
	must(err)
	runtime.GC() // the host's data must survive a collection
	must(proxywasm.ReplaceHttpRequestBody([]byte(strings.ToUpper(string(body)))))
	must(proxywasm.PrependHttpRequestBody([]byte("<")))
	must(proxywasm.AppendHttpRequestBody([]byte(">")))
	return types.ActionContinue
}

func (s *stream) OnHttpResponseHeaders(int, bool) types.Action {
	must(proxywasm.RemoveHttpResponseHeader("content-length"))
	must(proxywasm.AddHttpResponseHeader("x-tour", s.do))
	status, err := proxywasm.GetHttpResponseHeader(":status")
	must(err)
	must(proxywasm.AddHttpResponseHeader("x-status", status))
	return types.ActionContinue
}

func (s *stream) OnHttpResponseBody(size int, end bool) types.Action {
	s.seen += size
	if s.do == "whole answer" {
		if !end {
			return types.ActionPause
		}
		body, err := proxywasm.GetHttpResponseBody(0, everything)
		must(err)
		must(proxywasm.ReplaceHttpResponseBody([]byte(fmt.Sprintf("%d bytes", len(body)))))
	}
	return types.ActionContinue
}

func (s *stream) OnHttpStreamDone() {
	s.plugin.live.Add(-1)
	s.plugin.bytes.Record(uint64(s.seen))
	must(proxywasm.EnqueueSharedQueue(s.plugin.queue, []byte("done "+s.do)))
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}
