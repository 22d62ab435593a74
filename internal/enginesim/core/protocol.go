package enginesim

import (
	"context"
	"net/http"
)

// protocol adds one kind of engine to the core. One value belongs to one
// Engine; many goroutines call its methods.
type protocol interface {
	// routes adds the protocol's own HTTP routes. The core serves
	// /v1/completions, /v1/chat/completions, /v1/models, /health, /version,
	// /metrics and /sim/*; a protocol's route of the same path replaces the
	// core's. Another generating route is added as mux.HandleFunc("POST
	// /generate", e.generating("/generate")): its requests pass parse, generate
	// and the dialect with request.Route set.
	routes(mux *http.ServeMux)

	// start opens the protocol's listeners in addition to the HTTP port and the
	// side channels. Work that outlives the call runs in e.spawn, whose context
	// ends at Close and Kill; listeners must be closed when it ends.
	start() error

	// parse checks a body as strictly as the engine does and returns the request,
	// or the engine's error. Use parseOpenAI and the fields helpers of openai.go.
	parse(route string, h http.Header, body []byte) (*request, *apiError)

	// generate runs one admitted sequence from the queue to its last token with
	// the primitives of rank (scheduler.go). When it returns, it has released
	// its blocks or pinned them. It calls emit once for each token, in order,
	// from its own goroutine. ctx ends when the client's connection does. The
	// dialect formats an error that is an *apiError; context errors are counted
	// as aborts; any other error is an internal server error.
	generate(ctx context.Context, s *sequence, emit func(token)) error

	// message answers a side channel message from another engine for rank r.
	// It may block: a connection carries one message at a time.
	message(ctx context.Context, r *rank, m sideMessage) (sideMessage, error)

	dialect
}

// headerProtocol is a protocol that adds its own headers to every answer.
type headerProtocol interface {
	// answerHeader sets headers of an answer to a request with header in.
	answerHeader(in, out http.Header)
}

// greetingProtocol is a protocol whose streams begin before the first token.
type greetingProtocol interface {
	// greeting returns the events that directly follow the head of a stream,
	// before the first sequence runs; nil for none.
	greeting(req *request, seqs []*sequence) []any
}

// loadingProtocol is a protocol whose streams open an answer for a request whose KV could not
// be loaded.
type loadingProtocol interface {
	// loadFailure returns the events of such a stream after its head and before its end;
	// nil cuts the connection.
	loadFailure(req *request, seqs []*sequence, err *apiError) []any
}

// measuringProtocol is a protocol whose answers may contain measured times.
type measuringProtocol interface {
	// unaryHeader adds headers to an unary answer.
	unaryHeader(req *request, h http.Header)
	// afterDone returns the events after the end of a stream.
	afterDone(req *request) []any
}

// bootstrapProtocol is a protocol with a bootstrap server.
type bootstrapProtocol interface {
	// bootstrapPort returns the port of the server; 0 for a role without one.
	bootstrapPort() int
}

// addressedProtocol is a protocol that may have an address for KV beside the side channels.
type addressedProtocol interface {
	// kvAddress returns the address as the engine registers it; empty for none.
	kvAddress() string
}

// bufferingProtocol is a protocol that may hold KV outside the ranks' caches.
type bufferingProtocol interface {
	// heldBlocks returns the number of blocks in the buffer.
	heldBlocks() int
}

// registeringProtocol is a protocol whose workers register with a record of their own.
type registeringProtocol interface {
	record() (key, value string)
}

// dialect renders answers in the engine's own form. The values returned are
// marshalled by encodeJSON: an object, or any struct.
type dialect interface {
	// errorBody is the body of an unary error answer.
	errorBody(err *apiError) any
	// errorEvents are the stream events after a failure under status 200, before "[DONE]"
	// (which is sent if ErrorDone is set); nil cuts the connection.
	errorEvents(req *request, err *apiError) []any
	// unary is the whole body of a non-streaming answer; the sequences are
	// finished and in choice order.
	unary(req *request, seqs []*sequence) any
	// opening returns the events before a sequence's first token (chat's role
	// chunk in vLLM); nil for none.
	opening(req *request, s *sequence) []any
	// event returns the event of new text; p.Finish is set on the last one.
	event(req *request, s *sequence, p piece) any
	// closing returns the events after the last sequence ended (usage); nil for
	// none.
	closing(req *request, seqs []*sequence) []any
	// streamOptions returns the engine's framing of streams.
	streamOptions(req *request) streamOptions
}

// streamOptions are the differences between the engines' streams that a single
// event does not show.
type streamOptions struct {
	// HoldHead delays the 200 head until the first token or error, so that an
	// error before the first token has its own status.
	HoldHead bool
	// HeldErrors makes an error before the first token an event of a 200 stream
	// anyway.
	HeldErrors bool
	// NoDone omits the "[DONE]" at the end of a stream.
	NoDone bool
	// ErrorDone sends "[DONE]" after an error event.
	ErrorDone bool
}

// piece is new text of one sequence in a stream.
type piece struct {
	// Text may be empty: the engine holds back text that could become a stop
	// string.
	Text string
	// Tokens are the tokens that were decoded since the previous piece.
	Tokens []token
	// Finish is the finish reason ("length", "stop"…) on the last piece.
	Finish string
}
