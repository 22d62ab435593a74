#!/bin/sh
# Installs the peers of the benchmark on Debian and Ubuntu; needs root.
set -eu
apt-get update -q
apt-get install -y -q --no-install-recommends \
  nginx python3-aiohttp python3-fastapi python3-httpx python3-uvicorn
# The package starts a server on port 80; the benchmark starts its own.
if command -v systemctl >/dev/null && systemctl is-active --quiet nginx; then
  systemctl disable --now nginx
fi
