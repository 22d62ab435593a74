package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"
)

// vllm is the vLLM engine: with the NixlConnector in pull mode when nixl is
// set, in push mode when push is, else with connector, or without any. Roles do
// not change its behaviour: as in vLLM, only kv_transfer_params make a request
// a prefill or a decode leg.
type vllm struct {
	vllmDialect
	e    *Engine
	nixl bool
	// push is the NixlPushConnector, nil for engines without it.
	push *nixlPush
	// connector is nil for engines without a connector and for those with a
	// NIXL connector.
	connector vllmConnector
	stored    responseStore

	mu sync.Mutex
	// beats are the remote requests whose leases this engine renews, by the
	// prefill's side channel address.
	beats map[string]map[string]int
	// known are the remote engine ids with which a handshake has completed.
	known map[string]bool
	// done holds, by request, the number of decode ranks that have read its blocks.
	done map[string]int
}

// vllmConnector is a KV connector of vLLM other than NIXL's.
type vllmConnector interface {
	// start opens the connector's sockets. The engine's mutex is held.
	start() error
	// parse reads the kv_transfer_params, nil if there are none, of a request
	// with that external id. It does not check them. run and rejected receive
	// its result, which may be nil.
	parse(params fields, id string) any
	// run runs a sequence whose rank is chosen.
	run(ctx context.Context, s *sequence, leg any, emit func(token)) error
	// rejected is called for a leg that the serving layer has rejected.
	rejected(leg any)
	// message answers a peer's side channel message for rank r.
	message(r *rank, m sideMessage) (sideMessage, error)
}

func newVLLM(e *Engine) *vllm {
	c := e.cfg.KVEvents
	wire := vllmWire{arrays: c.Arrays, digests: c.DigestHashes}
	if e.publishers = newPublishers(e, wire.batch, c.PlainReplay); e.publishers != nil {
		e.logKV(e.publishers, vllmNaming{e.id}, true)
	}
	v := &vllm{
		e: e, nixl: e.cfg.Connector == ConnectorVLLMNixl && e.cfg.Role != RoleEncode,
		beats: make(map[string]map[string]int), known: make(map[string]bool), done: make(map[string]int),
	}
	switch c := e.cfg.Connector; {
	case e.cfg.Role == RoleEncode: // it transfers no KV
	case (c == ConnectorVLLMMoRIIO || c == ConnectorVLLMMoRIIORead) && e.cfg.Role != RoleBoth: // role both has no connector
		v.connector = newMoRIIO(e, c == ConnectorVLLMMoRIIORead)
	case c == ConnectorVLLMMooncake:
		v.connector = newMooncake(e)
	case c == ConnectorVLLMStore && e.cfg.Store != "":
		v.connector = &kvStore{v, e.cfg.Store}
	case c == ConnectorVLLMP2PNCCL && e.cfg.Role != RoleBoth: // the same
		v.connector = newP2PNCCL(e)
	case c == ConnectorVLLMP2PTier && e.cfg.Role != RoleBoth: // role both works alone
		v.connector = &p2pTier{v: v, supplies: make(map[string]*p2pSupply)}
	case c == ConnectorVLLMNixlPush:
		v.push = newNixlPush(v)
	}
	return v
}

func (v *vllm) start() error {
	if v.nixl {
		v.e.spawn(v.heartbeat)
	}
	if v.connector != nil {
		return v.connector.start()
	}
	return nil
}

func (v *vllm) routes(mux *http.ServeMux) {
	for _, route := range []string{routeMessages, routeTokens} {
		mux.HandleFunc("POST "+route, v.e.generating(route))
	}
	mux.HandleFunc("POST "+routeResponses, v.storing(v.e.generating(routeResponses)))
	v.storedRoutes(mux)
	mux.HandleFunc("/ping", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /load", func(w http.ResponseWriter, _ *http.Request) {
		// The answer is constant without --enable-server-load-tracking.
		writeJSON(w, http.StatusOK, obj("server_load", 0))
	})
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, obj("version", v.e.cfg.Version))
	})
	v.poolingRoutes(mux)
	v.mediaRoutes(mux)
	mux.HandleFunc("POST /tokenize", v.tokenize)
	for _, route := range []string{routeChat, routeCompletions} {
		mux.HandleFunc("POST "+route+"/render", v.render(route))
	}
	// This route belongs to the development mode. It answers 200 even when
	// blocks are in use.
	mux.HandleFunc("POST /reset_prefix_cache", func(http.ResponseWriter, *http.Request) { v.e.resetCache() })
	mux.HandleFunc("POST /detokenize", v.detokenize)
	v.sleepRoutes(mux)
}

