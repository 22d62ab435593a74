// Package operations tests what operators import: the dashboard, the alert rules and the
// ScaledObjects of deploy, and those of the Inference Extension, with a real Prometheus, and the
// export by OTLP with a receiver of the published protocol. `make test-operations` runs it.
package operations
