"""Streams whose engines are killed, stopped or drained, compared with the same
streams of an engine that nobody disturbs. continue.sh starts all programs.

    python continue.py --engines plain-1,plain-2,plain-3
    python continue.py --engines decode,decode-2,decode-3 --prefill prefill
        --streams 200      how many
        --kinds a,b        only these kinds of requests (see KINDS)
        --numerics         first: does one engine write the same text when it computes the begin of
                           an answer as a prompt?

Prints the streams that went wrong, then counts. It exits with 1 if a text or
another part of an answer differs, a stream ends with a reason that its request
does not explain, or anything stays on an engine or in the proxy.
"""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import pickle
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import wire
from wire import ADMIN, ALONE, MODEL, PROXY, Call, metrics, post, words

HERE = pathlib.Path(__file__).parent
DIR = pathlib.Path(os.environ["REAL_DIR"])
COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
END_OF_TEXT, END_OF_MESSAGE, END_OF_THINKING = "257", "261", "263"
REASONING = os.environ.get("REAL_REASONING", "")
TOOLS = [{"type": "function", "function": {
    "name": "weather", "description": "the weather of a town",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}}]

# The logits of the model's text are 3.2 on average, and those of a special
# token 0: with this bias, one is written after a hundred tokens or so.
RARE = 2.15


def completion(n, **more):
    return COMPLETIONS, dict({"model": MODEL, "prompt": words(40 + 37 * n % 500, 1000 + n), "max_tokens": 150 + 29 * n % 150,
                              "temperature": 0, "seed": n, "stream": True}, **more)


def chat(n, thinking=False, **more):
    body = dict({"model": MODEL, "messages": [{"role": "system", "content": "You are brief."}, {"role": "user", "content": words(30 + 41 * n % 500, 3000 + n)}],
                 "max_completion_tokens": 150 + 31 * n % 150, "temperature": 0, "seed": n, "stream": True}, **more)
    if REASONING:
        body["chat_template_kwargs"] = {"thinking": thinking, "enable_thinking": thinking}
    if thinking:
        body["logit_bias"] = {END_OF_THINKING: RARE}
    return CHAT, body


