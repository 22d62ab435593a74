"""HTTP/1.1 over a bare socket: what probe.py and drive.py need and urllib
hides, namely the bytes that travelled, when the head and each event came, and
leaving at a chosen moment. Also the engines' metrics."""

import json
import os
import re
import socket
import time
import urllib.request

HOST = "127.0.0.1"
PREFILL = int(os.environ.get("REAL_PREFILL_PORT", 8100))
DECODE = int(os.environ.get("REAL_DECODE_PORT", 8200))
ALONE = int(os.environ.get("REAL_ALONE_PORT", 8300))
PROXY = int(os.environ.get("REAL_PROXY_PORT", 8080))
ADMIN = int(os.environ.get("REAL_ADMIN_PORT", 9090))
MODEL = "tiny"

# The parameters of the prefill leg. The null values are usual but not read.
ASK = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}


class Call:
    """One request on a connection of its own. The request is sent by the
    constructor; nothing is read until asked for."""

    def __init__(self, port, path, body=None, headers=None, method=None, timeout=90):
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method or ('POST' if body is not None else 'GET')} {path} HTTP/1.1", f"Host: {HOST}:{port}"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        lines += [f"{k}: {v}" for k, v in (headers or {}).items()]
        self.sent = "\r\n".join(lines).encode() + b"\r\n\r\n" + data
        self.sock = socket.create_connection((HOST, port), timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.began = time.perf_counter()
        self.sock.sendall(self.sent)
        self.buf, self.head, self.status, self.head_after = b"", None, None, None
        self.headers = {}

    def _more(self):
        got = self.sock.recv(65536)
        self.buf += got
        return len(got) > 0

    def read_head(self):
        """Reads up to the end of the response head; False when the peer closed first."""
        while b"\r\n\r\n" not in self.buf:
            if not self._more():
                return False
        self.head_after = time.perf_counter() - self.began
        head, self.buf = self.buf.split(b"\r\n\r\n", 1)
        self.head = head.decode("latin-1")
        self.status = int(self.head.split()[1])
        for line in self.head.split("\r\n")[1:]:
            k, v = line.split(":", 1)
            self.headers[k.lower()] = v.strip()
        return True

    def pieces(self):
        """Yields the body as it comes, without the chunk framing."""
        if self.head is None and not self.read_head():
            return
        if "content-length" in self.headers:
            left = int(self.headers["content-length"])
            while left > 0:
                if not self.buf and not self._more():
                    raise ConnectionError("body cut short")
                piece, self.buf = self.buf[:left], self.buf[left:]
                left -= len(piece)
                yield piece
            return
        if self.headers.get("transfer-encoding") != "chunked":
            while self.buf or self._more():
                piece, self.buf = self.buf, b""
                yield piece
            return
        while True:
            while b"\r\n" not in self.buf:
                if not self._more():
                    raise ConnectionError("chunk cut short")
            size, self.buf = self.buf.split(b"\r\n", 1)
            try:
                size = int(size.split(b";")[0], 16)
            except ValueError:
                raise ConnectionError("no chunk size") from None
            while len(self.buf) < size + 2:
                if not self._more():
                    raise ConnectionError("chunk cut short")
            piece, self.buf = self.buf[:size], self.buf[size + 2:]
            if size == 0:
                return
            yield piece

    def body(self):
        """The whole body as bytes; closes the connection."""
        whole = b"".join(self.pieces())
        self.close()
        return whole

    def json(self):
        return json.loads(self.body())

    def half_close(self):
        self.sock.shutdown(socket.SHUT_WR)

    def close(self):
        self.sock.close()


def post(port, path, body, headers=None, timeout=90):
    """Sends, reads everything, returns (status, decoded JSON or text)."""
    call = Call(port, path, body, headers, timeout=timeout)
    raw = call.body()
    try:
        return call.status, json.loads(raw)
    except ValueError:
        return call.status, raw.decode("utf-8", "replace")


def get(port, path):
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


def metrics(port):
    """Prometheus samples summed over their labels, name -> value."""
    out = {}
    for name, value in re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", get(port, "/metrics"), re.M):
        out[name] = out.get(name, 0.0) + float(value)
    return out


def usage(port):
    """The share of the engine's KV blocks that are in use."""
    return metrics(port)["vllm:kv_cache_usage_perc"]


def used_blocks(port):
    # One block of the pool is never used.
    return round(usage(port) * (int(os.environ.get("REAL_BLOCKS", 512)) - 1))


def wait_until(condition, limit, every=0.02):
    """Seconds until condition() holds, or None after limit seconds."""
    began = time.perf_counter()
    while True:
        if condition():
            return time.perf_counter() - began
        if time.perf_counter() - began > limit:
            return None
        time.sleep(every)


def idle(port):
    m = metrics(port)
    return m["vllm:num_requests_running"] == 0 and m["vllm:num_requests_waiting"] == 0


def empty(port):
    return idle(port) and usage(port) == 0


def events(raw):
    """The data of each SSE event in raw bytes; comments are dropped."""
    out = []
    for block in raw.decode().split("\n\n"):
        data = [line[6:] for line in block.split("\n") if line.startswith("data: ")]
        if data:
            out.append("\n".join(data))
    return out


def words(tokens, seed):
    """A prompt of exactly that many tokens (the tokenizer is one byte a token)
    that shares no block with a prompt of another seed."""
    text, n = f"{seed:08d} ", 0
    while len(text) < tokens:
        n = (n * 1103515245 + seed * 12345 + 97) % 2147483648
        text += "abcdefghijklmnopqrstuvwxyz ,."[(n >> 8) % 29]
    return text[:tokens]
