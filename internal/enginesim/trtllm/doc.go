// Package trtllm simulates trtllm-serve: its OpenAI routes, disaggregated_params, KV
// events by polling, and the registration of workers.
package trtllm
