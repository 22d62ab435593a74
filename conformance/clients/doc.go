// Package clients tests that common clients work unchanged with the built pdproxy binary:
// OpenAI's own clients for Go, Node and Python, Anthropic's for Node and Python, curl over
// HTTP/1.1 and HTTP/2, and quic-go and Chromium over HTTP/3. Raw sockets send bytes that no
// client would send. The engines are simulated, in separate processes. The tests compare
// every text with the text of one engine alone, so an answer is right only if the right KV
// blocks arrived. The same clients, ai-sdk and LangChain read streams whose decode process is
// killed in the middle. Sessions in the shape of agents find the KV of their earlier turns.
//
// It is a separate module, because the product does not need its dependencies. run.sh
// installs the tools and runs one suite (one top-level test) at a time.
package clients
