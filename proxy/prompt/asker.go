package prompt

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Asker requests token ids from the engines of a registry, over the connections of the
// data path. It does not send the client's own key, so an engine that requires that key
// rejects the request.
type Asker struct {
	Registry *engine.Registry
	Memory   *buffer.Budget // counts the answers while they are read; nil: they are not counted
}

var _ tokens.Asker = Asker{}

// Ask implements tokens.Asker.
func (a Asker) Ask(ctx context.Context, instance, path string, body []byte) (status int, answer []byte, err error) {
	i := a.Registry.Snapshot().Instance(instance)
	if i == nil {
		return 0, nil, errors.New("request token ids: the engine has left")
	}
	r := upstream.Request{
		Method: "POST", Path: i.Prefix + path, Body: [][]byte{body},
		Header: []upstream.Field{{Name: "Content-Type", Value: "application/json"}},
	}
	if i.APIKey != "" {
		r.Header = append(r.Header, upstream.Field{Name: "Authorization", Value: "Bearer " + i.APIKey})
	}
	resp, err := i.Client.Do(ctx, &r)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Close()
	b, err := a.Memory.ReadAll(resp, resp.ContentLength, tokens.MaxAnswer, time.Time{}) // ctx bounds the time
	defer b.Free()
	if err != nil {
		return 0, nil, err
	}
	return resp.Status, append([]byte(nil), b.B...), nil
}
