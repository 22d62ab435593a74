// Package sglang simulates SGLang: its native and OpenAI routes, and the bootstrap of
// prefill and decode.
package sglang