SAMPLED = {"temperature": 1, "seed": None, "return_token_ids": True, "allowed_token_ids": list(range(32, 127))}
USAGE = {"stream_options": {"include_usage": True}}
KINDS = {
    "completion": lambda n: completion(n),
    "completion usage": lambda n: completion(n, **USAGE),
    "completion each usage": lambda n: completion(n, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    "completion stop": lambda n: completion(n, stop=[], **USAGE),
    "completion stop kept": lambda n: completion(n, stop=[], include_stop_str_in_output=True),
    "completion logprobs": lambda n: completion(n, logprobs=2, **USAGE),
    "completion stop logprobs": lambda n: completion(n, logprobs=0, stop=[], **USAGE),
    "completion min_tokens": lambda n: completion(n, min_tokens=100, logit_bias={END_OF_TEXT: RARE}, **USAGE),
    "completion special": lambda n: completion(n, logit_bias={END_OF_MESSAGE: RARE}, **USAGE),
    "completion special shown": lambda n: completion(n, logit_bias={END_OF_MESSAGE: RARE}, skip_special_tokens=False, **USAGE),
    "completion repetition": lambda n: completion(n, repetition_penalty=1.3, **USAGE),
    "completion presence": lambda n: completion(n, presence_penalty=0.5, **USAGE),
    "completion truncated": lambda n: completion(n, truncate_prompt_tokens=30, **USAGE),
    "completion sampled": lambda n: completion(n, **SAMPLED, **USAGE),
    "completion ids": lambda n: completion(n, return_token_ids=True, **USAGE),
    "chat": lambda n: chat(n),
    "chat usage": lambda n: chat(n, **USAGE),
    "chat stop": lambda n: chat(n, stop=[], **USAGE),
    "chat logprobs": lambda n: chat(n, logprobs=True, top_logprobs=2, **USAGE),
    "chat min_tokens": lambda n: chat(n, min_tokens=100, logit_bias={END_OF_TEXT: RARE}, **USAGE),
    "chat sampled": lambda n: chat(n, **SAMPLED, **USAGE),
    "chat truncated": lambda n: chat(n, truncate_prompt_tokens=40, **USAGE),
    "chat tools": lambda n: chat(n, tools=TOOLS, **USAGE),
    "chat tools auto": lambda n: chat(n, tools=TOOLS, tool_choice="auto", stop=[]),
    "chat thinking": lambda n: chat(n, thinking=True, **USAGE),
    "chat thinking tools": lambda n: chat(n, thinking=True, tools=TOOLS, **USAGE),
    "chat thinking logprobs": lambda n: chat(n, thinking=True, logprobs=True, top_logprobs=0),
    "generate": lambda n: (GENERATE, {"model": MODEL, "token_ids": list(words(60 + 17 * n % 400, 5000 + n).encode()), "stream": True,
                                      "sampling_params": {"max_tokens": 150 + 23 * n % 150, "temperature": 0}}),
}


class Stream:
    """One streamed answer, event by event."""

    def __init__(self, port, path, body, request_id=None):
        self.text = self.reasoning = ""
        self.ids, self.prompt_ids, self.tokens, self.chances, self.offsets = [], None, [], [], []
        self.heads, self.roles, self.finish, self.usage, self.usages, self.done = set(), 0, None, None, 0, False
        self.error, self.status, self.wrong, self.moments = None, None, [], []
        call = Call(port, path, body, {"X-Request-Id": request_id} if request_id else None, timeout=180)
        buf = b""
        try:
            for piece in call.pieces():
                buf += piece
                *whole, buf = buf.split(b"\n\n")
                for event in whole:
                    if event.startswith(b"data: "):
                        self.take(event[6:].decode())
        except OSError as err:
            self.wrong.append(f"connection: {err}")
        self.status = call.status
        call.close()
        if self.status != 200:
            self.wrong.append(f"status {self.status}: {buf[:300]!r}")
        elif buf.strip() or not self.done:
            self.wrong.append(f"ends with {buf[-100:]!r}, [DONE]: {self.done}")

    def take(self, data):
        if self.done:
            self.wrong.append(f"behind [DONE]: {data[:100]}")
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        self.heads.add((event.get("id") or event.get("request_id"), event.get("created"), event.get("model"), event.get("object")))
        self.prompt_ids = self.prompt_ids or event.get("prompt_token_ids")
        if event.get("usage"):
            self.usage, self.usages = event["usage"], self.usages + 1
        for choice in event["choices"]:
            self.moments.append(time.monotonic())
            if self.finish is not None:
                self.wrong.append(f"behind the finish reason: {data[:200]}")
            delta = choice.get("delta", {})
            self.roles += "role" in delta
            self.text += choice.get("text") or delta.get("content") or ""
            self.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
            if delta.get("tool_calls"):
                self.wrong.append(f"a tool call: {data[:200]}")
            self.prompt_ids = self.prompt_ids or choice.get("prompt_token_ids")
            self.ids += choice.get("token_ids") or []
            self.finish = choice.get("finish_reason")
            self.take_logprobs(choice.get("logprobs") or {})

    def take_logprobs(self, logprobs):
        for one in logprobs.get("content") or []:
            self.tokens.append((one["token"], one.get("bytes")))
            self.chances.append(one["logprob"])
        self.tokens += logprobs.get("tokens") or []
        self.chances += logprobs.get("token_logprobs") or []
        self.offsets += logprobs.get("text_offset") or []

    def gap(self):
        """The longest time between two events behind the first one, in seconds."""
        return max((b - a for a, b in zip(self.moments[1:], self.moments[2:])), default=0)


# The undisturbed texts


def asking(body):
    return body if "token_ids" in body else dict(body, return_token_ids=True)


def undisturbed(path, body):
    """The stream of the engine alone; with stop = [] also fills in a stop string that ends it. A file
    keeps it for the next run."""
    if body.get("stop") == []:
        text = alone(path, {k: v for k, v in body.items() if k != "stop"}).text
        at = len(text) * 3 // 5
        body["stop"] = [text[at:at + 3], "\n\n\n never"]
    return alone(path, body)


def alone(path, body):
    key = json.dumps([path, body, os.environ["REAL_MODEL"], os.environ["REAL_FLAGS"]])
    file = DIR / "alone" / hashlib.sha256(key.encode()).hexdigest()
    if file.exists():
        stream = object.__new__(Stream)
        vars(stream).update(pickle.loads(file.read_bytes()))
        return stream
    stream = Stream(ALONE, path, asking(body))
    if not stream.wrong and not stream.error:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(pickle.dumps(vars(stream)))
    return stream


def in_parallel(jobs, work, workers=8):
    """Runs work on each job, and returns the results in order."""
    todo, out = queue.SimpleQueue(), [None] * len(jobs)
    for n, job in enumerate(jobs):
        todo.put((n, job))

    def run():
        while True:
            try:
                n, job = todo.get_nowait()
            except queue.Empty:
                return
            out[n] = work(n, job)

    threads = [threading.Thread(target=run) for _ in range(workers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return out


def weighing(body):
    """The members of a request that change which token is the most likely one."""
    return {k: body[k] for k in ("logit_bias", "repetition_penalty") if k in body}


def margin_of(prompt, ids, body):
    """The difference of the log probabilities of the two most likely tokens behind prompt and ids, as
    the engine alone computes them; None if it refuses."""
    status, answer = post(ALONE, COMPLETIONS, dict(weighing(body), model=MODEL, prompt=prompt + ids, max_tokens=1, temperature=0, logprobs=2))
    if status != 200:
        return None
    top = sorted(answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)
    return top[0] - top[1]


def numerics(jobs, wants):
    """Continues each undisturbed answer from a prefix of its own tokens, on the same engine."""
    def again(n, want):
        path, body = jobs[n]
        if path == GENERATE or len(want.ids) < 20 or "presence_penalty" in body or body["temperature"]:
            return None
        cut = random.Random(n).randrange(5, len(want.ids) - 5)
        rest = want.ids[cut:]
        ends = rest[-1:] == [int(END_OF_TEXT)]
        got = Stream(ALONE, COMPLETIONS, dict(weighing(body), model=MODEL, prompt=want.prompt_ids + want.ids[:cut], max_tokens=len(rest),
                                              min_tokens=len(rest) - ends, temperature=0, stream=True, return_token_ids=True))
        at = next((i for i, (a, b) in enumerate(zip(got.ids, rest)) if a != b), None)
        if at is None and len(got.ids) == len(rest):
            return True
        return f"stream {n}, cut {cut}: differs {at} tokens later, margin {margin_of(want.prompt_ids, want.ids[:cut + (at or 0)], body)}"

    results = [r for r in in_parallel(wants, again) if r is not None]
    other = [r for r in results if r is not True]
    print(f"numerics: {len(results)} answers continued from a prefix of their tokens on the engine alone, {len(other)} differ", flush=True)
    for r in other:
        print("   ", r)


# Trouble for the engines


def admin(method, path):
    request = urllib.request.Request(f"http://127.0.0.1:{ADMIN}{path}", method=method, headers={"Authorization": "Bearer " + os.environ["REAL_ADMIN_TOKEN"]})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as err:
        raise RuntimeError(f"{method} {path}: {err.code} {err.read()[:200]!r}") from None


def states():
    return {e["name"]: e["state"] for e in admin("GET", "/v1/engines")}


class Trouble(threading.Thread):
    """Disturbs one engine at a time, until told to end."""

    def __init__(self, engines, seed, kinds):
        super().__init__()
        self.engines, self.kinds, self.random = engines, kinds, random.Random(seed)
        self.over, self.counts, self.failed = threading.Event(), collections.Counter(), None
        self.calm = threading.Event()  # new streams begin only then, so that each kill finds some
        self.calm.set()

    def ready(self, limit=300):
        end = time.monotonic() + limit
        while any(states()[e] != "ready" for e in self.engines):
            if time.monotonic() > end:
                raise RuntimeError(f"engines are not ready: {states()}")
            time.sleep(0.3)

    def run(self):
        try:
            turn = 0
            while not self.over.wait(self.random.uniform(0.7, 3)):
                victim, kind = self.random.choice(self.engines), self.kinds[turn % len(self.kinds)]
                turn += 1
                self.counts[kind] += 1
                print(f"  {time.strftime('%H:%M:%S')} {kind} {victim}", flush=True)
                self.calm.clear()
                getattr(self, kind)(victim)
                self.ready()
                self.calm.set()
        except Exception as err:
            self.failed = err
            self.calm.set()
            print("  trouble ended:", err, flush=True)

    def group(self, name):
        return int((DIR / "run" / f"{name}.pid").read_text())

    def start_again(self, name):
        for _ in range(3):  # another program may have taken one of its ports meanwhile
            out = subprocess.run([HERE / "engines.sh", "start", name], capture_output=True, text=True)
            if out.returncode == 0:
                return
            subprocess.run([HERE / "engines.sh", "stop", name], capture_output=True, check=True)
        raise RuntimeError(f"{name} did not start again: {out.stderr[-500:]}")

    def gone(self, group):
        """Waits until all processes of a group have ended: each may have a port."""
        def ended():
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return True
            return False

        wire.wait_until(ended, 30)

    def kill(self, name):
        """The whole engine, as when its container ends."""
        group = self.group(name)
        os.killpg(group, signal.SIGKILL)
        self.gone(group)
        time.sleep(self.random.uniform(0, 1))
        self.start_again(name)

    def core(self, name):
        """Only the process that computes: the server reports the error, and ends."""
        group = self.group(name)
        children = pathlib.Path(f"/proc/{group}/task/{group}/children").read_text().split()
        for pid in children:
            if b"EngineCore" in pathlib.Path(f"/proc/{pid}/comm").read_bytes() + pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), signal.SIGKILL)
                break
        else:
            raise RuntimeError(f"{name} has no process EngineCore among {children}")
        wire.wait_until(lambda: not os.path.exists(f"/proc/{group}"), 30)
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.gone(group)
        self.start_again(name)

    def stop(self, name):
        """Suspended for some time: silent, but its connections stay."""
        group = self.group(name)
        os.killpg(group, signal.SIGSTOP)
        time.sleep(self.random.uniform(3, 12))
        os.killpg(group, signal.SIGCONT)

    def drain(self, name):
        admin("POST", f"/v1/engines/{name}/drain?move=true")
        time.sleep(4)
        admin("DELETE", f"/v1/engines/{name}/drain")

    def roll(self, _):
        """Each engine drains in turn, as in a rolling update: streams move more than once."""
        for name in self.engines:
            admin("POST", f"/v1/engines/{name}/drain?move=true")
            time.sleep(2)
            admin("DELETE", f"/v1/engines/{name}/drain")
            self.ready()


# The comparison


def differences(kind, body, got, want):
    """What of an answer is not as in the undisturbed one."""
    out = list(got.wrong)
    if "allowed_token_ids" in body: # a sampled text is another one, but must be that of its tokens
        if got.text != bytes(got.ids).decode() or len(got.ids) != len(want.ids):
            out.append(f"{got.text!r} of {len(got.ids)} tokens {got.ids}, alone {len(want.ids)} tokens")
        got.text, got.ids = want.text, want.ids
    for what in ("text", "reasoning", "tokens", "offsets", "finish", "roles", "usages"):
        a, b = getattr(got, what), getattr(want, what)
        if what == "usages" and "continuous_usage_stats" in body.get("stream_options", {}):
            a, b = a > 0, b > 0  # the events may hold other numbers of tokens
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b))) if isinstance(a, (str, list)) else ""
            out.append(f"{what} at {at}: {a[at:at + 20]!r}, alone {b[at:at + 20]!r}" if at != "" else f"{what}: {a}, alone {b}")
    if body.get("return_token_ids") or "token_ids" in body:
        if got.ids != want.ids:
            out.append(f"ids: {len(got.ids)}, alone {len(want.ids)}")
    elif got.ids or got.prompt_ids:
        out.append("the client got ids that it did not ask for")
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        a, b = (got.usage or {}).get(key), (want.usage or {}).get(key)
        if a != b:
            out.append(f"{key}: {a}, alone {b}")
    if any(abs(a - b) > 1e-3 for a, b in zip(got.chances, want.chances)):
        out.append("log probabilities differ")
    if len(got.heads) != 1:
        out.append(f"ids of the answer: {got.heads}")
    return out


