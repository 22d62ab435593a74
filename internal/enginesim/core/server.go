package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// Routes that every engine serves.
const (
	routeCompletions = "/v1/completions"
	routeChat        = "/v1/chat/completions"
)

// maxBody bounds a request body.
const maxBody = 64 << 20

// slowAdmission is the delay of the fault "slow" before a request is admitted.
const slowAdmission = 500 * time.Millisecond

// handler builds the HTTP routes: the protocol's own, and the core's where the
// protocol has none.
func (e *Engine) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+routeCompletions, e.generating(routeCompletions))
	mux.HandleFunc("POST "+routeChat, e.generating(routeChat))
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {})
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, obj("version", "0.0.0+sim"))
	})
	mux.HandleFunc("GET /metrics", e.metrics)
	mux.HandleFunc("GET /sim/state", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, e.State())
	})
	mux.HandleFunc("POST /sim/fault", e.setFault)
	own := http.NewServeMux()
	e.proto.routes(own)
	headers, _ := e.proto.(headerProtocol)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.faults.await()
		if headers != nil {
			headers.answerHeader(r.Header, w.Header())
		}
		if _, pattern := own.Handler(r); pattern != "" {
			own.ServeHTTP(w, r)
			return
		}
		if _, pattern := mux.Handler(r); pattern == "" {
			w = &fastAPIError{w}
		}
		mux.ServeHTTP(w, r)
	})
}

// fastAPIError gives the mux's own 404 and 405 the body of FastAPI.
type fastAPIError struct{ http.ResponseWriter }

func (w *fastAPIError) WriteHeader(status int) {
	w.Header().Del("X-Content-Type-Options")
	writeJSON(w.ResponseWriter, status, obj("detail", http.StatusText(status)))
}

func (w *fastAPIError) Write(b []byte) (int, error) { return len(b), nil }

// writeJSON answers with a JSON body.
func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := encodeJSON(v)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(body)
}

// models answers GET /v1/models.
func (e *Engine) models(w http.ResponseWriter, _ *http.Request) {
	now := time.Now().Unix()
	card := func(id, root string, parent, length any) any {
		return obj(
			"id", id, "object", "model", "created", now, "owned_by", "vllm", "root", root, "parent", parent,
			"max_model_len", length, "permission", []any{obj(
				"id", "modelperm-"+randomID(), "object", "model_permission", "created", now, "allow_create_engine", false,
				"allow_sampling", true, "allow_logprobs", true, "allow_search_indices", false, "allow_view", true,
				"allow_fine_tuning", false, "organization", "*", "group", nil, "is_blocking", false,
			)},
		)
	}
	cards := []any{card(e.cfg.Model, e.cfg.Model, nil, e.maxModelLen())}
	for _, name := range e.cfg.LoRA.Modules { // vLLM, entrypoints/openai/models/serving.py show_available_models
		cards = append(cards, card(name, "/adapters/"+name, e.cfg.Model, nil))
	}
	writeJSON(w, http.StatusOK, obj("object", "list", "data", cards))
}

// maxModelLen returns the longest sequence in tokens: the size of one rank's
// cache.
func (e *Engine) maxModelLen() int { return e.cfg.KVBlocks * e.cfg.BlockSize }

// setFault answers POST /sim/fault {"fail","die_after","hang","kv_events",
// "wrong_tokens"}: it replaces all faults; an absent field means none. kv_events
// is a kind of fault, or "KIND:BATCHES".
func (e *Engine) setFault(w http.ResponseWriter, r *http.Request) {
	var f struct {
		Fail        string `json:"fail"`
		DieAfter    int    `json:"die_after"`
		Hang        string `json:"hang"`
		KVEvents    string `json:"kv_events"`
		WrongTokens bool   `json:"wrong_tokens"`
	}
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<16))
	dec.DisallowUnknownFields()
	err := dec.Decode(&f)
	var kind string
	var batches int
	if err == nil {
		kind, batches, err = parseKVEventFault(f.KVEvents)
	}
	if err == nil {
		err = checkKVEventFault(kind)
	}
	if err == nil {
		err = e.SetFault(f.Fail, f.DieAfter, f.Hang)
	}
	if err == nil {
		err = e.SetKVEventFault(kind, batches)
	}
	if err != nil {
		writeJSON(w, http.StatusBadRequest, obj("error", err.Error()))
		return
	}
	e.SetWrongTokens(f.WrongTokens)
	writeJSON(w, http.StatusOK, obj("fail", f.Fail, "die_after", f.DieAfter, "hang", f.Hang,
		"kv_events", f.KVEvents, "wrong_tokens", f.WrongTokens))
}

