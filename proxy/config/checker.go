package config

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"reflect"
	"strconv"
	"strings"
)

// checker collects problems. Each of its methods looks at one value and adds
// at most one problem under the value's key.
type checker struct {
	config   *Config
	problems Problems
}

// add notes a problem of key at the key's line.
func (k *checker) add(key, format string, args ...any) {
	if len(k.problems) >= maxProblems {
		return
	}
	k.problems = append(k.problems, Problem{
		Key: key, Line: k.config.lines.line(key), Message: fmt.Sprintf(format, args...),
	})
}

// positive requires a duration or size above zero.
func (k *checker) positive(key string, n int64) {
	if n <= 0 {
		k.add(key, "must be more than 0")
	}
}

// atLeast requires n to be at least least.
func (k *checker) atLeast(key string, n, least int) {
	if n < least {
		k.add(key, "must be at least %d, found %d", least, n)
	}
}

// within requires n to be from low to high.
func (k *checker) within(key string, n, low, high int) {
	if n < low || n > high {
		k.add(key, "must be from %d to %d, found %d", low, high, n)
	}
}

// share requires a number from 0 to 1.
func (k *checker) share(key string, x float64) {
	if !(x >= 0 && x <= 1) { // this form also rejects NaN
		k.add(key, "must be from 0 to 1, found %v", x)
	}
}

// oneOf requires value to be one of allowed.
func (k *checker) oneOf(key, value string, allowed ...string) {
	if err := OneOf(value, allowed...); err != nil {
		k.add(key, "%v", err)
	}
}

// required requires a non-empty text.
func (k *checker) required(key, value string) {
	if value == "" {
		k.add(key, "is required")
	}
}

// maxName bounds a name that appears in labels of metrics and in lines of the log, in bytes.
const maxName = 256

// name requires a name that is safe in a URL path, a header and a log line.
func (k *checker) name(key, value string) {
	switch {
	case value == "":
		k.required(key, value)
	case len(value) > maxName:
		k.add(key, "must have at most %d bytes, found %d", maxName, len(value))
	case !safeName(value):
		k.add(key, "invalid name %q: want letters, digits and - _ . : @, a letter or digit first", value)
	}
}

// safeName reports whether a name that is not empty consists of letters, digits and
// - _ . : @, a letter or digit first.
func safeName(name string) bool {
	for i, c := range []byte(name) {
		if !isAlphanumeric(c) && (i == 0 || !strings.ContainsRune("-_.:@", rune(c))) {
			return false
		}
	}
	return name != ""
}

// unique requires that no earlier entry has value. seen maps values to the keys that
// have them.
func (k *checker) unique(key, value string, seen map[string]string) {
	if value == "" {
		return
	}
	if first, again := seen[value]; again {
		k.add(key, "%q is already the name of %s", value, first)
		return
	}
	seen[value] = key[:max(strings.LastIndexByte(key, '.'), 0)]
}

// durations requires all durations to be non-negative. It runs after the checks of
// single keys and skips keys that have a problem already.
func (k *checker) durations() {
	reported := k.problems.keys()
	walk("", "", reflect.ValueOf(k.config).Elem(), func(key, _ string, v reflect.Value) {
		if d, ok := v.Interface().(Duration); ok && d < 0 && !reported[key] {
			k.add(key, "must not be negative, found %v", d)
		}
	})
}

// httpURL requires an http or https URL of a host, with nothing after the path.
// Problems never repeat its text, because a mistaken URL may contain a password.
func (k *checker) httpURL(key, value string) {
	if value == "" {
		k.required(key, value)
		return
	}
	u, err := url.Parse(value)
	switch {
	case err != nil:
		k.add(key, "invalid URL: want http://host:port or https://host:port")
	case u.Scheme != "http" && u.Scheme != "https":
		k.add(key, "invalid URL: the scheme must be http or https")
	case u.Hostname() == "":
		k.add(key, "invalid URL: no host")
	case u.Port() != "" && !validPort(u.Port(), 1), strings.HasSuffix(u.Host, ":"):
		k.add(key, "invalid URL: the port must be from 1 to 65535")
	case u.User != nil:
		k.add(key, "invalid URL: must not contain a user or password")
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.HasSuffix(value, "#"):
		k.add(key, "invalid URL: no query or fragment may follow the path")
	}
}

