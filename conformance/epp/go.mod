module github.com/pdproxy/pdproxy/conformance/epp

go 1.26.0
