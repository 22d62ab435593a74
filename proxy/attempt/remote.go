package attempt

import (
	"net/http"

	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// staysHere reports whether a remote does not get this header line of the client.
func staysHere(f upstream.Field) bool {
	return !connector.SendsRemote(http.CanonicalHeaderKey(f.Name))
}

// copyRemoteHeader copies the type of a remote's answer to the client. The other header lines may
// name the operator's account.
func (a *attempt) copyRemoteHeader(resp *upstream.Response) {
	if t := resp.Get("Content-Type"); t != "" {
		a.env.Client.AnswerHeader().Set("Content-Type", t)
	}
}

// replyHeader returns the header lines of an answer that the client gets. Those of a remote may name
// the operator's account.
func replyHeader(t engine.Target, resp *upstream.Response) http.Header {
	h := make(http.Header)
	if !t.IsRemote() {
		downstream.CopyHeader(h, resp)
	} else if text := resp.Get("Content-Type"); text != "" {
		h.Set("Content-Type", text)
	}
	return h
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
