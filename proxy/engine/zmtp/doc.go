// Package zmtp implements ZMTP 3.0, the wire protocol of ZeroMQ, for connections with
// engines. It has SUB and DEALER sockets for the publishers of KV events, and ROUTER
// sockets for registrations. A Conn is one TCP connection. There are no sockets with
// queues and reconnects as in libzmq, because the owners of the connections (kvevents,
// moriio) must know when a connection ends.
//
// The peer is not trusted. A Conn reads no frame, message or command beyond its
// limits, allocates memory only for bytes that have arrived, and gives up a peer
// that stops in the middle of the handshake or of a message. The end of a Conn's
// context closes the connection.
//
// Specifications: ZMTP 3.0 (https://rfc.zeromq.org/spec/23/), PLAIN
// (https://rfc.zeromq.org/spec/24/) and, for PING and PONG, ZMTP 3.1
// (https://rfc.zeromq.org/spec/37/). libzmq 4 implements version 3.1 and uses version 3.0
// with this package. Therefore a subscription is a message and not a command.
//
// The decisions behind this package are in docs/design/engines.md.
package zmtp
