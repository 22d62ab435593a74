// Package clients tests that common clients work unchanged with the built
// pdproxy binary: OpenAI's own for Go, Node and Python, curl over HTTP/1.1 and
// HTTP/2, quic-go and Chromium over HTTP/3, and raw sockets for bytes that none
// of them would send. The engines are simulated, in processes of their own.
// Every text is compared with that of one engine alone, so an answer is right
// only if the right KV blocks arrived.
//
// It is a module of its own, because the product does not need its
// dependencies. run.sh installs the tools and runs one suite (one top-level
// test) at a time.
package clients
