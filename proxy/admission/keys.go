// Package admission checks API keys, queues requests, and limits the number of open
// requests of each client.
package admission

import (
	"context"
	"crypto/rand"
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

// Keys is the set of valid API keys: names with the SHA-256 of each key. A nil *Keys accepts
// every client. Safe for concurrent use.
type Keys struct {
	names  []string
	hashes [][sha256.Size]byte
}

// ParseKeys reads lines of the form "NAME SHA256", with 64 hexadecimal digits. It skips empty lines and lines that begin with
// #. Errors name the number of the line, never its content.
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
			return nil, fmt.Errorf("line %d is not \"NAME SHA256\", the SHA-256 of the key as 64 hexadecimal digits: \"pdproxy keys new NAME\" makes a key with its line, and printf %%s KEY | sha256sum gives the digits of a key", n)
		}
		k.names = append(k.names, name)
		k.hashes = append(k.hashes, [sha256.Size]byte(sum))
	}
	if len(k.names) == 0 {
		return nil, errors.New("no key in the file")
	}
	return k, nil
}

// NewKey is an API key with its line in a file of keys.
type NewKey struct {
	Name string `json:"name"`
	Key  string `json:"key"`  // the secret
	Line string `json:"line"` // without it
}

// GenerateKey returns a random key of a client. The name must consist of letters, digits
// and - _ . : @, so that it is a word of its line.
func GenerateKey(name string) (NewKey, error) {
	if !validName(name) {
		return NewKey{}, fmt.Errorf("invalid name %q: want letters, digits and - _ . : @", name)
	}
	key := "pd-" + rand.Text() + rand.Text() // 260 random bits
	sum := sha256.Sum256([]byte(key))
	return NewKey{Name: name, Key: key, Line: name + " " + hex.EncodeToString(sum[:])}, nil
}

func validName(name string) bool {
	for _, c := range []byte(name) {
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (c < '0' || c > '9') && !strings.ContainsRune("-_.:@", rune(c)) {
			return false
		}
	}
	return name != ""
}

// name returns the name of a key. It compares every entry, each in constant time, so that
// the time does not depend on the keys.
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

// ErrNoKey is the error of Authenticate.
var ErrNoKey = openai.NewError(openai.CodeInvalidAPIKey, "a valid API key is needed: Authorization: Bearer KEY")

type clientKey struct{}

// Authenticate checks the API key of a request. It returns the request with the name of
// the key in its context, for Client and KeyName. The error is ErrNoKey.
func (k *Keys) Authenticate(r *http.Request) (*http.Request, error) {
	if k == nil {
		return r, nil
	}
	scheme, key, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		key = r.Header.Get("X-Api-Key") // the header of Anthropic clients
	}
	name, ok := k.name(key)
	if !ok {
		return nil, ErrNoKey
	}
	return r.WithContext(context.WithValue(r.Context(), clientKey{}, name)), nil
}

// Client returns the name of the client for limits: the name of its key, else its address.
// All addresses of an IPv6 /64 network are one client.
func Client(r *http.Request) string {
	if name := KeyName(r); name != "" {
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

// networkOf returns the /64 network of an IPv6 address. An IPv4-mapped address stays one
// address.
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

// KeyName returns the name of the client's API key, "" if the proxy requires no key. The
// name is a label of metrics. A client address must not be a label.
func KeyName(r *http.Request) string {
	name, _ := r.Context().Value(clientKey{}).(string)
	return name
}
