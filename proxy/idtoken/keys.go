package idtoken

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/MicahParks/keyfunc/v3"
	"github.com/golang-jwt/jwt/v5"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const (
	// leeway is the accepted difference between the clocks of the issuer and of this host.
	leeway = 30 * time.Second
	// fetchPause is the shortest time between two requests to an issuer, so that tokens
	// with unknown keys cause no load on the issuer.
	fetchPause = 10 * time.Second
	// fetchLimit bounds one request to an issuer.
	fetchLimit = 5 * time.Second
	// mostKeys is the size of the largest accepted set of keys, in bytes.
	mostKeys = 1 << 20
)

// errNoKeys reports that no set of keys has been read yet.
var errNoKeys = errors.New("no keys of the issuer have been read")

// keySet is the public keys of one issuer. It reads them when a token needs them, so that it
// has no goroutine.
type keySet struct {
	url     string // "": the keys are those of a file
	refresh time.Duration
	client  *http.Client
	keys    atomic.Pointer[loadedKeys] // nil: none were read yet

	mu    sync.Mutex
	tried time.Time // of the last request; guarded by mu
}

// loadedKeys is a set of keys that was read at a time.
type loadedKeys struct {
	keyfunc.Keyfunc
	at time.Time
}

func newKeySet(c config.JWT, file []byte, transport http.RoundTripper) (*keySet, error) {
	s := &keySet{url: c.JWKSURL, refresh: time.Duration(c.JWKSRefresh)}
	if s.url == "" {
		return s, s.load(file)
	}
	s.client = &http.Client{Transport: transport, Timeout: fetchLimit, CheckRedirect: func(*http.Request, []*http.Request) error {
		return errors.New("the issuer's keys must be at jwks_url itself, without a redirect")
	}}
	return s, nil
}

// load replaces the keys by those of a JSON Web Key Set. Keys of an unknown type are left out.
func (s *keySet) load(text []byte) error {
	var set jwkset.JWKSMarshal
	if err := json.Unmarshal(text, &set); err != nil {
		return errors.New("the keys are not a JSON Web Key Set")
	}
	storage := jwkset.NewMemoryStorage()
	usable := 0
	for _, one := range set.Keys {
		key, err := jwkset.NewJWKFromMarshal(one, jwkset.JWKMarshalOptions{Private: true}, jwkset.JWKValidateOptions{})
		if err != nil || one.KTY == jwkset.KtyOct {
			continue
		}
		if err := storage.KeyWrite(context.Background(), key); err != nil {
			return err
		}
		usable++
	}
	if usable == 0 {
		return errors.New("the keys are not a JSON Web Key Set with a public key")
	}
	find, err := keyfunc.New(keyfunc.Options{Storage: storage})
	if err != nil {
		return err
	}
	s.keys.Store(&loadedKeys{find, time.Now()})
	return nil
}

// find returns the function that finds the key of a token.
func (s *keySet) find(log *slog.Logger) jwt.Keyfunc {
	return func(token *jwt.Token) (any, error) {
		now := s.keys.Load()
		if s.url != "" && (now == nil || time.Since(now.at) > s.refresh) {
			now = s.fetch(now, log)
		}
		if now == nil {
			return nil, errNoKeys
		}
		key, err := now.Keyfunc.Keyfunc(token)
		if errors.Is(err, jwkset.ErrKeyNotFound) && s.url != "" { // the issuer may have a new key
			if next := s.fetch(now, log); next != now {
				return next.Keyfunc.Keyfunc(token)
			}
		}
		return key, err
	}
}

// fetch reads the keys from the issuer, unless another token has done so since old was loaded,
// or shortly before. It returns the present keys, nil for none.
func (s *keySet) fetch(old *loadedKeys, log *slog.Logger) *loadedKeys {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.keys.Load(); now != old || !s.tried.IsZero() && time.Since(s.tried) < fetchPause {
		return now
	}
	s.tried = time.Now()
	text, err := s.get()
	if err == nil {
		err = s.load(text)
	}
	if err != nil {
		log.Warn("the keys of an issuer of tokens cannot be read", "url", s.url, "error", err)
	}
	return s.keys.Load()
}

func (s *keySet) get() ([]byte, error) {
	resp, err := s.client.Get(s.url)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the issuer answers with status %d", resp.StatusCode)
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, mostKeys+1))
	if err == nil && len(text) > mostKeys {
		err = fmt.Errorf("the set of keys has more than %d bytes", mostKeys)
	}
	return text, err
}
