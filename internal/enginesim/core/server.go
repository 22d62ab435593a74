package core

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Routes that every engine serves.
const (
	RouteCompletions = "/v1/completions"
	RouteChat        = "/v1/chat/completions"
)

// maxBody bounds a request body.
const maxBody = 64 << 20

// SlowAdmission is the delay of the fault "slow" before a request is admitted.
const SlowAdmission = 500 * time.Millisecond

// handler builds the HTTP routes: the protocol's own, and the core's where the
// protocol has none.
func (e *Engine) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+RouteCompletions, e.Generating(RouteCompletions))
	mux.HandleFunc("POST "+RouteChat, e.Generating(RouteChat))
	mux.HandleFunc("GET /v1/models", e.models)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {})
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		WriteJSON(w, http.StatusOK, Obj("version", "0.0.0+sim"))
	})
	mux.HandleFunc("GET /metrics", e.metrics)
	mux.HandleFunc("GET /sim/state", func(w http.ResponseWriter, _ *http.Request) {
		WriteJSON(w, http.StatusOK, e.State())
	})
	mux.HandleFunc("POST /sim/fault", e.setFault)
	own := http.NewServeMux()
	e.Proto.Routes(own)
	headers, _ := e.Proto.(headerProtocol)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		e.Faults.Await()
		if headers != nil {
			headers.AnswerHeader(r.Header, w.Header())
		}
		if _, pattern := own.Handler(r); pattern != "" {
			own.ServeHTTP(w, r)
			return
		}
		if _, pattern := mux.Handler(r); pattern == "" {
			w = &FastAPIError{w}
			if otherMethod(own, r) {
				w.WriteHeader(http.StatusMethodNotAllowed)
				return
			}
		}
		mux.ServeHTTP(w, r)
	})
}

// otherMethod reports whether mux has the path of r, but not its method.
func otherMethod(mux *http.ServeMux, r *http.Request) bool {
	other := *r
	for _, other.Method = range []string{http.MethodGet, http.MethodPost, http.MethodPut} {
		if _, pattern := mux.Handler(&other); pattern != "" {
			return true
		}
	}
	return false
}

// FastAPIError gives the mux's own 404 and 405 the body of FastAPI.
type FastAPIError struct{ http.ResponseWriter }

func (w *FastAPIError) WriteHeader(status int) {
	w.Header().Del("X-Content-Type-Options")
	WriteJSON(w.ResponseWriter, status, Obj("detail", http.StatusText(status)))
}

func (w *FastAPIError) Write(b []byte) (int, error) { return len(b), nil }

// WriteJSON answers with a JSON body.
func WriteJSON(w http.ResponseWriter, status int, v any) {
	body, err := EncodeJSON(v)
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
		return Obj(
			"id", id, "object", "model", "created", now, "owned_by", "vllm", "root", root, "parent", parent,
			"max_model_len", length, "permission", []any{Obj(
				"id", "modelperm-"+RandomID(), "object", "model_permission", "created", now, "allow_create_engine", false,
				"allow_sampling", true, "allow_logprobs", true, "allow_search_indices", false, "allow_view", true,
				"allow_fine_tuning", false, "organization", "*", "group", nil, "is_blocking", false,
			)},
		)
	}
	cards := []any{card(e.Cfg.Model, e.Cfg.Model, nil, e.MaxModelLen())}
	for _, name := range e.Cfg.LoRA.Modules { // vLLM, entrypoints/openai/models/serving.py show_available_models
		cards = append(cards, card(name, "/adapters/"+name, e.Cfg.Model, nil))
	}
	WriteJSON(w, http.StatusOK, Obj("object", "list", "data", cards))
}

// MaxModelLen returns the longest sequence in tokens: the size of one rank's
// cache.
func (e *Engine) MaxModelLen() int { return e.Cfg.KVBlocks * e.Cfg.BlockSize }

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
		WriteJSON(w, http.StatusBadRequest, Obj("error", err.Error()))
		return
	}
	e.SetWrongTokens(f.WrongTokens)
	WriteJSON(w, http.StatusOK, Obj("fail", f.Fail, "die_after", f.DieAfter, "hang", f.Hang,
		"kv_events", f.KVEvents, "wrong_tokens", f.WrongTokens))
}

