"""Talks to the engines of engines.sh directly, no proxy between, and finds out
what the connector's rules rest on.

    probe.py texts    the two legs by hand give the text of one engine alone
    probe.py golden   writes real exchanges to golden/
    probe.py ids      token ids in events, and as the prompt of a chat, to golden/ (alone only)
    probe.py refuse   what a prefill leg may not carry, and what is pinned after it
    probe.py free     ways to free prefill's blocks that nobody will read
    probe.py leave    a client that leaves, at each point
    probe.py twice    blocks used again, or gone
    probe.py events   real KV events over ZMQ, to golden/kv_events.json
    probe.py push     the push connector: both orders, what failures leave behind
    probe.py poison   params that no prefill made; some kill the decode engine,
                      which is then started again

Results go to standard output as one JSON object a line.
"""

import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

import wire
from wire import ALONE, ASK, DECODE, MODEL, PREFILL, Call, metrics, post, used_blocks, wait_until, words

GOLDEN = pathlib.Path(__file__).parent / "golden"
SEED = int(time.time()) % 100000 * 1000


def fresh():
    global SEED
    SEED += 1
    return SEED


def say(**what):
    print(json.dumps(what), flush=True)


def prefill_body(body):
    """The prefill leg of a client's body, as the connector makes it."""
    leg = {k: v for k, v in body.items() if k not in ("stream_options", "min_tokens")}
    leg["stream"] = False
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if key in leg:
            leg[key] = 1
    if "input" in leg:
        leg["max_output_tokens"] = 1
    elif "token_ids" in leg:
        leg["sampling_params"] = dict(leg["sampling_params"], max_tokens=1)
    else:
        leg["max_tokens"] = 1
    leg["kv_transfer_params"] = ASK
    return leg


def prefill(body, path="/v1/completions", headers=None):
    status, answer = post(PREFILL, path, prefill_body(body), headers)
    if status != 200:
        raise SystemExit(f"prefill answered {status}: {answer}")
    return answer["kv_transfer_params"]


def pair(body, path="/v1/completions"):
    params = prefill(body, path)
    return post(DECODE, path, dict(body, kv_transfer_params=params))


def text_of(answer):
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def settle():
    """Waits for both engines to be empty; says so when they are not."""
    for port in (PREFILL, DECODE):
        if wait_until(lambda: wire.empty(port), 45, 0.1) is None:
            raise SystemExit(f"engine on {port} is not empty: {used_blocks(port)} blocks")


# texts


def texts():
    wrong = 0
    for tokens in (1, 5, 31, 32, 33, 64, 65, 200, 513, 1200):
        body = {"model": MODEL, "prompt": words(tokens, fresh()), "max_tokens": 24, "temperature": 0}
        before = metrics(DECODE)
        status, got = pair(body)
        hits = metrics(DECODE)["vllm:external_prefix_cache_hits_total"] - before["vllm:external_prefix_cache_hits_total"]
        _, want = post(ALONE, "/v1/completions", body)
        same = status == 200 and text_of(got) == text_of(want)
        wrong += not same
        say(check="text", prompt_tokens=tokens, same=same, external_hits=hits, usage=got.get("usage"))
    for n in range(3):
        chat = {"model": MODEL, "temperature": 0, "max_completion_tokens": 24,
                "messages": [{"role": "user", "content": words(100 * (n + 1), fresh())}]}
        _, got = pair(chat, "/v1/chat/completions")
        _, want = post(ALONE, "/v1/chat/completions", chat)
        same = text_of(got) == text_of(want)
        wrong += not same
        say(check="chat text", same=same, usage=got["usage"])
    settle()
    say(check="texts", wrong=wrong)
    return wrong


# golden


def keep(name, port, path, body=None, headers=None, note=""):
    """Makes one exchange and writes its bytes to golden/NAME.txt."""
    call = Call(port, path, body, headers)
    raw = call.body()
    engine = {PREFILL: "prefill", DECODE: "decode", ALONE: "alone"}[port]
    GOLDEN.mkdir(exist_ok=True)
    head = f"# vllm {VERSION}, engine {engine}{': ' + note if note else ''}\n"
    out = head.encode() + b">>>\n" + call.sent.replace(b"\r\n", b"\n") + b"\n<<<\n"
    out += call.head.encode() + b"\n\n"
    out = out.replace(b"\r\n", b"\n") + raw
    (GOLDEN / f"{name}.txt").write_bytes(out if out.endswith(b"\n") else out + b"\n")
    say(golden=name, status=call.status)
    try:
        return json.loads(raw)
    except ValueError:
        return None


