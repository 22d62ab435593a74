// Package filter runs filters: proxy-wasm modules that see each request and its
// answer as they pass. A Plugin is one version of one filter with its VMs, a
// Chain is net/http middleware that leads streams through several of them. A
// guest that traps, loops or answers too late costs its own VM, which is
// replaced, and the streams on it, which end or go on without the filter; the
// proxy and all other streams are unhurt.
//
// A stream is pinned to one VM of each plugin. A VM is entered by one goroutine
// at a time: the stream's own, the VM's background one (ticks, queues, ends of
// streams), or that of an HTTP call whose answer came. What a guest asks for
// during a call (to go on, to answer by itself) is noted and done after the call
// has returned, by whoever drives the stream.
//
// Where the specification is silent the package does as Envoy does
// (source/extensions/common/wasm/context.cc, source/common/http/filter_manager.cc).
package filter
