package vllm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"sync"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// VLLM is the vLLM engine: with the NixlConnector in pull mode when nixl is
// set, in push mode when push is, else with connector, or without any. Roles do
// not change its behaviour: as in vLLM, only kv_transfer_params make a request
// a prefill or a decode leg.
type VLLM struct {
	vllmDialect
	e    *core.Engine
	nixl bool
	// Push is the NixlPushConnector, nil for engines without it.
	Push *nixlPush
	// Connector is nil for engines without a connector and for those with a
	// NIXL connector.
	Connector vllmConnector
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
	// Start opens the connector's sockets. The engine's mutex is held.
	Start() error
	// Parse reads the kv_transfer_params, nil if there are none, of a request
	// with that external id. It does not check them. run and rejected receive
	// its result, which may be nil.
	Parse(params core.Fields, id string) any
	// run runs a sequence whose rank is chosen.
	run(ctx context.Context, s *core.Sequence, leg any, emit func(core.Token)) error
	// rejected is called for a leg that the serving layer has rejected.
	rejected(leg any)
	// Message answers a peer's side channel message for rank r.
	Message(r *core.Rank, m core.SideMessage) (core.SideMessage, error)
}

func New(e *core.Engine) *VLLM {
	c := e.Cfg.KVEvents
	wire := core.VLLMWire{Arrays: c.Arrays, Digests: c.DigestHashes}
	if e.Publishers = core.NewPublishers(e, wire.Batch, c.PlainReplay); e.Publishers != nil {
		e.LogKV(e.Publishers, core.VLLMNaming{Seed: e.UUID}, true)
	}
	v := &VLLM{
		e: e, nixl: e.Cfg.Connector == core.ConnectorVLLMNixl && e.Cfg.Role != core.RoleEncode,
		beats: make(map[string]map[string]int), known: make(map[string]bool), done: make(map[string]int),
	}
	switch c := e.Cfg.Connector; {
	case e.Cfg.Role == core.RoleEncode: // it transfers no KV
	case (c == core.ConnectorVLLMMoRIIO || c == core.ConnectorVLLMMoRIIORead) && e.Cfg.Role != core.RoleBoth: // role both has no connector
		v.Connector = newMoRIIO(e, c == core.ConnectorVLLMMoRIIORead)
	case c == core.ConnectorVLLMMooncake:
		v.Connector = newMooncake(e)
	case c == core.ConnectorVLLMStore && e.Cfg.Store != "":
		v.Connector = &kvStore{v, e.Cfg.Store}
	case c == core.ConnectorVLLMP2PTier && e.Cfg.Role != core.RoleBoth: // role both works alone
		v.Connector = &p2pTier{v: v, supplies: make(map[string]*p2pSupply)}
	case c == core.ConnectorVLLMNixlPush:
		v.Push = newNixlPush(v)
	}
	return v
}

func (v *VLLM) Start() error {
	if v.nixl {
		v.e.Spawn(v.heartbeat)
	}
	if v.Connector != nil {
		return v.Connector.Start()
	}
	return nil
}

func (v *VLLM) Routes(mux *http.ServeMux) {
	mux.HandleFunc("POST "+core.RouteMessages, v.e.Generating(core.RouteMessages))
	v.scaleOutRoutes(mux)
	mux.HandleFunc("POST "+core.RouteResponses, v.storing(v.e.Generating(core.RouteResponses)))
	v.storedRoutes(mux)
	mux.HandleFunc("/ping", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /load", func(w http.ResponseWriter, _ *http.Request) {
		// The answer is constant without --enable-server-load-tracking.
		core.WriteJSON(w, http.StatusOK, core.Obj("server_load", 0))
	})
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		core.WriteJSON(w, http.StatusOK, core.Obj("version", v.e.Cfg.Version))
	})
	v.poolingRoutes(mux)
	v.mediaRoutes(mux)
	mux.HandleFunc("POST /tokenize", v.tokenize)
	// This route belongs to the development mode. It answers 200 even when
	// blocks are in use.
	mux.HandleFunc("POST /reset_prefix_cache", func(http.ResponseWriter, *http.Request) { v.e.ResetCache() })
	mux.HandleFunc("POST /detokenize", v.detokenize)
	v.sleepRoutes(mux)
	v.eventRoutes(mux)
}