def golden():
    story = "The mill stood by the river, and every spring the water rose to its third step. " * 2
    chat = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": story + "Why?"}]
    cases = {
        "completions": ("/v1/completions", {"model": MODEL, "prompt": story, "max_tokens": 6, "temperature": 0}),
        "chat": ("/v1/chat/completions", {"model": MODEL, "messages": chat, "max_completion_tokens": 6, "temperature": 0}),
        "responses": ("/v1/responses", {"model": MODEL, "input": story, "max_output_tokens": 6, "temperature": 0}),
        "messages": ("/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": story}], "max_tokens": 6, "temperature": 0}),
        "generate": ("/inference/v1/generate", {"model": MODEL, "token_ids": list(story.encode()),
                                                "sampling_params": {"max_tokens": 6, "temperature": 0}}),
    }
    for n, (name, (path, body)) in enumerate(cases.items()):
        for stream in (False, True):
            kind = "stream" if stream else "unary"
            ask = dict(body, stream=True) if stream else dict(body)
            if stream and name in ("completions", "chat"):
                ask["stream_options"] = {"include_usage": True}
            ids = {"X-Request-Id": f"golden-{n}{kind[0]}"}
            answer = keep(f"{name}_{kind}_prefill", PREFILL, path, prefill_body(ask), ids)
            params = (answer or {}).get("kv_transfer_params")
            if params is None:
                say(golden=name, kind=kind, missing="kv_transfer_params")
                continue
            keep(f"{name}_{kind}_decode", DECODE, path, dict(ask, kv_transfer_params=params), ids)
    base = cases["completions"][1]
    more = {
        "logprobs": dict(base, logprobs=2, max_tokens=3),
        "echo": dict(base, echo=True, max_tokens=3),
    }
    for name, ask in more.items():
        params = prefill(ask)
        keep(f"completions_{name}_decode", DECODE, "/v1/completions", dict(ask, kv_transfer_params=params))
    short = dict(base, prompt="Hi")
    keep("completions_short_prefill", PREFILL, "/v1/completions", prefill_body(short), note="a prompt shorter than a block")
    settle()
    eos = dict(base, prompt=words(70, 7), logit_bias={"257": 100})
    params = keep("completions_eos_prefill", PREFILL, "/v1/completions", prefill_body(eos),
                  note="prefill's only token is the end token")["kv_transfer_params"]
    keep("completions_eos_decode", DECODE, "/v1/completions", dict(eos, kv_transfer_params=params))
    keep("completions_stream_on_prefill", PREFILL, "/v1/completions", dict(prefill_body(base), stream=True),
         note="a streamed prefill leg: no kv_transfer_params come back, the blocks stay pinned for the lease")
    keep("completions_no_params_decode", DECODE, "/v1/completions", base, note="decode prefills by itself")
    keep("models", PREFILL, "/v1/models")
    keep("version", PREFILL, "/version")
    keep("health", PREFILL, "/health")
    keep("load", PREFILL, "/load")
    keep("kv_event_sources", PREFILL, "/kv_event_sources")
    settle()


# ids


def ids():
    """An answer with token ids, and the same answer continued behind its first three tokens."""
    ask = {"model": MODEL, "max_tokens": 5, "temperature": 0, "stream": True, "return_token_ids": True,
           "stream_options": {"include_usage": True}}
    chat = dict(ask, messages=[{"role": "user", "content": "Why?"}])
    for name, path, body in (("completions", "/v1/completions", dict(ask, prompt="Why?")), ("chat", "/v1/chat/completions", chat)):
        call = Call(ALONE, path, body)
        first = [json.loads(e) for e in wire.events(call.body())[:-1]]
        prompt, out = [], []
        for event in first:
            prompt = prompt or event.get("prompt_token_ids") or []
            for choice in event["choices"]:
                prompt = prompt or choice.get("prompt_token_ids") or []
                out += choice.get("token_ids") or []
        keep(f"{name}_ids_alone", ALONE, path, body, {"X-Request-Id": f"golden-{name}"})
        more = dict(body, max_tokens=2)
        if name == "chat":
            more["messages"] = [{"role": "user", "content": "-"}]
            more["kv_transfer_params"] = {"prompt_token_ids": prompt + out[:3]}
        else:
            more["prompt"] = prompt + out[:3]
        keep(f"{name}_ids_again_alone", ALONE, path, more, {"X-Request-Id": f"golden-{name}"}, note="continues the answer before")
    keep("detokenize_alone", ALONE, "/detokenize", {"model": MODEL, "tokens": prompt + out})


