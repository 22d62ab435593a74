package core

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// etcdStore is etcd as a store, through the JSON routes of etcd's own gateway (etcd 3.4
// or newer). Each registration has a separate lease.
type etcdStore struct {
	url   string
	ttl   time.Duration
	http  http.Client
	lease string
}

func newEtcdStore(url string, ttl time.Duration) *etcdStore {
	return &etcdStore{url: strings.TrimSuffix(url, "/"), ttl: ttl}
}

func (s *etcdStore) Close() { s.http.CloseIdleConnections() }

func (s *etcdStore) set(ctx context.Context, key, value string) bool {
	var lease struct{ ID string }
	if !s.call(ctx, "/v3/lease/grant", Obj("TTL", strconv.Itoa(max(1, int(s.ttl/time.Second)))), &lease) {
		return false
	}
	s.lease = lease.ID
	k, v := base64.StdEncoding.EncodeToString([]byte(key)), base64.StdEncoding.EncodeToString([]byte(value))
	var answer struct{ Succeeded bool }
	return s.call(ctx, "/v3/kv/txn", Obj(
		"compare", []any{Obj("key", k, "target", "CREATE", "create_revision", "0")},
		"success", []any{Obj("request_put", Obj("key", k, "value", v, "lease", s.lease))},
	), &answer) && answer.Succeeded
}

func (s *etcdStore) refresh(ctx context.Context, _ string) bool {
	var answer struct{ Result struct{ TTL string } }
	return s.call(ctx, "/v3/lease/keepalive", Obj("ID", s.lease), &answer) && answer.Result.TTL != "" && answer.Result.TTL != "0"
}

func (s *etcdStore) delete(ctx context.Context, key string) {
	s.call(ctx, "/v3/kv/deleterange", Obj("key", base64.StdEncoding.EncodeToString([]byte(key))), &struct{}{})
}

// call makes one call and reports whether it succeeded.
func (s *etcdStore) call(ctx context.Context, path string, body Object, answer any) bool {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	text, _ := EncodeJSON(body)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+path, bytes.NewReader(text))
	if err != nil {
		return false
	}
	resp, err := s.http.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.StatusCode == http.StatusOK && json.NewDecoder(resp.Body).Decode(answer) == nil
}
