package config

import (
	"net"
	"strings"
)

// The schemes of Sidecar.Picker for endpoint pickers that serve ext_proc: without and with TLS.
const (
	schemeExtProc    = "ext_proc://"
	schemeExtProcTLS = "ext_procs://"
)

// ExtProcPicker returns the address, host:port, of an endpoint picker that serves ext_proc, and
// whether the proxy connects to it by TLS. The address is "" if Picker names none.
func (s Sidecar) ExtProcPicker() (address string, secure bool) {
	if address, ok := strings.CutPrefix(s.Picker, schemeExtProc); ok {
		return address, false
	}
	address, secure = strings.CutPrefix(s.Picker, schemeExtProcTLS)
	if !secure {
		return "", false
	}
	return address, true
}

// picker checks the keys of the picker.
func (k *checker) picker() {
	s := k.config.Sidecar
	k.positive("sidecar.picker_timeout", int64(s.PickerTimeout))
	switch {
	case strings.HasPrefix(s.Picker, schemeExtProc), strings.HasPrefix(s.Picker, schemeExtProcTLS):
		k.extProcPicker()
		return
	case s.Picker == "":
	case strings.HasPrefix(s.Picker, "http://"), strings.HasPrefix(s.Picker, "https://"):
		k.add("sidecar.picker", "the JSON form of a picker was removed: use an endpoint picker that serves ext_proc, as ext_proc://host:port or ext_procs://host:port")
	default:
		k.add("sidecar.picker", "invalid address of an endpoint picker: want ext_proc://host:port or ext_procs://host:port")
	}
	if s.PickerFailureModeAllow {
		k.add("sidecar.picker_failure_mode_allow", "needs an ext_proc:// or ext_procs:// picker")
	}
	if s.PickerSubset {
		k.add("sidecar.picker_subset", "needs an ext_proc:// or ext_procs:// picker")
	}
	k.pickerCertificate()
}

// extProcPicker checks a picker that serves ext_proc.
func (k *checker) extProcPicker() {
	s := k.config.Sidecar
	address, secure := s.ExtProcPicker()
	if host, port, err := net.SplitHostPort(address); err != nil || host == "" || strings.ContainsAny(host, "/@?# ") || !validPort(port, 1) {
		k.add("sidecar.picker", "invalid address of an endpoint picker: want ext_proc://host:port or ext_procs://host:port")
	}
	if s.Local != "" && (s.Role == RoleDecode || s.Connector == ConnectorNone) {
		k.add("sidecar.picker", "chooses the decode engine of a sidecar, and the sidecar of role %q and connector %q has no decode leg on another engine", s.Role, s.Connector)
	}
	if s.Local != "" && s.PickerFailureModeAllow {
		k.add("sidecar.picker_failure_mode_allow", "must not be set together with sidecar.local: without a choice of the picker, a sidecar always uses the place policy")
	}
	if k.config.EPP.Listen != "" {
		k.add("sidecar.picker", "an ext_proc picker must not be set together with epp.listen: this proxy would be both the picker and the gateway")
	}
	if !secure {
		k.pickerCertificate()
	} else if s.PickerCA != "" && s.PickerInsecureSkipVerify {
		k.add("sidecar.picker_ca", "must not be set together with sidecar.picker_insecure_skip_verify, which accepts any certificate")
	}
}

// pickerCertificate refuses the keys of TLS for a picker without TLS.
func (k *checker) pickerCertificate() {
	if k.config.Sidecar.PickerCA != "" {
		k.add("sidecar.picker_ca", "needs an ext_procs:// picker")
	}
	if k.config.Sidecar.PickerInsecureSkipVerify {
		k.add("sidecar.picker_insecure_skip_verify", "needs an ext_procs:// picker")
	}
}
