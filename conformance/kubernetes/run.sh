#!/usr/bin/env bash
# Runs the tests of Kubernetes discovery and of the Helm chart against a real
# kube-apiserver, built from its Go module (a few minutes the first time), with a
# real etcd, in a network namespace of their own. It needs root, unshare and ip,
# build/release/helm (make test-kubernetes builds it), and Debian's etcd-server,
# which it installs if it may. Arguments go to the tests.
set -euo pipefail
cd "$(dirname "$0")"
bin=$(cd ../.. && pwd)/build/kubernetes
mkdir -p "$bin"
command -v etcd >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends etcd-server; }
# Helm asks the API server for its release, which the module alone does not tell.
release=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
go build -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$release" -o "$bin/kube-apiserver" k8s.io/kubernetes/cmd/kube-apiserver
# The custom resources that the chart can make. Only their schemas are used.
crds=()
for file in github.com/prometheus-operator/prometheus-operator@v0.85.0/example/prometheus-operator-crd/monitoring.coreos.com_servicemonitors.yaml \
  github.com/kedacore/keda/v2@v2.18.0/config/crd/bases/keda.sh_scaledobjects.yaml; do
  module=${file%%/example/*}
  module=${module%%/config/*}
  go mod download "$module"
  crds+=("$(go env GOMODCACHE)/$file")
done
cd ../discovery
go test -race -tags kubernetes -c -o "$bin/discovery.test" .
PATH=$bin:$(cd ../.. && pwd)/build/release:$PATH PDPROXY_CRDS="${crds[*]}" exec unshare --net sh -c '
  ip link set lo up && ip address add 10.77.0.1/32 dev lo && exec "$0" "$@"' \
  "$bin/discovery.test" -test.v -test.run '^Test(Kubernetes|KubernetesChart|TerminatingPodDrains|RoleIsChanged|APIServerAway|TokenIsReadAgain)$' "$@"
