package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

const (
	benchModel = "bench"
	countsPath = "/bench/counts"
	notFound   = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
	eventSize  = 200 // bytes of one SSE event without token ids
	// answerText fills a unary answer up to about 1 KB.
	answerText = 760
)

// counts are the numbers of answers of a backend. The suite compares them with
// the requests of the load, because a proxy that skips a leg would look cheap.
type counts struct {
	Whole   int64 `json:"whole"`   // unary answers without a transfer
	Prefill int64 `json:"prefill"` // requests whose KV is kept for a decode
	Decode  int64 `json:"decode"`  // streams that named a prefill's blocks
	Stream  int64 `json:"stream"`  // streams without such blocks
}

func (c counts) minus(o counts) counts {
	return counts{c.Whole - o.Whole, c.Prefill - o.Prefill, c.Decode - o.Decode, c.Stream - o.Stream}
}

// backend answers as a vLLM or an SGLang engine does, from fixed bytes and at a
// given pace.
type backend struct {
	whole, prefill, models, version, model []byte // answers, head included

	wholes, prefills, decodes, streams atomic.Int64

	noTokens    bool      // no route gives token ids
	sglang      bool      // routers tell the engines apart by GET /version
	cacheBlocks int       // of the prefix cache of an engine, 0: none
	recorded    *recorder // nil: requests are not kept
}

// wholeAnswer returns an answer with those parameters, and with the ids of its prompt if ids is
// not empty.
func wholeAnswer(params, ids string, prompt int) []byte {
	if ids != "" {
		ids = `,"prompt_token_ids":[` + ids + `]`
	}
	return jsonAnswer(`{"id":"cmpl-1","object":"text_completion","created":1,"model":"` + benchModel +
		`","choices":[{"index":0,"text":"` + string(bytes.Repeat([]byte("x"), answerText)) +
		`","logprobs":null,"finish_reason":"length","stop_reason":null` + ids + `}],` +
		fmt.Sprintf(`"usage":{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":%d},"kv_transfer_params":%s}`, prompt, prompt+1, params))
}

