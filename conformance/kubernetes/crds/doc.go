// Package crds pins the Go types from which conformance/kubernetes/run.sh generates the custom
// resource definitions of the Prometheus operator and of KEDA, and the modules that contain
// the definitions of InferencePool and of Gateway API.
package crds

import (
	_ "github.com/kedacore/keda/v2/apis/keda/v1alpha1"
	_ "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	_ "sigs.k8s.io/gateway-api-inference-extension/api/v1"
	_ "sigs.k8s.io/gateway-api/apis/v1"
)
