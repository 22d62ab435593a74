// Package kube is a small client of a Kubernetes API server: it lists and watches objects, and
// reads and writes single ones. The package decodes only the members that the proxy needs.
//
// The decisions behind this package are in docs/design/engines.md.
package kube

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const (
	// timeout bounds one listing, and Timeout one request for a single object.
	timeout = 30 * time.Second
	// watchFor is the time-out that a watch requests from the API server. The source
	// closes a watch that is still open grace later.
	watchFor = 5 * time.Minute
	grace    = 15 * time.Second
	// listEvery is the time after which a watch begins with a new listing: if the
	// server's store was set back, a watch from a future version reports nothing.
	listEvery = 10 * time.Minute
	// again is the pause after a failed listing.
	again = time.Second
	// maxList bounds one listing, maxEvent one event of a watch, in bytes. etcd
	// stores no object above 1.5 MB.
	maxList  = 256 << 20
	maxEvent = 8 << 20
	// maxObjects bounds the objects of one watch, maxParts their endpoints, ports and
	// conditions together, and maxBraces the JSON objects within one object: a part takes up to
	// 200 bytes of memory, and two bytes of a listing.
	maxObjects = 50_000
	maxParts   = 500_000
	maxBraces  = 50_000
)

// serviceAccount is the directory with the token, the CA and the namespace of a pod's
// service account.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// Timeout bounds one request for a single object.
const Timeout = 5 * time.Second

// errGone reports that the requested history no longer exists: a new listing is needed.
var errGone = errors.New("the history since the last listing no longer exists")

// StatusError is an answer of the API server that is no success.
type StatusError struct {
	Code int
	text string
}

// Error implements error.
func (e *StatusError) Error() string { return e.text }

// Is reports whether err is an answer with that status.
func Is(err error, code int) bool {
	s := (*StatusError)(nil)
	return errors.As(err, &s) && s.Code == code
}

// Client is a client of an API server. Its methods are safe for concurrent use.
type Client struct {
	// Namespace is the namespace of objects without one; "": unknown.
	Namespace string

	base      string // without a final slash
	tokenFile string // read for each request, because tokens are renewed
	client    atomic.Pointer[http.Client]
}

// Open returns a client for the address and the credentials of the configuration, or of the pod
// in which this process runs. It opens nothing but files. The error is a config.Problems.
func Open(cfg config.DiscoveryKubernetes) (*Client, error) {
	return newClient(cfg, serviceAccount, os.Getenv)
}

// Over returns a client without credentials whose requests go to transport.
func Over(transport http.RoundTripper) *Client {
	a := &Client{base: "http://kubernetes.invalid"}
	a.client.Store(clientOf(transport))
	return a
}

// newClient reads the address and credentials of the API server: from the
// configuration, or else from the pod's service account.
func newClient(cfg config.DiscoveryKubernetes, account string, getenv func(string) string) (*Client, error) {
	a := &Client{base: strings.TrimSuffix(cfg.API, "/"), Namespace: cfg.Namespace, tokenFile: cfg.TokenFile}
	ca := cfg.CA
	if a.base == "" {
		host, port := getenv("KUBERNETES_SERVICE_HOST"), getenv("KUBERNETES_SERVICE_PORT")
		if host == "" || port == "" {
			return nil, config.Problems{{Key: "discovery.kubernetes.api", Message: "is required outside a cluster: no KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT"}}
		}
		a.base = "https://" + net.JoinHostPort(host, port)
		if a.tokenFile == "" {
			a.tokenFile = filepath.Join(account, "token")
		}
		if ca == "" {
			ca = filepath.Join(account, "ca.crt")
		}
		if a.Namespace == "" {
			name, _ := os.ReadFile(filepath.Join(account, "namespace")) // without it, Services must name their namespace
			a.Namespace = strings.TrimSpace(string(name))
		}
	}
	if _, err := config.ReadSecret(a.tokenFile); err != nil {
		return nil, config.Problems{{Key: "discovery.kubernetes.token_file", Message: err.Error()}}
	}
	transport := &http.Transport{
		ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: 10 * time.Second, ResponseHeaderTimeout: timeout, IdleConnTimeout: time.Minute,
		DialContext: (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 10 * time.Second}).DialContext,
		// Pings detect that the server's host has lost power or its link: such a host
		// sends no reset.
		HTTP2: &http.HTTP2Config{SendPingTimeout: 10 * time.Second, PingTimeout: 5 * time.Second},
	}
	if ca != "" {
		var err error
		if transport.TLSClientConfig.RootCAs, err = readCAs(ca); err != nil {
			return nil, config.Problems{{Key: "discovery.kubernetes.ca", Message: err.Error()}}
		}
	}
	a.client.Store(clientOf(transport))
	return a, nil
}

func clientOf(transport http.RoundTripper) *http.Client {
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // the token must not be sent elsewhere
	}
}

