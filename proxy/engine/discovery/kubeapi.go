package discovery

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/config"
)

const (
	// kubeListTimeout bounds one listing.
	kubeListTimeout = 30 * time.Second
	// kubeWatchFor is the time-out that a watch requests from the API server. The source
	// closes a watch that is still open kubeGrace later.
	kubeWatchFor = 5 * time.Minute
	kubeGrace    = 15 * time.Second
	// kubeListEvery is the time after which a watch begins with a new listing: if the
	// server's store was set back, a watch from a future version reports nothing.
	kubeListEvery = 10 * time.Minute
	// maxKubeList bounds one listing, maxKubeEvent one event of a watch, in bytes. etcd
	// stores no object above 1.5 MB.
	maxKubeList  = 256 << 20
	maxKubeEvent = 8 << 20
	// maxKubeObjects bounds the objects of one watch, maxKubeParts their endpoints, ports and
	// conditions together, and maxKubeBraces the JSON objects within one object: a part takes up to
	// 200 bytes of memory, and two bytes of a listing.
	maxKubeObjects = 50_000
	maxKubeParts   = 500_000
	maxKubeBraces  = 50_000
)

// serviceAccount is the directory with the token, the CA and the namespace of a pod's
// service account.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// errGone reports that the requested history no longer exists: a new listing is needed.
var errGone = errors.New("the history since the last listing no longer exists")

// kubeAPI is a client of an API server. Its methods are safe for concurrent use.
type kubeAPI struct {
	base      string // without a final slash
	namespace string // namespace of Services without one; "" unknown
	tokenFile string // read for each request, because tokens are renewed
	client    *http.Client
}

// newKubeAPI reads the address and credentials of the API server: from the
// configuration, or else from the pod's service account.
func newKubeAPI(cfg config.DiscoveryKubernetes, account string, getenv func(string) string) (*kubeAPI, error) {
	a := &kubeAPI{base: strings.TrimSuffix(cfg.API, "/"), namespace: cfg.Namespace, tokenFile: cfg.TokenFile}
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
		if a.namespace == "" {
			name, _ := os.ReadFile(filepath.Join(account, "namespace")) // without it, Services must name their namespace
			a.namespace = strings.TrimSpace(string(name))
		}
	}
	if _, err := config.ReadSecret(a.tokenFile); err != nil {
		return nil, config.Problems{{Key: "discovery.kubernetes.token_file", Message: err.Error()}}
	}
	transport := &http.Transport{
		ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: 10 * time.Second, ResponseHeaderTimeout: kubeListTimeout, IdleConnTimeout: time.Minute,
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
	a.client = &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // the token must not be sent elsewhere
	}
	return a, nil
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

// get makes a GET of a path. An answer other than 200 is an error, errGone for 410.
func (a *kubeAPI) get(ctx context.Context, path string, query url.Values) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.base+path+"?"+query.Encode(), nil)
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
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "pdproxy")
	resp, err := a.client.Do(req)
	if err != nil {
		if u := (*url.Error)(nil); errors.As(err, &u) { // its text contains the whole query
			err = fmt.Errorf("get %s: %w", path, u.Err)
		}
		return nil, err
	}
	if resp.StatusCode == http.StatusOK {
		return resp.Body, nil
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusGone {
		return nil, errGone
	}
	var s kubeStatus
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	_ = json.Unmarshal(text, &s) // a proxy in between may send another body
	return nil, fmt.Errorf("get %s: status %d %s", path, resp.StatusCode, clip(s.Message))
}

// clip bounds the length of foreign text in a log.
func clip(text string) string {
	const most = 300
	if len(text) > most {
		text = text[:most] + "..."
	}
	return text
}

// list returns the objects of a path that match a label selector, and the version to
// watch from.
func (a *kubeAPI) list(ctx context.Context, path, selector string) (list kubeList, err error) {
	ctx, cancel := context.WithTimeout(ctx, kubeListTimeout)
	defer cancel()
	query := url.Values{}
	if selector != "" {
		query.Set("labelSelector", selector)
	}
	body, err := a.get(ctx, path, query)
	if err != nil {
		return list, err
	}
	defer body.Close()
	if err := list.read(io.LimitReader(body, maxKubeList)); err != nil {
		return kubeList{}, fmt.Errorf("decode the list of %s: %w", path, err)
	}
	if list.Metadata.ResourceVersion == "" {
		return list, fmt.Errorf("decode the list of %s: no resourceVersion", path)
	}
	return list, nil
}

// watch calls event with the changes after a version, in order, until the server ends
// the watch (nil) or there is an error.
func (a *kubeAPI) watch(ctx context.Context, path, selector, version string, event func(kind string, o kubeObject)) error {
	ctx, cancel := context.WithTimeout(ctx, kubeWatchFor+kubeGrace)
	defer cancel()
	query := url.Values{
		"watch": {"true"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {version},
		"timeoutSeconds": {fmt.Sprint(int(kubeWatchFor.Seconds()))},
	}
	if selector != "" {
		query.Set("labelSelector", selector)
	}
	body, err := a.get(ctx, path, query)
	if err != nil {
		return err
	}
	defer body.Close()
	bounded := &io.LimitedReader{R: body}
	for d := json.NewDecoder(bounded); ; {
		bounded.N = maxKubeEvent
		var e kubeEvent
		switch err := d.Decode(&e); {
		case err == io.EOF && bounded.N > 0:
			return nil
		case err != nil:
			return fmt.Errorf("read the watch of %s: %w", path, err)
		}
		if err := e.take(event); err != nil {
			return fmt.Errorf("watch %s: %w", path, err)
		}
	}
}
