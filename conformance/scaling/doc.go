// Package scaling tests that the ScaledObjects of deploy/keda can scale a fleet: a rule in the
// form of KEDA and Kubernetes' horizontal pod autoscaler starts and stops simulated engines by
// the queries of these objects, for prefill and for decode apart, while the load changes in
// steps. The fleet begins and ends without engines.
//
// object_test.go reads the ScaledObjects, query_test.go evaluates their queries, rule_test.go
// is the rule, fleet_test.go the engines and the proxy, and scaling_test.go the load.
// `make scaling` writes the plots of docs/concepts/scaling.md.
package scaling
