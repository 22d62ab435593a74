// Package vllm simulates vLLM with each of its KV connectors: NIXL by pull and push, a
// shared store, MoRI-IO, Mooncake and the P2P tier of the offloading connector.
package vllm
