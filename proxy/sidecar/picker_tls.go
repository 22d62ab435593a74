package sidecar

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"

	"github.com/pdproxy/pdproxy/proxy/config"
)

// PickerTLS returns the TLS configuration for the ext_proc picker of s; nil without TLS. It reads the
// file sidecar.picker_ca.
func PickerTLS(s config.Sidecar) (*tls.Config, error) {
	if _, secure := s.ExtProcPicker(); !secure {
		return nil, nil
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: s.PickerInsecureSkipVerify}
	if s.PickerCA == "" {
		return c, nil
	}
	pem, err := os.ReadFile(s.PickerCA)
	if err != nil {
		return nil, err
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM(pem) {
		return nil, errors.New("no certificate in the file")
	}
	return c, nil
}
