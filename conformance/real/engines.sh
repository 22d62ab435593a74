#!/usr/bin/env bash
# Starts and stops real vLLM engines on the CPU.
#
#   engines.sh start [NAME...]    default: prefill decode alone
#   engines.sh stop  [NAME...]
#   engines.sh status [NAME...]
#
# prefill and decode are a NIXL pair; decode-2 and so on are further decode
# engines. alone is one plain engine of the same model; its texts are the
# reference. plain-1 and so on are engines like it. Engines start one after the
# other (20 s each on two cores), and start returns when the last one is healthy.
set -euo pipefail
. "$(dirname "$0")/env.sh"
mkdir -p "$REAL_DIR/run" "$REAL_DIR/log"

# number_of prints the number in an engine's name; 1 for decode.
number_of() {
	case $1 in
	*-*) echo "${1#*-}" ;;
	*) echo 1 ;;
	esac
}

port_of() {
	case $1 in
	prefill) echo "$REAL_PREFILL_PORT" ;;
	decode | decode-[2-9]) echo $((REAL_DECODE_PORT + $(number_of "$1") - 1)) ;;
	alone) echo "$REAL_ALONE_PORT" ;;
	plain-[1-9]) echo $((REAL_PLAIN_PORT + $(number_of "$1") - 1)) ;;
	*) echo "engines.sh: unknown engine $1" >&2; exit 2 ;;
	esac
}

# pair_flags prints, one a line, the flags that make an engine one half of a
# NIXL pair. The publisher binds only an endpoint with a star in it, and
# connects to any other.
pair_flags() {
	local role id events turns=
	[ "$REAL_TURNS" != 1 ] || turns=",\"bidirectional_kv_xfer\":true,\"decoder_kv_blocks_ttl\":$REAL_KEEP_FOR"
	case $1 in
	prefill) role=kv_producer id=p0 events=$REAL_EVENTS ;;
	decode*) role=kv_consumer id=d$(($(number_of "$1") - 1)) events=$((REAL_EVENTS + 10 * $(number_of "$1"))) ;;
	*) return ;;
	esac
	printf '%s\n' --kv-transfer-config "{\"kv_connector\":\"$REAL_CONNECTOR\",\"kv_role\":\"$role\",\"kv_buffer_device\":\"cpu\",\"engine_id\":\"$id\",\"kv_load_failure_policy\":\"fail\",\"kv_connector_extra_config\":{\"kv_lease_duration\":$REAL_LEASE$turns}}"
	printf '%s\n' --kv-events-config "{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:$events\",\"replay_endpoint\":\"tcp://127.0.0.1:$((events + 1))\",\"topic\":\"kv\"}"
}

launch() {
	local name=$1 side=$REAL_SIDE_CHANNEL flags more
	case $name in decode*) side=$((side + $(number_of "$name"))) ;; esac
	read -ra more <<<"$REAL_FLAGS"
	mapfile -t flags < <(pair_flags "$name")
	cd "$REAL_DIR" # so that no path of this machine appears in an answer
	VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1 \
		PYTHONHASHSEED=0 PYTHONPATH=$REAL_HERE/engine_env \
		HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 \
		VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$side UCX_TLS=tcp,sm \
		setsid nice -n "$REAL_NICE" "$REAL_PYTHON" -m vllm.entrypoints.openai.api_server \
		--model "./$REAL_MODEL" --served-model-name tiny --host 127.0.0.1 --port "$(port_of "$name")" \
		--dtype float32 --enforce-eager --seed 1 --max-model-len 4096 --max-num-seqs 8 \
		--max-num-batched-tokens 512 --block-size "$REAL_BLOCK_SIZE" --num-gpu-blocks-override "$REAL_BLOCKS" \
		--enable-request-id-headers --enable-prompt-tokens-details --enable-scale-out "${flags[@]}" "${more[@]}" \
		>"$REAL_DIR/log/$name.log" 2>&1 </dev/null &
	echo $! >"$REAL_DIR/run/$name.pid"
}

healthy() { curl -sf -o /dev/null --max-time 2 "http://127.0.0.1:$(port_of "$1")/health"; }

running() {
	local pid
	pid=$(cat "$REAL_DIR/run/$1.pid" 2>/dev/null) && kill -0 "$pid" 2>/dev/null
}

start() {
	if running "$1"; then
		echo "$1: already running"
	else
		if healthy "$1"; then
			echo "$1: port $(port_of "$1") is taken by something else" >&2
			return 1
		fi
		launch "$1"
	fi
	local began=$SECONDS
	until healthy "$1"; do
		if ! running "$1" || [ $((SECONDS - began)) -gt 240 ]; then
			echo "$1: did not start; the end of $REAL_DIR/log/$1.log:" >&2
			grep -aE 'Error|Traceback' "$REAL_DIR/log/$1.log" | tail -5 >&2
			tail -20 "$REAL_DIR/log/$1.log" >&2
			return 1
		fi
		sleep 0.5
	done
	echo "$1: healthy on port $(port_of "$1") after $((SECONDS - began)) s"
}

# stop ends only the engine's own process group, which start made.
stop() {
	local pid
	running "$1" || { rm -f "$REAL_DIR/run/$1.pid"; return 0; }
	pid=$(cat "$REAL_DIR/run/$1.pid")
	kill -TERM -- "-$pid" 2>/dev/null || true
	for _ in $(seq 1 40); do
		kill -0 -- "-$pid" 2>/dev/null || break
		sleep 0.25
	done
	kill -KILL -- "-$pid" 2>/dev/null || true
	rm -f "$REAL_DIR/run/$1.pid"
	echo "$1: stopped"
}

what=${1:-status}
shift || true
engines=("$@")
[ ${#engines[@]} -gt 0 ] || engines=(prefill decode alone)
case $what in
start) for e in "${engines[@]}"; do start "$e"; done ;;
stop) for e in "${engines[@]}"; do stop "$e"; done ;;
status) for e in "${engines[@]}"; do running "$e" && healthy "$e" && echo "$e: healthy" || echo "$e: down"; done ;;
*) echo "usage: engines.sh start|stop|status [NAME...]" >&2; exit 2 ;;
esac