# refuse


def refuse():
    base = {"model": MODEL, "prompt": words(80, fresh()), "max_tokens": 4, "temperature": 0}
    bad = {
        "stream_options_without_stream": dict(prefill_body(base), stream_options={"include_usage": True}),
        "max_tokens_0": dict(prefill_body(base), max_tokens=0),
        "max_tokens_minus": dict(prefill_body(base), max_tokens=-1),
        "min_tokens_over_max": dict(prefill_body(base), min_tokens=5),
        "unknown_model": dict(prefill_body(base), model="nobody"),
        "huge_prompt": dict(prefill_body(base), prompt=words(5000, fresh())),
        "exact_prompt": dict(prefill_body(base), prompt=words(4096, fresh())),
        "wrong_type": dict(prefill_body(base), temperature="warm"),
        "params_not_object": dict(prefill_body(base), kv_transfer_params="yes"),
        "not_json": b'{"model": "tiny", "prompt": ',
        "n_2": dict(prefill_body(base), n=2, temperature=0.5),
        "prompt_list_2": dict(prefill_body(base), prompt=[words(80, fresh()), words(90, fresh())]),
    }
    for name, body in bad.items():
        keep(f"refuse_{name}", PREFILL, "/v1/completions", body)
        time.sleep(0.3)
        say(refuse=name, pinned_blocks=used_blocks(PREFILL))
        if used_blocks(PREFILL):
            expired = metrics(PREFILL)["vllm:nixl_num_kv_expired_reqs_total"]
            after = wait_until(lambda: used_blocks(PREFILL) == 0, 60, 0.1)
            say(refuse=name, free_after_s=after and round(after, 2),
                expired=metrics(PREFILL)["vllm:nixl_num_kv_expired_reqs_total"] - expired)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 1,
            "max_tokens": 1, "stream_options": {"include_usage": True}, "kv_transfer_params": ASK}
    keep("refuse_chat_stream_options", PREFILL, "/v1/chat/completions", chat)
    keep("refuse_chat_no_messages", PREFILL, "/v1/chat/completions", {"model": MODEL, "max_tokens": 1, "kv_transfer_params": ASK})
    keep("refuse_path", PREFILL, "/v1/nothing", {"model": MODEL})
    keep("refuse_method", PREFILL, "/v1/completions")
    settle()


# free


def counted(port, before):
    now = metrics(port)
    names = {
        "expired": "vllm:nixl_num_kv_expired_reqs_total", "late_reads": "vllm:nixl_num_notifications_after_expiry_total",
        "bytes": "vllm:nixl_bytes_transferred_sum", "external_hits": "vllm:external_prefix_cache_hits_total",
        "prompt_tokens": "vllm:prompt_tokens_total", "finished": "vllm:request_success_total",
        "failed": "vllm:nixl_num_failed_transfers_total",
    }
    return {k: now.get(v, 0) - before.get(v, 0) for k, v in names.items() if now.get(v, 0) != before.get(v, 0)}


class Busy:
    """Fills every decode slot with long answers while it is entered."""

    def __enter__(self):
        self.calls = [Call(DECODE, "/v1/completions", {
            "model": MODEL, "prompt": words(40, fresh()), "max_tokens": 3000, "temperature": 0, "stream": True,
        }) for _ in range(8)]
        for call in self.calls:
            call.read_head()
        wait_until(lambda: metrics(DECODE)["vllm:num_requests_running"] >= 8, 20, 0.1)
        return self

    def __exit__(self, *_):
        for call in self.calls:
            call.close()
        wait_until(lambda: wire.idle(DECODE), 20, 0.1)


def minimal(params, **more):
    return dict({"model": MODEL, "prompt": "x", "max_tokens": 1, "stream": True, "kv_transfer_params": params}, **more)


def chat_of(tokens):
    return {"model": MODEL, "messages": [{"role": "user", "content": words(tokens, fresh())}], "max_tokens": 50, "temperature": 0}


def at_head(port, path, body):
    call = Call(port, path, body)
    call.read_head()
    call.close()
    return {"head_ms": round(call.head_after * 1000), "status": call.status}


def at_once(port, path, body, wait=0.0):
    call = Call(port, path, body)
    time.sleep(wait)
    call.close()
    return {}