// AnswerHeader returns the request's id, as with --enable-request-id-headers.
func (v *VLLM) AnswerHeader(in, out http.Header) {
	id := in.Get("X-Request-Id")
	if id == "" {
		id = core.RandomID() + core.RandomID()
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
func pydanticError(err *core.FieldError, f core.Fields) *core.APIError {
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
	return &core.APIError{
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
func badValue(param string, value any, format string, args ...any) *core.APIError {
	err := core.BadRequest(param, format, args...)
	err.Message += fmt.Sprintf(" (parameter=%s, value=%v)", param, value)
	return err
}

// Parse rejects in two stages, as vLLM does. A rejection by the request models has no effect. A
// rejection by the serving layer informs the prefill engine that its blocks will not be read.
func (v *VLLM) Parse(route string, h http.Header, body []byte) (*core.Request, *core.APIError) {
	req, refusal := v.parseRoute(route, h, body)
	if refusal != nil && route == core.RouteMessages && refusal.Type != pydanticType {
		refusal.Body = messagesError(refusal)
	}
	return req, refusal
}

func (v *VLLM) parseRoute(route string, h http.Header, body []byte) (*core.Request, *core.APIError) {
	f, ferr := core.DecodeFields(body)
	if ferr != nil {
		return nil, pydanticError(ferr, nil)
	}
	req, refusal := parseAPI(route, h, f)
	if refusal != nil {
		return nil, refusal
	}
	if f.Has("stream_options") && !req.Stream {
		return nil, core.BadRequest("stream_options", "Stream options can only be defined when `stream=True`. (parameter=stream_options)")
	}
	params, ferr := transferParams(route, f)
	if ferr != nil {
		return nil, pydanticError(ferr, f)
	}
	ext := &vllmRequest{}
	params, ext.ids = v.cutIDs(route, params)
	ext.received, _ = params.Boolean("do_remote_prefill", false)
	if (v.nixl || v.Push != nil) && params != nil {
		ext.leg = parseNixl(params, v.wire())
	}
	if req.ID, ferr = requestID(h, f); ferr != nil {
		return nil, pydanticError(ferr, f)
	}
	if route == core.RouteResponses {
		req.ID, req.Response = core.RandomID(), &core.ResponseState{Item: core.RandomID()} // no header sets the id of a response
		if req.Model == "" {
			req.Model = v.e.Cfg.Model
		}
	}
	if v.Connector != nil {
		ext.other = v.Connector.Parse(params, req.ID)
		if _, tier := v.Connector.(*p2pTier); tier {
			ext.received = ext.other.(*p2pTierLeg).prefiller != ""
		}
	}
	req.Ext = ext
	if refusal := v.check(req); refusal != nil {
		v.refused(req)
		return nil, refusal
	}
	return req, nil
}

// parseAPI reads a body with the request model of its route.
func parseAPI(route string, h http.Header, f core.Fields) (req *core.Request, refusal *core.APIError) {
	var ferr *core.FieldError
	switch route {
	case core.RouteResponses:
		req, ferr = core.ParseResponses(h, f)
	case core.RouteMessages:
		req, ferr = parseMessages(h, f)
	case core.RouteTokens:
		req, ferr = parseTokens(h, f)
	default:
		if text, err := f.Str("prompt", ""); route == core.RouteCompletions && err == nil && text == "" {
			return nil, core.BadRequest("prompt", "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)")
		}
		req, ferr = core.ParseOpenAI(route, h, f)
	}
	if ferr != nil {
		return nil, pydanticError(ferr, f)
	}
	return req, nil
}

// NoRoom refuses a request that --max-num-queued-reqs does not allow (exceptions.py
// QueueOverflowError). The serving layer checks this limit inside the clean-up of rejected requests
// (entrypoints/generate/base/serving.py _preflight).
func (v *VLLM) NoRoom(req *core.Request) *core.APIError {
	v.refused(req)
	return &core.APIError{Status: http.StatusServiceUnavailable, Type: "Service Unavailable",
		Message: "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."}
}

// refused makes the connector give up the transfer of a request that the
// serving layer has rejected.
func (v *VLLM) refused(req *core.Request) {
	ext := req.Ext.(*vllmRequest)
	switch {
	case req.Route == core.RouteTokens: // this route has no clean-up
	case v.Connector != nil:
		v.Connector.rejected(ext.other)
	case v.Push != nil:
		v.Push.rejected(ext.leg)
	default:
		v.rejected(ext.leg)
	}
}

// vllmRequest is vLLM's state of a request.
type vllmRequest struct {
	ids      json.RawMessage // kv_transfer_params.prompt_token_ids, see cutIDs
	received bool            // another engine computes its KV, and has used the encoders' results
	leg      *nixlLeg        // nil: no kv_transfer_params
	other    any             // of another connector
}

// requestID is the external id: header, body field or random.
func requestID(h http.Header, f core.Fields) (string, *core.FieldError) {
	id, err := f.Str("request_id", "")
	if err != nil {
		return "", err
	}
	if head := h.Get("X-Request-Id"); head != "" {
		id = head
	}
	if id == "" {
		id = core.RandomID()
	}
	return id, nil
}

// checkModel rejects a model that is not served; "" means the served one.
func (v *VLLM) checkModel(name string) *core.APIError {
	if name == "" || name == v.e.Cfg.Model || slices.Contains(v.e.Cfg.LoRA.Modules, name) {
		return nil
	}
	return &core.APIError{
		Status: http.StatusNotFound, Type: "NotFoundError", Param: "model",
		Message: fmt.Sprintf("The model `%s` does not exist. Valid aliases: %s.", name, v.e.Cfg.Model),
	}
}

// check does the serving layer's checks and those of the sampling parameters.
// It limits the token limit to the rest of the model's length.
func (v *VLLM) check(req *core.Request) *core.APIError {
	if refusal := v.checkModel(req.Model); refusal != nil {
		return refusal
	}
	if refusal := v.takeIDs(req); refusal != nil {
		return refusal
	}
	if refusal := v.e.CheckTokens(req); refusal != nil {
		return refusal
	}
	longest := v.e.MaxModelLen()
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
		return core.BadRequest("n", "n must be at least 1, got %d.", req.N)
	case req.N > core.MaxSamples:
		return core.BadRequest("n", "n must be at most %d, got %d.", core.MaxSamples, req.N)
	case req.Limited && req.MaxTokens < 1:
		return badValue("max_tokens", req.MaxTokens, "max_tokens must be at least 1, got %d.", req.MaxTokens)
	case req.MinTokens < 0:
		return core.BadRequest("", "min_tokens must be greater than or equal to 0, got %d.", req.MinTokens)
	case req.Limited && req.MinTokens > req.MaxTokens:
		return core.BadRequest("", "min_tokens must be less than or equal to max_tokens=%d, got %d.", req.MaxTokens, req.MinTokens)
	case req.Temperature < 0:
		return badValue("temperature", req.Temperature, "temperature must be non-negative, got %v.", req.Temperature)
	case req.TopP <= 0 || req.TopP > 1:
		return badValue("top_p", req.TopP, "top_p must be in (0, 1], got %v.", req.TopP)
	}
	if rank, err := strconv.Atoi(req.Header.Get("X-Data-Parallel-Rank")); err == nil {
		if rank < 0 || rank >= v.e.Cfg.Ranks {
			return core.BadRequest("", "data_parallel_rank %d is out of range [0, %d).", rank, v.e.Cfg.Ranks)
		}
		req.Rank = rank
	}
	return nil
}

// internalID returns the engine core's id of a sequence: the external id, for
// completions with the prompt's index, for responses with the turn's, for n > 1
// with the sample's, and always with 8 random hex digits.
func internalID(s *core.Sequence) string {
	id := core.BaseID(s.Req)
	switch s.Req.Route {
	case core.RouteCompletions:
		id += "-" + strconv.Itoa(s.Choice/s.Req.N)
	case core.RouteResponses:
		id += "_0"
	}
	if s.Req.N > 1 {
		id = strconv.Itoa(s.Sample) + "_" + id
	}
	return id + "-" + core.RandomID()[:8]
}

func (v *VLLM) Generate(ctx context.Context, s *core.Sequence, emit func(core.Token)) error {
	watched, end := v.e.Sleeper.Watch(ctx)
	err := v.slept(watched, s, v.run(watched, s, emit), emit)
	end()
	if err == nil {
		err = v.parseTools(s)
	}
	var failure *core.APIError
	if s.Req.Route == core.RouteMessages && errors.As(err, &failure) {
		copied := *failure
		copied.Body = messagesError(failure)
		return &copied
	}
	return err
}

// run runs a sequence in the engine core.
func (v *VLLM) run(ctx context.Context, s *core.Sequence, emit func(core.Token)) error {
	s.ID = internalID(s)
	if v.nixl && v.wire() < core.NixlWireRequestID {
		s.ID = randomSuffix.ReplaceAllString(s.ID, "")
	}
	v.e.Enter(core.BaseID(s.Req) + "/" + strconv.Itoa(s.Choice))
	defer v.e.Leave(core.BaseID(s.Req) + "/" + strconv.Itoa(s.Choice))
	s.Rank = v.e.PickRank(s.Req.Rank)
	defer s.Rank.Release(s)
	ext := s.Req.Ext.(*vllmRequest)
	switch {
	case v.e.Cfg.Role == core.RoleEncode:
		return v.runEncoder(ctx, s)
	case !ext.received:
		v.encode(s.Req)
	}
	if v.Connector != nil {
		return v.Connector.run(ctx, s, ext.other, emit)
	}
	leg := ext.leg
	if err := v.admit(ctx, s, leg); err != nil {
		return err
	}
	if err := s.Rank.Prefill(ctx, s); err != nil {
		return err
	}
	return s.Rank.Decode(ctx, s, func(t core.Token) {
		if s.Finish != "" {
			v.finished(s, leg)
		}
		emit(t)
	})
}

// finished holds the blocks of a sequence that another engine may read. The engine core does so before
// the front end sends the last event (v1/core/sched/scheduler.py, update_from_output).
func (v *VLLM) finished(s *core.Sequence, leg *nixlLeg) {
	switch {
	case leg == nil || !leg.remoteDecode && !v.e.Cfg.Nixl.Bidirectional:
	case !leg.remoteDecode:
		s.Ext = v.keep(s)
	case v.Push != nil:
		s.Ext = v.Push.hold(s)
	default:
		s.Ext = v.hold(s)
	}
}

// admit returns when the sequence's blocks are reserved, it holds a slot, and
// its KV from other engines has arrived.
func (v *VLLM) admit(ctx context.Context, s *core.Sequence, leg *nixlLeg) error {
	var err error
	switch {
	case leg != nil && leg.remotePrefill && v.Push != nil:
		err = v.Push.await(ctx, s, leg)
	case leg != nil && leg.remotePrefill:
		err = v.loadRemote(ctx, s, leg)
	case leg != nil && leg.remoteDecode && len(leg.blocks) > 0 && v.e.Cfg.Nixl.Bidirectional:
		err = v.loadTurn(ctx, s, leg)
	case leg != nil && leg.remoteDecode && len(leg.blocks) > 0 && v.Push == nil:
		// Without bidirectional transfers the scheduler waits for a load that
		// never starts.
		return s.Rank.WaitLoading(func() error { <-ctx.Done(); return context.Cause(ctx) })
	default:
		return s.Rank.Reserve(ctx, s, core.Room(s), true)
	}
	if err != nil {
		return err
	}
	return s.Rank.AcquireSlot(ctx, s)
}

func (v *VLLM) BootstrapPort() int {
	if m, ok := v.Connector.(*mooncake); ok && m.bootstrap != nil {
		return m.bootstrap.port()
	}
	return 0
}

func (v *VLLM) KVAddress() string {
	if m, ok := v.Connector.(*MoRIIO); ok {
		return m.address()
	}
	return ""
}

func (v *VLLM) HeldBlocks() int {
	if m, ok := v.Connector.(interface{ held() int }); ok {
		return m.held()
	}
	return 0
}
