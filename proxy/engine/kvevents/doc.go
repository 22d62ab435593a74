// Package kvevents owns the way of KV events from the engines into the feeds of
// kvindex: the decoders of the three wires, the subscriber for vLLM and SGLang
// (ZeroMQ, with replay) and the poller for TensorRT-LLM, and the Manager that
// runs one of them for each instance it is told to follow.
//
// An index may know less than an engine holds, never more for long. So whatever
// leaves a doubt (a gap that no replay fills, a sequence that went back, a
// connection that was lost, a batch that cannot be read) ends the same way: the
// feed is cleared, it is counted as a resync, and the blocks come back with the
// events that follow.
package kvevents
