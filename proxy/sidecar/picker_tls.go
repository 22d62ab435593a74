package sidecar

import (
	"crypto/tls"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/pemfile"
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
	var r pemfile.Reader
	c.RootCAs = r.Pool(pemfile.File{Key: "sidecar.picker_ca", Path: s.PickerCA})
	if _, err := r.Sum(); err != nil {
		return nil, err
	}
	return c, nil
}