// answerHeader returns the request's id, as with --enable-request-id-headers.
func (v *vllm) answerHeader(in, out http.Header) {
	id := in.Get("X-Request-Id")
	if id == "" {
		id = randomID() + randomID()
	}
	out.Set("X-Request-Id", id)
	out.Set("Server", "uvicorn")
	out.Set("Vary", "Origin")
}

// pydanticType is the type of an error of the request models. It has the OpenAI
// form on every route.
const pydanticType = "Bad Request"

// pydanticError is vLLM's answer to a body f that its request models reject.
// The engine core does not receive such a request.
func pydanticError(err *fieldError, f fields) *apiError {
	input, more := pythonRepr(f[err.Field]), ""
	switch err.Kind {
	case "missing":
		input = fmt.Sprintf("'<dict of %d items>'", len(f))
	case "json_invalid":
		input, more = "'<dict of 0 items>'", ", 'ctx': {'error': 'Expecting value'}"
	}
	loc := err.Field
	if loc != "body" {
		loc = "body." + loc
	}
	return &apiError{
		Status: http.StatusBadRequest, Type: pydanticType, Param: loc,
		Message: fmt.Sprintf("1 validation error:\n  {'type': '%s', 'loc': '%s', 'msg': '%s', 'input': %s%s}", err.Kind, loc, err.Message, input, more),
	}
}

// pythonRepr formats a JSON value approximately as Python prints it.
func pythonRepr(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil && len(raw) > 0 && raw[0] == '"' {
		return "'" + s + "'"
	}
	return string(raw)
}

// badValue is a 400 for a value out of range.
func badValue(param string, value any, format string, args ...any) *apiError {
	err := badRequest(param, format, args...)
	err.Message += fmt.Sprintf(" (parameter=%s, value=%v)", param, value)
	return err
}

// parse rejects in two stages, as vLLM does. A rejection by the request models has no effect. A
// rejection by the serving layer informs the prefill engine that its blocks will not be read.
func (v *vllm) parse(route string, h http.Header, body []byte) (*request, *apiError) {
	req, refusal := v.parseRoute(route, h, body)
	if refusal != nil && route == routeMessages && refusal.Type != pydanticType {
		refusal.Body = messagesError(refusal)
	}
	return req, refusal
}

func (v *vllm) parseRoute(route string, h http.Header, body []byte) (*request, *apiError) {
	f, ferr := decodeFields(body)
	if ferr != nil {
		return nil, pydanticError(ferr, nil)
	}
	var req *request
	switch route {
	case routeResponses:
		req, ferr = parseResponses(h, f)
	case routeMessages:
		req, ferr = parseMessages(h, f)
	case routeTokens:
		req, ferr = parseTokens(h, f)
	default:
		if text, err := f.str("prompt", ""); route == routeCompletions && err == nil && text == "" {
			return nil, badRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")
		}
		req, ferr = parseOpenAI(route, h, f)
	}
	if ferr != nil {
		return nil, pydanticError(ferr, f)
	}
	if f.has("stream_options") && !req.Stream {
		return nil, badRequest("stream_options", "Stream options can only be defined when `stream=True`. (parameter=stream_options)")
	}
	params, ferr := transferParams(route, f)
	if ferr != nil {
		return nil, pydanticError(ferr, f)
	}
	ext := &vllmRequest{}
	ext.received, _ = params.boolean("do_remote_prefill", false)
	if (v.nixl || v.push != nil) && params != nil {
		ext.leg = parseNixl(params, v.wire())
	}
	if req.ID, ferr = requestID(h, f); ferr != nil {
		return nil, pydanticError(ferr, f)
	}
	if route == routeResponses {
		req.ID, req.response = randomID(), &responseState{item: randomID()} // no header sets the id of a response
		if req.Model == "" {
			req.Model = v.e.cfg.Model
		}
	}
	if v.connector != nil {
		ext.other = v.connector.parse(params, req.ID)
		switch m := v.connector.(type) {
		case *p2pNCCL: // without parameters
			ext.received = !m.producer
		case *p2pTier:
			ext.received = ext.other.(*p2pTierLeg).prefiller != ""
		}
	}
	req.Ext = ext
	if refusal := v.check(req); refusal != nil {
		if route != routeTokens { // this route has no clean-up
			v.refused(ext)
		}
		return nil, refusal
	}
	return req, nil
}

