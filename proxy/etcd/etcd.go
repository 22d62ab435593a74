// Package etcd builds the configuration of etcd clients: addresses, certificates,
// password, and the time until a dead server is noticed.
//
// The decisions behind this package are in docs/design/engines.md.
package etcd

import (
	"crypto/tls"
	"errors"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/pemfile"
)

// Timeout bounds one request to etcd.
const Timeout = 3 * time.Second

// Client returns the configuration of a client without certificate and password.
func Client(endpoints []string) clientv3.Config {
	return clientv3.Config{
		Endpoints: endpoints, DialTimeout: Timeout, Logger: zap.NewNop(),
		// A server whose host has lost power or its link sends nothing, not even a reset.
		DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: Timeout,
	}
}

// Open reads the files that a names and returns a client configuration with their
// content. at is the configuration table of a. The error is a config.Problems with keys
// of this table.
func Open(a config.EtcdAccess, at string) (clientv3.Config, error) {
	c := Client(a.Endpoints)
	var err error
	if c.TLS, err = secure(a, at); err != nil {
		return clientv3.Config{}, err
	}
	if a.Username != "" {
		password, err := os.ReadFile(a.PasswordFile)
		if err != nil {
			return clientv3.Config{}, config.Problems{{Key: at + ".password_file", Message: err.Error()}}
		}
		c.Username, c.Password = a.Username, strings.TrimSpace(string(password))
	}
	return c, nil
}

// secure returns the TLS configuration for https; nil for the default.
func secure(a config.EtcdAccess, at string) (*tls.Config, error) {
	if a.CA == "" && a.Cert == "" {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12}
	var r pemfile.Reader
	if a.Cert != "" {
		c.Certificates = []tls.Certificate{r.Pair(pemfile.File{Key: at + ".cert", Path: a.Cert}, pemfile.File{Key: at + ".key", Path: a.Key})}
	}
	if a.CA != "" {
		c.RootCAs = r.Pool(pemfile.File{Key: at + ".ca", Path: a.CA})
	}
	var wrong pemfile.Errors
	if _, err := r.Sum(); errors.As(err, &wrong) {
		var problems config.Problems
		for _, e := range wrong {
			problems = append(problems, config.Problem{Key: e.Key, Message: e.Err.Error()})
		}
		return nil, problems
	}
	return c, nil
}