def to_end(port, path, body):
    call = Call(port, path, body)
    raw = call.body()
    return {"status": call.status, "took_ms": round((time.perf_counter() - call.began) * 1000), "head_ms": round(call.head_after * 1000),
            "said": raw.decode()[-160:] if call.status != 200 else ""}


def clean_ups():
    """name -> (what to send after a prefill, of which client body and path)."""
    comp, chat = "/v1/completions", "/v1/chat/completions"
    return {
        "a full leg, stream, max_tokens 1, closed at the head": lambda body, path, kv: at_head(
            DECODE, path, dict(body, stream=True, max_tokens=1, kv_transfer_params=kv)),
        "a2 full leg, stream, closed at the head": lambda body, path, kv: at_head(
            DECODE, path, dict(body, stream=True, kv_transfer_params=kv)),
        "b minimal, stream, closed at the head": lambda body, path, kv: at_head(DECODE, comp, minimal(kv)),
        "c full leg, closed before the head": lambda body, path, kv: at_once(
            DECODE, path, dict(body, stream=True, max_tokens=1, kv_transfer_params=kv)),
        "c2 full leg, closed 5 ms after it": lambda body, path, kv: at_once(
            DECODE, path, dict(body, stream=True, max_tokens=1, kv_transfer_params=kv), 0.005),
        "c3 minimal, closed before the head": lambda body, path, kv: at_once(DECODE, comp, minimal(kv)),
        "d minimal, to its end": lambda body, path, kv: to_end(DECODE, comp, minimal(kv)),
        "d2 minimal, unary, to its end": lambda body, path, kv: to_end(DECODE, comp, minimal(kv, stream=False)),
        "d3 full leg, unary, max_tokens 1, to its end": lambda body, path, kv: to_end(
            DECODE, path, dict(body, max_tokens=1, kv_transfer_params=kv)),
        "f unknown model, to its end": lambda body, path, kv: to_end(
            DECODE, comp, minimal(kv, model="no-such-model", stream=False)),
        "f2 max_tokens 0, to its end": lambda body, path, kv: to_end(
            DECODE, comp, minimal(kv, max_tokens=0, stream=False)),
        "f3 unknown model, closed before the head": lambda body, path, kv: at_once(
            DECODE, comp, minimal(kv, model="no-such-model", stream=False)),
        "f4 empty prompt, to its end": lambda body, path, kv: to_end(
            DECODE, comp, minimal(kv, prompt="", stream=False)),
        "g abort_requests on prefill": lambda body, path, kv: to_end(
            PREFILL, "/inference/v1/abort_requests", {"request_ids": [kv["remote_request_id"], kv["remote_request_id"][:-9]]}),
    }


def one_clean_up(name, way, busy=False, limit=40, tokens=320, path="/v1/chat/completions"):
    body = chat_of(tokens) if "chat" in path else {"model": MODEL, "prompt": words(tokens, fresh()), "max_tokens": 50, "temperature": 0}
    kv = prefill(body, path)
    wait_until(lambda: used_blocks(PREFILL) > 0, 5)
    pinned = used_blocks(PREFILL)
    p, d = metrics(PREFILL), metrics(DECODE)
    began = time.perf_counter()
    extra = way(body, path, kv)
    wait_until(lambda: used_blocks(PREFILL) == 0, limit, 0.005)
    free = time.perf_counter() - began
    time.sleep(0.1)
    return {"pinned": pinned, "free_ms": round(free * 1000), **extra,
            "prefill": counted(PREFILL, p), "decode": counted(DECODE, d)}


def free():
    prefill_once = pair({"model": MODEL, "prompt": words(64, fresh()), "max_tokens": 2, "temperature": 0})
    assert prefill_once[0] == 200 # the pair has completed its handshake
    settle()
    ways = clean_ups()
    only = sys.argv[2:] or None
    for name, way in ways.items():
        if only and name.split()[0] not in only:
            continue
        runs = 1 if name[0] == "g" else 6 if name[0] != "c" else 12
        rows = [one_clean_up(name, way) for _ in range(runs)]
        times = [r["free_ms"] for r in rows]
        say(free=name, decode="idle", runs=len(rows), median_ms=statistics.median(times), max_ms=max(times),
            leaked=sum("expired" in r["prefill"] for r in rows), last=rows[-1])
    for name, way in ways.items():
        if name[0] in "gc" and not name.startswith("c "):
            continue
        if only and name.split()[0] not in only:
            continue
        with Busy():
            rows = [one_clean_up(name, way, busy=True) for _ in range(3)]
        times = [r["free_ms"] for r in rows]
        say(free=name, decode="busy (all 8 slots)", runs=len(rows), median_ms=statistics.median(times), max_ms=max(times),
            leaked=sum("expired" in r["prefill"] for r in rows), last=rows[-1])
    settle()
    if not only or "e" in only:
        row = one_clean_up("e", lambda body, path, kv: {}, limit=60)
        say(free="e nothing: the lease", **row)
    settle()


