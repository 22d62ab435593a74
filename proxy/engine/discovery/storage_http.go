package discovery

import (
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// routes returns the five routes of the store, for requests that have passed its guard.
// Each answers {"result": …}, with status 400 if the result is false, null or empty, as
// the workers' client expects. A malformed request gets 422. GET /expire changes state:
// that is TensorRT-LLM's protocol.
func (s *Storage) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /set", s.serveSet)
	mux.HandleFunc("GET /expire", s.serveExpire)
	mux.HandleFunc("HEAD /expire", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusMethodNotAllowed) })
	mux.HandleFunc("GET /get", s.serveGet)
	mux.HandleFunc("GET /get_prefix", s.servePrefix)
	mux.HandleFunc("DELETE /delete", s.serveDelete)
	return s.guard.Wrap(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, 2*maxRecord)
		mux.ServeHTTP(w, r)
	}))
}

// serveSet stores one StorageItem.
func (s *Storage) serveSet(w http.ResponseWriter, r *http.Request) {
	var q struct {
		Key       *string `json:"key"`
		Value     *string `json:"value"`
		TTL       *int64  `json:"ttl"` // seconds; none if not positive
		Overwrite bool    `json:"overwrite_if_exists"`
	}
	if json.NewDecoder(r.Body).Decode(&q) != nil || q.Key == nil || q.Value == nil {
		malformed(w)
		return
	}
	var ttl int64
	if q.TTL != nil {
		ttl = *q.TTL
	}
	peer, _, _ := net.SplitHostPort(r.RemoteAddr)
	result(w, s.set(*q.Key, *q.Value, lasting(ttl), q.Overwrite, peer))
}

// serveExpire handles the heartbeat.
func (s *Storage) serveExpire(w http.ResponseWriter, r *http.Request) {
	ttl, err := strconv.ParseInt(r.FormValue("ttl"), 10, 64)
	if err != nil || !r.Form.Has("key") {
		malformed(w)
		return
	}
	result(w, s.expire(r.FormValue("key"), lasting(ttl)))
}

func (s *Storage) serveGet(w http.ResponseWriter, r *http.Request) {
	if r.FormValue("key") == "" {
		malformed(w)
		return
	}
	s.mu.Lock()
	it, there := s.live(r.FormValue("key"), time.Now())
	s.mu.Unlock()
	switch {
	case !there:
		answer(w, http.StatusBadRequest, "result", nil)
	case it.value == "":
		answer(w, http.StatusBadRequest, "result", "")
	default:
		answer(w, http.StatusOK, "result", it.value)
	}
}

func (s *Storage) servePrefix(w http.ResponseWriter, r *http.Request) {
	only, err := strconv.ParseBool(r.FormValue("keys_only"))
	if err != nil && r.Form.Has("keys_only") || !r.Form.Has("key_prefix") {
		malformed(w)
		return
	}
	found := map[string]string{}
	now := time.Now()
	s.mu.Lock()
	for key := range s.items {
		if !strings.HasPrefix(key, r.FormValue("key_prefix")) {
			continue
		}
		if it, there := s.live(key, now); there && only {
			found[key] = ""
		} else if there {
			found[key] = it.value
		}
	}
	s.mu.Unlock()
	status := http.StatusOK
	if len(found) == 0 {
		status = http.StatusBadRequest
	}
	answer(w, status, "result", found)
}

func (s *Storage) serveDelete(w http.ResponseWriter, r *http.Request) {
	if !r.URL.Query().Has("key") {
		malformed(w)
		return
	}
	s.mu.Lock()
	there := s.remove(r.URL.Query().Get("key"))
	s.mu.Unlock()
	result(w, there)
}

// lasting converts seconds to a duration, and limits the result.
func lasting(seconds int64) time.Duration {
	const most = 1 << 31
	return time.Duration(max(-1, min(seconds, most))) * time.Second
}

func malformed(w http.ResponseWriter) {
	answer(w, http.StatusUnprocessableEntity, "detail", "malformed request")
}

// result answers true or false.
func result(w http.ResponseWriter, ok bool) {
	status := http.StatusOK
	if !ok {
		status = http.StatusBadRequest
	}
	answer(w, status, "result", ok)
}

// answer writes an object with one member.
func answer(w http.ResponseWriter, status int, key string, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{key: value}) // the worker may have closed the connection
}
