package core

import (
	"context"
	"net/http"
)

// Protocol adds one kind of engine to the core. One value belongs to one
// Engine; many goroutines call its methods.
type Protocol interface {
	// Routes adds the protocol's own HTTP routes. The core serves
	// /v1/completions, /v1/chat/completions, /v1/models, /health, /version,
	// /metrics and /sim/*; a protocol's route of the same path replaces the
	// core's. Another generating route is added as mux.HandleFunc("POST
	// /generate", e.generating("/generate")): its requests pass parse, generate
	// and the dialect with request.Route set.
	Routes(mux *http.ServeMux)

	// Start opens the protocol's listeners in addition to the HTTP port and the
	// side channels. Work that outlives the call runs in e.spawn, whose context
	// ends at Close and Kill; listeners must be closed when it ends.
	Start() error

	// Parse checks a body as strictly as the engine does and returns the request,
	// or the engine's error. Use ParseOpenAI and the fields helpers of openai.go.
	Parse(route string, h http.Header, body []byte) (*Request, *APIError)

	// Generate runs one admitted sequence from the queue to its last token with
	// the primitives of rank (scheduler.go). When it returns, it has released
	// its blocks or pinned them. It calls emit once for each token, in order,
	// from its own goroutine. ctx ends when the client's connection does. The
	// dialect formats an error that is an *APIError; context errors are counted
	// as aborts; any other error is an internal server error.
	Generate(ctx context.Context, s *Sequence, emit func(Token)) error

	// Message answers a side channel message from another engine for rank r.
	// It may block: a connection carries one message at a time.
	Message(ctx context.Context, r *Rank, m SideMessage) (SideMessage, error)

	dialect
}

// headerProtocol is a protocol that adds its own headers to every answer.
type headerProtocol interface {
	// AnswerHeader sets headers of an answer to a request with header in.
	AnswerHeader(in, out http.Header)
}

// refusingProtocol is a protocol whose engine does more than to answer when it has no room.
type refusingProtocol interface {
	// NoRoom returns the refusal of a request that the engine would have accepted.
	NoRoom(req *Request) *APIError
}

// greetingProtocol is a protocol whose streams begin before the first token.
type greetingProtocol interface {
	// Greeting returns the events that directly follow the head of a stream,
	// before the first sequence runs; nil for none.
	Greeting(req *Request, seqs []*Sequence) []any
}

// loadingProtocol is a protocol whose streams open an answer for a request whose KV could not
// be loaded.
type loadingProtocol interface {
	// LoadFailure returns the events of such a stream after its head and before its end;
	// nil cuts the connection.
	LoadFailure(req *Request, seqs []*Sequence, err *APIError) []any
}

// measuringProtocol is a protocol whose answers may contain measured times.
type measuringProtocol interface {
	// UnaryHeader adds headers to an unary answer.
	UnaryHeader(req *Request, h http.Header)
	// AfterDone returns the events after the end of a stream.
	AfterDone(req *Request) []any
}

// bootstrapProtocol is a protocol with a bootstrap server.
type bootstrapProtocol interface {
	// BootstrapPort returns the port of the server; 0 for a role without one.
	BootstrapPort() int
}

// addressedProtocol is a protocol that may have an address for KV beside the side channels.
type addressedProtocol interface {
	// KVAddress returns the address as the engine registers it; empty for none.
	KVAddress() string
}

// bufferingProtocol is a protocol that may hold KV outside the ranks' caches.
type bufferingProtocol interface {
	// HeldBlocks returns the number of blocks in the buffer.
	HeldBlocks() int
}

// registeringProtocol is a protocol whose workers register with a record of their own.
type registeringProtocol interface {
	Record() (key, value string)
}

// dialect renders answers in the engine's own form. The values returned are
// marshalled by EncodeJSON: an object, or any struct.
type dialect interface {
	// ErrorBody is the body of an unary error answer.
	ErrorBody(err *APIError) any
	// ErrorEvents are the stream events after a failure under status 200, before "[DONE]"
	// (which is sent if ErrorDone is set); nil cuts the connection.
	ErrorEvents(req *Request, err *APIError) []any
	// Unary is the whole body of a non-streaming answer; the sequences are
	// finished and in choice order.
	Unary(req *Request, seqs []*Sequence) any
	// Opening returns the events before a sequence's first token (chat's role
	// chunk in vLLM); nil for none.
	Opening(req *Request, s *Sequence) []any
	// Event returns the event of new text; p.Finish is set on the last one.
	Event(req *Request, s *Sequence, p Piece) any
	// Closing returns the events after the last sequence ended (usage); nil for
	// none.
	Closing(req *Request, seqs []*Sequence) []any
	// StreamOptions returns the engine's framing of streams.
	StreamOptions(req *Request) StreamOptions
}

// StreamOptions are the differences between the engines' streams that a single
// event does not show.
type StreamOptions struct {
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
	// Detokenizer is the engine's way from tokens to text.
	Detokenizer Detokenizer
}

// Detokenizer is the way in which an engine makes text of new tokens. The ways differ only for
// tokens that end inside a letter and for stop strings.
type Detokenizer int

const (
	// DecodeAlone decodes the output without the prompt. Text that may begin a stop string is held
	// back.
	DecodeAlone Detokenizer = iota
	// DecodeAfterPrompt is vLLM's (v1/engine/detokenizer.py): the tokenizer's stream begins with
	// the prompt. A token that ends inside a letter gives no text before the letter's end. If the
	// prompt ends inside a letter, the first text is that of the whole prompt and output. As many
	// letters as the longest stop string has, less one, are held back.
	DecodeAfterPrompt
	// DecodeDifference is SGLang's (managers/detokenizer_manager.py): the text of the last tokens
	// less the length of the text before. If the prompt ends inside a letter, this letter is lost.
	// Of a token that ends inside a letter, the part up to its last blank is sent. While the text
	// may end with the begin of a stop string, nothing is sent, neither text nor tokens
	// (scheduler_components/output_streamer.py, accept).
	DecodeDifference
)

// Piece is new text of one sequence in a stream.
type Piece struct {
	// Text may be empty: the engine holds back text that could become a stop
	// string.
	Text string
	// Tokens are the tokens that were decoded since the previous piece.
	Tokens []Token
	// Finish is the finish reason ("length", "stop"…) on the last piece.
	Finish string
}