// SetFault replaces all faults. The values are those of Config's Fail, DieAfter
// (counted from now) and Hang.
func (e *Engine) SetFault(fail string, dieAfter int, hang string) error {
	return e.faults.set(fail, dieAfter, hang)
}

// SetDecodeUsPerToken replaces Config.DecodeUsPerToken, also for requests that
// are decoding.
func (e *Engine) SetDecodeUsPerToken(micros int) {
	e.step.Store(int64(time.Duration(micros) * time.Microsecond))
}

// Stop makes the engine stop, as SIGSTOP does, or, with false, continue. A
// stopped engine answers nothing over HTTP, begins no step of a computation,
// and does not notice the end of a connection. Transfers with peers continue.
func (e *Engine) Stop(stopped bool) { e.faults.stop(stopped) }

// generating returns the handler of a route that produces tokens.
func (e *Engine) generating(route string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !e.begin() {
			panic(http.ErrAbortHandler)
		}
		defer e.wg.Done()
		kind, die := e.faults.draw()
		if die {
			e.Kill()
			panic(http.ErrAbortHandler)
		}
		if e.failEarly(w, r, kind) {
			return
		}
		body, err := readBody(w, r)
		if err != nil {
			panic(http.ErrAbortHandler) // the client left, or its body is beyond any engine's limit
		}
		if e.faults.hang(r.Context(), hangHead) != nil {
			panic(http.ErrAbortHandler)
		}
		req, refusal := e.proto.parse(route, r.Header, body)
		if refusal == nil {
			refusal = e.checkTokens(req)
		}
		if refusal != nil {
			e.stats.rejected.Add(1)
			e.refuse(w, refusal)
			return
		}
		if kind == failSlow && sleep(r.Context(), slowAdmission) != nil {
			panic(http.ErrAbortHandler) // the engine core does not receive the request
		}
		req.fault = kind
		e.answer(w, r, req)
	}
}

// refuse answers with an error.
func (e *Engine) refuse(w http.ResponseWriter, err *apiError) {
	body := err.Body
	if body == nil {
		body = e.proto.errorBody(err)
	}
	writeJSON(w, err.Status, body)
}

// readBody reads a request's whole body.
func readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	return io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
}

