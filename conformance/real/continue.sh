#!/usr/bin/env bash
# Streams whose engines are killed, stopped and drained: continue.py compares
# each text with the text of an engine that nobody disturbs.
#
#   continue.sh plain [flags of continue.py]   three engines without KV transfer
#   continue.sh nixl  [flags of continue.py]   one prefill and three decode engines (NIXL)
#
# PDPROXY_BIN=path         use that binary instead of building one
# REAL_KEEP=1              leave the engines running for the next run
# REAL_REASONING=PARSER    the engines' --reasoning-parser (default deepseek_r1); "" for none
set -euo pipefail
REAL_REASONING=${REAL_REASONING-deepseek_r1}
# With logit_bias in the log probabilities, continue.py sees how near two tokens are.
export REAL_FLAGS="--logprobs-mode processed_logprobs --enable-auto-tool-choice --tool-call-parser hermes${REAL_REASONING:+ --reasoning-parser $REAL_REASONING}"
export REAL_REASONING
. "$(dirname "$0")/env.sh"
root=$(cd "$REAL_HERE/../.." && pwd)
proxy_pid=

what=${1:-plain}
shift || true
case $what in
plain) prefill=() engines=(plain-1 plain-2 plain-3) port=$REAL_PLAIN_PORT role=both connector=none ;;
nixl) prefill=(prefill) engines=(decode decode-2 decode-3) port=$REAL_DECODE_PORT role=decode connector=vllm-nixl ;;
*) echo "usage: continue.sh plain|nixl [flags]" >&2; exit 2 ;;
esac

finish() {
	local code=$?
	if [ -n "$proxy_pid" ] && kill -0 "$proxy_pid" 2>/dev/null; then
		kill -TERM "$proxy_pid" && wait "$proxy_pid" || true
	fi
	[ "${REAL_KEEP:-}" = 1 ] || "$REAL_HERE/engines.sh" stop "${prefill[@]}" "${engines[@]}" alone
	exit "$code"
}
trap finish EXIT

"$REAL_HERE/install.sh"
mkdir -p "$REAL_DIR/run" "$REAL_DIR/log"
bin=${PDPROXY_BIN:-$REAL_DIR/pdproxy}
if [ -z "${PDPROXY_BIN:-}" ]; then
	(cd "$root" && nice -n "$REAL_NICE" go build -o "$bin" ./cmd/pdproxy)
fi
"$REAL_HERE/engines.sh" start alone "${prefill[@]}" "${engines[@]}"

config=$REAL_DIR/run/continue.toml
access=$REAL_DIR/log/access.log
rm -f "$access"
{
	# A run breaks far more streams than the default budget of retries allows.
	cat <<-END
	[server]
	listen = "127.0.0.1:$REAL_PROXY_PORT"
	drain_timeout = "10s"
	access_log = "$access"

	[admin]
	listen = "127.0.0.1:$REAL_ADMIN_PORT"

	[timeouts]
	prefill = "60s"
	first_byte = "60s"
	stream_idle = "60s"

	[retry]
	budget = 1.0
	move_after = "0s"
	END
	for e in "${prefill[@]}"; do
		printf '\n[[engine]]\nname = "%s"\nurl = "http://127.0.0.1:%s"\nrole = "prefill"\nconnector = "%s"\n' "$e" "$REAL_PREFILL_PORT" "$connector"
	done
	for e in "${engines[@]}"; do
		printf '\n[[engine]]\nname = "%s"\nurl = "http://127.0.0.1:%s"\nrole = "%s"\nconnector = "%s"\n' "$e" "$port" "$role" "$connector"
		port=$((port + 1))
	done
} >"$config"
"$bin" check "$config"
"$bin" run "$config" >"$REAL_DIR/log/pdproxy.log" 2>&1 &
proxy_pid=$!
for _ in $(seq 1 100); do
	curl -sf -o /dev/null --max-time 1 "http://127.0.0.1:$REAL_ADMIN_PORT/readyz" && break
	kill -0 "$proxy_pid" 2>/dev/null || { echo "continue.sh: pdproxy ended; see $REAL_DIR/log/pdproxy.log" >&2; tail -20 "$REAL_DIR/log/pdproxy.log" >&2; exit 1; }
	sleep 0.2
done
REAL_ADMIN_TOKEN=$("$bin" admin-token --admin "127.0.0.1:$REAL_ADMIN_PORT")
export REAL_ADMIN_TOKEN

code=0
nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/continue.py" --engines "$(IFS=,; echo "${engines[*]}")" ${prefill:+--prefill "${prefill[0]}"} "$@" || code=1

kill -TERM "$proxy_pid"
left=0
wait "$proxy_pid" || left=$?
proxy_pid=
if [ "$left" != 0 ]; then
	echo "continue.sh: pdproxy exited with $left after SIGTERM" >&2
	code=1
fi
exit "$code"
