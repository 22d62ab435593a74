"""Measures what an engine saves if it gets the token ids of a prompt.

    python tokens.py engine NAME=PORT [--sizes ...] [--rounds N]
    python tokens.py pair PROXY=PORT,PROXY=PORT ENGINE,ENGINE [...]

engine sends one engine a streamed chat and a completion, with the text of the prompt and
with its token ids in turn, and the prefill leg of the chat, without and with the question
for the ids. pair sends a streamed chat through several proxies in turn. The prompts are
in the prefix caches, so that the engines compute little. The tables have medians: the wall
time to the first token, of prefill legs to the whole answer, and the processor time of all
threads of the API servers, which depends less on other programs of the machine.

NAME is that of engines.sh, whose file of the process id the script reads.
"""

import argparse
import http.client
import json
import os
import pathlib
import statistics
import time

REAL_DIR = pathlib.Path(os.environ["REAL_DIR"])
ROOT = pathlib.Path(__file__).resolve().parents[2]
SIZES = "128,1024,2048,4096,8192,32768,65536,262144"


def text_of(size):
    text = "".join(p.read_text(errors="replace") for p in sorted(ROOT.glob("docs/**/*.md")))
    return text.encode("ascii", "ignore").decode()[:size]


def processor_time(pid):
    """Seconds that the threads of an API server have run. Its engine core is another process."""
    total = 0
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            pass  # the thread has ended
    return total / 1e9


class Server:
    def __init__(self, port):
        self.conn = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def ask(self, path, body, watched):
        """Returns the answer, or None for a stream; and in ms the time to it or its first token, and the
        processor times of the watched processes."""
        data = json.dumps(body).encode()
        used, began = [processor_time(p) for p in watched], time.perf_counter()
        self.conn.request("POST", path, data, {"Content-Type": "application/json"})
        answer = self.conn.getresponse()
        raw, first = b"", None
        if body["stream"]:
            while line := answer.readline():
                if first is None and (b'"content":"' in line and b'"role"' not in line or b'"text":"' in line):
                    first = time.perf_counter() - began
        else:
            raw = answer.read()
            first = time.perf_counter() - began
        answer.close()
        if answer.status != 200 or first is None:
            raise SystemExit(f"{path}: status {answer.status}: {raw[:300]}")
        return raw, [first * 1e3] + [(processor_time(p) - u) * 1e3 for p, u in zip(watched, used)]


def compare(forms, rounds, watched):
    """Sends the forms in turn and returns the medians of each."""
    for server, path, body in forms.values():
        server.ask(path, body, watched)  # fills the caches
    rows = {name: [] for name in forms}
    for _ in range(rounds):
        for name, (server, path, body) in forms.items():
            rows[name].append(server.ask(path, body, watched)[1])
    return {name: [statistics.median(column) for column in zip(*of)] for name, of in rows.items()}


def show(title, medians, columns):
    print(f"\n{title}\n\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}", flush=True)
    for name, values in medians.items():
        print(f"| {name} | {' | '.join(f'{v:.1f}' for v in values)} |", flush=True)


def chat_of(text):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0, "stream": True}


def engine(server, pid, sizes, rounds):
    for size in sizes:
        chat, path = chat_of(text_of(size)), "/v1/chat/completions"
        asking = dict(chat, stream=False, return_token_ids=True)
        ids = json.loads(server.ask(path, asking, [pid])[0])["prompt_token_ids"]
        completion = {k: v for k, v in chat.items() if k != "messages"}
        medians = compare({
            "chat, text": (server, path, chat),
            "chat, ids": (server, path, dict(chat, kv_transfer_params={"prompt_token_ids": ids})),
            "completion, text": (server, "/v1/completions", dict(completion, prompt=text_of(size))),
            "completion, ids": (server, "/v1/completions", dict(completion, prompt=ids)),
            "prefill leg": (server, path, dict(chat, stream=False)),
            "prefill leg that asks for the ids": (server, path, asking),
        }, rounds, [pid])
        show(f"{size} bytes, {len(ids)} tokens", medians, ["first token, ms", "API server, ms of processor time"])


def pair(proxies, engines, sizes, rounds):
    for size in sizes:
        chat = chat_of(text_of(size))
        forms = {name: (server, "/v1/chat/completions", chat) for name, server in proxies.items()}
        medians = compare(forms, rounds, list(engines.values()))
        show(f"{size} bytes", medians, ["first token, ms"] + [f"API server of {name}, ms of processor time" for name in engines])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["engine", "pair"])
    parser.add_argument("servers", help="NAME=PORT,...")
    parser.add_argument("engines", nargs="?", default="", help="NAME,... of engines.sh, behind the proxies")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    ports = dict(s.split("=") for s in args.servers.split(","))
    pid_of = lambda name: int((REAL_DIR / "run" / f"{name}.pid").read_text())
    sizes = [int(s) for s in args.sizes.split(",")]
    servers = {name: Server(int(port)) for name, port in ports.items()}
    if args.what == "engine":
        for name, server in servers.items():
            engine(server, pid_of(name), sizes, args.rounds)
        return
    pair(servers, {name: pid_of(name) for name in args.engines.split(",")}, sizes, args.rounds)


if __name__ == "__main__":
    main()
