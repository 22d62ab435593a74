package core

import (
	"bytes"
	"context"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// store is a registry of engines. A key stays as long as it is refreshed in time.
type store interface {
	// set stores the key if it is absent, and reports whether it did.
	set(ctx context.Context, key, value string) bool
	// refresh restarts the key's time. It returns false when the key no longer
	// exists.
	refresh(ctx context.Context, key string) bool
	delete(ctx context.Context, key string)
	Close()
}

const (
	// storeTimeout is the limit for one call of a store.
	storeTimeout = 5 * time.Second
	// registerAgain is the time after which a failed registration is repeated.
	registerAgain = 5 * time.Second
)

// registerIn keeps the engine registered in a store until the engine ends, as
// trtllm-serve does (serve/disagg_auto_scaling.py, DisaggClusterWorker). It
// sets the key if it is absent, then refreshes it, and registers again when
// that fails. An engine that is closed deletes its key; an engine that dies
// does not.
func (e *Engine) registerIn(ctx context.Context, s store, key, value string, heartbeat time.Duration) {
	defer s.Close()
	for ctx.Err() == nil {
		if !s.set(ctx, key, value) {
			_ = Sleep(ctx, min(heartbeat, registerAgain)) // the loop checks ctx
			continue
		}
		for Sleep(ctx, heartbeat) == nil && s.refresh(ctx, key) {
		}
	}
	if !e.killed() {
		s.delete(context.WithoutCancel(ctx), key)
	}
}

// registration returns the engine's key and value, and the store; an empty key
// means no registration.
func (e *Engine) registration() (s store, key, value string) {
	cfg := &e.Cfg.TRTLLM
	worker, isWorker := e.Proto.(registeringProtocol)
	address, inEtcd := strings.CutPrefix(cfg.ClusterURI, "etcd://")
	switch {
	case e.Cfg.Etcd != "":
		s = newEtcdStore(e.Cfg.Etcd, cfg.InactiveTimeout)
	case cfg.ClusterURI == "" || !isWorker:
		return nil, "", ""
	case inEtcd:
		s = newEtcdStore("http://"+address, cfg.InactiveTimeout)
	default:
		s = &clusterStorage{uri: cfg.ClusterURI, token: cfg.ClusterToken, ttl: cfg.InactiveTimeout}
	}
	if isWorker {
		key, value = worker.Record()
	} else {
		key, value = e.Record()
	}
	return s, key, value
}

// recordPrefix is where pdproxy looks for records of engines in etcd.
const recordPrefix = "/pdproxy/engines/"

// Record returns the engine's key and value as pdproxy reads them: an entry of
// its list of engines.
func (e *Engine) Record() (key, value string) {
	name := e.Cfg.Role + "@" + e.Addr()
	if e.Cfg.Name != e.Cfg.Connector+"-"+e.Cfg.Role {
		name = e.Cfg.Name
	}
	o := Obj("name", name, "url", e.URL(), "role", e.Cfg.Role, "connector", e.Cfg.Connector, "ranks", len(e.Ranks))
	for _, m := range []member{{"kv_events", e.KVEventsEndpoint()}, {"kv_replay", e.KVEventsReplay()}, {"kv_address", e.KVAddress()}} {
		if m.Value != "" {
			o = o.With(m.Name, m.Value)
		}
	}
	text, _ := EncodeJSON(o)
	return recordPrefix + name, string(text)
}

// clusterStorage is an orchestrator's cluster storage over HTTP. It is called
// as HttpClusterStorageClient does (serve/cluster_storage.py).
type clusterStorage struct {
	uri, token string
	ttl        time.Duration
	http       http.Client
}

func (c *clusterStorage) Close() { c.http.CloseIdleConnections() }

func (c *clusterStorage) seconds() int { return max(1, int(c.ttl/time.Second)) }

func (c *clusterStorage) set(ctx context.Context, key, value string) bool {
	body, _ := EncodeJSON(Obj("key", key, "value", value, "expire_time", -1, "ttl", c.seconds(), "overwrite_if_exists", false))
	return c.call(ctx, http.MethodPost, "/set", body)
}

func (c *clusterStorage) refresh(ctx context.Context, key string) bool {
	return c.call(ctx, http.MethodGet, "/expire?"+url.Values{"key": {key}, "ttl": {strconv.Itoa(c.seconds())}}.Encode(), nil)
}

func (c *clusterStorage) delete(ctx context.Context, key string) {
	c.call(ctx, http.MethodDelete, "/delete?"+url.Values{"key": {key}}.Encode(), nil)
}

// call reports whether the storage reported success.
func (c *clusterStorage) call(ctx context.Context, method, path string, body []byte) bool {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, c.uri+path, bytes.NewReader(body))
	if err != nil {
		return false
	}
	req.Header.Set("Content-Type", "application/json")
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}
