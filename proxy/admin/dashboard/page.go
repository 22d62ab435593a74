// Package dashboard is the page that the admin address shows to browsers. The page reads
// snapshots of the process or the fleet from a stream of server-sent events, which a Hub
// sends to all viewers. A Meter computes the traffic in the snapshots.
//
// The decisions behind this package are in docs/design/edge.md.
package dashboard

import (
	"embed"
	"net/http"
	"path"
	"strings"
)

// files are the page and its parts. They contain nothing of the process, so that a browser
// may load them without a token.
//
//go:embed page
var files embed.FS

// Folder is the path of the parts of the page.
const Folder = "/dashboard/"

// policy is the Content-Security-Policy. The page has only its own parts, no frame shows the
// page, and its scripts cannot make HTML from text.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// types are the media types of the files.
var types = map[string]string{
	".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml",
}

// Accepted reports whether the client of r is a browser that opens a page.
func Accepted(r *http.Request) bool {
	return strings.Contains(strings.Join(r.Header["Accept"], ","), "text/html")
}

// Page answers with the page.
func Page(w http.ResponseWriter) { Part(w, "index.html") }

// Part answers with the part of the page of that name. It returns false, and has answered
// nothing, if there is no such part.
func Part(w http.ResponseWriter, name string) bool {
	text, err := files.ReadFile("page/" + name)
	if err != nil {
		return false
	}
	head := w.Header()
	head.Set("Content-Type", types[path.Ext(name)])
	head.Set("Content-Security-Policy", policy)
	head.Set("Referrer-Policy", "no-referrer")
	head.Set("X-Frame-Options", "DENY") // for browsers without frame-ancestors
	head.Set("X-Content-Type-Options", "nosniff")
	_, _ = w.Write(text) // an error means that the client has left
	return true
}
