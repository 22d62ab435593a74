package discovery

import (
	"errors"
	"log/slog"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/etcd"
)

// newRecords is pdproxy's own records in etcd: each key below the prefix holds
// the JSON of an [[engine]].
func newRecords(cfg config.DiscoveryEtcd, log *slog.Logger) (*etcdSource, error) {
	s := newEtcd("etcd", cfg.Endpoints, cfg.Prefix, log)
	s.read = readRecord
	var err error
	if s.etcd, err = etcd.Open(cfg.Access(), "discovery.etcd"); err != nil {
		return nil, err
	}
	return s, nil
}

// readRecord makes an engine of one record. Who may write to etcd may not
// thereby have files of this machine read, and sent: no key names one.
func readRecord(_ string, value []byte) (config.Engine, error) {
	e, err := config.EngineFromJSON(value)
	if err == nil && (e.APIKeyFile != "" || e.CA != "") {
		err = errors.New("api_key_file and ca name local files: they cannot be in a registration")
	}
	if err != nil {
		return config.Engine{}, err
	}
	return e, nil
}
