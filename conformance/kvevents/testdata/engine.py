"""An engine's KV caches and what it says of them, for the test beside it.

Usage: engine.py ENCODING EVENTS_PORT REPLAY_PORT SEED

It serves two data-parallel ranks. Commands come as JSON lines on standard
input, and each is answered by one JSON line:

  {"op": "steps", "n": 100, "faults": ["gap", "restart"]}  random work
  {"op": "check"}     what the index must say of each prompt, and of a marker
                      prompt that was stored just now
  {"op": "garbage"}   something that cannot be read, on each rank
  {"op": "turnover"}  all blocks leave and come back
"""

import hashlib
import http.server
import json
import random
import struct
import sys
import threading
import time

import msgpack
import zmq

BLOCK = 4  # tokens of a block
RANKS = 2
GPU, CPU, DISK = 0, 1, 2
END = (1 << 64) - 1

# The features of each encoding.
ENCODINGS = {
    # vLLM: arrays; medium since 2025-09.
    "vllm-2025": dict(kind="vllm", maps=False, lora=False, salt=False, image=False, groups=False,
                      hashes="int", replay=True, topic=False, tiers=["GPU", "CPU", "STORAGE"]),
    # vLLM: LoRA name and extra keys; VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0.
    "vllm-bytes": dict(kind="vllm", maps=False, lora=True, salt=True, image=True, groups=False,
                       hashes="bytes", replay=True, topic=False, tiers=["GPU", "CPU", "OBJ"]),
    # vLLM since 2026-07: maps, groups, topic in the replay.
    "vllm-2026": dict(kind="vllm", maps=True, lora=True, salt=True, image=True, groups=True,
                      hashes="int", replay=True, topic=True, tiers=["GPU", "CPU", "STORAGE"]),
    # The same with the batch as a map, and without replays.
    "vllm-live": dict(kind="vllm", maps=True, lora=True, salt=True, image=False, groups=True, batch_map=True,
                      hashes="int", replay=False, topic=False, tiers=["GPU", "CPU", "STORAGE"]),
    "sglang": dict(kind="sglang", lora=False, salt=True, image=False, groups=False, eagle=False,
                   hashes="signed", replay=True, topic=False, tiers=["GPU", "CPU_PINNED", "EXTERNAL"]),
    "sglang-eagle": dict(kind="sglang", lora=False, salt=False, image=False, groups=False, eagle=True,
                         hashes="signed", replay=False, topic=False, tiers=["GPU", "CPU_PINNED", "DISK"]),
    "trtllm-v1": dict(kind="trtllm", lora=False, salt=True, image=True, hashes="int", tiers=[0, 1]),
    "trtllm-v2": dict(kind="trtllm", lora=False, salt=False, image=True, hashes="hex", tiers=[0, 1, 2]),
}


