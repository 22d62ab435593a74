#!/usr/bin/env bash
# Compares pdproxy bench with `vllm bench serve` on the same engine: alternately, with
# the same number of requests, lengths and rate. It prints the table of
# docs/howto/bench.md. It takes 8 minutes once install.sh has run.
#
# PDPROXY_BIN=path  use that binary instead of building one
# REAL_ROUNDS=3     runs of each program
set -euo pipefail
. "$(dirname "$0")/env.sh"
"$REAL_HERE/install.sh"
bin=${PDPROXY_BIN:-$REAL_DIR/pdproxy}
if [ -z "${PDPROXY_BIN:-}" ]; then
	(cd "$REAL_HERE/../.." && nice -n "$REAL_NICE" go build -o "$bin" ./cmd/pdproxy)
fi
trap '"$REAL_HERE/engines.sh" stop alone' EXIT
"$REAL_HERE/engines.sh" start alone
nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/bench.py" "$bin" "http://127.0.0.1:$REAL_ALONE_PORT" "$REAL_DIR/model" "${REAL_ROUNDS:-3}"
