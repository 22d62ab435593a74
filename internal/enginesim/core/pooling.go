package core

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

// Pooled is the input of a pooling model: the body after the checks, and the number of
// tokens that the answer has used.
type Pooled struct {
	FieldReader
	e      *Engine
	tokens int
}

// Pooling returns the handler of a route whose answer is that of run. check returns the
// engine's error for a model's name, answer the engine's form of an ill-typed field.
func (e *Engine) Pooling(check func(model string) *APIError, answer func(*FieldError, Fields) *APIError, run func(p *Pooled) any) http.HandlerFunc {
	return e.Serving(func(w http.ResponseWriter, r *http.Request, _ string) {
		body, err := ReadBody(w, r)
		if err != nil || e.Faults.hang(r.Context(), HangHead) != nil {
			panic(http.ErrAbortHandler)
		}
		f, ferr := DecodeFields(body)
		p := &Pooled{FieldReader: FieldReader{F: f, Err: ferr}, e: e}
		var result any
		refusal := check(FieldText(f, "model"))
		if p.Err == nil {
			result = run(p)
		}
		if p.Err != nil {
			refusal = answer(p.Err, f)
		}
		if refusal != nil {
			e.Stats.Rejected.Add(1)
			e.Refuse(w, refusal)
			return
		}
		e.Stats.Requests.Add(1)
		e.Stats.promptTokens.Add(int64(p.tokens))
		WriteJSON(w, http.StatusOK, result)
	})
}

// Need notes that a field is missing.
func (p *Pooled) Need(names ...string) {
	for _, name := range names {
		if !p.F.Has(name) {
			p.Keep(&FieldError{name, "missing", "Field required"})
		}
	}
}

// texts returns a field that is a text or a list of texts, and counts its tokens.
func (p *Pooled) texts(name string) (list []string) {
	p.Need(name)
	var one string
	if json.Unmarshal(p.F[name], &one) == nil {
		list = []string{one}
	} else if json.Unmarshal(p.F[name], &list) != nil {
		p.Keep(&FieldError{name, "string_type", "Input should be a valid string"})
	}
	for _, text := range list {
		p.tokens += len(Tokenize(text))
	}
	return list
}

// usage is the usage of an answer.
func (p *Pooled) usage() Object {
	return Obj("prompt_tokens", p.tokens, "total_tokens", p.tokens, "completion_tokens", 0, "prompt_tokens_details", nil)
}

// list is an answer in the form that OpenAI's embeddings have.
func (p *Pooled) list(id string, data []any) Object {
	return Obj("id", id+RandomID(), "object", "list", "created", time.Now().Unix(), "model", p.e.Cfg.Model, "data", data, "usage", p.usage())
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

func (p *Pooled) Embeddings() any {
	var data []any
	for i, text := range p.texts("input") {
		v := vectorOf(text)
		embedding := any(v)
		if p.Str("encoding_format", "float") == "base64" {
			var raw []byte
			for _, x := range v {
				raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
			}
			embedding = base64.StdEncoding.EncodeToString(raw)
		}
		data = append(data, Obj("index", i, "object", "embedding", "embedding", embedding))
	}
	return p.list("embd-", data)
}

func (p *Pooled) PooledOutputs() any {
	var data []any
	for i, text := range p.texts("input") {
		data = append(data, Obj("index", i, "object", "pooling", "data", vectorOf(text)))
	}
	return p.list("pool-", data)
}

func (p *Pooled) Classes() any {
	var data []any
	for i, text := range p.texts("input") {
		one := scoreOf("class", text)
		data = append(data, Obj("index", i, "label", map[bool]string{true: "LABEL_1", false: "LABEL_0"}[one > 0.5], "probs", []float64{1 - one, one}, "num_classes", 2))
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
func (p *Pooled) ranked() (list []ranking) {
	query := p.texts("query")
	for i, text := range p.texts("documents") {
		if len(query) == 1 {
			list = append(list, ranking{i, text, scoreOf(query[0], text)})
		}
	}
	slices.SortStableFunc(list, func(a, b ranking) int { return cmp.Compare(b.score, a.score) })
	if n := p.Integer("top_n", 0); n > 0 && int(n) < len(list) {
		list = list[:n]
	}
	return list
}

func (p *Pooled) Rerank() any {
	var results []any
	for _, r := range p.ranked() {
		results = append(results, Obj("index", r.index, "document", Obj("text", r.text, "multi_modal", nil), "relevance_score", r.score))
	}
	return Obj("id", "rerank-"+RandomID(), "model", p.e.Cfg.Model, "usage", Obj("prompt_tokens", p.tokens, "total_tokens", p.tokens), "results", results)
}

// Scores compares one text with several, or texts in pairs.
func (p *Pooled) Scores() any {
	first, second := "text_1", "text_2"
	for _, names := range [][2]string{{"queries", "documents"}, {"queries", "items"}, {"data_1", "data_2"}} {
		if p.F.Has(names[0]) && p.F.Has(names[1]) {
			first, second = names[0], names[1]
		}
	}
	a, b := p.texts(first), p.texts(second)
	if len(a) != 1 && len(a) != len(b) {
		p.Keep(&FieldError{first, "value_error", "Value error, Input lengths must be either 1:1, 1:N or N:N"})
		return nil
	}
	var data []any
	for i := range b {
		data = append(data, Obj("index", i, "object", "score", "score", scoreOf(a[min(i, len(a)-1)], b[i])))
	}
	return p.list("score-", data)
}

func (p *Pooled) CountTokens() any {
	p.Need("model", "messages")
	text, err := ChatText(p.F)
	p.Keep(err)
	return Obj("input_tokens", len(Tokenize(text)))
}

// RerankSGLang, ScoresSGLang and ClassSGLang have SGLang's own forms. vLLM's
// /generative_scoring has the form of ScoresSGLang.

func (p *Pooled) RerankSGLang() any {
	results := []any{}
	for _, r := range p.ranked() {
		results = append(results, Obj("score", r.score, "document", r.text, "index", r.index, "meta_info", nil))
	}
	return results
}

func (p *Pooled) ScoresSGLang() any {
	var labels []Token
	labels, err := ParseTokenIDs(p.F, "label_token_ids")
	p.Keep(err)
	p.Need("label_token_ids")
	rows := []any{}
	for _, item := range p.texts("items") {
		row := []float64{}
		for range labels {
			row = append(row, scoreOf(p.Str("query", ""), item))
		}
		rows = append(rows, row)
	}
	return Obj("scores", rows, "model", p.e.Cfg.Model, "usage", nil, "object", "scoring")
}

func (p *Pooled) ClassSGLang() any {
	results := []any{}
	for _, text := range p.texts("text") {
		results = append(results, Obj("embedding", vectorOf(text), "meta_info", Obj("id", RandomID(), "prompt_tokens", len(Tokenize(text)))))
	}
	if len(results) == 1 {
		return results[0]
	}
	return results
}

// Pictures is the answer of the routes for images.
func Pictures(of string) Object {
	return Obj("created", 1700000000, "data", []any{Obj("b64_json", base64.StdEncoding.EncodeToString([]byte("\x89PNG "+of)), "revised_prompt", nil, "url", nil)},
		"output_format", "png", "size", "1024x1024")
}

// GenerateImages answers /v1/images/generations.
func (p *Pooled) GenerateImages() any {
	p.Need("prompt")
	return Pictures(p.Str("prompt", ""))
}
