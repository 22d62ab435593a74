package connector

import (
	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tokens"
)

// remote is for OpenAI endpoints of other operators. It names their model, and cuts PD
// fields also where the proxy trusts those of its clients. It adds no header line.
type remote struct{ none }

func (remote) Name() string { return "remote" }

// Serves reports whether the route is one of OpenAI's that need no state.
func (remote) Serves(api openai.API) bool {
	switch api {
	case openai.Chat, openai.Completions, openai.Embeddings, openai.Responses:
		return true
	}
	return false
}

func (remote) HealthPath(abi.Role) (path string, bootstrap bool) { return "", false }
func (remote) FactPaths(abi.Role) []string                       { return nil }
func (remote) Tokenizes() tokens.Dialect                         { return tokens.NoTokenizer }
func (remote) Loads() []engine.LoadRoute                         { return nil }

func (remote) Aggregated(a *Attempt, dst []byte) (Leg, error) {
	var room [editRoom]openai.Edit
	edits := openai.CutPD(room[:0], a.Request)
	edits = append(edits, openai.Edit{Key: "model", Value: openai.AppendQuoted(nil, a.Decode.Spec.RemoteModel)})
	return Leg{Path: a.Request.Path(), Body: a.Request.Append(dst, edits...)}, nil
}

// SendsRemote reports whether a remote gets a client's header line of that canonical
// name. Other lines may name clients, their keys, or hosts behind the proxy.
func SendsRemote(name string) bool { return name == "Content-Type" || name == "Accept" }
