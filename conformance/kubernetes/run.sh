#!/usr/bin/env bash
# Runs the tests of Kubernetes discovery against a real kube-apiserver, built
# from its Go module (a few minutes the first time), with a real etcd, in a
# network namespace of their own. It needs root, unshare and ip, and Debian's
# etcd-server, which it installs if it may. Arguments go to the tests.
set -euo pipefail
cd "$(dirname "$0")"
bin=$(cd ../.. && pwd)/build/kubernetes
mkdir -p "$bin"
command -v etcd >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends etcd-server; }
go build -ldflags "-s -w" -o "$bin/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver
cd ../discovery
go test -race -tags kubernetes -c -o "$bin/discovery.test" .
PATH=$bin:$PATH exec unshare --net sh -c '
  ip link set lo up && ip address add 10.77.0.1/32 dev lo && exec "$0" "$@"' \
  "$bin/discovery.test" -test.v -test.run '^Test(Kubernetes|TerminatingPodDrains|RoleIsChanged|APIServerAway|TokenIsReadAgain)$' "$@"
