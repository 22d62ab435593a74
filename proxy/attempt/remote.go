package attempt

import (
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// appendClientFields appends the client's header lines that the engine t gets: all, or those
// for a remote.
func appendClientFields(dst, fields []upstream.Field, t engine.Target) []upstream.Field {
	if !t.IsRemote() {
		return append(dst, fields...)
	}
	for _, f := range fields {
		if connector.SendsRemote(http.CanonicalHeaderKey(f.Name)) {
			dst = append(dst, f)
		}
	}
	return dst
}

// copyHeader copies the header lines of the answer to the client. Those of a remote may name
// the operator's account, and are not copied, except for the type of the answer.
func (a *attempt) copyHeader(resp *upstream.Response) {
	if !a.p.Decode.IsRemote() {
		a.env.Client.CopyHeader(resp)
		return
	}
	if t := resp.Get("Content-Type"); t != "" {
		a.env.Client.AnswerHeader().Set("Content-Type", t)
	}
}

// blamesOperator reports whether a remote's status depends on the operator's key, account,
// limits or configuration. The client does not get such an answer, which may quote the key.
func blamesOperator(status int) bool {
	switch status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		return false
	}
	return true
}

// isJSONObject reports whether an answer is one JSON object.
func isJSONObject(answer []byte) bool {
	var o openai.Object
	return o.Parse(answer) == nil
}
