// Package filter runs filters: proxy-wasm modules that see each request and its
// answer. A Plugin is one version of one filter with its VMs. A Chain is
// net/http middleware that passes streams through several filters. When a guest
// traps, loops or exceeds its time, its VM is lost and replaced. The streams on
// that VM end, or continue without the filter. The proxy and all other streams
// are not affected.
//
// A stream is pinned to one VM of each plugin. One goroutine at a time enters a
// VM: that of a stream, the VM's background goroutine (ticks, queues, ends of
// streams), or that of an HTTP call whose answer arrived. Requests of the guest
// during a call (to continue, to send a local response) are recorded. The
// goroutine that drives the stream carries them out after the call has
// returned.
//
// Where the specification leaves the behaviour open, the package does as Envoy
// does
// (source/extensions/common/wasm/context.cc, source/common/http/filter_manager.cc).
//
// The decisions behind this package are in docs/design/plugins.md.
package filter
