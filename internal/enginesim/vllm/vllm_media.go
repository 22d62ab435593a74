package enginesim

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"mime/multipart"
	"net/http"
	"strings"
)

// The routes of models for sound and images. Sources: vLLM
// entrypoints/speech_to_text/transcription/protocol.py, whose forms have the parameters of
// the engine in vllm_xargs; TensorRT-LLM serve/openai_server.py register_visual_gen_routes.

// maxFormMemory is the memory for a form, in bytes.
const maxFormMemory = 32 << 20

// form reads a form as Starlette does: the last value of a name counts.
func form(r *http.Request) (fields, *multipart.FileHeader, *fieldError) {
	if err := r.ParseMultipartForm(maxFormMemory); err != nil {
		return nil, nil, &fieldError{"body", "missing", "Field required"}
	}
	f := fields{}
	for name, values := range r.MultipartForm.Value {
		f[name], _ = json.Marshal(values[len(values)-1])
	}
	for _, name := range []string{"file", "image", "image[]"} {
		if files := r.MultipartForm.File[name]; len(files) > 0 {
			return f, files[0], nil
		}
	}
	return f, nil, &fieldError{"file", "missing", "Field required"}
}

// heard is the text of a sound: its length and a sum of its bytes.
func heard(file *multipart.FileHeader) string {
	sum, n := fnv.New32a(), int64(0)
	if opened, err := file.Open(); err == nil {
		n, _ = io.Copy(sum, opened)
		opened.Close()
	}
	return fmt.Sprintf("a sound of %d bytes, sum %08x", n, sum.Sum32())
}

// media returns the handler of a route with a form. run writes the answer.
func media(e *Engine, check func(model string) *apiError, run func(w http.ResponseWriter, f fields, file *multipart.FileHeader)) http.HandlerFunc {
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
		f, file, ferr := form(r)
		refusal := check(fieldText(f, "model"))
		if ferr == nil && f.has("vllm_xargs") {
			var object map[string]any
			if json.Unmarshal([]byte(fieldText(f, "vllm_xargs")), &object) != nil {
				ferr = &fieldError{"vllm_xargs", "dict_type", "Input should be a valid dictionary"}
			}
		}
		if ferr != nil {
			refusal = pydanticError(ferr, f)
		}
		if refusal != nil {
			e.stats.rejected.Add(1)
			e.refuse(w, refusal)
			return
		}
		e.stats.requests.Add(1)
		run(w, f, file)
	}
}

func editImages(w http.ResponseWriter, f fields, file *multipart.FileHeader) {
	writeJSON(w, http.StatusOK, pictures(fieldText(f, "prompt")+" in "+heard(file)))
}

// transcribe answers /v1/audio/transcriptions and /v1/audio/translations: a stream, a plain
// text or an object.
func (v *vllm) transcribe(w http.ResponseWriter, f fields, file *multipart.FileHeader) {
	text := heard(file)
	switch {
	case fieldText(f, "stream") == "true":
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for word := range strings.SplitAfterSeq(text, " ") {
			event, _ := encodeJSON(obj("id", "trsc-1", "object", "transcription.chunk", "created", 1700000000, "model", v.e.cfg.Model,
				"choices", []any{obj("delta", obj("content", word), "finish_reason", nil, "stop_reason", nil)}))
			fmt.Fprintf(w, "data: %s\n\n", event)
			http.NewResponseController(w).Flush()
		}
		io.WriteString(w, "data: [DONE]\n\n")
	case fieldText(f, "response_format") == "text":
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		io.WriteString(w, text+"\n")
	default:
		writeJSON(w, http.StatusOK, obj("text", text, "usage", obj("type", "duration", "seconds", 1)))
	}
}

// speak answers /v1/audio/speech with bytes that are no text.
func (v *vllm) speak(w http.ResponseWriter, r *http.Request) {
	body, err := readBody(w, r)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	f, ferr := decodeFields(body)
	p := &pooled{fieldReader: fieldReader{f: f, err: ferr}}
	p.need("input")
	input := p.str("input", "")
	if p.err != nil {
		v.e.refuse(w, pydanticError(p.err, f))
		return
	}
	w.Header().Set("Content-Type", "audio/wav")
	io.WriteString(w, "RIFF\x00\xff\xfe"+input)
}

// mediaRoutes adds vLLM's routes, and those of its extension for speech and images.
func (v *vllm) mediaRoutes(mux *http.ServeMux) {
	for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		mux.HandleFunc("POST "+path, media(v.e, v.checkModel, v.transcribe))
	}
	mux.HandleFunc("POST /v1/images/edits", media(v.e, v.checkModel, editImages))
	mux.HandleFunc("POST /v1/images/generations", v.e.pooling(v.checkModel, pydanticError, (*pooled).generateImages))
	mux.HandleFunc("POST /v1/audio/speech", v.speak)
}
