module github.com/pdproxy/pdproxy/conformance/clients

go 1.26.0

require (
	github.com/openai/openai-go/v3 v3.95.0
	github.com/quic-go/quic-go v0.65.0
)

require (
	github.com/coder/websocket v1.8.15 // indirect
	github.com/quic-go/qpack v0.6.0 // indirect
	github.com/tidwall/gjson v1.20.0 // indirect
	github.com/tidwall/match v1.1.1 // indirect
	github.com/tidwall/pretty v1.2.1 // indirect
	github.com/tidwall/sjson v1.2.5 // indirect
	golang.org/x/crypto v0.57.0 // indirect
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
	golang.org/x/text v0.42.0 // indirect
)
