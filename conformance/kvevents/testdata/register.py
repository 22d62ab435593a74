"""Registers one vLLM engine with a proxy, as the engine's own connector does:
python3 register.py KIND ENDPOINT ROLE HTTP HANDSHAKE NOTIFY MODE [PASSWORD], with KIND new
or old (MoRI-IO since and before vLLM pull request 39565) or nccl (P2P-NCCL of vLLM
before pull request 44854, whose one port is HANDSHAKE), ROLE P or D, HTTP "ip:port" of its API, the ports of its KV
transfer and MODE READ or WRITE. With PASSWORD it uses the PLAIN mechanism."""

import sys
import time

import msgpack
import zmq

kind, endpoint, role, http, handshake, notify, mode = sys.argv[1:8]
host = http.rsplit(":", 1)[0]
index = 0
with zmq.Context().socket(zmq.DEALER) as sock:
    if kind == "nccl":
        sock.setsockopt_string(zmq.IDENTITY, f"{host}:{handshake}")
    if len(sys.argv) > 8:
        sock.plain_username, sock.plain_password = b"vllm", sys.argv[8].encode()
    sock.connect(endpoint)
    while True:
        index += 1
        if kind == "new":
            data = {
                "type": role,
                "http_address": http,
                "zmq_address": f"host:{host},handshake:{handshake},notify:{notify}",
                "dp_size": 1,
                "tp_size": 1,
                "transfer_mode": mode,
            }
        elif kind == "nccl":
            data = {
                "type": role,
                "http_address": http,
                "zmq_address": f"{host}:{handshake}",
            }
        else:
            data = {
                "type": "register",
                "role": role,
                "index": str(index),
                "request_address": f"http://{http}/v1",
                "handshake_port": int(handshake),
                "notify_port": int(notify),
                "dp_size": 1,
                "tp_size": 1,
                "transfer_mode": mode,
            }
        sock.send(msgpack.dumps(data))
        time.sleep(3)
