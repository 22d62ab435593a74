// Package kvevents proves that the KV index follows engines that publish with
// libzmq and msgpack as vLLM and SGLang do, or are polled as TensorRT-LLM is:
// testdata/engine.py holds a cache, tells of it in each engine's encoding, and
// knows what the index must say of it. testdata/register.py registers engines
// with the proxy as vLLM's connectors do, through libzmq too. Both need Debian's
// python3-zmq and python3-msgpack, which are installed if that is allowed.
package kvevents