// refused makes the connector give up the transfer of a request that the
// serving layer has rejected.
func (v *vllm) refused(ext *vllmRequest) {
	switch {
	case v.connector != nil:
		v.connector.rejected(ext.other)
	case v.push != nil:
		v.push.rejected(ext.leg)
	default:
		v.rejected(ext.leg)
	}
}

// vllmRequest is vLLM's state of a request.
type vllmRequest struct {
	received bool     // another engine computes its KV, and has used the encoders' results
	leg      *nixlLeg // nil: no kv_transfer_params
	other    any      // of another connector
}

// requestID is the external id: header, body field or random.
func requestID(h http.Header, f fields) (string, *fieldError) {
	id, err := f.str("request_id", "")
	if err != nil {
		return "", err
	}
	if head := h.Get("X-Request-Id"); head != "" {
		id = head
	}
	if id == "" {
		id = randomID()
	}
	return id, nil
}

// checkModel rejects a model that is not served; "" means the served one.
func (v *vllm) checkModel(name string) *apiError {
	if name == "" || name == v.e.cfg.Model || slices.Contains(v.e.cfg.LoRA.Modules, name) {
		return nil
	}
	return &apiError{
		Status: http.StatusNotFound, Type: "NotFoundError", Param: "model",
		Message: fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", name, v.e.cfg.Model),
	}
}

// check does the serving layer's checks and those of the sampling parameters.
// It limits the token limit to the rest of the model's length.
func (v *vllm) check(req *request) *apiError {
	if refusal := v.checkModel(req.Model); refusal != nil {
		return refusal
	}
	if refusal := v.e.checkTokens(req); refusal != nil {
		return refusal
	}
	longest := v.e.maxModelLen()
	for _, prompt := range req.Prompts {
		if len(prompt) > longest {
			return badValue("input_tokens", len(prompt), "This model's maximum context length is %d tokens. However, your prompt contains at least %d input tokens, "+
				"which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.", longest, len(prompt))
		}
		if req.Limited {
			req.MaxTokens = min(req.MaxTokens, longest-len(prompt))
		} else if len(prompt) == longest {
			req.Limited = true
		}
	}
	switch {
	case req.N < 1:
		return badRequest("n", "n must be at least 1, got %d.", req.N)
	case req.N > maxSamples:
		return badRequest("n", "n must be at most %d, got %d.", maxSamples, req.N)
	case req.Limited && req.MaxTokens < 1:
		return badValue("max_tokens", req.MaxTokens, "max_tokens must be at least 1, got %d.", req.MaxTokens)
	case req.MinTokens < 0:
		return badRequest("", "min_tokens must be greater than or equal to 0, got %d.", req.MinTokens)
	case req.Limited && req.MinTokens > req.MaxTokens:
		return badRequest("", "min_tokens must be less than or equal to max_tokens=%d, got %d.", req.MaxTokens, req.MinTokens)
	case req.Temperature < 0:
		return badValue("temperature", req.Temperature, "temperature must be non-negative, got %v.", req.Temperature)
	case req.TopP <= 0 || req.TopP > 1:
		return badValue("top_p", req.TopP, "top_p must be in (0, 1], got %v.", req.TopP)
	}
	if rank, err := strconv.Atoi(req.Header.Get("X-Data-Parallel-Rank")); err == nil {
		if rank < 0 || rank >= v.e.cfg.Ranks {
			return badRequest("", "data_parallel_rank %d is out of range [0, %d).", rank, v.e.cfg.Ranks)
		}
		req.Rank = rank
	}
	return nil
}

