// Package admission checks API keys, queues requests, and limits the number of open
// requests of each client.
//
// The decisions behind this package are in docs/design/request.md.
package admission

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"strings"
	"unicode/utf8"

	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/openai"
	"github.com/pdproxy/pdproxy/proxy/tenant"
)

// Keys is the set of valid API keys: names with the SHA-256 of each key, and the tenant of
// each. A nil *Keys accepts every client. Safe for concurrent use.
type Keys struct {
	clients []*client
	hashes  [][sha256.Size]byte
	tokens  Tokens // nil: there are API keys only
}

// client is what the proxy knows about the holder of a key or a token.
type client struct {
	name   string // label of metrics
	tenant *tenant.Tenant
}

// Tokens verifies the tokens that clients may send instead of an API key.
type Tokens interface {
	// Tenant returns the tenant of the client with that token. The end of ctx ends a wait for
	// the issuer of the token. The error is an *openai.Error.
	Tenant(ctx context.Context, token string) (*tenant.Tenant, error)
}

// ParseKeys reads lines of the form "NAME SHA256 ATTRIBUTE=VALUE...", with 64 hexadecimal
// digits. The attributes are optional. tenants are those of the configuration. ParseKeys skips
// empty lines and lines that begin with #. Errors name the numbers of the wrong lines and the
// attribute, never the content of a line.
func ParseKeys(text []byte, tenants ...config.Tenant) (*Keys, error) {
	k, all := &Keys{}, newTenants(tenants)
	var malformed []int // numbers of lines
	var wrong error     // of the first line that is wrong in another way
	for n, words := range keyLines(text) {
		var sum []byte
		err := hex.ErrLength
		if len(words) > 1 {
			sum, err = hex.DecodeString(words[1])
		}
		if err != nil || len(sum) != sha256.Size {
			malformed = append(malformed, n)
			continue
		}
		switch err := all.add(n, words[0], words[2:]); {
		case wrong != nil:
		case [sha256.Size]byte(sum) == sha256.Sum256(nil):
			wrong = fmt.Errorf("line %d has the SHA-256 of an empty key, which every client without a key would have", n)
		case !utf8.ValidString(words[0]): // the name is a label of metrics
			wrong = fmt.Errorf("line %d has a name that is not UTF-8", n)
		case err != nil:
			wrong = fmt.Errorf("line %d: %w", n, err)
		}
		k.clients = append(k.clients, &client{name: words[0]})
		k.hashes = append(k.hashes, [sha256.Size]byte(sum))
	}
	switch {
	case len(malformed) > 0:
		return nil, fmt.Errorf("%s not \"NAME SHA256\", the SHA-256 of the key as 64 hexadecimal digits: \"pdproxy keys new NAME\" makes a key with its line, and printf %%s KEY | sha256sum gives the digits of a key", linesAre(malformed))
	case wrong != nil:
		return nil, wrong
	case len(k.clients) == 0:
		return nil, errors.New("no key in the file")
	}
	if err := all.assign(k.clients); err != nil {
		return nil, err
	}
	return k, nil
}

// keyLines yields the number and the words of each line that is neither empty nor a comment.
func keyLines(text []byte) iter.Seq2[int, []string] {
	return func(yield func(int, []string) bool) {
		n := 0
		for line := range strings.Lines(string(text)) {
			n++
			words := strings.Fields(line)
			if len(words) > 0 && !strings.HasPrefix(words[0], "#") && !yield(n, words) {
				return
			}
		}
	}
}

// maxNamed is the largest number of lines that an error names.
const maxNamed = 5

// linesAre returns "line 1 is" or "lines 1, 2 and 3 more are".
func linesAre(numbers []int) string {
	if len(numbers) == 1 {
		return fmt.Sprintf("line %d is", numbers[0])
	}
	named := numbers[:min(len(numbers), maxNamed)]
	text := "lines " + strings.ReplaceAll(strings.Trim(fmt.Sprint(named), "[]"), " ", ", ")
	if more := len(numbers) - len(named); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text + " are"
}

// WithTokens returns the keys of k together with tokens. k may be nil: then there are tokens
// only.
func (k *Keys) WithTokens(tokens Tokens) *Keys {
	both := Keys{tokens: tokens}
	if k != nil {
		both.clients, both.hashes = k.clients, k.hashes
	}
	return &both
}

// NewKey is an API key with its line in a file of keys.
type NewKey struct {
	Name string `json:"name"`
	Key  string `json:"key"`  // the secret
	Line string `json:"line"` // without it
}

// GenerateKey returns a random key of a client. The name must consist of letters, digits
// and - _ . : @, so that it is a word of its line. attributes are words of the line, such as
// "rpm=60"; empty ones are left out.
func GenerateKey(name string, attributes ...string) (NewKey, error) {
	if !validName(name) {
		return NewKey{}, fmt.Errorf("invalid name %q: want letters, digits and - _ . : @", name)
	}
	key := "pd-" + rand.Text() + rand.Text() // 260 random bits
	sum := sha256.Sum256([]byte(key))
	line := name + " " + hex.EncodeToString(sum[:])
	for _, attribute := range attributes {
		if attribute == "" {
			continue
		}
		if err := new(keyLine).set(attribute); err != nil {
			return NewKey{}, err
		}
		line += " " + attribute
	}
	return NewKey{Name: name, Key: key, Line: line}, nil
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

// client returns the holder of a key, nil for none. It compares every entry, each in constant
// time, so that the time does not depend on the keys.
func (k *Keys) client(key string) *client {
	sum := sha256.Sum256([]byte(key))
	found := -1
	for i := range k.hashes {
		if subtle.ConstantTimeCompare(sum[:], k.hashes[i][:]) == 1 {
			found = i
		}
	}
	if found < 0 {
		return nil
	}
	return k.clients[found]
}

// ErrNoKey is the error of Authenticate.
var ErrNoKey = openai.NewError(openai.CodeInvalidAPIKey, "a valid API key is needed: Authorization: Bearer KEY")

type clientKey struct{}

// Authenticate checks the API key or the token of a request. It returns the request with the
// holder in its context, for Proxies.Client, KeyName and Tenant. The error is an *openai.Error:
// ErrNoKey, or one of Tokens.
func (k *Keys) Authenticate(r *http.Request) (*http.Request, error) {
	if k == nil {
		return r, nil
	}
	scheme, key, ok := strings.Cut(r.Header.Get("Authorization"), " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		key = r.Header.Get("X-Api-Key") // the header of Anthropic clients
	}
	c := k.client(key)
	if c == nil && k.tokens != nil && key != "" {
		t, err := k.tokens.Tenant(r.Context(), key)
		if err != nil {
			return nil, err
		}
		c = &client{name: t.Name, tenant: t}
	}
	if c == nil {
		return nil, ErrNoKey
	}
	return r.WithContext(context.WithValue(r.Context(), clientKey{}, c)), nil
}

// KeyName returns the name of the client's API key, and for a token that of its tenant; ""
// if the proxy requires no key. The name is a label of metrics. A client address must not be a
// label.
func KeyName(r *http.Request) string {
	if c, _ := r.Context().Value(clientKey{}).(*client); c != nil {
		return c.name
	}
	return ""
}

// Tenant returns the tenant of the client of r, nil if the proxy requires no key. r is a
// result of Authenticate.
func Tenant(r *http.Request) *tenant.Tenant {
	if c, _ := r.Context().Value(clientKey{}).(*client); c != nil {
		return c.tenant
	}
	return nil
}
