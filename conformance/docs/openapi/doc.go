// Package openapi compares the generated documents of docs/reference with the answers of the
// built program. It is a module of its own, because it needs a library for OpenAPI.
// `make test-docs` runs it.
package openapi
