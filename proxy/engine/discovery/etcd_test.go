package discovery

import (
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// store is a source without a client. The test supplies the data of etcd.
type store struct {
	*etcdSource
	logs *logs
	now  time.Time
}

func newStore(t *testing.T) *store {
	t.Helper()
	l := &logs{}
	s, err := newRecords(config.DiscoveryEtcd{Endpoints: []string{"http://127.0.0.1:1"}, Prefix: "/e/"}, l.logger())
	if err != nil {
		t.Fatal(err)
	}
	return &store{etcdSource: s, logs: l, now: time.Unix(1e9, 0)}
}

// list passes one listing to the source.
func (s *store) list(cluster uint64, revision int64, kvs ...*mvccpb.KeyValue) {
	s.takeAll(&etcdserverpb.ResponseHeader{ClusterId: cluster, Revision: revision}, kvs, s.now)
}

func (s *store) want(t *testing.T, names ...string) {
	t.Helper()
	got := []string{}
	for _, e := range s.engines() {
		got = append(got, e.Name)
	}
	if !slices.Equal(got, names) {
		t.Errorf("engines are %v, want %v", got, names)
	}
}

func kv(key, value string, created int64) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{Key: []byte("/e/" + key), Value: []byte(value), CreateRevision: created}
}

// rec returns the record of an engine.
func rec(key, name string, created int64) *mvccpb.KeyValue {
	return kv(key, `{"name":"`+name+`","url":"http://`+name+`:1","role":"both"}`, created)
}

func TestListingReplacesRecords(t *testing.T) {
	s := newStore(t)
	s.list(1, 10, rec("a", "a", 3), rec("b", "b", 4))
	s.want(t, "a", "b")
	s.list(1, 12, rec("b", "b", 4), rec("c", "c", 12))
	s.want(t, "b", "c")
	s.put(rec("a", "a", 13))
	s.drop("/e/b")
	s.want(t, "a", "c")
}

func TestBadRecordIsLeftOut(t *testing.T) {
	s := newStore(t)
	s.list(1, 10, rec("a", "a", 3), kv("x", "{", 4), kv("y", `{"name":"y","url":"http://y","role":"chef"}`, 5),
		kv("z", `{"name":"z","url":"http://z","role":"both","api_key_file":"/etc/shadow"}`, 6),
		kv("w", `{"name":"w","url":"https://w","role":"both","ca":"/etc/shadow"}`, 7),
		kv("long", `{"name":"long`+strings.Repeat("g", maxRecord)+`"}`, 8))
	s.want(t, "a")
	text := s.logs.take()
	for _, key := range []string{"/e/x", "/e/y", "/e/z", "/e/w", "/e/long"} {
		if strings.Count(text, "key="+key+" ") != 1 {
			t.Errorf("%s is not named once: %s", key, text)
		}
	}
	if !strings.Contains(text, "engine[0].role") || !strings.Contains(text, "local files") || !strings.Contains(text, "too long") {
		t.Errorf("logged: %s", text)
	}
	s.put(kv("a", "nonsense", 3))
	s.want(t, "a") // unchanged
	s.logs.take()
	s.list(1, 11, kv("a", "nonsense", 3), kv("x", "{", 4))
	s.want(t, "a")
	if text := s.logs.take(); text != "" {
		t.Errorf("the problem was logged again: %s", text)
	}
	s.list(1, 12)
	s.want(t)
}

func TestYoungestRecordOfAnEngineCounts(t *testing.T) {
	s := newStore(t)
	old, young := rec("1", "a", 5), kv("2", `{"name":"a","url":"http://a2:1","role":"both"}`, 9)
	s.list(1, 10, old, young)
	s.want(t, "a")
	if e := s.engines()[0]; e.URL != "http://a2:1" {
		t.Errorf("got %s", e.URL)
	}
	s.drop("/e/2")
	if e := s.engines()[0]; e.URL != "http://a:1" {
		t.Errorf("got %s", e.URL)
	}
}

// A store that restarts without its data does not remove the engines. They have time to
// register again.
func TestStoreThatLostItsData(t *testing.T) {
	for name, back := range map[string]struct {
		cluster  uint64
		revision int64
	}{"the same cluster": {1, 2}, "another cluster": {7, 1000}} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			s.list(1, 100, rec("a", "a", 50), rec("b", "b", 60))
			s.list(back.cluster, back.revision, rec("a", "a", 2))
			s.want(t, "a", "b")
			s.now = s.now.Add(keepLost)
			s.list(back.cluster, back.revision+1, rec("a", "a", 2), rec("other", "b", 3))
			s.want(t, "a", "b")
			if e := s.engines()[1]; s.records["/e/b"].created != 0 || e.Name != "b" {
				t.Errorf("the existing record does not count: %+v", s.records)
			}
			s.now = s.now.Add(time.Second)
			s.list(back.cluster, back.revision+1, rec("a", "a", 2))
			s.want(t, "a")
		})
	}
}

