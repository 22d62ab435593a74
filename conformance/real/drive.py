"""Drives pdproxy in front of the real pair and compares with one engine alone.

    python drive.py            all checks but the last one
    python drive.py --dying    and at the end: what a client sees when decode dies

Prints one line a check and, last, "N passed, N failed"; exits 1 when any failed.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import wire
from wire import ADMIN, ALONE, DECODE, MODEL, PREFILL, PROXY, Call, events, metrics, post, used_blocks, wait_until, words

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FREE_WITHIN = 3.0  # seconds; the lease would take 30
SEED = int(time.time()) % 100000 * 1000
PASSED, FAILED = [], []
BEFORE = {"prefill": {}, "decode": {}}  # the engines' counters when the run began


def fresh():
    global SEED
    SEED += 1
    return SEED


def check(test):
    """Runs one test function; an exception is a failure."""
    began = time.perf_counter()
    try:
        note = test() or ""
        PASSED.append(test.__name__)
        print(f"ok    {test.__name__:34} {time.perf_counter() - began:6.2f} s  {note}", flush=True)
    except Exception as err:
        FAILED.append(test.__name__)
        where = traceback.extract_tb(err.__traceback__)[-1]
        print(f"FAIL  {test.__name__:34} {time.perf_counter() - began:6.2f} s  {where.name}:{where.lineno}: {err}", flush=True)


def expect(condition, *what):
    if not condition:
        raise AssertionError(" ".join(str(w) for w in what))


def completion(tokens, **more):
    return dict({"model": MODEL, "prompt": words(tokens, fresh()), "max_tokens": 16, "temperature": 0}, **more)


def conversation(tokens, **more):
    return dict({"model": MODEL, "messages": [{"role": "user", "content": words(tokens, fresh())}],
                 "max_completion_tokens": 16, "temperature": 0}, **more)


def text(answer):
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed(raw):
    """The text, the usage and the events of a streamed answer."""
    got = events(raw)
    expect(got and got[-1] == "[DONE]", "stream does not end in [DONE]:", raw[-200:])
    chunks = [json.loads(e) for e in got[:-1]]
    out, usage = "", None
    for chunk in chunks:
        expect("error" not in chunk, "error event:", chunk)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            out += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return out, usage, chunks


def alone(path, body):
    status, answer = post(ALONE, path, {k: v for k, v in body.items() if k not in ("stream", "stream_options")})
    expect(status == 200, "the engine alone answered", status, answer)
    return answer


def emptied(within=FREE_WITHIN):
    """Seconds until both engines hold nothing."""
    took = wait_until(lambda: wire.empty(PREFILL) and wire.empty(DECODE), within)
    expect(took is not None, f"after {within} s prefill holds {used_blocks(PREFILL)} blocks, decode {used_blocks(DECODE)}")
    return f"engines empty after {took * 1000:.0f} ms"


# Texts


def completions_equal_alone():
    for tokens in (1, 31, 32, 33, 64, 200, 513, 1500):
        body = completion(tokens)
        before = metrics(DECODE)["vllm:external_prefix_cache_hits_total"]
        status, got = post(PROXY, COMPLETIONS, body)
        expect(status == 200, status, got)
        want = alone(COMPLETIONS, body)
        expect(text(got) == text(want), f"{tokens} tokens: {text(got)!r}, alone {text(want)!r}")
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            expect(got["usage"][key] == want["usage"][key], key, got["usage"], want["usage"])
        moved = metrics(DECODE)["vllm:external_prefix_cache_hits_total"] - before
        expect(moved >= tokens, f"decode took {moved} of {tokens} prompt tokens from prefill")
        expect(not got.get("kv_transfer_params"), "kv_transfer_params reached the client")
    return emptied()


def chat_equals_alone():
    for tokens in (20, 300):
        body = conversation(tokens)
        status, got = post(PROXY, CHAT, body)
        expect(status == 200 and text(got) == text(alone(CHAT, body)), status, got)
    return emptied()


def streams_equal_alone():
    for path, body in ((COMPLETIONS, completion(150)), (CHAT, conversation(150))):
        want = alone(path, body)
        call = Call(PROXY, path, dict(body, stream=True, stream_options={"include_usage": True}))
        raw = call.body()
        expect(call.status == 200 and call.headers["content-type"].startswith("text/event-stream"), call.head)
        got, usage, chunks = streamed(raw)
        expect(got == text(want), f"{got!r}, alone {text(want)!r}")
        expect(usage and usage["completion_tokens"] == 16, "usage", usage)
        expect(len(chunks) >= 16, f"{len(chunks)} events: tokens were gathered")
    return emptied()


def events_come_one_by_one():
    call = Call(PROXY, COMPLETIONS, completion(50, stream=True, max_tokens=200))
    moments = []
    for _ in call.pieces():
        moments.append(time.perf_counter())
    call.close()
    spread = moments[-1] - moments[0]
    expect(len(moments) > 50 and spread > 0.2, f"{len(moments)} pieces within {spread:.3f} s")
    return f"{len(moments)} pieces over {spread:.2f} s"


def responses_and_messages():
    for path, body in (
        ("/v1/responses", {"model": MODEL, "input": words(120, fresh()), "max_output_tokens": 8, "temperature": 0}),
        ("/v1/messages", {"model": MODEL, "messages": [{"role": "user", "content": words(120, fresh())}], "max_tokens": 8, "temperature": 0}),
    ):
        status, got = post(PROXY, path, body)
        if status == 501:
            continue
        expect(status == 200, path, status, got)
        pick = (lambda a: a["output"][0]["content"][0]["text"]) if "output" in got else (lambda a: a["content"][0]["text"])
        expect(pick(got) == pick(alone(path, body)), path, pick(got))
        raw = Call(PROXY, path, dict(body, stream=True)).body().decode()
        expect("event: " in raw, path, "lost its event names:", raw[:120])
    return emptied()


def openai_client():
    try:
        import openai
    except ImportError:
        return "not installed: left out"
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{PROXY}/v1", api_key="none", max_retries=0)
    body = conversation(90)
    want = text(alone(CHAT, body))
    got = client.chat.completions.create(**body)
    expect(got.choices[0].message.content == want, got)
    parts = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**body, stream=True) if c.choices]
    expect("".join(parts) == want, parts)
    expect(MODEL in [m.id for m in client.models.list()], "models")
    try:
        client.chat.completions.create(**dict(body, model="nobody"))
        raise AssertionError("an unknown model was served")
    except openai.NotFoundError:
        pass
    return f"openai {openai.__version__}"


def many_at_once():
    bodies = [(COMPLETIONS, completion(20 + 37 * n % 700)) if n % 2 else (CHAT, conversation(20 + 53 * n % 700)) for n in range(24)]
    got = [None] * len(bodies)

    def one(n, path, body):
        try:
            if n % 3 == 0:
                got[n] = streamed(Call(PROXY, path, dict(body, stream=True)).body())[0]
            else:
                got[n] = text(post(PROXY, path, body)[1])
        except Exception as err:
            got[n] = err

    threads = [threading.Thread(target=one, args=(n, *b)) for n, b in enumerate(bodies)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for n, (path, body) in enumerate(bodies):
        want = text(alone(path, body))
        expect(got[n] == want, f"request {n}: {got[n]!r}, alone {want!r}")
    return emptied()


# Fields


def one_token():
    body = completion(100, max_tokens=1)
    status, got = post(PROXY, COMPLETIONS, body)
    expect(status == 200 and got["usage"]["completion_tokens"] == 1 and text(got) == text(alone(COMPLETIONS, body)), status, got)
    return emptied()


def no_limit_given():
    body = conversation(60, max_completion_tokens=None, stop=["a", "e", "i"])
    del body["max_completion_tokens"]
    status, got = post(PROXY, CHAT, body)
    expect(status == 200 and text(got) == text(alone(CHAT, body)), status, got)
    return emptied()


def first_token_ends():
    body = completion(100, logit_bias={"257": 100})
    status, got = post(PROXY, COMPLETIONS, body)
    expect(status == 200 and got["choices"][0]["finish_reason"] == "stop", status, got)
    return emptied()


def min_tokens_kept():
    body = completion(80, min_tokens=10, logit_bias={"257": 30})
    status, got = post(PROXY, COMPLETIONS, body)
    expect(status == 200 and got["usage"]["completion_tokens"] >= 10, status, got)
    return emptied()


def two_choices_and_lists():
    for body, many in ((completion(80, n=2, temperature=0.7), 2), (completion(80, prompt=["one prompt", "another one"]), 2)):
        status, got = post(PROXY, COMPLETIONS, body)
        expect(status == 400 or status == 200 and len(got["choices"]) == many, status, got)
    return emptied()


def forged_params_are_dropped():
    for forged in (
        {"do_remote_prefill": True, "do_remote_decode": False},  # would kill decode's engine core
        {"do_remote_decode": True, "do_remote_prefill": False},  # would pin decode's or prefill's blocks
    ):
        body = completion(70)
        status, got = post(PROXY, COMPLETIONS, dict(body, kv_transfer_params=forged))
        expect(status == 400 or status == 200 and text(got) == text(alone(COMPLETIONS, body)), status, got)
        expect(wire.get(DECODE, "/health") == "", "decode is unhealthy")
    return emptied()


def request_id_comes_back():
    call = Call(PROXY, COMPLETIONS, completion(40), {"X-Request-Id": "drive-7"})
    call.body()
    expect(call.headers.get("x-request-id") == "drive-7", call.head)


def same_request_id_twice():
    threads = [threading.Thread(target=lambda: post(PROXY, COMPLETIONS, completion(400), {"X-Request-Id": "twin"})) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return emptied()


def refusals_are_the_engines():
    for body, status, word in (
        (completion(20, model="nobody"), 404, "model"),
        (completion(20, temperature="warm"), 400, "temperature"),
        (completion(5000), 400, "4096"),
        (completion(20, max_tokens=0), 400, "max_tokens"),
        (completion(20, stream_options={"include_usage": True}), 400, "stream"),
        (b'{"model": "tiny", "prompt": ', 400, ""),
    ):
        got, answer = post(PROXY, COMPLETIONS, body)
        expect(got == status and word in json.dumps(answer), status, word, "but got", got, answer)
    return emptied()


# A client that leaves early


def leaves_while_prefill_runs():
    for at in (0.02, 0.1, 0.2, 0.4):
        call = Call(PROXY, COMPLETIONS, completion(4000, stream=True))
        time.sleep(at)
        call.close()
    return emptied()


def leaves_before_the_first_token():
    for tokens in (100, 300, 600):
        for at in (0.01, 0.03, 0.05, 0.07, 0.1):
            call = Call(PROXY, CHAT, conversation(tokens, stream=True))
            time.sleep(at)
            call.close()
        emptied()
    return emptied()


def leaves_during_a_short_prefill():
    """A prefill of one step cannot be stopped: an aborted one often pins its
    blocks all the same, and then nobody knows them. The proxy has to wait for
    its answer and clean up."""
    rnd = random.Random(7)
    for n in range(1, 61):
        call = Call(PROXY, CHAT, conversation(rnd.choice((60, 300)), stream=True))
        time.sleep(rnd.uniform(0.002, 0.06))
        call.close()
        if n % 10 == 0 and wait_until(lambda: wire.empty(PREFILL) and wire.empty(DECODE), FREE_WITHIN) is None:
            blocks = used_blocks(PREFILL)
            wait_until(lambda: wire.empty(PREFILL), 45, 0.2) # the next test begins with empty engines
            raise AssertionError(f"{blocks} blocks stayed on prefill for the lease, within {n} leavers")
    return emptied()


def leaves_mid_stream():
    for path, body in ((COMPLETIONS, completion(200, stream=True, max_tokens=3000)), (CHAT, conversation(200, stream=True, max_completion_tokens=3000))):
        call = Call(PROXY, path, body)
        pieces = call.pieces()
        for _ in range(5):
            next(pieces)
        call.close()
    return emptied()


def leaves_a_unary_answer():
    for at in (0.05, 0.3, 0.8):
        call = Call(PROXY, COMPLETIONS, completion(200, max_tokens=3000))
        time.sleep(at)
        call.close()
    return emptied()


def many_leave_at_random():
    before = metrics(PREFILL)["vllm:nixl_num_kv_expired_reqs_total"]
    rnd = random.Random(3)
    gone = [0]

    def one(at, tokens):
        call = Call(PROXY, COMPLETIONS, completion(tokens, stream=True, max_tokens=400))
        time.sleep(at)
        call.close()
        gone[0] += 1

    for _ in range(5):
        threads = [threading.Thread(target=one, args=(rnd.uniform(0, 1.2), rnd.choice((60, 300, 900)))) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    # If its connection closes at the moment a prefill ends, its blocks can stay
    # for the lease.
    note = emptied(40)
    expired = metrics(PREFILL)["vllm:nixl_num_kv_expired_reqs_total"] - before
    expect(expired * 20 <= gone[0], f"{expired:.0f} of {gone[0]} leavers left blocks to the lease")
    return f"{gone[0]} left, {expired:.0f} leases ran out; {note}"


# Turns of conversations (REAL_TURNS=1)


TURN = dict(temperature=0, max_tokens=128, ignore_eos=True)  # above kv_recompute_threshold


def turns(path, stream):
    """Five turns. Each but the first pulls the KV of the turn before from decode."""
    names = stream and tuple(map(int, json.loads(wire.get(DECODE, "/version"))["version"].split(".")[:2])) >= (0, 33)
    pulls = not stream or names
    question = words(200, fresh())
    session = f"turns-{SEED}"
    ids, messages = list(question.encode()), [{"role": "user", "content": question}]
    for turn in range(5):
        body = dict(TURN, model=MODEL, session_id=session, **({"messages": messages} if path == CHAT else {"prompt": ids}))
        before = {port: metrics(port)["vllm:external_prefix_cache_hits_total"] for port in (PREFILL, DECODE)}
        kept = metrics(ADMIN).get("pdproxy_turn_kv_total", 0)
        if stream:
            got, _, _ = streamed(Call(PROXY, path, dict(body, stream=True)).body())
        else:
            got = text(post(PROXY, path, body)[1])
        want = alone(path, dict(body, return_token_ids=True))
        expect(got == text(want), f"turn {turn}: {got!r}, alone {text(want)!r}")
        moved = {port: metrics(port)["vllm:external_prefix_cache_hits_total"] - n for port, n in before.items()}
        expect(moved[DECODE] > 0, f"turn {turn}: decode pulled nothing")
        expect((moved[PREFILL] >= 64) == (pulls and turn > 0), f"turn {turn}: prefill pulled {moved[PREFILL]} tokens")
        counted = metrics(ADMIN).get("pdproxy_turn_kv_total", 0) - kept
        expect(counted == (0 if not pulls else 1 if turn == 0 else 2), f"turn {turn}: {counted} kept and pulled")
        more = words(40, fresh())
        ids = ids + want["choices"][0]["token_ids"] + list(more.encode())
        messages = messages + [{"role": "assistant", "content": got}, {"role": "user", "content": more}]
    expect(metrics(ADMIN).get("pdproxy_leases_open") == 0, "leases are open")
    return "" if pulls else "this release names no KV in streams: none was pulled"


def turns_of_completions():
    return turns(COMPLETIONS, False)


def turns_of_chats():
    return turns(CHAT, False)


def turns_of_streamed_completions():
    return turns(COMPLETIONS, True)


def turns_of_streamed_chats():
    return turns(CHAT, True)


def kept_kv_ends():
    return emptied(int(os.environ["REAL_KEEP_FOR"]) + 10)


# Final counters


def proxy_books_are_closed():
    sample = metrics(ADMIN)
    expect(sample.get("pdproxy_leases_open") == 0, "pdproxy_leases_open", sample.get("pdproxy_leases_open"))
    expect(sample.get("pdproxy_exchanges_total", 0) > 50, "pdproxy_exchanges_total", sample.get("pdproxy_exchanges_total"))
    exchanges = json.loads(wire.get(ADMIN, "/v1/exchanges"))
    expect(not exchanges, "still listed:", exchanges)


def engines_are_idle_and_empty():
    note = emptied(1)
    counts = {}
    for name, port in (("prefill", PREFILL), ("decode", DECODE)):
        now = metrics(port)
        for key in ("failed_transfers", "failed_notifications", "notifications_after_expiry", "kv_expired_reqs"):
            metric = f"vllm:nixl_num_{key}_total"
            counts[f"{name} {key}"] = now[metric] - BEFORE[name][metric]
    for key, count in counts.items():
        # A clean-up may reach prefill after its blocks were freed: prefill
        # counts it, and it has no effect.
        expect(count == 0 or "expir" in key, key, count)
    return note + "; " + ", ".join(f"{k} {v:.0f}" for k, v in counts.items() if v)


def decode_dies():
    """Last: decode is killed while it streams, then stays away."""
    call = Call(PROXY, COMPLETIONS, completion(200, stream=True, max_tokens=3500))
    pieces = call.pieces()
    for _ in range(5):
        next(pieces)
    subprocess.run([str(Path(__file__).parent / "engines.sh"), "stop", "decode"], check=True, stdout=subprocess.DEVNULL)
    rest = b""
    try:
        for piece in pieces:
            rest += piece
    except ConnectionError:
        rest += b" (cut)"
    expect(b"error" in rest or b"(cut)" in rest, "the broken stream looks whole:", rest[-200:])
    began = time.perf_counter()
    status, answer = post(PROXY, COMPLETIONS, completion(200), timeout=60)
    expect(status in (502, 503, 504), status, answer)
    return f"then {status} after {time.perf_counter() - began:.2f} s: {json.dumps(answer)[:120]}"


def main():
    BEFORE.update(prefill=metrics(PREFILL), decode=metrics(DECODE))
    conversations = (turns_of_completions, turns_of_chats, turns_of_streamed_completions, turns_of_streamed_chats, kept_kv_ends, engines_are_idle_and_empty)
    for test in conversations if os.environ["REAL_TURNS"] == "1" else (
        completions_equal_alone, chat_equals_alone, streams_equal_alone, events_come_one_by_one,
        responses_and_messages, openai_client, many_at_once,
        one_token, no_limit_given, first_token_ends, min_tokens_kept, two_choices_and_lists,
        forged_params_are_dropped, request_id_comes_back, same_request_id_twice, refusals_are_the_engines,
        leaves_while_prefill_runs, leaves_before_the_first_token, leaves_during_a_short_prefill, leaves_mid_stream,
        leaves_a_unary_answer, many_leave_at_random,
        proxy_books_are_closed, engines_are_idle_and_empty,
    ):
        check(test)
    if "--dying" in sys.argv:
        check(decode_dies)
    print(f"{len(PASSED)} passed, {len(FAILED)} failed")
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
