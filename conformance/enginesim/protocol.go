package enginesim

import (
	"context"
	"fmt"
	"net/http"
)

// protocol is what one engine kind adds to the core. One value belongs to one
// Engine; its methods are called by many goroutines.
type protocol interface {
	// routes adds the protocol's own HTTP routes. The core serves
	// /v1/completions, /v1/chat/completions, /v1/models, /health, /version,
	// /metrics and /sim/*; a protocol's route of the same path takes the place of
	// the core's. A further generating route is added as
	// mux.HandleFunc("POST /generate", e.generating("/generate")): it comes back
	// through parse, generate and the dialect with request.Route set.
	routes(mux *http.ServeMux)

	// start opens what the protocol listens on besides the HTTP port and the
	// side channels. Work that outlives the call is started with e.spawn, whose
	// context ends at Close and Kill; listeners are closed when it ends.
	start() error

	// parse checks a body as strictly as the engine does and returns the request,
	// or the engine's error. Use parseOpenAI and the fields helpers of openai.go.
	parse(route string, h http.Header, body []byte) (*request, *apiError)

	// generate runs one admitted sequence from the queue to its last token with
	// the primitives of rank (scheduler.go), and has given its blocks back, or
	// pinned them, when it returns. It calls emit once for each token, in order,
	// from its own goroutine. ctx ends when the client's connection does. An
	// error that is an *apiError is answered in the dialect; context errors are
	// counted as aborts; any other error is an internal server error.
	generate(ctx context.Context, s *sequence, emit func(token)) error

	// message answers a side channel message from another engine for rank r.
	// It may block: a connection carries one message at a time.
	message(ctx context.Context, r *rank, m sideMessage) (sideMessage, error)

	dialect
}

// headerProtocol is a protocol whose every answer bears headers of its own.
type headerProtocol interface {
	// answerHeader sets headers of an answer to a request with header in.
	answerHeader(in, out http.Header)
}

// greetingProtocol is a protocol whose streams begin before there is a token.
type greetingProtocol interface {
	// greeting are the events that follow the head of a stream at once, before
	// the first sequence runs; nil for none.
	greeting(req *request, seqs []*sequence) []any
}

// measuringProtocol is a protocol whose answers may tell how the request went.
type measuringProtocol interface {
	// unaryHeader adds headers to a whole answer.
	unaryHeader(req *request, h http.Header)
	// afterDone are events behind the end of a stream.
	afterDone(req *request) []any
}

// dialect renders answers in the engine's own form. The values returned are
// marshalled by encodeJSON: an object, or any struct.
type dialect interface {
	// errorBody is the body of an unary error answer.
	errorBody(err *apiError) any
	// errorEvents are the stream events after a failure under status 200, before
	// "[DONE]" (which is sent when ErrorDone says so); nil cuts the connection.
	errorEvents(req *request, err *apiError) []any
	// unary is the whole body of a non-streaming answer; the sequences are
	// finished and in choice order.
	unary(req *request, seqs []*sequence) any
	// opening are the events before a sequence's first token (chat's role
	// chunk in vLLM); nil for none.
	opening(req *request, s *sequence) []any
	// event is the event of new text; p.Finish is set on the last one.
	event(req *request, s *sequence, p piece) any
	// closing are the events after the last sequence ended (usage); nil for none.
	closing(req *request, seqs []*sequence) []any
	// streamOptions says how the engine frames its streams.
	streamOptions(req *request) streamOptions
}

// streamOptions are the differences between the engines' streams that are not
// visible in a single event.
type streamOptions struct {
	// HoldHead delays the 200 head until the first token or error, so that an
	// error before the first token has its own status.
	HoldHead bool
	// HeldErrors makes an error before the first token an event of a 200 stream
	// all the same.
	HeldErrors bool
	// NoDone leaves out the "[DONE]" at the end of a stream.
	NoDone bool
	// ErrorDone sends "[DONE]" after an error event.
	ErrorDone bool
}

// piece is new text of one sequence in a stream.
type piece struct {
	// Text may be empty: the engine holds back what could become a stop string.
	Text string
	// Tokens are the tokens that were decoded since the piece before.
	Tokens []token
	// Finish is the finish reason ("length", "stop"…) on the last piece.
	Finish string
}

// newProtocol returns the protocol that the engine's config names.
func newProtocol(e *Engine) (protocol, error) {
	switch e.cfg.Connector {
	case ConnectorVLLMNixl, ConnectorVLLMNixlPush, ConnectorVLLMStore, ConnectorVLLMMoRIIO, ConnectorVLLMMoRIIORead, ConnectorVLLMMooncake, ConnectorVLLMP2PNCCL, ConnectorVLLMP2PTier, ConnectorNone:
		return newVLLM(e), nil
	case ConnectorSGLang:
		return newSGLang(e), nil
	case ConnectorTRTLLM:
		return newTRTLLM(e), nil
	}
	return nil, fmt.Errorf("config connector: %q is unknown", e.cfg.Connector)
}
