package enginesim

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
)

// vllm is the vLLM engine: with the NixlConnector in pull mode when nixl is
// set, else without a KV connector. Roles do not change what it serves: as in
// vLLM, kv_transfer_params alone make a request a prefill or a decode leg.
type vllm struct {
	vllmDialect
	e    *Engine
	nixl bool

	mu sync.Mutex
	// beats are the remote requests whose leases this engine keeps alive, by
	// the prefill's side channel address.
	beats map[string]map[string]int
	// known are the remote engine ids with which a handshake was made.
	known map[string]bool
}

func newVLLM(e *Engine) *vllm {
	return &vllm{
		e: e, nixl: e.cfg.Connector == ConnectorVLLMNixl,
		beats: make(map[string]map[string]int), known: make(map[string]bool),
	}
}

func (v *vllm) start() error {
	if v.nixl {
		v.e.spawn(v.heartbeat)
	}
	return nil
}

func (v *vllm) routes(mux *http.ServeMux) {
	mux.HandleFunc("/ping", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /load", func(w http.ResponseWriter, _ *http.Request) {
		// Without --enable-server-load-tracking the answer is constant.
		writeJSON(w, http.StatusOK, obj("server_load", 0))
	})
	mux.HandleFunc("POST /tokenize", v.tokenize)
	mux.HandleFunc("POST /detokenize", v.detokenize)
}

// pydanticError is vLLM's answer to a body that its request models refuse. The
// engine core never hears of such a request.
func pydanticError(err *fieldError) *apiError {
	return &apiError{
		Status: http.StatusBadRequest, Type: "Bad Request", Param: err.Field,
		Message: fmt.Sprintf("1 validation error:\n  {'type': '%s', 'loc': ('body', '%s'), 'msg': '%s'}", err.Kind, err.Field, err.Message),
	}
}

// parse refuses in two stages, as vLLM does: what the request models refuse
// leaves no trace; what the serving layer refuses tells the prefill engine that
// its blocks will not be read.
func (v *vllm) parse(route string, h http.Header, body []byte) (*request, *apiError) {
	f, ferr := decodeFields(body)
	if ferr != nil {
		return nil, pydanticError(ferr)
	}
	req, ferr := parseOpenAI(route, h, f)
	if ferr != nil {
		return nil, pydanticError(ferr)
	}
	if f.has("stream_options") && !req.Stream {
		return nil, &apiError{
			Status: http.StatusBadRequest, Type: "Bad Request", Param: "stream_options",
			Message: "Stream options can only be defined when `stream=True`.",
		}
	}
	params, ferr := f.object("kv_transfer_params")
	if ferr != nil {
		return nil, pydanticError(ferr)
	}
	if req.ID, ferr = requestID(h, f); ferr != nil {
		return nil, pydanticError(ferr)
	}
	var leg *nixlLeg
	if v.nixl && params != nil {
		leg = parseNixl(params)
	}
	req.Ext = &vllmRequest{leg: leg}
	if refusal := v.check(req); refusal != nil {
		v.rejected(leg)
		return nil, refusal
	}
	return req, nil
}

// vllmRequest is what vLLM keeps of a request.
type vllmRequest struct {
	leg *nixlLeg // nil: no kv_transfer_params
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
		id = strings.ReplaceAll(newUUID(), "-", "")
	}
	return id, nil
}

// maxSamples is the default of VLLM_MAX_N_SEQUENCES.
const maxSamples = 16384

// check is the serving layer's and the sampling parameters' part of validation.
func (v *vllm) check(req *request) *apiError {
	if req.Model != "" && req.Model != v.e.cfg.Model {
		return &apiError{
			Status: http.StatusNotFound, Type: "NotFoundError", Param: "model",
			Message: fmt.Sprintf("The model `%s` does not exist.", req.Model),
		}
	}
	limited := req.MaxTokens != 0 || req.Fields.has("max_tokens") || req.Chat && req.Fields.has("max_completion_tokens")
	switch {
	case req.N < 1:
		return badRequest("n", "n must be at least 1, got %d.", req.N)
	case req.N > maxSamples:
		return badRequest("n", "n must be at most %d, got %d.", maxSamples, req.N)
	case limited && req.MaxTokens < 1:
		return badRequest("max_tokens", "max_tokens must be at least 1, got %d.", req.MaxTokens)
	case req.MinTokens < 0:
		return badRequest("min_tokens", "min_tokens must be greater than or equal to 0, got %d.", req.MinTokens)
	case limited && req.MinTokens > req.MaxTokens:
		return badRequest("min_tokens", "min_tokens must be less than or equal to max_tokens=%d, got %d.", req.MaxTokens, req.MinTokens)
	case req.Temperature < 0:
		return badRequest("temperature", "temperature must be non-negative, got %v.", req.Temperature)
	case req.TopP <= 0 || req.TopP > 1:
		return badRequest("top_p", "top_p must be in (0, 1], got %v.", req.TopP)
	}
	if refusal := v.e.checkTokens(req); refusal != nil {
		return refusal
	}
	for _, prompt := range req.Prompts {
		if longest := v.e.maxModelLen(); max(1, req.MaxTokens) > longest-len(prompt) {
			return badRequest("input_tokens", "This model's maximum context length is %d tokens. However, you requested %d output tokens and your prompt contains %d input tokens.",
				longest, req.MaxTokens, len(prompt))
		}
	}
	if rank, err := strconv.Atoi(req.Header.Get("X-Data-Parallel-Rank")); err == nil {
		if rank < 0 || rank >= v.e.cfg.Ranks {
			return badRequest("", "data_parallel_rank %d is out of range [0, %d).", rank, v.e.cfg.Ranks)
		}
		req.Rank = rank
	}
	return nil
}