// SetFault replaces all faults. The values are those of Config's Fail, DieAfter
// (counted from now) and Hang.
func (e *Engine) SetFault(fail string, dieAfter int, hang string) error {
	return e.Faults.set(fail, dieAfter, hang)
}

// SetDecodeUsPerToken replaces Config.DecodeUsPerToken, also for requests that
// are decoding.
func (e *Engine) SetDecodeUsPerToken(micros int) {
	e.step.Store(int64(time.Duration(micros) * time.Microsecond))
}

// Stop makes the engine stop, as SIGSTOP does, or, with false, continue. A
// stopped engine answers nothing over HTTP, begins no step of a computation,
// and does not notice the end of a connection. Transfers with peers continue.
func (e *Engine) Stop(stopped bool) { e.Faults.stop(stopped) }

// Serving returns the handler of a route whose requests meet the faults of the engine. serve answers a
// request, unless its fault does not need the body; kind is the fault.
func (e *Engine) Serving(serve func(w http.ResponseWriter, r *http.Request, kind string)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !e.Begin() {
			panic(http.ErrAbortHandler)
		}
		defer e.Wg.Done()
		kind, die := e.Faults.Draw()
		if die {
			e.Kill()
			panic(http.ErrAbortHandler)
		}
		if e.failEarly(w, r, kind) {
			return
		}
		serve(w, r, kind)
	}
}

// Generating returns the handler of a route that produces tokens.
func (e *Engine) Generating(route string) http.HandlerFunc {
	return e.Serving(func(w http.ResponseWriter, r *http.Request, kind string) {
		body, err := ReadBody(w, r)
		if err != nil {
			panic(http.ErrAbortHandler) // the client left, or its body is beyond any engine's limit
		}
		if e.Faults.hang(r.Context(), HangHead) != nil {
			panic(http.ErrAbortHandler)
		}
		req, refusal := e.Proto.Parse(route, r.Header, body)
		if refusal == nil {
			refusal = e.CheckTokens(req)
		}
		if refusal == nil && kind == FailBusy {
			refusal = e.noRoom(req)
		}
		if refusal != nil {
			e.Stats.Rejected.Add(1)
			e.Refuse(w, refusal)
			return
		}
		if kind == FailSlow && Sleep(r.Context(), SlowAdmission) != nil {
			panic(http.ErrAbortHandler) // the engine core does not receive the request
		}
		req.Fault = kind
		e.answer(w, r, req)
	})
}

// noRoom returns the refusal of a request for which the engine has no room. The text is SGLang's
// (managers/scheduler.py).
func (e *Engine) noRoom(req *Request) *APIError {
	if p, ok := e.Proto.(refusingProtocol); ok {
		return p.NoRoom(req)
	}
	return &APIError{Status: http.StatusServiceUnavailable, Type: "ServiceUnavailable", Message: "The request queue is full."}
}

// Refuse answers with an error.
func (e *Engine) Refuse(w http.ResponseWriter, err *APIError) {
	body := err.Body
	if body == nil {
		body = e.Proto.ErrorBody(err)
	}
	WriteJSON(w, err.Status, body)
}

// ReadBody reads a request's whole body.
func ReadBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	return io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
}