# leave


def leave():
    long = 4000

    def prefill_call():
        return Call(PREFILL, "/v1/completions", prefill_body(
            {"model": MODEL, "prompt": words(long, fresh()), "max_tokens": 5, "temperature": 0}))

    call = prefill_call()
    call.body()
    whole = time.perf_counter() - call.began
    say(leave="prefill undisturbed", tokens=long, took_ms=round(whole * 1000))
    wait_until(lambda: wire.empty(PREFILL), 60, 0.1)

    def gone(how, at):
        call = prefill_call()
        time.sleep(at)
        running = metrics(PREFILL)["vllm:num_requests_running"]
        before = metrics(PREFILL)
        began = time.perf_counter()
        how(call)
        stopped = wait_until(lambda: wire.idle(PREFILL), 30, 0.005)
        stopped_ms = round((time.perf_counter() - began) * 1000)
        free = wait_until(lambda: used_blocks(PREFILL) == 0, 60, 0.02)
        row = {"running": running, "idle_ms": stopped_ms if stopped is not None else None,
               "free_ms": round((time.perf_counter() - began) * 1000), "prefill": counted(PREFILL, before)}
        if how is Call.half_close:
            try:
                row["answer_bytes"] = len(call.sock.recv(65536))
            except OSError as err:
                row["answer"] = str(err)
        call.close()
        return row

    for name, how in (("close", Call.close), ("half-close (SHUT_WR)", Call.half_close)):
        for at in (0.01, whole * 0.3, whole * 0.6):
            say(leave=f"prefill running, {name}", at_ms=round(at * 1000), **gone(how, at))

    # The client leaves at random times around prefill's end: how often do
    # blocks stay pinned?
    stuck, rows = 0, []
    rnd = random.Random(1)
    for _ in range(10):
        at = whole * rnd.uniform(0.8, 1.05)
        call = prefill_call()
        time.sleep(at)
        call.close()
        time.sleep(0.6)
        left = used_blocks(PREFILL)
        stuck += left > 0
        rows.append([round(at / whole, 2), left])
        if left:
            wait_until(lambda: used_blocks(PREFILL) == 0, 60, 0.1)
    say(leave="prefill about to end, close", runs=len(rows), pinned_after=stuck, at_and_blocks=rows)

    for name, how in (("close", Call.close), ("half-close (SHUT_WR)", Call.half_close)):
        body = {"model": MODEL, "prompt": words(320, fresh()), "max_tokens": 2000, "temperature": 0, "stream": True}
        kv = prefill(body)
        call = Call(DECODE, "/v1/completions", dict(body, kv_transfer_params=kv))
        pieces = call.pieces()
        for _ in range(5):
            next(pieces)
        began = time.perf_counter()
        how(call)
        wait_until(lambda: wire.idle(DECODE), 30, 0.005)
        idle_ms = round((time.perf_counter() - began) * 1000)
        wait_until(lambda: used_blocks(DECODE) == 0, 30, 0.005)
        say(leave=f"decode streaming, {name}", idle_ms=idle_ms, free_ms=round((time.perf_counter() - began) * 1000),
            prefill_blocks=used_blocks(PREFILL))
        call.close()
    body = {"model": MODEL, "prompt": words(320, fresh()), "max_tokens": 2000, "temperature": 0}
    kv = prefill(body)
    call = Call(DECODE, "/v1/completions", dict(body, kv_transfer_params=kv))
    time.sleep(0.5)
    began = time.perf_counter()
    call.close()
    wait_until(lambda: wire.empty(DECODE), 30, 0.005)
    say(leave="decode unary, close", free_ms=round((time.perf_counter() - began) * 1000), prefill_blocks=used_blocks(PREFILL))
    settle()


# twice


