// Package plugins tests the authors' tools with real SDKs. The plugins in testdata are
// separate modules, so that the product's go.mod does not change. They are built with
// package plugins/build and run in the proxy's chain of filters. The modules of the SDKs
// come from the module cache or the Go proxy.
package plugins
