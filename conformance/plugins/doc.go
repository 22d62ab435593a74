// Package plugins holds the tests of the authors' tools over real SDKs: plugins
// in testdata, each a module of its own so that the product's go.mod stays as it
// is, are built with package plugins/build and run in the proxy's chain of
// filters. The modules of the SDKs come from the module cache or the Go proxy.
package plugins
