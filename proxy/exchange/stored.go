package exchange

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/attempt"
	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/connector"
	"github.com/pdproxy/pdproxy/proxy/downstream"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/telemetry"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// ServeStored serves a request about a response that an engine stores: GET or DELETE of the
// response, or POST to cancel it. The request counts as the other requests do, but no policy
// places it: only the engine that stores the response can answer.
func (run *Runner) ServeStored(w http.ResponseWriter, r *http.Request, target openai.StoredResponse) {
	x := run.open(w, r)
	defer x.close()
	defer x.recovered()
	x.answer(x.serveStored(r, target))
	if x.client.MustCut() {
		panic(http.ErrAbortHandler)
	}
}

func (x *exchange) serveStored(r *http.Request, target openai.StoredResponse) error {
	client, err := x.authenticate(r, openai.Responses)
	if err != nil {
		return err
	}
	if x.account.tenant != nil {
		if err := x.charge(); err != nil { // one request without tokens
			return err
		}
	}
	if err := x.admit(client, ""); err != nil {
		return err
	}
	defer x.leave()
	x.account.asked = true
	x.env.Fields = downstream.Without(x.client.AppendFields(x.env.Fields[:0], "", x.env.Key == "", false), "Content-Type")
	x.withoutQueueLines()
	fields := x.env.Fields
	s, err := x.find(target.ID, fields)
	if err != nil {
		return err
	}
	defer s.answer.Free()
	if query, plain := storedQuery(r); target.Cancel || r.Method == http.MethodDelete || !plain {
		return x.askEngine(r.Method, target, query, s.engine, fields)
	}
	x.client.CopyHeader(s.head)
	return x.env.Answer(s.head.Status, x.publicStored(s.engine, s.answer.B))
}

// storedQuery returns the parameters of a GET that engines know: those that resume the stream
// of a response in the background. plain: there are none.
func storedQuery(r *http.Request) (query string, plain bool) {
	values := r.URL.Query()
	for name := range values {
		if name != "stream" && name != "starting_after" {
			delete(values, name)
		}
	}
	return values.Encode(), len(values) == 0
}

// publicStored returns a stored response without the parameters of its KV transfer.
func (x *exchange) publicStored(i *engine.Instance, answer []byte) []byte {
	x.req.API = openai.Responses
	return x.run.Connector(i.Spec.Connector).Public(&connector.Attempt{Request: &x.req, Decode: engine.Target{Instance: i}}, answer)
}

// askEngine passes the request to the engine that stores the response, and its answer to the
// client: a stream as its events come.
func (x *exchange) askEngine(method string, target openai.StoredResponse, query string, i *engine.Instance, fields []upstream.Field) error {
	path := i.Prefix + target.Path()
	if query != "" && method == http.MethodGet {
		path += "?" + query
	}
	limit := time.Duration(x.env.Config.Timeouts.FirstByte)
	resp, err := i.Client.Do(x.env.Context, &upstream.Request{
		Method: method, Path: path, Header: attempt.WithKey(fields, i), HeadTimeout: limit, IdleTimeout: limit, Once: true,
	})
	if err != nil {
		return errStoring(i)
	}
	defer resp.Close()
	if strings.HasPrefix(resp.Get("Content-Type"), "text/event-stream") {
		return x.relayStored(resp, i)
	}
	b, err := x.run.Memory.ReadAll(resp, resp.ContentLength, buffer.MaxAnswer, time.Now().Add(limit))
	defer b.Free()
	if err != nil {
		return errStoring(i)
	}
	if resp.Status == http.StatusMethodNotAllowed || resp.Status == http.StatusNotFound && bytes.HasPrefix(b.B, []byte(`{"detail"`)) { // FastAPI's own: there is no such route
		return openai.NewError(openai.CodeNotImplemented, "the engine that holds the response cannot "+target.Action(method)+" it")
	}
	x.client.CopyHeader(resp)
	return x.env.Answer(resp.Status, x.publicStored(i, b.B))
}

func errStoring(i *engine.Instance) error {
	return openai.NewError(openai.CodeLegFailed, "the engine "+i.Spec.Name+", which holds the response, did not answer")
}

// relayStored writes the stream of a response to the client.
func (x *exchange) relayStored(resp *upstream.Response, i *engine.Instance) error {
	resp.SetIdleTimeout(time.Duration(x.env.Config.Timeouts.StreamIdle))
	b, err := x.run.Memory.Get(buffer.FirstRead)
	if err != nil {
		return downstream.ErrMemory
	}
	defer b.Free()
	x.client.CopyHeader(resp)
	x.journal.Status = resp.Status
	x.client.Begin(resp.Status)
	for {
		n, err := resp.Read(b.B[:cap(b.B)])
		if n > 0 {
			x.client.LimitWrites(time.Duration(x.env.Config.Server.WriteTimeout))
			if werr := x.client.Write(b.B[:n]); werr != nil {
				return werr
			}
			x.client.Flush()
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			x.journal.Outcome = telemetry.OutcomeBroken
			x.client.Cut()
			return errStoring(i)
		}
	}
}

// follow restricts the placement of a response that continues a stored one to the engine that
// stores the earlier response. If no engine stores it, any engine reports that, except to a tenant
// that may not use every model: the engine may store the response of another tenant.
func (x *exchange) follow() error {
	const field = "previous_response_id"
	v, _ := x.req.Get(field)
	if openai.IsNull(v) {
		return nil
	}
	text, _ := openai.String(v)
	target, ok := openai.StoredResponseFor(text)
	elsewhere := x.gateway != nil || x.placing.route.Restricted // another program places the response
	switch {
	case !ok && x.restricted():
		return errNotStored(field)
	case !ok || elsewhere && !x.restricted():
		return nil
	}
	s, err := x.find(target.ID, downstream.Without(append([]upstream.Field(nil), x.env.Fields...), "Content-Type"))
	switch {
	case PublicError(err).Code == openai.CodeResponseNotFound && x.restricted():
		return errNotStored(field)
	case PublicError(err).Code == openai.CodeResponseNotFound:
		return nil
	case err != nil:
		return err
	}
	s.answer.Free()
	if elsewhere {
		return nil
	}
	x.placing.ask.Within.Whole = []*engine.Instance{s.engine}
	return x.stayWith(s.engine)
}
