// Package httpguard protects the internal HTTP addresses: the admin address and those
// at which TensorRT-LLM's workers register and are placed. A guard refuses requests
// that a web page made, and requests without the bearer token.
//
// Any web page can make a browser send requests to internal addresses. The browser marks
// such requests. Origin names the page's origin, except on GET and HEAD. Sec-Fetch-Site
// shows whether the page has another origin. Host is the name in the page's URL, even if
// the page's owner has made that name resolve to this address (DNS rebinding). A page of
// another origin can send bodies of only three media types without a preflight request.
// The guard accepts none of these types.
//
// The decisions behind this package are in docs/design/edge.md.
package httpguard

import (
	"cmp"
	"crypto/subtle"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/pdproxy/pdproxy/proxy/lograte"
)

// Guard determines which requests an internal address serves. The zero value serves
// requests without a token if their Host is an IP address or localhost and if they have
// no body.
type Guard struct {
	// Name names the address in the log, such as "admin.listen".
	Name string
	// Address is where the listener is; nil is an address beyond loopback.
	Address net.Addr
	// Hosts are names without a port. A request without the token may have one of
	// them as its Host, besides localhost and, beyond loopback, this machine's name.
	Hosts []string
	// Token is the bearer token. "": no request needs one.
	Token string
	// Open reports whether a request without the token is served; nil: none is.
	Open func(*http.Request) bool
	// Page reports whether the answer is a page for the users of browsers. A link on a page
	// of another origin may lead there; nil: no answer is such a page. The page must forbid
	// frames, because the other page may not show it.
	Page func(*http.Request) bool
	// Types are the media types that a request's body may have, in lower case.
	Types []string
	// Refuse answers a request with an error: 401, 403 or 415.
	Refuse func(w http.ResponseWriter, r *http.Request, status int, text string)
	// Log gets at most one line a minute for each client address about refused
	// requests; nil: none.
	Log *slog.Logger
}

// refusalEvery is the time for which further refusals of the same client address are not
// logged.
const refusalEvery = time.Minute

// The texts of refusals. They repeat nothing of the request.
const (
	textOrigin = "requests of web pages of another origin are refused"
	textHost   = "the Host line names neither an IP address nor a name of this address; send the token, or add the name to admin.allowed_hosts"
	textToken  = "the token of this address is needed: Authorization: Bearer TOKEN"
	textType   = "the body's Content-Type is missing or is not one of: "
)

// Wrap returns a handler that checks each request before h sees it. It reads no body.
func (g Guard) Wrap(h http.Handler) http.Handler {
	lines := &lograte.Limiter[string]{Every: refusalEvery}
	g.Hosts = g.allHosts()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		head := w.Header()
		head.Set("Cache-Control", "no-store")
		head.Set("Cross-Origin-Resource-Policy", "same-origin")
		head.Set("X-Content-Type-Options", "nosniff")
		status, text := g.check(r)
		if status == 0 {
			h.ServeHTTP(w, r)
			return
		}
		if status == http.StatusUnauthorized {
			head.Set("WWW-Authenticate", "Bearer")
		}
		if from := remote(r); g.Log != nil && lines.Allow(from) {
			g.Log.Warn("a request to an internal address was refused", "address", g.Name, "client", from, "status", status, "reason", text)
		}
		g.Refuse(w, r, status, text)
	})
}

// check returns why a request is refused. Status 0: the request is allowed.
func (g *Guard) check(r *http.Request) (status int, text string) {
	known := g.Token != "" && g.bears(r)
	switch {
	case !sameOrigin(r) && !g.followed(r):
		return http.StatusForbidden, textOrigin
	case !known && !g.ownHost(r.Host):
		return http.StatusForbidden, textHost
	case !known && g.Token != "" && (g.Open == nil || !g.Open(r)):
		return http.StatusUnauthorized, textToken
	case r.ContentLength != 0 && !g.takes(r.Header["Content-Type"]):
		return http.StatusUnsupportedMediaType, textType + strings.Join(g.Types, ", ")
	}
	return 0, ""
}

