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
//
// The ZeroMQ protocol itself is github.com/go-zeromq/zmq4's, but not its
// sockets: those give up after ten attempts to connect or, if told not to, cannot
// be cancelled while they greet, leave a goroutine behind when they are closed
// unread, answer no heartbeat, and allocate whatever length a peer claims. A link
// takes the connection below them and keeps it within bounds.
package kvevents
