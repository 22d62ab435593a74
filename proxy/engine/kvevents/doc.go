// Package kvevents carries KV events from the engines into the feeds of kvindex. It has
// the decoders of the three wire formats, the subscriber for vLLM and SGLang (ZeroMQ,
// with replay), the poller for TensorRT-LLM, and the Manager that runs one of them for
// each followed instance.
//
// An index may know fewer blocks than an engine holds, but must not know more for long.
// So every doubt is handled in the same way: a gap that no replay fills, a sequence
// that went back, a lost connection, an unreadable batch. The feed is cleared, the
// clearing is counted as a resync, and the blocks come back with later events.
package kvevents