// bears reports whether the request has the token. The comparison takes the same time
// for every token of the right length.
func (g *Guard) bears(r *http.Request) bool {
	lines := r.Header["Authorization"]
	if len(lines) != 1 {
		return false
	}
	scheme, token, _ := strings.Cut(lines[0], " ")
	return strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare([]byte(token), []byte(g.Token)) == 1
}

// sameOrigin reports whether no page of another origin can have sent the request. A page
// has the same origin only if its scheme is HTTP and its host and port equal those of
// Host. ownHost checks Host.
func sameOrigin(r *http.Request) bool {
	for _, site := range r.Header["Sec-Fetch-Site"] {
		if site != "same-origin" && site != "none" {
			return false
		}
	}
	for _, origin := range r.Header["Origin"] {
		u, err := url.Parse(origin)
		if err != nil || u.Host == "" || u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" {
			return false
		}
		port, ok := map[string]string{"http": "80", "https": "443"}[u.Scheme]
		if !ok || withPort(u.Host, port) != withPort(r.Host, port) {
			return false
		}
	}
	return true
}

// followed reports whether the user of a browser has followed a link to a page. The page that
// has the link cannot read the answer.
func (g *Guard) followed(r *http.Request) bool {
	only := func(name, value string) bool {
		lines := r.Header[name]
		return len(lines) == 1 && lines[0] == value
	}
	return g.Page != nil && g.Page(r) && r.Method == http.MethodGet && len(r.Header["Origin"]) == 0 &&
		only("Sec-Fetch-Mode", "navigate") && only("Sec-Fetch-Dest", "document")
}

// withPort returns a host in lower case with its port.
func withPort(hostport, port string) string {
	host := &url.URL{Host: hostport}
	return strings.ToLower(host.Hostname()) + ":" + cmp.Or(host.Port(), port)
}

// ownHost reports whether Host is an IP address or one of the names of this address. The
// owner of another DNS name cannot make a browser send these. An empty Host comes from
// HTTP/1.0, which no browser uses.
func (g *Guard) ownHost(hostport string) bool {
	if _, local := g.Address.(*net.UnixAddr); local || hostport == "" {
		return true // no browser reaches a Unix socket
	}
	host := canonical((&url.URL{Host: hostport}).Hostname())
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap().IsLoopback() || !g.loopback() || slices.Contains(g.Hosts, host)
	}
	return host == "localhost" || slices.Contains(g.Hosts, host)
}

// allHosts returns Hosts and, beyond loopback, this machine's name, which other hosts
// of its network use.
func (g *Guard) allHosts() []string {
	var all []string
	for _, name := range g.Hosts {
		all = append(all, canonical(name))
	}
	if name, err := os.Hostname(); err == nil && name != "" && !g.loopback() {
		short, _, _ := strings.Cut(name, ".")
		all = append(all, canonical(name), canonical(short))
	}
	return all
}

// loopback reports whether only this host reaches the address.
func (g *Guard) loopback() bool { return Loopback(g.Address) }

// Loopback reports whether only this host can reach a listener at the address, as with a
// Unix socket.
func Loopback(a net.Addr) bool {
	switch a := a.(type) {
	case *net.TCPAddr:
		return a.IP.IsLoopback()
	case *net.UnixAddr:
		return true
	}
	return false
}

// canonical returns a host name in lower case without the final dot.
func canonical(host string) string { return strings.ToLower(strings.TrimSuffix(host, ".")) }

// takes reports whether a body of that Content-Type is accepted.
func (g *Guard) takes(lines []string) bool {
	if len(lines) != 1 {
		return false
	}
	media, _, _ := strings.Cut(lines[0], ";")
	return slices.Contains(g.Types, strings.ToLower(strings.TrimSpace(media)))
}

// remote returns the address of the client without its port.
func remote(r *http.Request) string {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return "local" // a Unix socket
	}
	return host
}