// baseID is the request id as the answer shows it.
func baseID(req *request) string {
	if req.Chat {
		return "chatcmpl-" + req.ID
	}
	return "cmpl-" + req.ID
}

// internalID is the engine core's id of a sequence: the external one, for
// completions with the prompt's index, for n > 1 with the sample's, and always
// with 8 random hex digits.
func internalID(s *sequence) string {
	id := baseID(s.req)
	if !s.req.Chat {
		id += "-" + strconv.Itoa(s.choice/s.req.N)
	}
	if s.req.N > 1 {
		id = strconv.Itoa(s.sample) + "_" + id
	}
	var suffix [4]byte
	rand.Read(suffix[:])
	return id + "-" + hex.EncodeToString(suffix[:])
}

func (v *vllm) generate(ctx context.Context, s *sequence, emit func(token)) error {
	s.id = internalID(s)
	v.e.enter(baseID(s.req) + "/" + strconv.Itoa(s.choice))
	defer v.e.leave(baseID(s.req) + "/" + strconv.Itoa(s.choice))
	s.rank = v.e.pickRank(s.req.Rank)
	defer s.rank.release(s)
	leg := s.req.Ext.(*vllmRequest).leg
	if leg != nil && leg.remotePrefill {
		if err := v.loadRemote(ctx, s, leg); err != nil {
			return err
		}
		if err := s.rank.acquireSlot(ctx, s); err != nil {
			return err
		}
	} else {
		if leg != nil && leg.remoteDecode && len(leg.blocks) > 0 {
			// Without bidirectional transfers the scheduler waits for a load that
			// nobody starts.
			return s.rank.waitLoading(func() error { <-ctx.Done(); return context.Cause(ctx) })
		}
		if err := s.rank.reserve(ctx, s, room(s), true); err != nil {
			return err
		}
	}
	if err := s.rank.prefill(ctx, s); err != nil {
		return err
	}
	if err := s.rank.decode(ctx, s, emit); err != nil {
		return err
	}
	if leg != nil && leg.remoteDecode {
		s.ext = v.hold(s)
	}
	return nil
}

// room is the number of tokens whose KV a sequence may come to hold: the last
// output token's is never computed.
func room(s *sequence) int { return len(s.prompt) + s.limit - 1 }

// tokenize answers POST /tokenize for a prompt or messages.
func (v *vllm) tokenize(w http.ResponseWriter, r *http.Request) {
	f, refusal := v.smallBody(w, r)
	if refusal == nil {
		var text string
		var ferr *fieldError
		if f.has("messages") {
			text, ferr = chatText(f)
		} else if text, ferr = f.str("prompt", ""); ferr == nil && !f.has("prompt") {
			ferr = &fieldError{"prompt", "missing", "Field required"}
		}
		if ferr == nil {
			tokens := tokenize(text)
			writeJSON(w, http.StatusOK, obj("count", len(tokens), "max_model_len", v.e.maxModelLen(), "tokens", tokens, "token_strs", nil))
			return
		}
		refusal = pydanticError(ferr)
	}
	writeJSON(w, refusal.Status, v.errorBody(refusal))
}

// detokenize answers POST /detokenize.
func (v *vllm) detokenize(w http.ResponseWriter, r *http.Request) {
	f, refusal := v.smallBody(w, r)
	if refusal == nil {
		ids, ferr := parseTokenIDs(f, "tokens")
		if ferr == nil {
			writeJSON(w, http.StatusOK, obj("prompt", validText(detokenize(ids))))
			return
		}
		refusal = pydanticError(ferr)
	}
	writeJSON(w, refusal.Status, v.errorBody(refusal))
}

func (v *vllm) smallBody(w http.ResponseWriter, r *http.Request) (fields, *apiError) {
	body, err := readBody(w, r)
	if err != nil {
		return nil, badRequest("", "unreadable body")
	}
	f, ferr := decodeFields(body)
	if ferr != nil {
		return nil, pydanticError(ferr)
	}
	return f, nil
}
