package enginesim

import (
	"cmp"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"hash/fnv"
	"math"
	"net/http"
	"slices"
	"time"
)

// The routes of models that generate no text. The core answers them at once, without the
// scheduler: the results depend only on the texts. Sources: vLLM
// entrypoints/pooling/*/protocol.py and api_router.py, entrypoints/anthropic; SGLang
// srt/entrypoints/http_server.py, managers/io_struct.py and openai/protocol.py.

// pooled is the input of a pooling model: the body after the checks, and the number of
// tokens that the answer has used.
type pooled struct {
	fieldReader
	e      *Engine
	tokens int
}

// pooling returns the handler of a route whose answer is that of run. check returns the
// engine's error for a model's name, answer the engine's form of an ill-typed field.
func (e *Engine) pooling(check func(model string) *apiError, answer func(*fieldError, fields) *apiError, run func(p *pooled) any) http.HandlerFunc {
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
		if err != nil || e.faults.hang(r.Context(), hangHead) != nil {
			panic(http.ErrAbortHandler)
		}
		f, ferr := decodeFields(body)
		p := &pooled{fieldReader: fieldReader{f: f, err: ferr}, e: e}
		var result any
		refusal := check(fieldText(f, "model"))
		if p.err == nil {
			result = run(p)
		}
		if p.err != nil {
			refusal = answer(p.err, f)
		}
		if refusal != nil {
			e.stats.rejected.Add(1)
			e.refuse(w, refusal)
			return
		}
		e.stats.requests.Add(1)
		e.stats.promptTokens.Add(int64(p.tokens))
		writeJSON(w, http.StatusOK, result)
	}
}

// need notes that a field is missing.
func (p *pooled) need(names ...string) {
	for _, name := range names {
		if !p.f.has(name) {
			p.keep(&fieldError{name, "missing", "Field required"})
		}
	}
}

// texts returns a field that is a text or a list of texts, and counts its tokens.
func (p *pooled) texts(name string) (list []string) {
	p.need(name)
	var one string
	if json.Unmarshal(p.f[name], &one) == nil {
		list = []string{one}
	} else if json.Unmarshal(p.f[name], &list) != nil {
		p.keep(&fieldError{name, "string_type", "Input should be a valid string"})
	}
	for _, text := range list {
		p.tokens += len(tokenize(text))
	}
	return list
}

// usage is the usage of an answer.
func (p *pooled) usage() object {
	return obj("prompt_tokens", p.tokens, "total_tokens", p.tokens, "completion_tokens", 0, "prompt_tokens_details", nil)
}

// list is an answer in the form that OpenAI's embeddings have.
func (p *pooled) list(id string, data []any) object {
	return obj("id", id+randomID(), "object", "list", "created", time.Now().Unix(), "model", p.e.cfg.Model, "data", data, "usage", p.usage())
}

// vectorOf returns the vector of a text: its length is 4.
func vectorOf(text string) (v [4]float32) {
	for i := range v {
		h := fnv.New32a()
		h.Write(append([]byte{byte(i)}, text...))
		v[i] = float32(h.Sum32()%2001)/1000 - 1
	}
	return v
}

// scoreOf is the similarity of two texts, from 0 to 1.
func scoreOf(a, b string) float64 {
	v, w := vectorOf(a), vectorOf(b)
	var dot float64
	for i := range v {
		dot += float64(v[i]) * float64(w[i])
	}
	return math.Round(1e4/(1+math.Exp(-dot))) / 1e4
}

func (p *pooled) embeddings() any {
	var data []any
	for i, text := range p.texts("input") {
		v := vectorOf(text)
		embedding := any(v)
		if p.str("encoding_format", "float") == "base64" {
			var raw []byte
			for _, x := range v {
				raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
			}
			embedding = base64.StdEncoding.EncodeToString(raw)
		}
		data = append(data, obj("index", i, "object", "embedding", "embedding", embedding))
	}
	return p.list("embd-", data)
}

func (p *pooled) pooledOutputs() any {
	var data []any
	for i, text := range p.texts("input") {
		data = append(data, obj("index", i, "object", "pooling", "data", vectorOf(text)))
	}
	return p.list("pool-", data)
}