// internalID returns the engine core's id of a sequence: the external id, for
// completions with the prompt's index, for responses with the turn's, for n > 1
// with the sample's, and always with 8 random hex digits.
func internalID(s *sequence) string {
	id := baseID(s.req)
	switch s.req.Route {
	case routeCompletions:
		id += "-" + strconv.Itoa(s.choice/s.req.N)
	case routeResponses:
		id += "_0"
	}
	if s.req.N > 1 {
		id = strconv.Itoa(s.sample) + "_" + id
	}
	return id + "-" + randomID()[:8]
}

func (v *vllm) generate(ctx context.Context, s *sequence, emit func(token)) error {
	watched, end := v.e.sleeper.watch(ctx)
	err := v.slept(watched, s, v.run(watched, s, emit), emit)
	end()
	if err == nil {
		err = v.parseTools(s)
	}
	var failure *apiError
	if s.req.Route == routeMessages && errors.As(err, &failure) {
		copied := *failure
		copied.Body = messagesError(failure)
		return &copied
	}
	return err
}

// run runs a sequence in the engine core.
func (v *vllm) run(ctx context.Context, s *sequence, emit func(token)) error {
	s.id = internalID(s)
	if v.nixl && v.wire() < NixlWireRequestID {
		s.id = randomSuffix.ReplaceAllString(s.id, "")
	}
	v.e.enter(baseID(s.req) + "/" + strconv.Itoa(s.choice))
	defer v.e.leave(baseID(s.req) + "/" + strconv.Itoa(s.choice))
	s.rank = v.e.pickRank(s.req.Rank)
	defer s.rank.release(s)
	ext := s.req.Ext.(*vllmRequest)
	switch {
	case v.e.cfg.Role == RoleEncode:
		return v.runEncoder(ctx, s)
	case !ext.received:
		v.encode(s.req)
	}
	if v.connector != nil {
		return v.connector.run(ctx, s, ext.other, emit)
	}
	leg := ext.leg
	if err := v.admit(ctx, s, leg); err != nil {
		return err
	}
	if err := s.rank.prefill(ctx, s); err != nil {
		return err
	}
	if err := s.rank.decode(ctx, s, emit); err != nil {
		return err
	}
	switch {
	case leg == nil || !leg.remoteDecode && !v.e.cfg.Nixl.Bidirectional:
	case !leg.remoteDecode:
		s.ext = v.keep(s)
	case v.push != nil:
		s.ext = v.push.hold(s)
	default:
		s.ext = v.hold(s)
	}
	return nil
}

// admit returns when the sequence's blocks are reserved, it holds a slot, and
// its KV from other engines has arrived.
func (v *vllm) admit(ctx context.Context, s *sequence, leg *nixlLeg) error {
	var err error
	switch {
	case leg != nil && leg.remotePrefill && v.push != nil:
		err = v.push.await(ctx, s, leg)
	case leg != nil && leg.remotePrefill:
		err = v.loadRemote(ctx, s, leg)
	case leg != nil && leg.remoteDecode && len(leg.blocks) > 0 && v.e.cfg.Nixl.Bidirectional:
		err = v.loadTurn(ctx, s, leg)
	case leg != nil && leg.remoteDecode && len(leg.blocks) > 0 && v.push == nil:
		// Without bidirectional transfers the scheduler waits for a load that
		// never starts.
		return s.rank.waitLoading(func() error { <-ctx.Done(); return context.Cause(ctx) })
	default:
		return s.rank.reserve(ctx, s, room(s), true)
	}
	if err != nil {
		return err
	}
	return s.rank.acquireSlot(ctx, s)
}

func (v *vllm) bootstrapPort() int {
	if m, ok := v.connector.(*mooncake); ok && m.bootstrap != nil {
		return m.bootstrap.port()
	}
	return 0
}

func (v *vllm) kvAddress() string {
	switch m := v.connector.(type) {
	case *moriio:
		return m.address()
	case *p2pNCCL:
		return m.address
	}
	return ""
}

func (v *vllm) heldBlocks() int {
	if m, ok := v.connector.(interface{ held() int }); ok {
		return m.held()
	}
	return 0
}
