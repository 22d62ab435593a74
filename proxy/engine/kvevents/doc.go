// Package kvevents carries KV events from the engines into the feeds of kvindex. It has
// the decoders of the three wire formats, the subscriber for vLLM and SGLang (ZeroMQ,
// with replay), the poller for TensorRT-LLM, and the Manager that runs one of them for
// each followed instance.
//
// An index may contain fewer blocks than an engine holds, but it must not contain more
// for long. So the package handles every uncertainty in the same way: a gap that no
// replay fills, a sequence that went back, a lost connection, an unreadable batch. It
// clears the feed and counts this as a resync. Later events restore the blocks.
//
// The decisions behind this package are in docs/design/engines.md.
package kvevents