func (p *pooled) classes() any {
	var data []any
	for i, text := range p.texts("input") {
		one := scoreOf("class", text)
		data = append(data, obj("index", i, "label", map[bool]string{true: "LABEL_1", false: "LABEL_0"}[one > 0.5], "probs", []float64{1 - one, one}, "num_classes", 2))
	}
	return p.list("classify-", data)
}

// ranking is one document with its score.
type ranking struct {
	index int
	text  string
	score float64
}

// ranked returns the documents in the order of their scores.
func (p *pooled) ranked() (list []ranking) {
	query := p.texts("query")
	for i, text := range p.texts("documents") {
		if len(query) == 1 {
			list = append(list, ranking{i, text, scoreOf(query[0], text)})
		}
	}
	slices.SortStableFunc(list, func(a, b ranking) int { return cmp.Compare(b.score, a.score) })
	if n := p.integer("top_n", 0); n > 0 && int(n) < len(list) {
		list = list[:n]
	}
	return list
}

func (p *pooled) rerank() any {
	var results []any
	for _, r := range p.ranked() {
		results = append(results, obj("index", r.index, "document", obj("text", r.text, "multi_modal", nil), "relevance_score", r.score))
	}
	return obj("id", "rerank-"+randomID(), "model", p.e.cfg.Model, "usage", obj("prompt_tokens", p.tokens, "total_tokens", p.tokens), "results", results)
}

// scores compares one text with several, or texts in pairs.
func (p *pooled) scores() any {
	first, second := "text_1", "text_2"
	for _, names := range [][2]string{{"queries", "documents"}, {"queries", "items"}, {"data_1", "data_2"}} {
		if p.f.has(names[0]) && p.f.has(names[1]) {
			first, second = names[0], names[1]
		}
	}
	a, b := p.texts(first), p.texts(second)
	if len(a) != 1 && len(a) != len(b) {
		p.keep(&fieldError{first, "value_error", "Value error, Input lengths must be either 1:1, 1:N or N:N"})
		return nil
	}
	var data []any
	for i := range b {
		data = append(data, obj("index", i, "object", "score", "score", scoreOf(a[min(i, len(a)-1)], b[i])))
	}
	return p.list("score-", data)
}

func (p *pooled) countTokens() any {
	p.need("model", "messages")
	text, err := chatText(p.f)
	p.keep(err)
	return obj("input_tokens", len(tokenize(text)))
}

// rerankSGLang, scoresSGLang and classSGLang have SGLang's own forms. vLLM's
// /generative_scoring has the form of scoresSGLang.

func (p *pooled) rerankSGLang() any {
	results := []any{}
	for _, r := range p.ranked() {
		results = append(results, obj("score", r.score, "document", r.text, "index", r.index, "meta_info", nil))
	}
	return results
}

func (p *pooled) scoresSGLang() any {
	var labels []token
	labels, err := parseTokenIDs(p.f, "label_token_ids")
	p.keep(err)
	p.need("label_token_ids")
	rows := []any{}
	for _, item := range p.texts("items") {
		row := []float64{}
		for range labels {
			row = append(row, scoreOf(p.str("query", ""), item))
		}
		rows = append(rows, row)
	}
	return obj("scores", rows, "model", p.e.cfg.Model, "usage", nil, "object", "scoring")
}

func (p *pooled) classSGLang() any {
	results := []any{}
	for _, text := range p.texts("text") {
		results = append(results, obj("embedding", vectorOf(text), "meta_info", obj("id", randomID(), "prompt_tokens", len(tokenize(text)))))
	}
	if len(results) == 1 {
		return results[0]
	}
	return results
}

// pictures is the answer of the routes for images.
func pictures(of string) object {
	return obj("created", 1700000000, "data", []any{obj("b64_json", base64.StdEncoding.EncodeToString([]byte("\x89PNG "+of)), "revised_prompt", nil, "url", nil)},
		"output_format", "png", "size", "1024x1024")
}

// generateImages answers /v1/images/generations.
func (p *pooled) generateImages() any {
	p.need("prompt")
	return pictures(p.str("prompt", ""))
}
