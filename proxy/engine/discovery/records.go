package discovery

import (
	"log/slog"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/etcd"
)

// newRecords returns the source for pdproxy's own records in etcd: each key below the
// prefix holds the JSON of an [[engine]].
func newRecords(cfg config.DiscoveryEtcd, log *slog.Logger) (*etcdSource, error) {
	s := newEtcd("etcd", cfg.Endpoints, cfg.Prefix, log)
	s.read = readRecord
	var err error
	if s.etcd, err = etcd.Open(cfg.Access(), "discovery.etcd"); err != nil {
		return nil, err
	}
	return s, nil
}

// readRecord converts one record to an engine. It rejects fields with which a writer to
// etcd could make the proxy read and send local files, or trust more hosts.
func readRecord(_ string, value []byte) (config.Engine, error) {
	e, err := config.EngineFromJSON(value)
	if err == nil {
		err = e.CheckAdded()
	}
	if err != nil {
		return config.Engine{}, err
	}
	return e, nil
}