// failEarly applies the faults that need no request body and reports whether
// the request is answered.
func (e *Engine) failEarly(w http.ResponseWriter, r *http.Request, kind string) bool {
	refuse := func(status int, kind, message string) bool {
		io.Copy(io.Discard, r.Body)
		e.Refuse(w, &APIError{Status: status, Type: kind, Message: message})
		return true
	}
	switch kind {
	case Fail500:
		return refuse(http.StatusInternalServerError, "InternalServerError", "Internal server error")
	case Fail503:
		return refuse(http.StatusServiceUnavailable, "ServiceUnavailableError", "Service unavailable")
	case Fail429:
		w.Header().Set("Retry-After", "1")
		return refuse(http.StatusTooManyRequests, "RateLimitError", "Too many requests")
	case Fail400:
		return refuse(http.StatusBadRequest, "BadRequestError", "simulated bad request")
	case FailReset, FailClose:
		io.Copy(io.Discard, r.Body)
		if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
			closeConn(conn, kind == FailReset)
		}
		return true
	case FailGarbage:
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"id":"garbage","choices":[{"index":0,`)
		return true
	}
	return false
}

// CheckTokens rejects prompts that no engine accepts.
func (e *Engine) CheckTokens(req *Request) *APIError {
	if len(req.Prompts) == 0 {
		return BadRequest("prompt", "The prompt cannot be empty.")
	}
	for _, prompt := range req.Prompts {
		if len(prompt) == 0 {
			return BadRequest("prompt", "The decoder prompt cannot be empty")
		}
		for _, t := range prompt {
			if !t.Valid() {
				return BadRequest("prompt", "Token id %d is out of vocabulary", t)
			}
		}
	}
	return nil
}

// answer runs an accepted request's sequences and writes the answer.
func (e *Engine) answer(w http.ResponseWriter, r *http.Request, req *Request) {
	seqs := e.NewSequences(req)
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	var st *eventStream
	if req.Stream {
		st = &eventStream{w: w, rc: http.NewResponseController(w)}
		st.before = func(events int) error { return e.streamFault(ctx, req, events) }
		if !e.Proto.StreamOptions(req).HoldHead {
			st.Start()
		}
		if g, ok := e.Proto.(greetingProtocol); ok {
			st.send(g.Greeting(req, seqs)...)
			st.events = 0 // faults count only the events of the answer itself
		}
		st.keep(e.Cfg.SSEKeepAlive)
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
	case errors.Is(err, context.Canceled), errors.Is(err, ErrEnded):
		// A client that closed only its writing side also gets no answer, as
		// with uvicorn.
		panic(http.ErrAbortHandler)
	default:
		e.writeFailure(w, st, req, seqs, err)
	}
}

// closeStream ends a successful stream. It also applies a stream fault if the
// stream was too short for it before.
func (e *Engine) closeStream(ctx context.Context, st *eventStream, req *Request, seqs []*Sequence) error {
	if err := e.streamFault(ctx, req, StreamEventsBeforeFault); err != nil {
		return err
	}
	last := e.Proto.Closing(req, seqs)
	if !e.Proto.StreamOptions(req).NoDone {
		last = append(last, doneEvent)
	}
	if m, ok := e.Proto.(measuringProtocol); ok {
		last = append(last, m.AfterDone(req)...)
	}
	if err := st.send(last...); err != nil {
		return context.Canceled // the client left
	}
	return nil
}

// NewSequences makes the sequences of a request, in choice order.
func (e *Engine) NewSequences(req *Request) []*Sequence {
	var seqs []*Sequence
	for p, prompt := range req.Prompts {
		text := Detokenize(prompt)
		eosAt, split := eosMark(text), strings.Contains(text, splitMark)
		sc := scriptOf(text, prompt)
		done := 0 // output tokens of this answer that the prompt has
		if (eosAt > 0 || !req.Limited) && !req.OwnOutput {
			done = e.Weights.generated(prompt, split, sc)
			eosAt = max(0, eosAt-done)
		}
		limit := req.MaxTokens
		if !req.Limited {
			limit = max(1, min(naturalLength(prompt[:len(prompt)-done])-done, e.MaxModelLen()-len(prompt)))
			if eosAt == 0 {
				eosAt = limit
			}
		}
		for j := range req.N {
			s := &Sequence{
				Req: req, Choice: p*req.N + j, Sample: j, Prompt: prompt, Limit: limit, eosAt: eosAt, split: split, Script: sc, adapter: req.adapter(&e.Cfg),
			}
			s.Text.prime(e.Proto.StreamOptions(req), text)
			seqs = append(seqs, s)
		}
	}
	return seqs
}

// runSequence runs one sequence. Its failure ends the other sequences through
// cancel.
func (e *Engine) runSequence(ctx context.Context, cancel context.CancelCauseFunc, s *Sequence, st *eventStream) {
	e.Stats.Requests.Add(1)
	if e.Cfg.OnPrompt != nil {
		e.Cfg.OnPrompt(Detokenize(s.Prompt))
	}
	e.loras.count(s.adapter, 1)
	defer e.loras.count(s.adapter, -1)
	opened := false
	emit := func(Token) {
		if st == nil || s.held() {
			return
		}
		var events []any
		if !opened {
			opened = true
			events = e.Proto.Opening(s.Req, s)
		}
		if ev := e.Proto.Event(s.Req, s, s.take()); ev != nil {
			events = append(events, ev)
		}
		if err := st.send(events...); err != nil && !isFault(err) {
			cancel(context.Canceled) // the client left
		} else if err != nil {
			cancel(err)
		}
	}
	err := e.Proto.Generate(ctx, s, emit)
	e.Stats.promptTokens.Add(int64(len(s.Prompt)))
	e.Stats.cachedTokens.Add(int64(s.CachedLocal + s.external))
	e.Stats.ExternalTokens.Add(int64(s.external))
	e.Stats.OutputTokens.Add(int64(len(s.Output)))
	switch {
	case err == nil:
	case errors.Is(context.Cause(ctx), context.Canceled), errors.Is(context.Cause(ctx), ErrEnded):
		e.Stats.Aborted.Add(1)
	case ctx.Err() != nil: // another sample failed, or a fault ended the stream
	default:
		e.Stats.errors.Add(1)
		cancel(err)
	}
}

// writeUnary writes an unary answer, through the faults that damage it.
func (e *Engine) writeUnary(w http.ResponseWriter, req *Request, seqs []*Sequence) {
	switch req.Fault {
	case FailSSEError:
		e.Stats.errors.Add(1)
		e.writeFailure(w, nil, req, seqs, errSimulated)
		return
	case FailCut:
		body, _ := EncodeJSON(e.Proto.Unary(req, seqs))
		w.Header().Set("Content-Type", "application/json")
		w.Write(body[:len(body)/2])
		http.NewResponseController(w).Flush()
		abortConn(w)
		return
	}
	if m, ok := e.Proto.(measuringProtocol); ok {
		m.UnaryHeader(req, w.Header())
	}
	WriteJSON(w, http.StatusOK, e.Proto.Unary(req, seqs))
}

// writeFailure answers with an engine's error: a status when no head was sent,
// else events of the stream.
func (e *Engine) writeFailure(w http.ResponseWriter, st *eventStream, req *Request, seqs []*Sequence, err error) {
	var failure *APIError
	if !errors.As(err, &failure) {
		failure = &APIError{Status: http.StatusInternalServerError, Type: "InternalServerError", Message: "Internal server error"}
	}
	if st == nil || !st.head && !e.Proto.StreamOptions(req).HeldErrors {
		e.Refuse(w, failure)
		return
	}
	events := e.Proto.ErrorEvents(req, failure)
	if p, ok := e.Proto.(loadingProtocol); ok && failure.Loading && st.events == 0 {
		events = p.LoadFailure(req, seqs, failure)
	}
	if events == nil {
		abortConn(w)
		return
	}
	st.before, st.err = nil, nil
	st.send(events...)
	if e.Proto.StreamOptions(req).ErrorDone {
		st.send(doneEvent)
	}
}

// errSimulated is the failure of the fault "sse-error", errCut that of "cut".
var (
	errSimulated = &APIError{Status: http.StatusInternalServerError, Type: "InternalServerError", Message: "simulated failure"}
	errCut       = errors.New("stream cut")
)

// isFault reports whether a stream's error is one that streamFault made.
func isFault(err error) bool { return errors.Is(err, errCut) || errors.Is(err, errSimulated) }

// streamFault applies the faults of a stream before its next event.
func (e *Engine) streamFault(ctx context.Context, req *Request, events int) error {
	if events < StreamEventsBeforeFault {
		return nil
	}
	switch req.Fault {
	case FailCut:
		return errCut
	case FailSSEError:
		e.Stats.errors.Add(1)
		return errSimulated
	}
	return e.Faults.hang(ctx, HangStream)
}

// abortConn resets the connection in the middle of an answer.
func abortConn(w http.ResponseWriter) {
	if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
		closeConn(conn, true)
		return
	}
	panic(http.ErrAbortHandler)
}

func PlainText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	w.Write([]byte(text))
}
