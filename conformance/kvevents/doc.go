// Package kvevents tests that the KV index follows engines that publish with
// libzmq and msgpack, as vLLM and SGLang do, or that are polled, as
// TensorRT-LLM is. testdata/engine.py simulates a cache, publishes its changes
// in each engine's encoding, and knows the expected content of the index.
// testdata/register.py registers engines with the proxy as vLLM's connectors
// do, also with libzmq. Both need Debian's python3-zmq and python3-msgpack,
// which the tests install if they may.
package kvevents