def twice():
    body = {"model": MODEL, "prompt": words(320, fresh()), "max_tokens": 12, "temperature": 0}
    _, want = post(ALONE, "/v1/completions", body)
    kv = prefill(body)
    for turn in ("first", "second", "third"):
        before, late = metrics(DECODE), metrics(PREFILL)
        began = time.perf_counter()
        status, got = post(DECODE, "/v1/completions", dict(body, kv_transfer_params=kv))
        say(twice=f"{turn} decode with the same params", status=status, same=status == 200 and text_of(got) == text_of(want),
            took_ms=round((time.perf_counter() - began) * 1000), decode=counted(DECODE, before), prefill=counted(PREFILL, late))
    # Blocks that were freed and reused for other prompts, on a decode without
    # the prefix in its cache.
    body = dict(body, prompt=words(320, fresh()))
    _, want = post(ALONE, "/v1/completions", body)
    kv = prefill(body)
    at_head(DECODE, "/v1/completions", minimal(kv))
    wait_until(lambda: used_blocks(PREFILL) == 0, 40)
    for _ in range(14):
        post(PREFILL, "/v1/completions", {"model": MODEL, "prompt": words(1200, fresh()), "max_tokens": 1})
    late = metrics(PREFILL)
    status, got = post(DECODE, "/v1/completions", dict(body, kv_transfer_params=kv))
    say(twice="freed and overwritten blocks", status=status, same=status == 200 and text_of(got) == text_of(want),
        prefill=counted(PREFILL, late))
    for name, change in {
        "remote_port closed": {"remote_port": 1, "remote_engine_id": "p-gone"},
        "unknown remote_engine_id": {"remote_engine_id": "p-other"},
    }.items():
        body = dict(body, prompt=words(320, fresh()))
        kv = prefill(body)
        used = dict(kv, **change)
        for stream in (False, True):
            ask = dict(body, kv_transfer_params=used, **({"stream": True} if stream else {}))
            call = Call(DECODE, "/v1/completions", ask, timeout=40)
            try:
                raw = call.body()
                say(twice=name, stream=stream, status=call.status, took_ms=round((time.perf_counter() - call.began) * 1000), body=raw.decode()[-400:])
            except OSError as err:
                say(twice=name, stream=stream, error=str(err))
        at_head(DECODE, "/v1/completions", minimal(kv))
        wait_until(lambda: used_blocks(PREFILL) == 0, 45)
    settle()


# push


def push_params(rid):
    return {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "p0", "remote_host": wire.HOST,
            "remote_port": int(os.environ.get("REAL_SIDE_CHANNEL", 5600)), "tp_size": 1, "pp_size": 1, "remote_request_id": rid}


