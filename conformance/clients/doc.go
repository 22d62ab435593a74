// Package clients proves that the clients people use work unchanged against the
// built pdproxy binary: OpenAI's own for Go, Node and Python, curl over HTTP/1.1
// and HTTP/2, quic-go and Chromium over HTTP/3, and raw sockets for what none of
// them would send. The engines are simulated ones, as processes of their own;
// every text is compared with that of one engine alone, so that an answer is
// right only if the right KV blocks arrived.
//
// It is a module of its own: none of what it needs is the product's business.
// run.sh installs the tools and runs one suite (one top-level test) at a time.
package clients
