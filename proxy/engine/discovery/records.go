package discovery

import (
	"crypto/tls"
	"errors"
	"log/slog"
	"os"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// newRecords is pdproxy's own records in etcd: each key below the prefix holds
// the JSON of an [[engine]].
func newRecords(cfg config.DiscoveryEtcd, log *slog.Logger) (*etcdSource, error) {
	s := newEtcd("etcd", cfg.Endpoints, cfg.Prefix, log)
	s.read = readRecord
	var err error
	if s.etcd.TLS, err = etcdTLS(cfg); err != nil {
		return nil, err
	}
	if cfg.Username != "" {
		password, err := os.ReadFile(cfg.PasswordFile)
		if err != nil {
			return nil, config.Problems{{Key: "discovery.etcd.password_file", Message: err.Error()}}
		}
		s.etcd.Username, s.etcd.Password = cfg.Username, strings.TrimSpace(string(password))
	}
	return s, nil
}

// etcdTLS is how etcd is spoken to over https; nil for the default.
func etcdTLS(cfg config.DiscoveryEtcd) (*tls.Config, error) {
	if cfg.CA == "" && cfg.Cert == "" {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	if cfg.Cert != "" {
		pair, err := tls.LoadX509KeyPair(cfg.Cert, cfg.Key)
		if err != nil {
			return nil, config.Problems{{Key: "discovery.etcd.cert", Message: err.Error()}}
		}
		c.Certificates = []tls.Certificate{pair}
	}
	if cfg.CA != "" {
		var err error
		if c.RootCAs, err = readCAs(cfg.CA); err != nil {
			return nil, config.Problems{{Key: "discovery.etcd.ca", Message: err.Error()}}
		}
	}
	return c, nil
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