def push():
    """The push connector (start the pair with REAL_CONNECTOR=NixlPushConnector):
    both legs at once, in both orders, and what each failure leaves behind."""

    def start(first, body, path="/v1/completions", lag=0.0, decode_id=None, prefill_leg=True, decode_leg=True):
        rid = f"push-{fresh()}"
        legs = {}

        def send(name):
            if name == "prefill" and prefill_leg:
                legs[name] = Call(PREFILL, path, prefill_body(body), {"X-Request-Id": rid})
            if name == "decode" and decode_leg:
                own = decode_id or rid
                legs[name] = Call(DECODE, path, dict(body, kv_transfer_params=push_params(own)), {"X-Request-Id": own}, timeout=20)

        order = ("prefill", "decode") if first == "prefill" else ("decode", "prefill")
        send(order[0])
        time.sleep(lag)
        send(order[1])
        return legs

    for first in ("prefill", "decode"):
        for lag in (0.0, 1.0):
            body = {"model": MODEL, "prompt": words(200, fresh()), "max_tokens": 12, "temperature": 0}
            legs = start(first, body, lag=lag)
            params = legs["prefill"].json()["kv_transfer_params"]
            got = legs["decode"].json()
            _, want = post(ALONE, "/v1/completions", body)
            say(push=f"{first} first, {lag} s apart", same=text_of(got) == text_of(want), params=params)
    chat = chat_of(100)
    rid = f"push-{fresh()}"
    GOLDEN.mkdir(exist_ok=True)
    ask = {"X-Request-Id": rid}
    keep("push_chat_prefill", PREFILL, "/v1/chat/completions", prefill_body(chat), ask)
    keep("push_chat_decode", DECODE, "/v1/chat/completions", dict(chat, max_tokens=4, kv_transfer_params=push_params(rid)), ask)

    lost = {PREFILL: 0, DECODE: 0}  # blocks that earlier steps left behind

    def left_over(name, limit=40):
        """How long each side holds blocks from now on; null: longer than limit."""
        began, row = time.perf_counter(), {}
        for side, port in (("prefill", PREFILL), ("decode", DECODE)):
            row[side] = {"blocks": used_blocks(port) - lost[port], "free_ms": None}

        def both_free():
            for side, port in (("prefill", PREFILL), ("decode", DECODE)):
                if row[side]["free_ms"] is None and used_blocks(port) <= lost[port]:
                    row[side]["free_ms"] = round((time.perf_counter() - began) * 1000)
            return all(row[side]["free_ms"] is not None for side in row)

        wait_until(both_free, limit)
        for port in lost:
            lost[port] = max(lost[port], used_blocks(port))
        say(push=name, **row, decode_idle=wire.idle(DECODE))

    body = {"model": MODEL, "prompt": words(200, fresh()), "max_tokens": 12, "temperature": 0}
    start("decode", body, prefill_leg=False)["decode"].close()
    time.sleep(0.3)
    left_over("decode leg alone, closed at once")
    body["prompt"] = words(200, fresh())
    call = start("decode", body, prefill_leg=False)["decode"]
    time.sleep(1)
    call.close()
    time.sleep(0.3)
    left_over("decode leg alone, closed after 1 s")
    body["prompt"] = words(200, fresh())
    start("prefill", body, decode_leg=False)["prefill"].body()
    time.sleep(0.3)
    left_over("prefill leg alone")
    for name, leg in (
        ("b", lambda kv: at_head(DECODE, "/v1/completions", minimal(kv))),
        ("b at end", lambda kv: to_end(DECODE, "/v1/completions", minimal(kv))),
        ("f", lambda kv: to_end(DECODE, "/v1/completions", minimal(kv, model="no-such-model", stream=False))),
    ):
        body["prompt"] = words(200, fresh())
        kv = start("prefill", body, decode_leg=False)["prefill"].json()["kv_transfer_params"]
        try:
            say(push=f"clean-up {name}", **leg(kv))
        except OSError as err:
            say(push=f"clean-up {name}", error=str(err))
        time.sleep(0.3)
        left_over(f"prefill leg alone, then clean-up {name}")
    body["prompt"] = words(200, fresh())
    legs = start("decode", body, lag=0.5)
    legs["decode"].close()
    legs["prefill"].body()
    time.sleep(0.3)
    left_over("decode closed while prefill runs")
    body["prompt"] = words(3900, fresh())
    legs = start("decode", body, lag=0.2)
    time.sleep(0.2)
    legs["prefill"].close()
    time.sleep(1)
    say(push="prefill closed while it runs", decode_waits=not wire.idle(DECODE))
    legs["decode"].close()
    time.sleep(0.3)
    left_over("prefill closed while it runs, decode closed 1 s later")
    body["prompt"] = words(200, fresh())
    legs = start("prefill", body, decode_id=f"push-{fresh()}")
    legs["prefill"].body()
    try:
        raw = legs["decode"].body()
        say(push="legs with different ids", status=legs["decode"].status, said=raw.decode()[-200:])
    except OSError as err:
        say(push="legs with different ids", decode=str(err))
    legs["decode"].close()
    time.sleep(0.3)
    left_over("legs with different ids, decode closed")


# events


