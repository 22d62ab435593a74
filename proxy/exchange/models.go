package exchange

import "github.com/pdproxy/pdproxy/proxy/openai"

// resolve replaces a name of [[model]] that the client requested by the model that serves
// the request. Everything after resolve, except the answers for unknown models and the
// records of the requested name, uses the name of that model.
func (x *exchange) resolve() error {
	route := x.run.Models().Route(x.req.Model)
	if route == nil {
		return nil
	}
	key := uint64(0)
	if route.Split() {
		key = x.run.Prompts.ConversationKey(x.env.Source())
	}
	model := route.Choose(key)
	x.journal.Requested(route.Name())
	x.run.Metrics.ModelChosen(route.Name(), model)
	return x.rename(model)
}

// rename writes the name of a model into the body and scans the new body: the connectors,
// the hooks and the clean-up calls then need no rule for names.
func (x *exchange) rename(model string) error {
	if model == x.req.Model {
		return nil
	}
	edit := openai.Edit{Key: "model", Value: openai.AppendQuoted(nil, model)}
	err := x.client.RewriteBody(len(x.client.Body())+len(edit.Value), func(dst []byte) []byte {
		return x.req.Append(dst, edit)
	})
	if err != nil {
		return err
	}
	return openai.ParseRequest(x.req.API, x.client.Body(), &x.req)
}

// requested returns the name of the model that the client requested.
func (x *exchange) requested() string {
	if name := x.journal.RequestedModel(); name != "" {
		return name
	}
	return x.req.Model
}
