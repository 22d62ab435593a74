#!/usr/bin/env bash
# Feeds every vLLM command of `pdproxy quickstart` to vLLM's own argument parser
# (flags.py). It starts no engine and takes 20 s once install.sh has run.
#
# PDPROXY_BIN=path  use that binary instead of building one
set -euo pipefail
. "$(dirname "$0")/env.sh"
"$REAL_HERE/install.sh"
bin=${PDPROXY_BIN:-$REAL_DIR/pdproxy}
if [ -z "${PDPROXY_BIN:-}" ]; then
	(cd "$REAL_HERE/../.." && nice -n "$REAL_NICE" go build -o "$bin" ./cmd/pdproxy)
fi
exec nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/flags.py" "$bin"