def kv_events():
    """Real KV events and a replay, frame by frame in hex, with what they decode to."""
    import msgspec
    import zmq

    port = int(os.environ.get("REAL_EVENTS", 5557))
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVTIMEO, 1500)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(f"tcp://127.0.0.1:{port}")
    time.sleep(0.5)

    def shown(value):
        if isinstance(value, bytes):
            return {"hex": value.hex()}
        if isinstance(value, (list, tuple)):
            return [shown(v) for v in value]
        if isinstance(value, dict):
            return {str(k): shown(v) for k, v in value.items()}
        return value

    def message(frames):
        out = {"frames": [f.hex() for f in frames]}
        try:
            out["payload"] = shown(msgspec.msgpack.decode(frames[-1]))
        except (msgspec.DecodeError, UnicodeDecodeError):
            pass
        return out

    def drain(sock):
        got = []
        try:
            while True:
                got.append(message(sock.recv_multipart()))
        except zmq.Again:
            return got

    steps = []
    prompt = words(100, 42)
    for name, body in (
        ("100 tokens: three full blocks", {"prompt": prompt}),
        ("the same prompt and 40 tokens more", {"prompt": prompt + words(40, 43)}),
        ("the same with a cache salt", {"prompt": prompt, "cache_salt": "tenant-a"}),
    ):
        post(PREFILL, "/v1/completions", dict({"model": MODEL, "max_tokens": 1, "temperature": 0}, **body))
        steps.append({"step": name, "prompt": body["prompt"], "events": drain(sub)})
    # 20 prompts of 1000 tokens do not fit at the same time: the oldest blocks
    # are evicted.
    for _ in range(20):
        post(PREFILL, "/v1/completions", {"model": MODEL, "prompt": words(1000, fresh()), "max_tokens": 1})
    removed = [e for e in drain(sub) if "BlockRemoved" in json.dumps(e["payload"])]
    steps.append({"step": "blocks pushed out", "events": removed[:2]})
    replay = context.socket(zmq.DEALER)
    replay.setsockopt(zmq.RCVTIMEO, 1500)
    replay.connect(f"tcp://127.0.0.1:{port + 1}")
    ask = [b"", (0).to_bytes(8, "big")]
    replay.send_multipart(ask)
    answers = drain(replay)
    steps.append({"step": "replay from 0", "asked": [f.hex() for f in ask], "count": len(answers),
                  "first": answers[:2], "last": answers[-1:]})
    GOLDEN.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(step) for step in steps)
    head = json.dumps({"vllm": VERSION, "block_size": int(os.environ.get("REAL_BLOCK_SIZE", 32))})
    (GOLDEN / "kv_events.json").write_text(f'{head[:-1]}, "steps": [\n{lines}\n]}}\n')
    for step in steps:
        say(events=step["step"], count=len(step.get("events", step.get("first", []))))


# poison


def poison():
    """Params that no prefill made. Restarts decode where they killed it."""
    comp = "/v1/completions"

    def without(key):
        return lambda kv: {k: v for k, v in kv.items() if k != key}

    forged = {"do_remote_prefill": True, "do_remote_decode": False}
    cases = {
        "nothing wrong": lambda kv: kv,
        "empty object": lambda kv: {},
        "remote_block_ids null": lambda kv: dict(kv, remote_block_ids=None),
        "remote_block_ids [[]]": lambda kv: dict(kv, remote_block_ids=[[]]),
        "tp_size missing": without("tp_size"),
        "remote_num_tokens missing": without("remote_num_tokens"),
        "remote_port a string": lambda kv: dict(kv, remote_port=str(kv["remote_port"])),
        "blocks out of range": lambda kv: dict(kv, remote_block_ids=[[100000 + n for n in range(10)]]),
        "remote_host missing": without("remote_host"),
        "remote_request_id missing": without("remote_request_id"),
        "only do_remote_prefill": lambda kv: forged,
        "only do_remote_prefill, unknown model": lambda kv: forged,
    }
    only = sys.argv[2:]
    for name, change in cases.items():
        if only and name not in only:
            continue
        body = {"model": MODEL, "prompt": words(320, fresh()), "max_tokens": 4, "temperature": 0}
        kv = prefill(body)
        ask = dict(body, kv_transfer_params=change(kv))
        if "unknown model" in name:
            ask["model"] = "nobody"
        call = Call(DECODE, comp, ask, timeout=8)
        row = {"poison": name}
        try:
            row.update(status=call.status, body=call.body().decode()[-200:])
            row["status"] = call.status
        except OSError as err:
            row["answer"] = str(err)
        row["took_ms"] = round((time.perf_counter() - call.began) * 1000)
        call.close()
        time.sleep(2)
        try:
            row["decode"] = post(DECODE, comp, dict(body, prompt="Are you there?"), timeout=8)[0]
            row["decode_idle"] = wire.idle(DECODE)
        except OSError as err:
            row["decode"] = f"dead: {err}"
        say(**row)
        if row["decode"] != 200 or not row["decode_idle"]:
            script = str(pathlib.Path(__file__).parent / "engines.sh")
            subprocess.run([script, "stop", "decode"], check=True, stdout=sys.stderr)
            subprocess.run([script, "start", "decode"], check=True, stdout=sys.stderr)
        wait_until(lambda: used_blocks(PREFILL) == 0, 60, 0.1)


if __name__ == "__main__":
    what = sys.argv[1] if len(sys.argv) > 1 else "texts"
    VERSION = json.loads(wire.get(ALONE if what == "ids" else PREFILL, "/version"))["version"]
    run = {"texts": texts, "golden": golden, "ids": ids, "refuse": refuse, "free": free, "leave": leave, "twice": twice, "poison": poison, "events": kv_events, "push": push}[what]
    sys.exit(1 if run() else 0)
