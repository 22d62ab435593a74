// Package manifests has the test of deploy/gateway against the schemas of the gateways' own
// releases, which the Go module proxy has. make test-manifests runs it.
package manifests
