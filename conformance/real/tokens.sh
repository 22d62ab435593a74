#!/usr/bin/env bash
# What an engine saves if it gets the token ids of a prompt: tokens.py.
#
#   tokens.sh engine [flags of tokens.py]   one engine, with texts and with ids
#   tokens.sh pair   [flags of tokens.py]   a NIXL pair behind two proxies: PDPROXY_BASE, which
#                                           sends decode no ids, and the program of this folder
#
# PDPROXY_BIN=path   use that binary instead of building one
# PDPROXY_BASE=path  the other program; needed for pair
set -euo pipefail
export REAL_MODEL=model-long
export REAL_FLAGS="--max-model-len 131072 --max-num-batched-tokens 8192 --num-gpu-blocks-override 8192"
. "$(dirname "$0")/env.sh"
root=$(cd "$REAL_HERE/../.." && pwd)
proxies=()

what=${1:-engine}
shift || true
case $what in
engine) engines=(plain-1) ;;
pair) engines=(prefill decode) ;;
*) echo "usage: tokens.sh engine|pair [flags]" >&2; exit 2 ;;
esac

finish() {
	local code=$?
	for pid in "${proxies[@]}"; do
		kill -TERM "$pid" 2>/dev/null && wait "$pid" || true
	done
	"$REAL_HERE/engines.sh" stop "${engines[@]}"
	exit "$code"
}
trap finish EXIT

"$REAL_HERE/install.sh"
nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/make_long_model.py" "$REAL_DIR/$REAL_MODEL"
"$REAL_HERE/engines.sh" start "${engines[@]}"
if [ "$what" = engine ]; then
	nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/tokens.py" engine "plain-1=$REAL_PLAIN_PORT" "$@"
	exit
fi

bin=${PDPROXY_BIN:-$REAL_DIR/pdproxy}
if [ -z "${PDPROXY_BIN:-}" ]; then
	(cd "$root" && nice -n "$REAL_NICE" go build -o "$bin" ./cmd/pdproxy)
fi
port=$REAL_PROXY_PORT admin=$REAL_ADMIN_PORT
for program in "$PDPROXY_BASE" "$bin"; do
	config=$REAL_DIR/run/tokens-$port.toml
	sed -e "s/@PROXY@/$port/; s/@ADMIN@/$admin/; s/@PREFILL@/$REAL_PREFILL_PORT/; s/@DECODE@/$REAL_DECODE_PORT/; /^kv_/d" "$REAL_HERE/config.toml.in" >"$config"
	"$program" run "$config" >"$REAL_DIR/log/tokens-$port.log" 2>&1 &
	proxies+=($!)
	for _ in $(seq 1 100); do
		curl -sf -o /dev/null --max-time 1 "http://127.0.0.1:$admin/readyz" && break
		sleep 0.2
	done
	port=$((port + 1)) admin=$((admin + 1))
done
nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/tokens.py" pair "base=$REAL_PROXY_PORT,new=$((REAL_PROXY_PORT + 1))" prefill,decode "$@"
