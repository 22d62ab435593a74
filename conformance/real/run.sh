#!/usr/bin/env bash
# The whole check against real engines: builds pdproxy, starts the engines and
# the proxy in front of the pair, runs the tests, and stops everything that it
# started.
#
#   run.sh            about 4 minutes once install.sh has run (2 minutes, 6 GB)
#
# PDPROXY_BIN=path  use that binary instead of building one
# REAL_TURNS=1      decode keeps the KV of its answers, and only the turns of conversations are tested
# REAL_KV_EVENTS=1  the addresses of prefill's KV events are configured; otherwise the proxy
#                   uses those that vLLM announces
# REAL_KEEP=1       leave the engines running for the next run
set -euo pipefail
. "$(dirname "$0")/env.sh"
root=$(cd "$REAL_HERE/../.." && pwd)
proxy_pid=

finish() {
	local code=$?
	if [ -n "$proxy_pid" ] && kill -0 "$proxy_pid" 2>/dev/null; then
		kill -TERM "$proxy_pid" && wait "$proxy_pid" || true
	fi
	[ "${REAL_KEEP:-}" = 1 ] || "$REAL_HERE/engines.sh" stop
	exit "$code"
}
trap finish EXIT

"$REAL_HERE/install.sh"
mkdir -p "$REAL_DIR/run" "$REAL_DIR/log"
bin=${PDPROXY_BIN:-$REAL_DIR/pdproxy}
if [ -z "${PDPROXY_BIN:-}" ]; then
	(cd "$root" && nice -n "$REAL_NICE" go build -o "$bin" ./cmd/pdproxy)
fi
"$REAL_HERE/engines.sh" start

config=$REAL_DIR/run/config.toml
sed -e "s/@PROXY@/$REAL_PROXY_PORT/; s/@ADMIN@/$REAL_ADMIN_PORT/; s/@PREFILL@/$REAL_PREFILL_PORT/; s/@DECODE@/$REAL_DECODE_PORT/; s/@EVENTS@/$REAL_EVENTS/; s/@REPLAY@/$((REAL_EVENTS + 1))/" \
	"$REAL_HERE/config.toml.in" >"$config"
[ "${REAL_KV_EVENTS:-}" = 1 ] || sed -i '/^kv_/d' "$config"
[ "$REAL_TURNS" != 1 ] || sed -i 's/^connector = .*/&\nbidirectional = true/; s/^role = "decode"/&\ndecoder_kv_blocks_ttl = "'"$REAL_KEEP_FOR"'s"/' "$config"
"$bin" check "$config"
curl -sf --max-time 5 "http://127.0.0.1:$REAL_PREFILL_PORT/kv_event_sources" >"$REAL_DIR/run/kv_event_sources.json" ||
	{ echo "run.sh: vLLM does not list its publishers of KV events" >&2; exit 1; }
grep -q "\"endpoint\":\"tcp://\*:$REAL_EVENTS\"" "$REAL_DIR/run/kv_event_sources.json" ||
	{ echo "run.sh: unknown form of /kv_event_sources:" >&2; cat "$REAL_DIR/run/kv_event_sources.json" >&2; exit 1; }
"$bin" doctor "$config" || [ $? = 5 ] || { echo "run.sh: pdproxy doctor found errors" >&2; exit 1; }
"$bin" run "$config" >"$REAL_DIR/log/pdproxy.log" 2>&1 &
proxy_pid=$!
for _ in $(seq 1 100); do
	curl -sf -o /dev/null --max-time 1 "http://127.0.0.1:$REAL_PROXY_PORT/health" && break
	kill -0 "$proxy_pid" 2>/dev/null || { echo "run.sh: pdproxy ended; see $REAL_DIR/log/pdproxy.log" >&2; tail -20 "$REAL_DIR/log/pdproxy.log" >&2; exit 1; }
	sleep 0.2
done

code=0
nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/drive.py" "$@" || code=1

kill -TERM "$proxy_pid"
left=0
wait "$proxy_pid" || left=$?
proxy_pid=
if [ "$left" != 0 ]; then
	echo "run.sh: pdproxy exited with $left after SIGTERM" >&2
	code=1
fi
exit "$code"