def near_tie(body, got, want):
    """Whether two texts part at a token that the engine alone nearly gave another one: (margin, at)."""
    if not want.prompt_ids or got.text == want.text and got.reasoning == want.reasoning:
        return None
    whole = [(got.reasoning, want.reasoning), (got.text, want.text)]
    same = 0
    for a, b in whole:
        n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        same += n
        if n < max(len(a), len(b)):
            break
    for at in range(max(0, same - 1), min(same + 4, len(want.ids))):
        margin = margin_of(want.prompt_ids, want.ids[:at], body)
        if margin is not None and margin < 1e-3:
            return margin, at
    return None


def quantile(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def port_of(name):
    if name == "prefill":
        return wire.PREFILL
    base = int(os.environ["REAL_PLAIN_PORT"]) if name.startswith("plain") else wire.DECODE
    return base + int(name.partition("-")[2] or 1) - 1


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--engines", required=True)
    p.add_argument("--prefill")
    p.add_argument("--streams", type=int, default=200)
    p.add_argument("--at-once", type=int, default=8)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--kinds")
    p.add_argument("--trouble", default="kill,roll,stop,core,drain,kill,stop")
    p.add_argument("--numerics", action="store_true")
    a = p.parse_args()
    engines = a.engines.split(",")
    kinds = a.kinds.split(",") if a.kinds else [k for k in KINDS if REASONING or "thinking" not in k]
    names = [kinds[n % len(kinds)] for n in range(a.streams)]
    jobs = [KINDS[kind](n) for n, kind in enumerate(names)]

    began = time.monotonic()
    wants = in_parallel(jobs, lambda n, job: undisturbed(*job))
    for n, want in enumerate(wants):
        if want.wrong or want.error:
            raise SystemExit(f"stream {n} ({names[n]}) of the engine alone: {want.wrong} {want.error}")
    lengths = [len(w.ids) for w in wants]
    print(f"alone: {len(wants)} streams of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, in {time.monotonic() - began:.0f} s; "
          f"ends: {dict(collections.Counter(w.finish for w in wants))}, with content behind reasoning: {sum(1 for w in wants if w.reasoning and w.text)}", flush=True)
    if a.numerics:
        numerics(jobs, wants)

    before = metrics(ADMIN)
    expired = metrics(wire.PREFILL)["vllm:nixl_num_kv_expired_reqs_total"] if a.prefill else 0
    run = f"c{int(time.time()) % 100000}"
    trouble = Trouble(engines, a.seed, a.trouble.split(","))
    trouble.ready()
    began = time.monotonic()
    trouble.start()

    def proxied(n, job):
        trouble.calm.wait()
        return Stream(PROXY, *job, f"{run}-{n}")

    gots = in_parallel(jobs, proxied, a.at_once)
    took = time.monotonic() - began
    trouble.over.set()
    trouble.join()

    bad, counts, ties, gaps, tokens = 0, collections.Counter(), 0, [], 0
    by_kind = collections.defaultdict(collections.Counter)
    seams, pauses, broken = [], collections.defaultdict(list), []
    for n, (got, want) in enumerate(zip(gots, wants)):
        kind, (path, body) = names[n], jobs[n]
        try:
            explained = admin("GET", f"/v1/explain/{run}-{n}")
        except RuntimeError:
            explained = {}
        places = explained.get("continuations") or []
        seams += places
        if places:
            broken.append(explained)
        moved = [c for c in places if c["result"] == "continued"]
        for c, error in zip(moved, [leg["error"] for leg in explained.get("legs", []) if leg.get("error")]):
            pauses[error].append(c["gap_ms"] / 1000)
        tokens += len(want.ids)
        if got.error is not None:
            # An error event of the engine itself reaches the client as it is.
            reason = got.error.get("not_continued") or places and places[-1]["result"]
            end = f"not continued: {reason or 'no reason'}"
            fair = reason == "reasoning" and "thinking" in kind and not got.text or reason == "sampling" and "presence" in kind
            if not want.text.startswith(got.text) or not want.reasoning.startswith(got.reasoning):
                fair, end = False, end + ", and the text before differs"
            if not fair:
                bad += 1
                print(f"WRONG stream {n} ({kind}): {end}; {json.dumps(got.error)[:300]}; {json.dumps(places)[:400]}")
        elif diffs := differences(kind, body, got, want):
            tie = near_tie(body, got, want)
            end = "differs at a near tie" if tie else "differs"
            ties += tie is not None
            bad += tie is None
            print(f"{'TIE' if tie else 'WRONG'} stream {n} ({kind}), {len(moved)} times continued: {'; '.join(diffs)[:600]}; margin {tie}; {json.dumps(places)[:400]}")
        else:
            end = "continued" if len(moved) else "completed by the proxy" if places else "undisturbed"
            if moved:
                gaps.append(got.gap())
        counts[end] += 1
        by_kind[kind][end] += 1

    (DIR / "log" / "broken.json").write_text(json.dumps(broken, indent=1))
    print(f"proxy: {len(gots)} streams, {tokens} tokens, in {took:.0f} s; trouble: {dict(trouble.counts)}")
    for kind in kinds:
        print(f"  {kind:26} {dict(by_kind[kind])}")
    print(f"streams: {dict(counts)}")
    often = max((len(e["continuations"]) for e in broken), default=0)
    print(f"continuations: {dict(collections.Counter(c['result'] for c in seams))}, at most {often} of one stream, seam behind {sorted(c['tokens'] for c in seams)[:1]} to {sorted(c['tokens'] for c in seams)[-1:]} tokens")
    for error, times in sorted(pauses.items()):
        print(f"  {error:12} {len(times)} pauses, p50 {quantile(times, 0.5):.2f} s, longest {max(times):.2f} s")
    print(f"gap of a continued stream at the client: p50 {quantile(gaps, 0.5):.2f} s, p99 {quantile(gaps, 0.99):.2f} s, of {len(gaps)}")

    living = [e for e, state in states().items() if state == "ready"]
    free = wire.wait_until(lambda: all(wire.empty(port_of(e)) for e in living), 45, 0.1)
    if free is None:
        bad += 1
        print("WRONG blocks are pinned:", {e: (wire.usage(port_of(e)), wire.idle(port_of(e))) for e in living})
    after = metrics(ADMIN)
    if after.get("pdproxy_leases_open") != 0 or admin("GET", "/v1/exchanges"):
        bad += 1
        print("WRONG leases open:", after.get("pdproxy_leases_open"), admin("GET", "/v1/exchanges"))
    note = f", {metrics(wire.PREFILL)['vllm:nixl_num_kv_expired_reqs_total'] - expired:.0f} leases of prefill ran out" if a.prefill else ""
    print(f"at the end: engines empty after {free} s, leases open {after.get('pdproxy_leases_open'):.0f}{note}")
    if trouble.failed:
        bad += 1
    print("FAILED" if bad else "passed", f"({ties} near ties)")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
