package proxy

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Keys is the set of API keys that may call: names with the SHA-256 of the key.
// The zero value lets everybody in.
type Keys struct {
	names  []string
	hashes [][sha256.Size]byte
}

// ParseKeys reads lines of «name sha256hex»; empty lines and lines that begin
// with # are skipped. Errors name the line, never its content.
func ParseKeys(text []byte) (*Keys, error) {
	k := &Keys{}
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, digits, _ := strings.Cut(line, " ")
		sum, err := hex.DecodeString(strings.TrimSpace(digits))
		if err != nil || len(sum) != sha256.Size {
			return nil, fmt.Errorf("line %d is not «name sha256hex»", n)
		}
		k.names = append(k.names, name)
		k.hashes = append(k.hashes, [sha256.Size]byte(sum))
	}
	if len(k.names) == 0 {
		return nil, errors.New("no key in the file")
	}
	return k, nil
}

// name returns whose key it is. Every entry is compared, each in constant time,
// so that the time tells nothing of the keys.
func (k *Keys) name(key string) (string, bool) {
	sum := sha256.Sum256([]byte(key))
	found := -1
	for i := range k.hashes {
		if subtle.ConstantTimeCompare(sum[:], k.hashes[i][:]) == 1 {
			found = i
		}
	}
	if found < 0 {
		return "", false
	}
	return k.names[found], true
}

var errNoKey = &openai.Error{Status: 401, Type: "authentication_error", Code: "invalid_api_key", Message: "a valid API key is needed: Authorization: Bearer KEY"}

type clientKey struct{}

// authenticate finds out who calls: the holder of a key when keys are asked for.
func (s *Server) authenticate(r *http.Request) (*http.Request, error) {
	keys := s.keys.Load()
	if keys == nil {
		return r, nil
	}
	scheme, key, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		key = r.Header.Get("X-Api-Key") // what Anthropic clients send
	}
	name, ok := keys.name(key)
	if !ok {
		return nil, errNoKey
	}
	return r.WithContext(context.WithValue(r.Context(), clientKey{}, name)), nil
}

// clientOf names the client for limits: its key's name, else its address. One
// client has a whole IPv6 network of 64 bits.
func clientOf(r *http.Request) string {
	if name := keyName(r); name != "" {
		return name
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return r.RemoteAddr
	}
	if strings.Contains(host, ":") {
		return networkOf(host)
	}
	return host
}

// networkOf is the network of 64 bits of an IPv6 address; an IPv4 address in the
// form of IPv6 stays one address.
func networkOf(host string) string {
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return host
	}
	if ip = ip.Unmap().WithZone(""); ip.Is4() || ip.IsLoopback() {
		return ip.String()
	}
	return netip.PrefixFrom(ip, 64).Masked().String()
}

// keyName is the name of the client's API key; "" when none is asked for. It
// labels metrics, where an address must not.
func keyName(r *http.Request) string {
	name, _ := r.Context().Value(clientKey{}).(string)
	return name
}