// prefillParams are those by which decode reads the KV.
const prefillParams = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"e1",` +
	`"remote_block_ids":[1,2,3,4],"remote_host":"127.0.0.1","remote_port":5600,"tp_size":1}`

func newBackend() *backend {
	return &backend{
		whole:   wholeAnswer("null", "", 500),
		prefill: wholeAnswer(prefillParams, "", 500),
		models:  jsonAnswer(`{"object":"list","data":[{"id":"` + benchModel + `","object":"model","max_model_len":1048576}]}`),
		version: jsonAnswer(`{"version":"0.33.0"}`),
		model:   jsonAnswer(`{"model_path":"` + benchModel + `","served_model_name":"` + benchModel + `","tokenizer_path":"` + benchModel + `","is_generation":true}`),
	}
}

func jsonAnswer(body string) []byte {
	return fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

func backendCommand(args []string) error {
	fs := flag.NewFlagSet("backend", flag.ContinueOnError)
	var engines addresses
	fs.Var(&engines, "listen", "`address` of an engine; repeat it for several; default 127.0.0.1:9000")
	prefill := fs.String("prefill", "", "`address` of an engine that only computes prompts")
	boot := fs.Int("bootstrap", 0, "`port` of the bootstrap server that the engines report")
	cache := fs.Int("cache", 0, "prefix cache of each engine, in `blocks`")
	sglang := fs.Bool("sglang", false, "look like SGLang: without vLLM's GET /version")
	noTokens := fs.Bool("no-tokens", false, "answer 404 to a router that asks for the token ids of a prompt")
	record := fs.Bool("record", false, "keep the requests for GET "+requestsPath)
	if err := fs.Parse(args); err != nil {
		return err
	}
	if len(engines) == 0 {
		engines = addresses{"127.0.0.1:9000"}
	}
	b := newBackend()
	b.cacheBlocks, b.sglang, b.noTokens = *cache, *sglang, *noTokens
	if *record {
		b.recorded = &recorder{}
	}
	failed := make(chan error, len(engines)+2)
	if *boot != 0 {
		go func() { failed <- b.listen(fmt.Sprintf("127.0.0.1:%d", *boot), newEngine(b, "prefill", *boot)) }()
	}
	for _, addr := range engines {
		go func() { failed <- b.listen(addr, newEngine(b, "decode", *boot)) }()
	}
	if *prefill != "" {
		go func() { failed <- b.listen(*prefill, newEngine(b, "prefill", *boot)) }()
	}
	return <-failed
}

// addresses is a flag that may be repeated.
type addresses []string

func (a *addresses) String() string     { return strings.Join(*a, ",") }
func (a *addresses) Set(s string) error { *a = append(*a, s); return nil }

func (b *backend) listen(addr string, e *engine) error {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go b.serve(c, e)
	}
}

// serve answers the requests of one connection in order.
func (b *backend) serve(c net.Conn, e *engine) {
	defer c.Close()
	br := bufio.NewReaderSize(c, 4096)
	var m message
	var body bytes.Buffer
	for readMessage(br, &m) == nil {
		body.Reset()
		if m.chunked || m.length > 0 {
			r, err := m.body(br)
			if err != nil {
				return
			}
			body.Grow(int(max(m.length, 0)) + bytes.MinRead) // avoids copies while it grows
			if _, err := body.ReadFrom(r); err != nil {
				return
			}
		}
		if b.answer(c, e, &m, body.Bytes()) != nil || m.close {
			return
		}
	}
}

func (b *backend) answer(w io.Writer, e *engine, m *message, body []byte) error {
	method, target := m.target()
	if string(method) == "GET" {
		return b.get(w, e, string(target))
	}
	if answer := e.other(string(target), body); answer != nil {
		_, err := w.Write(answer)
		return err
	}
	b.recorded.add(e, body)
	joined := afterKey(body, `"bootstrap_room"`) != nil // a leg of SGLang: prefill's engine is told by its address
	switch {
	case hasTrue(body, `"do_remote_decode"`) || joined && e.prefill:
		b.prefills.Add(1)
		e.look(body)
		answer := b.prefill
		if hasTrue(body, `"return_token_ids"`) {
			n := idsOf(body)
			answer = wholeAnswer(prefillParams, strings.Repeat("1523,", n-1)+"1523", n)
		}
		_, err := w.Write(answer)
		return err
	case !hasTrue(body, `"stream"`) && (joined || hasTrue(body, `"do_remote_prefill"`)):
		b.decodes.Add(1)
		_, err := w.Write(b.whole)
		return err
	case !hasTrue(body, `"stream"`):
		b.wholes.Add(1)
		e.look(body)
		_, err := w.Write(b.whole)
		return err
	}
	if joined || hasTrue(body, `"do_remote_prefill"`) {
		b.decodes.Add(1)
	} else {
		b.streams.Add(1)
	}
	events := number(body, `"max_tokens"`)
	period := time.Duration(number(body, `"`+periodField+`"`)) * time.Microsecond
	ids := 0
	if hasTrue(body, `"return_token_ids"`) {
		ids = idsOf(body)
	}
	return writeStream(w, events, ids, period)
}

// idsOf returns the number of token ids that the backend answers for the prompt in a body.
func idsOf(body []byte) int { return max(1, len(body)/4) }

func (b *backend) get(w io.Writer, e *engine, target string) (err error) {
	switch target {
	case "/v1/models":
		_, err = w.Write(b.models)
	case "/version":
		if b.sglang {
			_, err = io.WriteString(w, notFound)
			break
		}
		_, err = w.Write(b.version)
	case countsPath:
		var text []byte
		text, err = json.Marshal(counts{b.wholes.Load(), b.prefills.Load(), b.decodes.Load(), b.streams.Load()})
		if err == nil {
			_, err = w.Write(jsonAnswer(string(text)))
		}
	case "/server_info", "/get_server_info":
		_, err = w.Write(e.info)
	case "/model_info", "/get_model_info":
		_, err = w.Write(b.model)
	case hitsPath:
		_, err = w.Write(e.hits())
	case requestsPath:
		_, err = w.Write(b.recorded.take())
	case bootstrapTarget:
		_, err = w.Write(e.topology)
	default: // /health
		_, err = io.WriteString(w, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
	}
	return err
}

// afterKey returns the text after a key and its colon in the body. The prompts
// of this program contain no quotes, so a key is never part of one. Decoding
// 256 KB would make the backend more expensive than the proxy.
func afterKey(body []byte, key string) []byte {
	i := bytes.Index(body, []byte(key))
	if i < 0 {
		return nil
	}
	return bytes.TrimLeft(body[i+len(key):], ": ")
}

func hasTrue(body []byte, key string) bool {
	return bytes.HasPrefix(afterKey(body, key), []byte("true"))
}

func number(body []byte, key string) int {
	v := afterKey(body, key)
	end := 0
	for end < len(v) && '0' <= v[end] && v[end] <= '9' {
		end++
	}
	n, _ := strconv.Atoi(string(v[:end])) // absent: 0
	return n
}

// writeStream writes a chunked SSE answer, one write per event. The first event follows
// the head at once, so the time to the first event is that of the proxy. The other events
// come at the period from a random phase, so that streams opened together do not write in
// step. Period 0: as fast as the connection accepts them. prompt is the number of ids of the prompt in
// the first event; 0: no event has token ids.
func writeStream(w io.Writer, events, prompt int, period time.Duration) error {
	if _, err := io.WriteString(w, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"+
		"Transfer-Encoding: chunked\r\n\r\n"); err != nil {
		return err
	}
	chunk, stamp := newEventChunk("")
	var first, firstStamp []byte // with the ids of the prompt
	if prompt > 0 {
		const one = `,"token_ids":[1523]`
		first, firstStamp = newEventChunk(`,"prompt_token_ids":[` + strings.Repeat("1523,", prompt-1) + "1523]" + one)
		chunk, stamp = newEventChunk(one)
	}
	next := time.Now()
	if period > 0 {
		next = next.Add(rand.N(period))
	}
	for i := range events {
		if i > 0 && period > 0 {
			time.Sleep(time.Until(next))
			next = next.Add(period)
		}
		event, at := chunk, stamp
		if i == 0 && first != nil {
			event, at = first, firstStamp
		}
		putStamp(at, time.Now())
		if _, err := w.Write(event); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
	return err
}

const (
	stampKey    = `"t":`
	stampDigits = 19 // Unix time in nanoseconds
)

// newEventChunk returns one SSE event as a chunk of the transfer coding, and
// the part of it that holds the time of sending. ids are further members of the choice.
func newEventChunk(ids string) (chunk, stamp []byte) {
	head := `data: {"id":"cmpl-1","object":"text_completion",` + stampKey
	tail := `,"choices":[{"index":0,"text":"%s","finish_reason":null` + ids + `}]}` + "\n\n"
	size := eventSize + len(ids)
	pad := size - len(head) - stampDigits - len(tail) + len("%s")
	chunk = fmt.Appendf(nil, "%x\r\n%s", size, head)
	at := len(chunk)
	chunk = append(chunk, make([]byte, stampDigits)...)
	chunk = fmt.Appendf(chunk, tail, bytes.Repeat([]byte("x"), pad))
	chunk = append(chunk, "\r\n"...)
	return chunk, chunk[at : at+stampDigits]
}

func putStamp(dst []byte, t time.Time) {
	n := t.UnixNano()
	for i := len(dst) - 1; i >= 0; i-- {
		dst[i] = byte('0' + n%10)
		n /= 10
	}
}

// readStamp returns the age of an event, from the time in it. ok is false for
// lines without a time.
func readStamp(line []byte, now time.Time) (age time.Duration, ok bool) {
	i := bytes.Index(line, []byte(stampKey))
	if i < 0 || len(line) < i+len(stampKey)+stampDigits {
		return 0, false
	}
	digits := line[i+len(stampKey):][:stampDigits]
	n, err := strconv.ParseInt(string(digits), 10, 64)
	if err != nil {
		return 0, false
	}
	return time.Duration(now.UnixNano() - n), true
}