class Prompt:
    """Tokens in whole blocks, and the digests of its blocks."""

    def __init__(self, tokens, lora="", salt="", image=None):
        self.tokens, self.lora, self.salt, self.image = tokens, lora, salt, image
        self.digests, digest = [], repr((lora, salt)).encode()
        for i in range(len(tokens) // BLOCK):
            extra = b"image" if i == image else b""
            digest = hashlib.sha256(digest + repr(tokens[i * BLOCK:(i + 1) * BLOCK]).encode() + extra).digest()
            self.digests.append(digest)


def make_prompts(rng, enc):
    """Prompts that share beginnings, as those of one application do."""
    prompts = []
    for _ in range(4):
        lora = "adapter" if enc["lora"] and rng.random() < 0.3 else ""
        salt = "tenant" if enc["salt"] and rng.random() < 0.4 else ""
        system = [rng.randrange(150000) for _ in range(BLOCK * rng.randint(1, 6))]
        for _ in range(8):
            tail = [rng.randrange(150000) for _ in range(BLOCK * rng.randint(1, 8))]
            image = None
            if enc["image"] and rng.random() < 0.2:
                image = (len(system) + rng.randrange(len(tail))) // BLOCK
            prompts.append(Prompt(system + tail, lora, salt, image))
    return prompts


class Rank:
    """One rank's cache: which blocks it holds, in which tiers."""

    def __init__(self, rng, enc, number, out):
        self.rng, self.enc, self.number, self.out = rng, enc, number, out
        self.prompts = make_prompts(rng, enc)
        self.held = {}  # digest -> set of tiers
        self.marker = None

    def hash(self, digest):
        kind = self.enc["hashes"]
        if kind == "bytes":
            return digest
        if kind == "hex":
            return digest.hex()
        value = int.from_bytes(digest[-8:], "big")
        return value - (1 << 64) if kind == "signed" and value >> 63 else value

    def expected(self, prompt):
        counts = [0, 0, 0]
        for i, digest in enumerate(prompt.digests):
            tiers = self.held.get(digest)
            if not tiers or i == prompt.image:
                break
            counts[min(tiers)] += 1
        return counts

    def store(self, prompt, start, end, tier):
        self.out.hold(self, prompt.digests[start:end], tier)
        return self.out.stored(self, prompt, start, end, tier)

    def remove(self, digests, tier):
        for digest in digests:
            self.held[digest].discard(tier)
            if not self.held[digest]:
                del self.held[digest]
        return self.out.removed(self, digests, tier)

    def compute(self, prompt):
        """A request: the blocks that the GPU lacks are stored."""
        n = self.rng.randint(1, len(prompt.digests))
        start = 0
        while start < n and GPU in self.held.get(prompt.digests[start], ()):
            start += 1
        return self.store(prompt, 0 if start == n else start, n, GPU)

    def offload(self, prompt):
        """A block is copied to a lower tier."""
        found = [i for i in range(len(prompt.digests)) if all(d in self.held for d in prompt.digests[:i + 1])]
        if not found:
            return []
        i = self.rng.choice(found)
        return self.store(prompt, i, i + 1, self.rng.choice([CPU, DISK][:len(self.enc["tiers"]) - 1]))

    def evict(self):
        if not self.held:
            return []
        digest = self.rng.choice(sorted(self.held))
        return self.remove([digest], self.rng.choice(sorted(self.held[digest])))

    def work(self):
        prompt = self.rng.choice(self.prompts)
        chance = self.rng.random()
        if chance < 0.5:
            return self.compute(prompt)
        if chance < 0.7 and self.out.copies:
            return self.offload(prompt)
        if chance < 0.99 or not self.out.can_clear:
            return self.evict()
        self.held.clear()
        return self.out.cleared()

    def mark(self):
        """A prompt that nobody has seen before, to know that all before it came through."""
        events = []
        if self.marker and self.marker.digests[0] in self.held:
            for tier in sorted(self.held[self.marker.digests[0]]):
                events += self.remove(self.marker.digests, tier)
        self.marker = Prompt([self.rng.randrange(150000) for _ in range(BLOCK)])
        return events + self.store(self.marker, 0, 1, GPU)

    def turnover(self):
        events = []
        for digest in sorted(self.held):
            for tier in sorted(self.held[digest]):
                events += self.remove([digest], tier)
        for prompt in self.prompts:
            events += self.store(prompt, 0, len(prompt.digests), GPU)
        return events

    def check(self):
        rows = []
        for prompt in self.prompts + [self.marker]:
            rows.append(dict(tokens=prompt.tokens, lora=prompt.lora, salt=prompt.salt, held=self.expected(prompt)))
        return rows


class Publisher:
    """vLLM's and SGLang's way: PUB, and a buffer behind a ROUTER."""

    copies = can_clear = True

    def __init__(self, rng, enc, events_port, replay_port):
        self.rng, self.enc = rng, enc
        self.ports = events_port, replay_port
        self.lives = [self.open(r) for r in range(RANKS)]

    # Sockets.

    def open(self, rank):
        life = dict(seq=0, buffer=[], lock=threading.Lock(), late=[])
        life["pub"] = self.bind(zmq.PUB, self.ports[0] + rank)
        if self.enc["replay"]:
            router = self.bind(zmq.ROUTER, self.ports[1] + rank)
            life["thread"] = threading.Thread(target=self.serve, args=(life, router), daemon=True)
            life["thread"].start()
        return life

    def bind(self, kind, port):
        socket = zmq.Context.instance().socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        for _ in range(200):
            try:
                socket.bind("tcp://*:%d" % port)
                return socket
            except zmq.ZMQError:
                time.sleep(0.05)
        raise SystemExit("port %d is taken" % port)

    def close(self, life):
        life["closed"] = True
        if "thread" in life:
            life["thread"].join()
        life["pub"].close()

    def serve(self, life, router):
        while not life.get("closed"):
            if not router.poll(20):
                continue
            frames = router.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            with life["lock"]:
                buffer = list(life["buffer"])
            topic = [b"kv-events"] if self.enc["topic"] else []
            for seq, payload in buffer:
                if seq >= int.from_bytes(start, "big"):
                    router.send_multipart([client, b""] + topic + [struct.pack(">Q", seq), payload])
            router.send_multipart([client, b""] + ([b""] if topic else []) + [struct.pack(">Q", END), b""])
        router.close()

    def publish(self, rank, events, fault=""):
        life = self.lives[rank]
        batch = [time.time(), events, rank]
        if self.enc.get("batch_map"):
            batch = dict(ts=batch[0], events=events, data_parallel_rank=rank)
        payload = msgpack.packb(batch)
        if fault == "garbage":
            payload = self.rng.choice([payload[:self.rng.randrange(len(payload))], self.rng.randbytes(50), b""])
        with life["lock"]:
            seq = life["seq"]
            life["seq"] += 1
            life["buffer"].append((seq, payload))
        message = [b"kv-events", struct.pack(">Q", seq), payload]
        if fault == "gap":
            return
        if fault == "reorder":
            life["late"].append(message)
            return
        life["pub"].send_multipart(message)
        if fault == "duplicate":
            life["pub"].send_multipart(message)
        if fault == "junk":
            for frames in ([b"alone"], [b"", b"short", payload], [b"", struct.pack(">Q", END), b""],
                           [b""] * 7, [b"kv-events", self.rng.randbytes(9), self.rng.randbytes(30)]):
                life["pub"].send_multipart(frames)
        for late in life["late"]:
            life["pub"].send_multipart(late)
        life["late"] = []

    def restart(self, ranks):
        for r, rank in enumerate(ranks):
            self.close(self.lives[r])
            rank.held.clear()
            self.lives[r] = self.open(r)

    # Encodings.

    def hold(self, rank, digests, tier):
        for digest in digests:
            rank.held.setdefault(digest, set()).add(tier)

    def event(self, name, fields):
        """Fields are (name, value, default) in the order of the array form."""
        if self.enc["kind"] == "vllm" and self.enc["maps"]:
            return dict([("type", name)] + [(k, v) for k, v, default in fields if v != default])
        while self.enc["kind"] == "vllm" and fields and fields[-1][1] == fields[-1][2]:
            fields = fields[:-1]
        return [name] + [v for _, v, _ in fields]

    def stored(self, rank, prompt, start, end, tier):
        tokens = prompt.tokens[start * BLOCK:end * BLOCK]
        parent = rank.hash(prompt.digests[start - 1]) if start else None
        hashes = [rank.hash(d) for d in prompt.digests[start:end]]
        medium = self.enc["tiers"][tier]
        if self.enc["kind"] == "sglang":
            if self.enc["eagle"]:
                after = prompt.tokens[start * BLOCK + 1:end * BLOCK + 1]
                tokens = [list(pair) for pair in zip(tokens, after + [0])]
            event = ["BlockStored", hashes, parent, tokens, BLOCK, None, medium]
            return [event + [{"cache_salt": prompt.salt}] if prompt.salt else event]
        if tier != GPU and rank.rng.random() < 0.5: # the default of offloading
            tokens, parent, placeholder = [], None, True
        else:
            placeholder = False
        required = object()  # has no default, so it is always there
        fields = [("block_hashes", hashes, required), ("parent_block_hash", parent, required),
                  ("token_ids", tokens, required), ("block_size", 0 if placeholder else BLOCK, required),
                  ("lora_id", 3 if prompt.lora and not placeholder else None, required), ("medium", medium, required)]
        if self.enc["lora"]:
            keys = None if placeholder else [self.extra_keys(prompt, i) for i in range(start, end)]
            fields += [("lora_name", prompt.lora or None, required), ("extra_keys", keys, None)]
        if not self.enc["groups"]:
            return [self.event("BlockStored", fields)]
        locality = None if tier == GPU else "LOCAL"
        events = [self.event("BlockStored", fields + [
            ("group_idx", 1, None), ("kv_cache_spec_kind", "full_attention", None),
            ("kv_cache_spec_sliding_window", None, None), ("locality", locality, None)])]
        if tier == GPU:
            # Layers with a sliding window have only the end.
            events.insert(rank.rng.randrange(2), self.event("BlockStored", [(k, hashes[-1:] if k == "block_hashes" else
                keys[-1:] if k == "extra_keys" else v, d) for k, v, d in fields] + [("group_idx", 0, None),
                ("kv_cache_spec_kind", "sliding_window", None), ("kv_cache_spec_sliding_window", 8, None)]))
            # A cut block at the end of the prompt.
            events.append(self.event("BlockStored", [
                ("block_hashes", [rank.rng.getrandbits(64)], required), ("parent_block_hash", hashes[-1], required),
                ("token_ids", [1, 2], required), ("block_size", 2, required), ("lora_id", None, required),
                ("medium", medium, required), ("lora_name", prompt.lora or None, required), ("group_idx", 1, None),
                ("kv_cache_spec_kind", "full_attention", None)]))
        return events

    def extra_keys(self, prompt, i):
        keys = [prompt.lora] if prompt.lora else []
        keys += [["0f" * 32, 2]] if i == prompt.image else []
        keys += [prompt.salt] if prompt.salt and i == 0 else []
        return keys or None

    def removed(self, rank, digests, tier):
        medium, required = self.enc["tiers"][tier], object()
        events = []
        for digest in digests:
            fields = [("block_hashes", [rank.hash(digest)], required), ("medium", medium, required)]
            if self.enc["groups"]:
                events.append(self.event("BlockRemoved", fields + [("group_idx", 1, None)]))
                if rank.rng.random() < 0.3:
                    other = rank.hash(rank.rng.choice(rank.rng.choice(rank.prompts).digests))
                    events.append(self.event("BlockRemoved", [("block_hashes", [other], required),
                                                              ("medium", "GPU", required), ("group_idx", 0, None)]))
            else:
                events.append(self.event("BlockRemoved", fields))
        return events

    def cleared(self):
        return [self.event("AllBlocksCleared", [])]


class Drain:
    """TensorRT-LLM's way: a queue that a poll empties."""

    copies = True # as when blocks move from the GPU to a lower tier and back
    can_clear = False

    def __init__(self, rng, enc, port):
        self.rng, self.enc, self.port = rng, enc, port
        self.lock = threading.Lock()
        self.fresh()
        self.server = self.listen()

    def fresh(self):
        with self.lock:
            self.queue, self.ids, self.fault = [], [0] * RANKS, ""
        for r in range(RANKS):
            self.publish(r, [dict(type="created", num_blocks_per_cache_level=[900, 900])])

    def listen(self):
        drain = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                with drain.lock:
                    fault, drain.fault = drain.fault, ""
                    events = []
                    if fault != "error":
                        events, drain.queue = drain.queue, []
                if fault == "error" or self.path != "/kv_cache_events":
                    self.send_error(500)
                    return
                body = json.dumps(events).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if fault == "cut":
                    self.wfile.write(body[:len(body) // 2])
                    self.close_connection = True
                    return
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        http.server.ThreadingHTTPServer.allow_reuse_address = True
        server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return server

    def publish(self, rank, datas, fault=""):
        with self.lock:
            for data in datas:
                event = dict(event_id=self.ids[rank], data=data, window_size=data.pop("window", 4096))
                event["attention_dp_rank"] = rank
                if self.enc["hashes"] == "hex":
                    event["hash_algo"] = "v2_sha256"
                self.ids[rank] += 1
                self.queue.append(event)
            if fault == "gap": # the queue was full
                del self.queue[:self.rng.randint(1, len(self.queue) + 1)]
            elif fault in ("error", "cut"):
                self.fault = fault
            elif fault == "garbage":
                self.queue.append(self.rng.choice([None, 7, [], {"event_id": "x"}, {"event_id": 1, "data": {"type": 3}}]))

    def restart(self, ranks):
        for rank in ranks:
            rank.held.clear()
        self.fresh()
        # A poller must see the first events of a restarted engine. If it loses exactly as
        # many events as the engine before had sent, the numbers show no restart: then only
        # the probe of a proxy detects the new process.
        while self.queue:
            time.sleep(0.002)

    def hold(self, rank, digests, tier):
        """A block is in one tier at a time: it moves."""
        self.moves = []
        for digest in digests:
            old = rank.held.get(digest)
            rank.held[digest] = {tier}
            if old and old != {tier}:
                self.moves.append(dict(type="updated", block_hash=rank.hash(digest), priority=None,
                                       cache_level=dict(type="event_diff", new_value=tier, old_value=min(old))))

    def stored(self, rank, prompt, start, end, tier):
        if tier != GPU:
            return self.moves
        blocks = []
        for i in range(start, end):
            tokens = [dict(type="unique_token", token_id=t, token_extra_id=0)
                      for t in prompt.tokens[i * BLOCK:(i + 1) * BLOCK]]
            block = dict(type="stored_block", block_hash=rank.hash(prompt.digests[i]), tokens=tokens,
                         cache_level=0, priority=35, mm_keys=[])
            if i == prompt.image:
                block["mm_keys"] = [dict(type="mm_key", hash="0f" * 32, start_offset=0)]
            if prompt.salt:
                block["cache_salt"] = prompt.salt
            blocks.append(block)
        if rank.rng.random() < 0.3:
            blocks.append(dict(type="stored_block", block_hash=rank.hash(hashlib.sha256(rank.rng.randbytes(8)).digest()),
                               tokens=[dict(type="unique_token", token_id=1, token_extra_id=0)], cache_level=0, priority=35))
        parent = rank.hash(prompt.digests[start - 1]) if start else None
        return self.moves + [dict(type="stored", parent_hash=parent, blocks=blocks),
                             dict(type="stored", parent_hash=None, blocks=blocks[:1], window=1024)]

    def removed(self, rank, digests, tier):
        return [dict(type="removed", block_hashes=[rank.hash(d) for d in digests])]


def main():
    name, events_port, replay_port, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    rng, enc = random.Random(seed), ENCODINGS[name]
    if enc["kind"] == "trtllm":
        out = Drain(rng, enc, events_port)
    else:
        out = Publisher(rng, enc, events_port, replay_port)
    ranks = [Rank(rng, enc, r, out) for r in range(RANKS)]
    for line in sys.stdin:
        command = json.loads(line)
        answer = {}
        if command["op"] == "steps":
            for _ in range(command["n"]):
                rank = rng.choice(ranks)
                fault = rng.choice(command["faults"]) if command["faults"] and rng.random() < 0.1 else ""
                if fault == "restart":
                    out.restart(ranks)
                    continue
                events = []
                for _ in range(rng.randint(1, 6)):
                    events += rank.work()
                out.publish(rank.number, events, fault)
                if rng.random() < 0.05:
                    time.sleep(0.02)
        elif command["op"] == "turnover":
            for rank in ranks:
                out.publish(rank.number, rank.turnover())
        elif command["op"] == "garbage":
            for rank in ranks:
                out.publish(rank.number, rank.work(), "garbage")
        elif command["op"] == "check":
            for rank in ranks:
                out.publish(rank.number, rank.mark())
            answer["ranks"] = [rank.check() for rank in ranks]
        print(json.dumps(answer), flush=True)


main()