// failEarly applies the faults that need no request body and reports whether
// the request is answered.
func (e *Engine) failEarly(w http.ResponseWriter, r *http.Request, kind string) bool {
	refuse := func(status int, kind, message string) bool {
		io.Copy(io.Discard, r.Body)
		e.refuse(w, &apiError{Status: status, Type: kind, Message: message})
		return true
	}
	switch kind {
	case fail500:
		return refuse(http.StatusInternalServerError, "InternalServerError", "Internal server error")
	case fail503:
		return refuse(http.StatusServiceUnavailable, "ServiceUnavailableError", "Service unavailable")
	case fail429:
		w.Header().Set("Retry-After", "1")
		return refuse(http.StatusTooManyRequests, "RateLimitError", "Too many requests")
	case fail400:
		return refuse(http.StatusBadRequest, "BadRequestError", "simulated bad request")
	case failReset, failClose:
		io.Copy(io.Discard, r.Body)
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			closeConn(conn, kind == failReset)
		}
		return true
	case failGarbage:
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"id":"garbage","choices":[{"index":0,`)
		return true
	}
	return false
}

// checkTokens rejects prompts that no engine accepts.
func (e *Engine) checkTokens(req *request) *apiError {
	if len(req.Prompts) == 0 {
		return badRequest("prompt", "The prompt cannot be empty.")
	}
	for _, prompt := range req.Prompts {
		if len(prompt) == 0 {
			return badRequest("prompt", "The decoder prompt cannot be empty")
		}
		for _, t := range prompt {
			if !t.valid() {
				return badRequest("prompt", "Token id %d is out of vocabulary", t)
			}
		}
	}
	return nil
}

// answer runs an accepted request's sequences and writes the answer.
func (e *Engine) answer(w http.ResponseWriter, r *http.Request, req *request) {
	seqs := e.newSequences(req)
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	var st *eventStream
	if req.Stream {
		st = &eventStream{w: w, rc: http.NewResponseController(w)}
		st.before = func(events int) error { return e.streamFault(ctx, req, events) }
		if !e.proto.streamOptions(req).HoldHead {
			st.start()
		}
		if g, ok := e.proto.(greetingProtocol); ok {
			st.send(g.greeting(req, seqs)...)
			st.events = 0 // faults count only the events of the answer itself
		}
		st.keep(e.cfg.SSEKeepAlive)
		defer st.finish()
	}
	var wg sync.WaitGroup
	for _, s := range seqs[1:] {
		wg.Go(func() { e.runSequence(ctx, cancel, s, st) })
	}
	e.runSequence(ctx, cancel, seqs[0], st)
	wg.Wait()
	err := context.Cause(ctx)
	if err == nil && st != nil {
		err = e.closeStream(ctx, st, req, seqs)
	}
	if st != nil {
		st.finish() // only this goroutine writes from here on
	}
	switch {
	case err == nil && st != nil:
	case err == nil:
		e.writeUnary(w, req, seqs)
	case errors.Is(err, errCut):
		abortConn(w)
	case errors.Is(err, context.Canceled), errors.Is(err, errEnded):
		// A client that closed only its writing side also gets no answer, as
		// with uvicorn.
		panic(http.ErrAbortHandler)
	default:
		e.writeFailure(w, st, req, seqs, err)
	}
}

// closeStream ends a successful stream. It also applies a stream fault if the
// stream was too short for it before.
func (e *Engine) closeStream(ctx context.Context, st *eventStream, req *request, seqs []*sequence) error {
	if err := e.streamFault(ctx, req, streamEventsBeforeFault); err != nil {
		return err
	}
	last := e.proto.closing(req, seqs)
	if !e.proto.streamOptions(req).NoDone {
		last = append(last, doneEvent)
	}
	if m, ok := e.proto.(measuringProtocol); ok {
		last = append(last, m.afterDone(req)...)
	}
	if err := st.send(last...); err != nil {
		return context.Canceled // the client left
	}
	return nil
}

// newSequences makes the sequences of a request, in choice order.
func (e *Engine) newSequences(req *request) []*sequence {
	var seqs []*sequence
	for p, prompt := range req.Prompts {
		eosAt := eosMark(detokenize(prompt))
		limit := req.MaxTokens
		if !req.Limited {
			limit = max(1, min(naturalLength(prompt), e.maxModelLen()-len(prompt)))
			if eosAt == 0 {
				eosAt = limit
			}
		}
		for j := range req.N {
			seqs = append(seqs, &sequence{
				req: req, choice: p*req.N + j, sample: j, prompt: prompt, limit: limit, eosAt: eosAt, adapter: req.adapter(&e.cfg),
			})
		}
	}
	return seqs
}

// runSequence runs one sequence. Its failure ends the other sequences through
// cancel.
func (e *Engine) runSequence(ctx context.Context, cancel context.CancelCauseFunc, s *sequence, st *eventStream) {
	e.stats.requests.Add(1)
	if e.cfg.OnPrompt != nil {
		e.cfg.OnPrompt(detokenize(s.prompt))
	}
	e.loras.count(s.adapter, 1)
	defer e.loras.count(s.adapter, -1)
	opened := false
	emit := func(token) {
		if st == nil {
			return
		}
		var events []any
		if !opened {
			opened = true
			events = e.proto.opening(s.req, s)
		}
		if ev := e.proto.event(s.req, s, s.take()); ev != nil {
			events = append(events, ev)
		}
		if err := st.send(events...); err != nil && !isFault(err) {
			cancel(context.Canceled) // the client left
		} else if err != nil {
			cancel(err)
		}
	}
	err := e.proto.generate(ctx, s, emit)
	e.stats.promptTokens.Add(int64(len(s.prompt)))
	e.stats.cachedTokens.Add(int64(s.cachedLocal + s.external))
	e.stats.externalTokens.Add(int64(s.external))
	e.stats.outputTokens.Add(int64(len(s.output)))
	switch {
	case err == nil:
	case errors.Is(context.Cause(ctx), context.Canceled), errors.Is(context.Cause(ctx), errEnded):
		e.stats.aborted.Add(1)
	case ctx.Err() != nil: // another sample failed, or a fault ended the stream
	default:
		e.stats.errors.Add(1)
		cancel(err)
	}
}

// writeUnary writes an unary answer, through the faults that damage it.
func (e *Engine) writeUnary(w http.ResponseWriter, req *request, seqs []*sequence) {
	switch req.fault {
	case failSSEError:
		e.stats.errors.Add(1)
		e.writeFailure(w, nil, req, seqs, errSimulated)
		return
	case failCut:
		body, _ := encodeJSON(e.proto.unary(req, seqs))
		w.Header().Set("Content-Type", "application/json")
		w.Write(body[:len(body)/2])
		http.NewResponseController(w).Flush()
		abortConn(w)
		return
	}
	if m, ok := e.proto.(measuringProtocol); ok {
		m.unaryHeader(req, w.Header())
	}
	writeJSON(w, http.StatusOK, e.proto.unary(req, seqs))
}

// writeFailure answers with an engine's error: a status when no head was sent,
// else events of the stream.
func (e *Engine) writeFailure(w http.ResponseWriter, st *eventStream, req *request, seqs []*sequence, err error) {
	var failure *apiError
	if !errors.As(err, &failure) {
		failure = &apiError{Status: http.StatusInternalServerError, Type: "InternalServerError", Message: "Internal server error"}
	}
	if st == nil || !st.head && !e.proto.streamOptions(req).HeldErrors {
		e.refuse(w, failure)
		return
	}
	events := e.proto.errorEvents(req, failure)
	if p, ok := e.proto.(loadingProtocol); ok && failure.loading && st.events == 0 {
		events = p.loadFailure(req, seqs, failure)
	}
	if events == nil {
		abortConn(w)
		return
	}
	st.before, st.err = nil, nil
	st.send(events...)
	if e.proto.streamOptions(req).ErrorDone {
		st.send(doneEvent)
	}
}

// errSimulated is the failure of the fault "sse-error", errCut that of "cut".
var (
	errSimulated = &apiError{Status: http.StatusInternalServerError, Type: "InternalServerError", Message: "simulated failure"}
	errCut       = errors.New("stream cut")
)

// isFault reports whether a stream's error is one that streamFault made.
func isFault(err error) bool { return errors.Is(err, errCut) || errors.Is(err, errSimulated) }

// streamFault applies the faults of a stream before its next event.
func (e *Engine) streamFault(ctx context.Context, req *request, events int) error {
	if events < streamEventsBeforeFault {
		return nil
	}
	switch req.fault {
	case failCut:
		return errCut
	case failSSEError:
		e.stats.errors.Add(1)
		return errSimulated
	}
	return e.faults.hang(ctx, hangStream)
}

// abortConn resets the connection in the middle of an answer.
func abortConn(w http.ResponseWriter) {
	if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
		closeConn(conn, true)
		return
	}
	panic(http.ErrAbortHandler)
}

func plainText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	w.Write([]byte(text))
}