func TestWorkers(t *testing.T) {
	const prefix = "/trtllm-disagg/blue/workers/"
	engine := func(name, url, role string) config.Engine {
		e := config.DefaultEngine()
		e.Name, e.URL, e.Role, e.Connector = name, url, role, config.ConnectorTRTLLM
		return e
	}
	for name, tt := range map[string]struct {
		id, value string
		want      config.Engine
		err       string
	}{
		"context": {
			"CONTEXT-10.1.0.1:7001-1763690000123-4711-042",
			`{"worker_id": "CONTEXT-10.1.0.1:7001-1763690000123-4711-042", "host": "10.1.0.1", "port": 7001, "role": 0}`,
			engine("CONTEXT-10.1.0.1:7001-1763690000123-4711-042", "http://10.1.0.1:7001", config.RolePrefill), "",
		},
		"generation, with more keys": {
			"GENERATION-gen0.lab:7002-1763690000999-1-1000", `{"worker_id":"x","host":"gen0.lab","port":7002,"role":1,"model":"m"}`,
			engine("GENERATION-gen0.lab:7002-1763690000999-1-1000", "http://gen0.lab:7002", config.RoleDecode), "",
		},
		"IPv6":         {"CONTEXT-fd00::1:7001-1-2-003", `{"host":"fd00::1","port":7001,"role":0}`, engine("CONTEXT-fd00::1:7001-1-2-003", "http://[fd00::1]:7001", config.RolePrefill), ""},
		"encoder":      {"MM_ENCODER-h:1-1-1-001", `{"host":"h","port":1,"role":2}`, config.Engine{}, errSkip.Error()},
		"no role":      {"w", `{"host":"h","port":1}`, config.Engine{}, "no role"},
		"no port":      {"w", `{"host":"h","role":0}`, config.Engine{}, "no port"},
		"no host":      {"w", `{"port":1,"role":0}`, config.Engine{}, "url"},
		"every host":   {"w", `{"host":"0.0.0.0","port":1,"role":0}`, config.Engine{}, "no address"},
		"a path":       {"w", `{"host":"h/?x=","port":1,"role":0}`, config.Engine{}, "url"},
		"a user":       {"w", `{"host":"u:p@h","port":1,"role":0}`, config.Engine{}, "url"},
		"odd id":       {"<b>", `{"host":"h","port":1,"role":0}`, config.Engine{}, "name"},
		"not JSON":     {"w", `x`, config.Engine{}, "decode worker"},
		"role by name": {"w", `{"host":"h","port":1,"role":"CONTEXT"}`, config.Engine{}, "decode worker"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := readWorker(prefix+tt.id, []byte(tt.value))
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) || got != tt.want {
				t.Errorf("got %+v, %v", got, err)
			}
		})
	}
}

// A restarted worker registers while its earlier record, whose lease has not expired,
// still exists.
func TestWorkerStartedAnew(t *testing.T) {
	s := newCluster(config.DiscoveryTRTLLM{ClusterURI: "etcd://a:1, etcd://b:2", ClusterName: "blue"}, (&logs{}).logger())
	if !slices.Equal(s.etcd.Endpoints, []string{"http://a:1", "http://b:2"}) || s.prefix != "/trtllm-disagg/blue/workers/" {
		t.Fatalf("looks in %s of %v", s.prefix, s.etcd.Endpoints)
	}
	put := func(id string, created int64) {
		s.put(&mvccpb.KeyValue{Key: []byte(s.prefix + id), Value: []byte(`{"host":"h","port":1,"role":0}`), CreateRevision: created})
	}
	put("old", 3)
	put("new", 4)
	if list := s.engines(); len(list) != 1 || list[0].Name != "new" {
		t.Errorf("engines are %+v", list)
	}
	s.drop(s.prefix + "old")
	if list := s.engines(); len(list) != 1 || list[0].Name != "new" {
		t.Errorf("engines are %+v", list)
	}
}

// For any data in etcd, discovery finds valid engines or none.
func FuzzRecords(f *testing.F) {
	f.Add("/p/w", []byte(`{"host":"h","port":1,"role":0}`))
	f.Add("/p/CONTEXT-[::1]:1", []byte(`{"host":"[::1]","port":65535,"role":1,"worker_id":1}`))
	f.Add("", []byte(`{"name":"a","url":"http://a","role":"both","ranks":2}`))
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		for _, read := range []func(string, []byte) (config.Engine, error){readRecord, readWorker} {
			e, err := read(key, value)
			if err != nil {
				if e != (config.Engine{}) {
					t.Errorf("engine %+v together with error %v", e, err)
				}
				continue
			}
			if err := e.Check(); err != nil || e.APIKeyFile != "" || e.CA != "" {
				t.Errorf("%q at %q became %+v: %v", value, key, e, err)
			}
		}
	})
}
