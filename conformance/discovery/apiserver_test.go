//go:build !kubernetes

package discovery

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pdproxy/pdproxy/internal/dev/testbed"
)

// engineHost is the address of the pods' engines. A real API server accepts no
// loopback address in an EndpointSlice. In all other respects that its clients
// here can notice, the simulated one is as strict.
const engineHost = "127.0.0.1"

// secondHost is the address of further pods.
const secondHost = "127.0.0.2"

// simServer is a simulated API server: objects under two paths, with versions
// from one history, as in etcd. Its answers have the form of kube-apiserver
// v1.34.4.
type simServer struct {
	t      *testing.T
	listen string
	certs  *certificates
	http   *http.Server

	mu      sync.Mutex
	version int
	oldest  int                          // earlier versions are compacted away
	objects map[string]map[string]fields // by path and name
	history []change
	news    chan struct{} // closed at the next change
}

// change is one step of the history.
type change struct {
	path        string
	before, now fields // nil: the object did not exist before, or does not exist now
	version     int
}

func newAPIServer(t *testing.T, c *cluster) apiServer {
	t.Helper()
	s := &simServer{
		t: t, listen: testbed.FreeAddr(t), certs: c.certs, version: 100, news: make(chan struct{}),
		objects: map[string]map[string]fields{slicesPath: {}, podsPath: {}, poolsPath: {}, leasesPath: {}, servicesPath: {}, objectivesPath: {}, rewritesPath: {}},
	}
	s.start()
	t.Cleanup(s.kill)
	return s
}

func (s *simServer) addr() string { return s.listen }

func (*simServer) definePools() {} // they are served from the start

func (*simServer) defineObjects() {} // so are these

func (s *simServer) start() {
	s.t.Helper()
	l, err := net.Listen("tcp", s.listen)
	if err != nil {
		s.t.Fatal(err)
	}
	s.http = &http.Server{Handler: s}
	go func(server *http.Server) { _ = server.ServeTLS(l, s.certs.cert, s.certs.key) }(s.http)
}

// kill ends the server with all its connections.
func (s *simServer) kill() { s.http.Close() }

func (s *simServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
	path, ofStatus := strings.CutSuffix(r.URL.Path, "/status")
	name := ""
	if s.objects[path] == nil {
		at := strings.LastIndexByte(path, '/')
		path, name = path[:at], path[at+1:]
	}
	switch {
	case token != adminToken && token != readerToken:
		sayStatus(w, http.StatusUnauthorized, "Unauthorized")
	case token == readerToken && !readerMay(r, path, name, ofStatus):
		sayStatus(w, http.StatusForbidden, "forbidden: User \"pdproxy\"")
	case s.objects[path] == nil:
		sayStatus(w, http.StatusNotFound, "the server could not find the requested resource")
	case r.Method != http.MethodGet:
		s.write(w, r, path, name)
	case name != "":
		s.read(w, path, name)
	case r.URL.Query().Has("watch"):
		s.watch(w, r, path)
	default:
		s.list(w, r, path)
	}
}

// readerMay reports whether the rights of the proxy allow a request: those that
// docs/howto/discovery.md lists.
func readerMay(r *http.Request, path, name string, ofStatus bool) bool {
	get := r.Method == http.MethodGet
	switch path {
	case leasesPath:
		return get || r.Method == http.MethodPost || r.Method == http.MethodPatch
	case servicesPath:
		return get && name != ""
	case poolsPath, objectivesPath, rewritesPath:
		return get && name == "" || r.Method == http.MethodPatch && ofStatus
	default:
		return get && name == ""
	}
}

// read answers with one object.
func (s *simServer) read(w http.ResponseWriter, path, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.objects[path][name]
	if o == nil {
		sayStatus(w, http.StatusNotFound, "not found")
		return
	}
	_ = json.NewEncoder(w).Encode(o)
}

func sayStatus(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(statusOf(code, message))
}

func statusOf(code int, message string) fields {
	return fields{"kind": "Status", "apiVersion": "v1", "metadata": fields{}, "status": "Failure", "message": message, "code": code}
}

