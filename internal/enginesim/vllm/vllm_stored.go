package vllm

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// maxStored bounds the responses that an engine stores.
const maxStored = 1000

// responseStore holds the responses of vLLM with VLLM_ENABLE_RESPONSES_API_STORE. Source:
// entrypoints/openai/responses/serving.py.
type responseStore struct {
	mu     sync.Mutex
	bodies map[string]json.RawMessage    // by id; guarded by mu
	cancel map[string]context.CancelFunc // of the responses in the background; guarded by mu
	made   int                           // number of ids of responses in the background; guarded by mu
}

// put stores a response, unless it was cancelled.
func (s *responseStore) put(id string, body json.RawMessage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bodies == nil {
		s.bodies, s.cancel = make(map[string]json.RawMessage), make(map[string]context.CancelFunc)
	}
	if len(s.bodies) < maxStored && !bytes.Contains(s.bodies[id], []byte(`"cancelled"`)) {
		s.bodies[id] = body
	}
}

func (s *responseStore) get(id string) json.RawMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.bodies[id]
}

// recorder keeps a copy of an answer. Without a writer nobody else gets the answer.
type recorder struct {
	to     http.ResponseWriter
	header http.Header
	status int
	body   bytes.Buffer
}

func (r *recorder) Header() http.Header { return r.header }

func (r *recorder) WriteHeader(status int) {
	if r.status = status; r.to != nil {
		r.to.WriteHeader(status)
	}
}

func (r *recorder) Write(p []byte) (int, error) {
	r.body.Write(p)
	if r.to == nil {
		return len(p), nil
	}
	return r.to.Write(p)
}

// Unwrap is for http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.to }

// response returns the response in a recorded answer, nil for none: the body, or the last
// event of a stream.
func (r *recorder) response() (body json.RawMessage) {
	var event struct{ Response json.RawMessage }
	if r.status != 0 && r.status != http.StatusOK {
		return nil
	}
	for line := range bytes.SplitSeq(r.body.Bytes(), []byte("\n")) {
		if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok && json.Unmarshal(data, &event) == nil && event.Response != nil {
			body = event.Response
		}
	}
	if body == nil && json.Valid(r.body.Bytes()) {
		body = bytes.Clone(r.body.Bytes())
	}
	return body
}

// storing wraps the handler of /v1/responses: it stores the answers, and runs the requests that
// ask for it in the background.
func (v *VLLM) storing(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !v.e.Begin() {
			panic(http.ErrAbortHandler)
		}
		defer v.e.Wg.Done()
		body, err := core.ReadBody(w, r)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		f, _ := core.DecodeFields(body)
		store, _ := f.Boolean("store", true)
		background, _ := f.Boolean("background", false)
		if id := core.FieldText(f, "previous_response_id"); id != "" && v.stored.get(id) == nil {
			v.noResponse(w, id)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		switch {
		case background && store:
			v.inBackground(w, r, next, body)
		case store:
			rec := &recorder{to: w, header: w.Header()}
			next(rec, r)
			v.storeResponse(rec.response())
		default:
			next(w, r)
		}
	}
}

// storeResponse stores a response under its id.
func (v *VLLM) storeResponse(body json.RawMessage) {
	var response struct{ ID string }
	if json.Unmarshal(body, &response) == nil && response.ID != "" {
		v.stored.put(response.ID, body)
	}
}

// inBackground answers at once, and computes the response afterwards.
func (v *VLLM) inBackground(w http.ResponseWriter, r *http.Request, next http.HandlerFunc, body []byte) {
	v.stored.mu.Lock()
	v.stored.made++
	id := fmt.Sprintf("resp_%s_%d", v.e.UUID[:min(8, len(v.e.UUID))], v.stored.made)
	v.stored.mu.Unlock()
	state := func(status string) json.RawMessage {
		raw, _ := core.EncodeJSON(core.Obj("id", id, "object", "response", "created_at", time.Now().Unix(), "status", status, "background", true, "model", v.e.Cfg.Model, "output", []any{}))
		return raw
	}
	v.stored.put(id, state("queued"))
	ctx, cancel := context.WithCancel(v.e.Ctx)
	v.stored.mu.Lock()
	v.stored.cancel[id] = cancel
	v.stored.mu.Unlock()
	again := r.Clone(ctx)
	again.Body = io.NopCloser(bytes.NewReader(bytes.Replace(body, []byte(`"stream":true`), []byte(`"stream":false`), 1)))
	v.e.Spawn(func(context.Context) {
		defer cancel()
		rec := &recorder{header: http.Header{}}
		func() {
			defer func() { _ = recover() }() // of a handler that was cancelled
			next(rec, again)
		}()
		done := state("failed")
		var members map[string]any
		if json.Unmarshal(rec.response(), &members) == nil && members != nil {
			members["id"], members["background"] = id, true
			done, _ = json.Marshal(members)
		}
		v.stored.put(id, done)
	})
	w.Header().Set("Content-Type", "application/json")
	w.Write(state("queued"))
}

// noResponse answers that there is no response of an id.
func (v *VLLM) noResponse(w http.ResponseWriter, id string) {
	v.e.Refuse(w, &core.APIError{Status: http.StatusNotFound, Type: "invalid_request_error", Param: "response_id", Message: "Response with id '" + id + "' not found."})
}

// storedRoutes adds the routes of stored responses. vLLM deletes none.
func (v *VLLM) storedRoutes(mux *http.ServeMux) {
	path := core.RouteResponses + "/{id}"
	mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
		core.WriteJSON(w, http.StatusMethodNotAllowed, core.Obj("detail", "Method Not Allowed"))
	})
	mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
		body := v.stored.get(r.PathValue("id"))
		if body == nil {
			v.noResponse(w, r.PathValue("id"))
			return
		}
		if r.URL.Query().Get("stream") == "true" {
			w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
			fmt.Fprintf(w, "event: response.completed\ndata: {\"response\":%s,\"sequence_number\":%s,\"type\":\"response.completed\"}\n\n",
				body, strings.TrimLeft("0"+r.URL.Query().Get("starting_after"), "0")+"1")
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Write(body)
	})
	mux.HandleFunc("POST "+path+"/cancel", func(w http.ResponseWriter, r *http.Request) {
		id := r.PathValue("id")
		body := v.stored.get(id)
		switch {
		case body == nil:
			v.noResponse(w, id)
			return
		case !bytes.Contains(body, []byte(`"status":"queued"`)):
			v.e.Refuse(w, &core.APIError{Status: http.StatusBadRequest, Type: "invalid_request_error", Message: "Cannot cancel a synchronous response."})
			return
		}
		body = bytes.Replace(body, []byte(`"queued"`), []byte(`"cancelled"`), 1)
		v.stored.put(id, body)
		v.stored.mu.Lock()
		v.stored.cancel[id]()
		v.stored.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		w.Write(body)
	})
}
