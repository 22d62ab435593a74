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

// storageTimeout is the worker's limit for one call of the cluster storage.
const storageTimeout = 5 * time.Second

// registerAgain is the time until a registration that failed is tried again.
const registerAgain = 5 * time.Second

// register keeps the worker in a cluster storage over HTTP as trtllm-serve does
// (serve/disagg_auto_scaling.py, DisaggClusterWorker): it sets its key where it
// is not there yet, then refreshes it, and registers again when that fails. A
// worker that is stopped in order deletes its key; one that dies leaves it.
func (t *trtllm) register(ctx context.Context) {
	c := &storageClient{cfg: t.cfg}
	defer c.http.CloseIdleConnections()
	key, value := t.record()
	for ctx.Err() == nil {
		pause := t.cfg.Heartbeat
		if !c.set(ctx, key, value) {
			pause = min(pause, registerAgain)
		} else {
			for sleep(ctx, t.cfg.Heartbeat) == nil && c.expire(ctx, key) {
			}
			continue
		}
		if sleep(ctx, pause) != nil {
			break
		}
	}
	if !t.e.killed() {
		c.delete(context.WithoutCancel(ctx), key)
	}
}

// record is the worker's key and value.
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

// storageClient makes the calls of HttpClusterStorageClient (serve/cluster_storage.py).
type storageClient struct {
	cfg  TRTLLMConfig
	http http.Client
}

func (c *storageClient) seconds() int { return max(1, int(c.cfg.InactiveTimeout/time.Second)) }

// set stores the key if it is not there.
func (c *storageClient) set(ctx context.Context, key, value string) bool {
	body, _ := encodeJSON(obj("key", key, "value", value, "expire_time", -1, "ttl", c.seconds(), "overwrite_if_exists", false))
	return c.call(ctx, http.MethodPost, "/set", body)
}

func (c *storageClient) expire(ctx context.Context, key string) bool {
	return c.call(ctx, http.MethodGet, "/expire?"+url.Values{"key": {key}, "ttl": {strconv.Itoa(c.seconds())}}.Encode(), nil)
}

func (c *storageClient) delete(ctx context.Context, key string) {
	c.call(ctx, http.MethodDelete, "/delete?"+url.Values{"key": {key}}.Encode(), nil)
}

// call reports whether the storage answered with success.
func (c *storageClient) call(ctx context.Context, method, path string, body []byte) bool {
	ctx, cancel := context.WithTimeout(ctx, storageTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, c.cfg.ClusterURI+path, bytes.NewReader(body))
	if err != nil {
		return false
	}
	req.Header.Set("Content-Type", "application/json")
	if c.cfg.ClusterToken != "" {
		req.Header.Set("Authorization", "Bearer "+c.cfg.ClusterToken)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}
