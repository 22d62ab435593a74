#!/usr/bin/env bash
# Runs real clients against bin/pdproxy (make build), one suite at a time, and
# prints one closing line for each, after the output of a failed one. The exit
# code is 0 only if all passed.
#
#   ./run.sh                 every suite
#   ./run.sh curl chromium   those only
#
# It first installs what the suites need: curl, Chromium and Python from
# Debian's packages (as root), the rest under build/clients from the registries
# of Python, Node and Go. The run fails if something cannot be installed.
set -euo pipefail
cd "$(dirname "$0")"
build=$(cd ../.. && pwd)/build/clients
mkdir -p "$build/log"

suites=(openai-go:TestOpenAIGo curl:TestCurl wire:TestWire auth:TestAuth http3:TestHTTP3
  chromium:TestChromium node:TestNode python:TestPython
  anthropic-node:TestAnthropicNode anthropic-python:TestAnthropicPython
  continued-node:TestContinuedNode continued-python:TestContinuedPython agents:TestAgents)

# step NAME COMMAND... prints nothing unless the command fails.
step() {
  local name=$1 log=$build/log/setup-$2.log
  shift
  "$@" >"$log" 2>&1 </dev/null && return
  tail -n 40 "$log"
  echo "clients: $name failed; no suite was run"
  exit 1
}

# missing names the Debian packages that the machine lacks.
missing() {
  curl --version 2>/dev/null | grep -q 'Features:.* HTTP2' || echo curl
  command -v chromium >/dev/null || echo chromium
  python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3 python3-venv
}

# The steps are joined with &&, because an error inside step does not end the
# script.
install_packages() {
  if ! command -v apt-get || [ "$(id -u)" != 0 ]; then
    echo "not root on a Debian system; install these by hand: $*"
    return 1
  fi
  apt-get update -q &&
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" &&
    if missing | grep .; then return 1; fi
}

install_python() {
  rm -rf "$build/venv" &&
    python3 -m venv "$build/venv" &&
    "$build/venv/bin/pip" install --disable-pip-version-check -r python/requirements.txt &&
    cp python/requirements.txt "$build/venv/installed"
}

install_node() {
  mkdir -p "$build/node" &&
    cp node/package.json node/package-lock.json "$build/node/" &&
    (cd "$build/node" && PATH=$build/venv/bin:$PATH npm ci --ignore-scripts --no-audit --no-fund) &&
    cp node/package-lock.json "$build/node/installed"
}

build_tests() {
  go vet . && go test -c -o "$build/clients.test" .
}

# count prints how many of a log's tests without subtests passed and failed. A
# skipped test counts as failed.
count() {
  awk '
    $1 == "---" && $2 ~ /^(PASS|FAIL|SKIP):$/ {
      verdict[$3] = $2
      for (name = $3; sub("/[^/]*$", "", name);) parent[name] = 1
    }
    END {
      for (name in verdict) if (!(name in parent)) n[verdict[name] == "PASS:"]++
      print n[1] + 0, n[0] + 0
    }' "$1"
}

# run NAME TEST runs one suite and prints its closing line.
run() {
  local log=$build/log/$1.log ok=true passed failed
  "$build/clients.test" -test.v -test.timeout 5m -test.run "^$2\$" >"$log" 2>&1 </dev/null || ok=false
  read -r passed failed < <(count "$log")
  if [ "$passed" = 0 ]; then ok=false; fi
  if ! $ok; then
    failed=$((failed > 0 ? failed : 1))
    grep -v '^ *\(=== \|--- PASS\)' "$log" || true
  fi
  echo "$1: $passed passed, $failed failed"
  $ok
}

if [ ! -x ../../bin/pdproxy ]; then
  echo "clients: bin/pdproxy is missing; make build makes it"
  exit 1
fi
rm -rf "$build"/profile-*
step "building the tests" build_tests & # at the same time as the downloads
builder=$!
trap 'wait' EXIT
read -r -a packages < <(missing | tr '\n' ' ') || true
if [ ${#packages[@]} -gt 0 ]; then
  step "installing ${packages[*]}" install_packages "${packages[@]}"
fi
cmp -s python/requirements.txt "$build/venv/installed" || step "installing Python packages" install_python
cmp -s node/package-lock.json "$build/node/installed" || step "installing Node packages" install_node
wait $builder

result=0
for suite in "${suites[@]}"; do
  name=${suite%%:*}
  if [ $# = 0 ] || [[ " $* " == *" $name "* ]]; then
    run "$name" "${suite##*:}" || result=1
  fi
done
exit $result
