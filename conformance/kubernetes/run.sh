#!/usr/bin/env bash
# Runs the tests of Kubernetes discovery, of a fleet that elects its leader in a Lease, of the Helm
# chart and of docs/howto/kubernetes.md against a real kube-apiserver, kube-controller-manager and
# kubectl, built from their Go module (a few minutes the first time), with a real etcd, in a network
# and a mount namespace of their own. It needs root, unshare and ip, build/release/helm
# (make test-kubernetes builds it), and Debian's etcd-server, which it installs if it may. Arguments
# go to the tests.
set -euo pipefail
cd "$(dirname "$0")"
bin=$(cd ../.. && pwd)/build/kubernetes
mkdir -p "$bin"
command -v etcd >/dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends etcd-server; }
# Helm asks the API server for its release, which the module alone does not tell.
release=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
for program in kube-apiserver kube-controller-manager kubectl; do
  go build -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$release" -o "$bin/$program" "k8s.io/kubernetes/cmd/$program"
done
CGO_ENABLED=0 go build -C ../.. -o "$bin/pdproxy" ./cmd/pdproxy
# The custom resources that the chart can make. crds/go.mod pins the operators' Go types, from
# which this tool generates the schemas. The operators themselves do not run.
rm -rf "$bin/crds"
(cd crds && go tool controller-gen crd:generateEmbeddedObjectMeta=true,maxDescLen=0 $(go list -f '{{range .Imports}}paths={{.}} {{end}}' .) output:crd:dir="$bin/crds")
gateway=$(cd crds && go list -m -f '{{.Dir}}' sigs.k8s.io/gateway-api)/config/crd/standard
pool=$(cd crds && go list -m -f '{{.Dir}}' sigs.k8s.io/gateway-api-inference-extension)/config/crd/bases/inference.networking.k8s.io_inferencepools.yaml
crds=("$bin"/crds/{monitoring.coreos.com_servicemonitors,monitoring.coreos.com_prometheusrules,keda.sh_scaledobjects}.yaml "$gateway/gateway.networking.k8s.io_httproutes.yaml" "$pool")
cd ../discovery
go test -race -tags kubernetes -c -o "$bin/discovery.test" .
PATH=$bin:$(cd ../.. && pwd)/build/release:$PATH PDPROXY_CRDS="${crds[*]}" PDPROXY_POOL_CRD="$pool" PDPROXY_GATEWAY_CRDS="$gateway" PDPROXY_PROGRAM="$bin/pdproxy" exec unshare --net --mount sh -c '
  ip link set lo up && ip address add 10.77.0.1/32 dev lo && ip address add 10.77.0.2/32 dev lo && exec "$0" "$@"' \
  "$bin/discovery.test" -test.v -test.run '^Test(Kubernetes|KubernetesChart|KubernetesManifests|KubernetesPage|InferencePool|PoolObjects|LeaseElection|LeaseIDs|LeaseFleet|PodLabels|TerminatingPodDrains|RoleIsChanged|APIServerAway|TokenIsReadAgain)$' "$@"
