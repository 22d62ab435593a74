package proxy

import (
	"context"
	"errors"
	"time"

	"github.com/pdproxy/pdproxy/proxy/buffer"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/engine"
	"github.com/pdproxy/pdproxy/proxy/tokens"
	"github.com/pdproxy/pdproxy/proxy/upstream"
)

// Asker asks the engines of a registry for token ids, over the connections of
// the data path. An engine that wants the client's own key is not asked with it,
// and refuses.
type Asker struct {
	Registry *engine.Registry
	Memory   *buffer.Budget // counts the answers that are held; nil: nobody does
}

var _ tokens.Asker = Asker{}

// Ask implements tokens.Asker.
func (a Asker) Ask(ctx context.Context, instance, path string, body []byte) (status int, answer []byte, err error) {
	i := a.Registry.Snapshot().Instance(instance)
	if i == nil {
		return 0, nil, errors.New("ask for tokens: the engine is gone")
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
	b, err := readAnswer(a.Memory, resp, tokens.MaxAnswer, time.Time{}) // ctx bounds it
	if err != nil {
		return 0, nil, err
	}
	defer b.Free()
	return resp.Status, append([]byte(nil), b.B...), nil
}

// dialectOf is how an instance tokenizes. What has no transfer may be any engine;
// it is taken for vLLM, and left alone when it refuses.
func dialectOf(i *engine.Instance) tokens.Dialect {
	switch i.Spec.Connector {
	case config.ConnectorSGLang:
		return tokens.SGLang
	case config.ConnectorTRTLLM:
		return tokens.TRTLLM
	}
	return tokens.VLLM
}
