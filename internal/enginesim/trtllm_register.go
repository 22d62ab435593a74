package enginesim

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"
)

// record returns the worker's key and value (serve/disagg_auto_scaling.py).
func (t *trtllm) record() (key, value string) {
	host, port, _ := net.SplitHostPort(t.e.Addr())
	number, _ := strconv.Atoi(port)
	name, role := "CONTEXT", 0
	if t.e.cfg.Role == RoleDecode {
		name, role = "GENERATION", 1
	}
	id := fmt.Sprintf("%s-%s:%s-%d-%d-%03d", name, host, port, time.Now().UnixMilli(), os.Getpid(), rand.IntN(1001))
	text, _ := encodeJSON(obj("worker_id", id, "host", host, "port", number, "role", role))
	return "/trtllm-disagg/" + t.cfg.ClusterName + "/workers/" + id, string(text)
}

// clusterStorage is an orchestrator's cluster storage over HTTP. It is called
// as HttpClusterStorageClient does (serve/cluster_storage.py).
type clusterStorage struct {
	uri, token string
	ttl        time.Duration
	http       http.Client
}

func (c *clusterStorage) close() { c.http.CloseIdleConnections() }

func (c *clusterStorage) seconds() int { return max(1, int(c.ttl/time.Second)) }

func (c *clusterStorage) set(ctx context.Context, key, value string) bool {
	body, _ := encodeJSON(obj("key", key, "value", value, "expire_time", -1, "ttl", c.seconds(), "overwrite_if_exists", false))
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
