// Package zmtp speaks ZMTP 3.0, the wire protocol of ZeroMQ, with the engines:
// as SUB and DEALER towards the publishers of their KV events, as ROUTER where
// they register. It connects or accepts one TCP connection at a time; there are
// no sockets with queues and reconnects as in libzmq, because their owners
// (kvevents, moriio) must know when a connection ends.
//
// The peer is not trusted. A Conn reads no frame, message or command beyond its
// limits, allocates memory only for bytes that have arrived, and gives up a peer
// that stops in the middle of the handshake or of a message. The end of a Conn's
// context closes the connection.
//
// Specifications: ZMTP 3.0 (https://rfc.zeromq.org/spec/23/), PLAIN
// (https://rfc.zeromq.org/spec/24/) and, for PING and PONG, ZMTP 3.1
// (https://rfc.zeromq.org/spec/37/). A peer of version 3.1, which libzmq 4 is,
// speaks 3.0 to this package: so a subscription is a message and not a command.
package zmtp