// write creates, patches or deletes one object.
func (s *simServer) write(w http.ResponseWriter, r *http.Request, path, name string) {
	var sent fields
	if err := json.NewDecoder(r.Body).Decode(&sent); err != nil {
		sayStatus(w, http.StatusBadRequest, err.Error())
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var now fields
	before := s.objects[path][name]
	switch {
	case r.Method == http.MethodPost && name == "":
		now = merged(sent, fields{"metadata": fields{"uid": fmt.Sprint("uid-", s.version+1), "namespace": "llm", "creationTimestamp": time.Now().UTC().Format(time.RFC3339)}})
		name, _ = now["metadata"].(fields)["name"].(string)
		before = s.objects[path][name]
		if name == "" || before != nil {
			sayStatus(w, http.StatusConflict, "already exists, or no name")
			return
		}
	case before == nil:
		sayStatus(w, http.StatusNotFound, "not found")
		return
	case r.Method == http.MethodPatch && r.Header.Get("Content-Type") == "application/merge-patch+json":
		if v := versionOf(sent); v != nil && v != versionOf(before) {
			sayStatus(w, http.StatusConflict, "the object has been modified")
			return
		}
		now = merged(before, sent)
	case r.Method != http.MethodDelete:
		sayStatus(w, http.StatusMethodNotAllowed, "the server does not allow this method on the requested resource")
		return
	}
	s.version++
	at := fields{"metadata": fields{"resourceVersion": strconv.Itoa(s.version)}}
	if now == nil {
		delete(s.objects[path], name)
		before = merged(before, at)
	} else {
		now = merged(now, at)
		s.objects[path][name] = now
	}
	s.history = append(s.history, change{path: path, before: before, now: now, version: s.version})
	close(s.news)
	s.news = make(chan struct{})
	answer := now
	if now == nil {
		answer = before
	}
	_ = json.NewEncoder(w).Encode(answer)
}

// versionOf returns the version in an object, nil for none.
func versionOf(o fields) any {
	metadata, _ := o["metadata"].(fields)
	return metadata["resourceVersion"]
}

// merged returns an object with a merge patch (RFC 7386) applied. It changes
// neither argument.
func merged(object, patch fields) fields {
	result := maps.Clone(object)
	if result == nil {
		result = fields{}
	}
	for key, value := range patch {
		inner, isObject := value.(fields)
		switch {
		case value == nil:
			delete(result, key)
		case isObject:
			of, _ := result[key].(fields)
			result[key] = merged(of, inner)
		default:
			result[key] = value
		}
	}
	return result
}

// selects reports whether the selectors of a query match an object; nil never matches.
func selects(q url.Values, o fields) bool {
	if o == nil {
		return false
	}
	metadata, _ := o["metadata"].(fields)
	if name, named := strings.CutPrefix(q.Get("fieldSelector"), "metadata.name="); named && metadata["name"] != name {
		return false
	}
	labels, _ := metadata["labels"].(fields)
	for term := range strings.SplitSeq(q.Get("labelSelector"), ",") {
		key, value, _ := strings.Cut(term, "=")
		if term != "" && labels[key] != value {
			return false
		}
	}
	return true
}

// knows rejects queries that the simulator does not support.
func knows(w http.ResponseWriter, r *http.Request, keys ...string) bool {
	for key := range r.URL.Query() {
		if !slices.Contains(keys, key) {
			sayStatus(w, http.StatusBadRequest, "unknown parameter "+key)
			return false
		}
	}
	return true
}

func (s *simServer) list(w http.ResponseWriter, r *http.Request, path string) {
	if !knows(w, r, "labelSelector", "fieldSelector") {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	items := []fields{}
	for _, name := range slices.Sorted(maps.Keys(s.objects[path])) {
		if o := s.objects[path][name]; selects(r.URL.Query(), o) {
			items = append(items, o)
		}
	}
	_ = json.NewEncoder(w).Encode(fields{"metadata": fields{"resourceVersion": strconv.Itoa(s.version)}, "items": items})
}

// watch sends the changes after a version until the client's time is up. Every
// second it sends its current version.
func (s *simServer) watch(w http.ResponseWriter, r *http.Request, path string) {
	if !knows(w, r, "watch", "allowWatchBookmarks", "resourceVersion", "timeoutSeconds", "labelSelector", "fieldSelector") {
		return
	}
	q := r.URL.Query()
	from, err := strconv.Atoi(q.Get("resourceVersion"))
	seconds, err2 := strconv.Atoi(q.Get("timeoutSeconds"))
	if err != nil || err2 != nil {
		sayStatus(w, http.StatusBadRequest, "invalid number")
		return
	}
	over, bookmark := time.After(time.Duration(seconds)*time.Second), time.NewTicker(time.Second)
	defer bookmark.Stop()
	say := func(kind string, object fields) {
		_ = json.NewEncoder(w).Encode(fields{"type": kind, "object": object})
		_ = http.NewResponseController(w).Flush()
	}
	w.Header().Set("Content-Type", "application/json")
	_ = http.NewResponseController(w).Flush()
	for {
		changes, news, expired := s.since(from)
		if expired {
			say("ERROR", statusOf(http.StatusGone, fmt.Sprintf("too old resource version: %d", from)))
			return
		}
		for _, c := range changes {
			from = c.version
			was, is := selects(q, c.before), selects(q, c.now)
			switch {
			case c.path != path:
			case is && was:
				say("MODIFIED", c.now)
			case is:
				say("ADDED", c.now)
			case was:
				say("DELETED", merged(c.before, fields{"metadata": fields{"resourceVersion": strconv.Itoa(c.version)}}))
			}
		}
		select {
		case <-news:
		case <-bookmark.C:
			if q.Get("allowWatchBookmarks") == "true" {
				say("BOOKMARK", fields{"metadata": fields{"resourceVersion": strconv.Itoa(from)}})
			}
		case <-over:
			return
		case <-r.Context().Done():
			return
		}
	}
}

// since returns the changes after a version, and a channel that is closed at
// the next one.
func (s *simServer) since(version int) (list []change, news chan struct{}, expired bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.history {
		if c.version > version {
			list = append(list, c)
		}
	}
	return list, s.news, version < s.oldest
}

// compact drops all history and makes every watch fail.
func (s *simServer) compact() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.history = nil
	s.version += 10
	s.oldest = s.version
	close(s.news)
	s.news = make(chan struct{})
}

// A client begins a watch anew when its history is gone.
func TestHistoryIsGone(t *testing.T) {
	c := newCluster(t)
	c.run("p0", "prefill", 0)
	d0 := c.run("d0", "decode", 0)
	n := c.node()
	n.is(podName("p0"), "ready")
	n.is(podName("d0"), "ready")
	c.server.(*simServer).compact()
	c.run("d1", "decode", 0)
	n.is(podName("d1"), "ready")
	d0.leaves()
	n.is(podName("d0"), "")
	if n.log.contains("discovery of engines failed") {
		t.Error("the log reports a problem for a watch whose history no longer exists")
	}
	n.ask()
}