// listen requires host:port. The host may be empty (every address), and the port 0 (any
// free one). It reports whether the address is well-formed.
func (k *checker) listen(key, value string) bool {
	host, port, err := net.SplitHostPort(value)
	switch {
	case err != nil:
		k.add(key, "invalid address %q: want host:port", value)
	case !validHost(host):
		k.add(key, "invalid address %q: the host is neither an IP address nor a name", value)
	case !validPort(port, 0):
		k.add(key, "invalid address %q: the port must be from 0 to 65535", value)
	default:
		return true
	}
	return false
}

// dialOrListen requires host:port or unix:path.
func (k *checker) dialOrListen(key, value string) {
	if path, isUnix := strings.CutPrefix(value, "unix:"); isUnix {
		if path == "" {
			k.add(key, "invalid address: no path after unix:")
		}
		return
	}
	k.listen(key, value)
}

// zmq requires tcp://host:port.
func (k *checker) zmq(key, value string) {
	address, isTCP := strings.CutPrefix(value, "tcp://")
	if !isTCP || !validHostPort(address) {
		k.add(key, "invalid address %q: want tcp://host:port", value)
	}
}

// validHostPort reports whether address is a host and a port that can be dialed.
func validHostPort(address string) bool {
	host, port, err := net.SplitHostPort(address)
	return err == nil && host != "" && validHost(host) && validPort(port, 1)
}

// validPort reports whether text is a port from least to 65535.
func validPort(text string, least uint64) bool {
	n, err := strconv.ParseUint(text, 10, 16)
	return err == nil && n >= least
}

// validHost reports whether host is empty, an IP address or a DNS name.
func validHost(host string) bool {
	if strings.Contains(host, ":") {
		_, err := netip.ParseAddr(host)
		return err == nil
	}
	for _, c := range []byte(host) {
		if !isAlphanumeric(c) && c != '-' && c != '.' && c != '_' {
			return false
		}
	}
	return true
}

// isLoopback reports whether only this machine can reach the well-formed address.
func isLoopback(address string) bool {
	host, _, _ := net.SplitHostPort(address)
	return hostIP(host).IsLoopback()
}

// overlap reports whether a process cannot listen on both well-formed addresses: they
// have the same port, and the same host or one host and all hosts.
func overlap(a, b string) bool {
	hostA, portA, _ := net.SplitHostPort(a)
	hostB, portB, _ := net.SplitHostPort(b)
	numberA, _ := strconv.ParseUint(portA, 10, 16)
	numberB, _ := strconv.ParseUint(portB, 10, 16)
	if numberA != numberB || numberA == 0 {
		return false
	}
	ipA, ipB := hostIP(hostA), hostIP(hostB)
	return hostA == hostB || ipA.IsValid() && ipA == ipB || covers(hostA, ipB) || covers(hostB, ipA)
}

// hostIP returns the address in host, or the zero address. A name other than localhost
// is not resolved.
func hostIP(host string) netip.Addr {
	if host == "localhost" {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	ip, _ := netip.ParseAddr(host)
	return ip.Unmap()
}

// covers reports whether host means every address of ip's family. An empty host and ::
// mean both families. A name is covered only if host means all addresses.
func covers(host string, ip netip.Addr) bool {
	return host == "" || host == "::" || host == "0.0.0.0" && ip.Is4()
}

// isAlphanumeric reports whether c is an ASCII letter or digit.
func isAlphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// quoteAll returns names in quotes, separated by commas.
func quoteAll(names []string) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = strconv.Quote(name)
	}
	return strings.Join(quoted, ", ")
}