// LocalIP returns the address of this host that connections to the API server have. It sends nothing.
func (a *Client) LocalIP() (net.IP, error) {
	u, err := url.Parse(a.base)
	if err != nil {
		return nil, err
	}
	conn, err := net.DialTimeout("udp", net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443")), Timeout)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).IP, nil
}

// Redial makes later requests use new connections.
func (a *Client) Redial() {
	before := a.client.Load()
	if t, ok := before.Transport.(*http.Transport); ok && a.client.CompareAndSwap(before, clientOf(t.Clone())) {
		t.CloseIdleConnections()
	}
}

// readCAs reads a file of CA certificates.
func readCAs(path string) (*x509.CertPool, error) {
	pem, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("no certificate in %s", path)
	}
	return pool, nil
}

// get makes a GET of a path. An answer other than 200 is a *StatusError, errGone for 410.
func (a *Client) get(ctx context.Context, path string, query url.Values) (io.ReadCloser, error) {
	return a.send(ctx, http.MethodGet, path+"?"+query.Encode(), nil)
}

// send makes a request. An answer other than 200 and 201 is a *StatusError, errGone for 410.
func (a *Client) send(ctx context.Context, method, target string, body []byte) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, method, a.base+target, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	token, err := config.ReadSecret(a.tokenFile)
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
		if method == http.MethodPatch {
			req.Header.Set("Content-Type", "application/merge-patch+json")
		}
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "pdproxy")
	resp, err := a.client.Load().Do(req)
	what := strings.ToLower(method) + " " + req.URL.Path // the query may be long
	if err != nil {
		if u := (*url.Error)(nil); errors.As(err, &u) {
			err = fmt.Errorf("%s: %w", what, u.Err)
		}
		return nil, err
	}
	if resp.StatusCode == http.StatusOK || resp.StatusCode == http.StatusCreated {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusGone {
		return nil, errGone
	}
	var s status
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	_ = json.Unmarshal(text, &s) // a proxy in between may send another body
	return nil, &StatusError{resp.StatusCode, fmt.Sprintf("%s: status %d %s", what, resp.StatusCode, clip(s.Message))}
}

// Read returns the object at path. Read ends after Timeout.
func (a *Client) Read(ctx context.Context, path string) (*Object, error) {
	return a.one(ctx, http.MethodGet, path, nil)
}

// Write makes an object by POST, or changes it by PATCH, and returns the object after the change.
// A resourceVersion in the metadata of a change is a condition: if the object has another version,
// the error has status 409. Write ends after Timeout.
func (a *Client) Write(ctx context.Context, method, path string, object any) (*Object, error) {
	body, err := json.Marshal(object)
	if err != nil {
		return nil, err
	}
	return a.one(ctx, method, path, body)
}

// one makes a request about one object.
func (a *Client) one(ctx context.Context, method, path string, body []byte) (*Object, error) {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	answer, err := a.send(ctx, method, path, body)
	if err != nil {
		return nil, err
	}
	defer answer.Close()
	text, err := io.ReadAll(io.LimitReader(answer, maxEvent+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	o, err := readObject(text)
	if err != nil {
		return nil, fmt.Errorf("decode %s: %w", path, err)
	}
	return &o, nil
}

// clip bounds the length of foreign text in a log.
func clip(text string) string {
	const most = 300
	if len(text) > most {
		text = text[:most] + "..."
	}
	return text
}

// list returns the objects of a path that the selectors of a query match, and the version to
// watch from.
func (a *Client) list(ctx context.Context, path string, selected url.Values) (l list, err error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	body, err := a.get(ctx, path, selected)
	if err != nil {
		return l, err
	}
	defer body.Close()
	if err := l.read(io.LimitReader(body, maxList)); err != nil {
		return list{}, fmt.Errorf("decode the list of %s: %w", path, err)
	}
	if l.Metadata.ResourceVersion == "" {
		return l, fmt.Errorf("decode the list of %s: no resourceVersion", path)
	}
	return l, nil
}

// watch calls take with the changes after a version, in order, until the server ends
// the watch (nil) or there is an error.
func (a *Client) watch(ctx context.Context, path string, selected url.Values, version string, take func(kind string, o Object)) error {
	ctx, cancel := context.WithTimeout(ctx, watchFor+grace)
	defer cancel()
	query := url.Values{
		"watch": {"true"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {version},
		"timeoutSeconds": {fmt.Sprint(int(watchFor.Seconds()))},
	}
	maps.Copy(query, selected)
	body, err := a.get(ctx, path, query)
	if err != nil {
		return err
	}
	defer body.Close()
	bounded := &io.LimitedReader{R: body}
	for d := json.NewDecoder(bounded); ; {
		bounded.N = maxEvent
		var e event
		switch err := d.Decode(&e); {
		case err == io.EOF && bounded.N > 0:
			return nil
		case err != nil:
			return fmt.Errorf("read the watch of %s: %w", path, err)
		}
		if err := e.take(take); err != nil {
			return fmt.Errorf("watch %s: %w", path, err)
		}
	}
}

// serves returns an error unless the server is an API server.
func (a *Client) serves(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	body, err := a.get(ctx, "/apis", nil)
	if err != nil {
		return err
	}
	defer body.Close()
	var groups struct {
		Kind string `json:"kind"`
	}
	if err := json.NewDecoder(io.LimitReader(body, maxEvent)).Decode(&groups); err != nil || groups.Kind != "APIGroupList" {
		return errors.New("get /apis: the answer is no list of API groups")
	}
	return nil
}
