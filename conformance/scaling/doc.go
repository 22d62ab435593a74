// Package scaling tests that the metrics of the proxy can scale a fleet: a rule in the form
// of Kubernetes' horizontal pod autoscaler starts and stops simulated engines by these
// metrics, for prefill and for decode apart, while the load changes in steps.
//
// rule_test.go is the rule, fleet_test.go the engines and the proxy, and scaling_test.go the
// load. `make scaling` writes the plots of docs/howto/keda.md.
package scaling
