package vllm

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"io"
	"mime/multipart"
	"net/http"
	"strings"

	"github.com/pdproxy/pdproxy/internal/enginesim/core"
)

// The routes of models for sound and images. Sources: vLLM
// entrypoints/speech_to_text/transcription/protocol.py, whose forms have the parameters of
// the engine in vllm_xargs; TensorRT-LLM serve/openai_server.py register_visual_gen_routes.

// maxFormMemory is the memory for a form, in bytes.
const maxFormMemory = 32 << 20

// form reads a form as Starlette does: the last value of a name counts.
func form(r *http.Request) (core.Fields, *multipart.FileHeader, *core.FieldError) {
	if err := r.ParseMultipartForm(maxFormMemory); err != nil {
		return nil, nil, &core.FieldError{Field: "body", Kind: "missing", Message: "Field required"}
	}
	f := core.Fields{}
	for name, values := range r.MultipartForm.Value {
		f[name], _ = json.Marshal(values[len(values)-1])
	}
	for _, name := range []string{"file", "image", "image[]"} {
		if files := r.MultipartForm.File[name]; len(files) > 0 {
			return f, files[0], nil
		}
	}
	return f, nil, &core.FieldError{Field: "file", Kind: "missing", Message: "Field required"}
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
func media(e *core.Engine, check func(model string) *core.APIError, run func(w http.ResponseWriter, f core.Fields, file *multipart.FileHeader)) http.HandlerFunc {
	return e.Serving(func(w http.ResponseWriter, r *http.Request, _ string) {
		f, file, ferr := form(r)
		refusal := check(core.FieldText(f, "model"))
		if ferr == nil && f.Has("vllm_xargs") {
			var object map[string]any
			if json.Unmarshal([]byte(core.FieldText(f, "vllm_xargs")), &object) != nil {
				ferr = &core.FieldError{Field: "vllm_xargs", Kind: "dict_type", Message: "Input should be a valid dictionary"}
			}
		}
		if ferr != nil {
			refusal = pydanticError(ferr, f)
		}
		if refusal != nil {
			e.Stats.Rejected.Add(1)
			e.Refuse(w, refusal)
			return
		}
		e.Stats.Requests.Add(1)
		run(w, f, file)
	})
}

func editImages(w http.ResponseWriter, f core.Fields, file *multipart.FileHeader) {
	core.WriteJSON(w, http.StatusOK, core.Pictures(core.FieldText(f, "prompt")+" in "+heard(file)))
}

// transcribe answers /v1/audio/transcriptions and /v1/audio/translations: a stream, a plain
// text or an object.
func (v *VLLM) transcribe(w http.ResponseWriter, f core.Fields, file *multipart.FileHeader) {
	text := heard(file)
	switch {
	case core.FieldText(f, "stream") == "true":
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for word := range strings.SplitAfterSeq(text, " ") {
			event, _ := core.EncodeJSON(core.Obj("id", "trsc-1", "object", "transcription.chunk", "created", 1700000000, "model", v.e.Cfg.Model,
				"choices", []any{core.Obj("delta", core.Obj("content", word), "finish_reason", nil, "stop_reason", nil)}))
			fmt.Fprintf(w, "data: %s\n\n", event)
			http.NewResponseController(w).Flush()
		}
		io.WriteString(w, "data: [DONE]\n\n")
	case core.FieldText(f, "response_format") == "text":
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		io.WriteString(w, text+"\n")
	default:
		core.WriteJSON(w, http.StatusOK, core.Obj("text", text, "usage", core.Obj("type", "duration", "seconds", 1)))
	}
}

// speak answers /v1/audio/speech with bytes that are no text.
func (v *VLLM) speak(w http.ResponseWriter, r *http.Request) {
	body, err := core.ReadBody(w, r)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	f, ferr := core.DecodeFields(body)
	p := &core.Pooled{FieldReader: core.FieldReader{F: f, Err: ferr}}
	p.Need("input")
	input := p.Str("input", "")
	if p.Err != nil {
		v.e.Refuse(w, pydanticError(p.Err, f))
		return
	}
	w.Header().Set("Content-Type", "audio/wav")
	io.WriteString(w, "RIFF\x00\xff\xfe"+input)
}

// mediaRoutes adds vLLM's routes, and those of its extension for speech and images.
func (v *VLLM) mediaRoutes(mux *http.ServeMux) {
	for _, path := range []string{"/v1/audio/transcriptions", "/v1/audio/translations"} {
		mux.HandleFunc("POST "+path, media(v.e, v.checkModel, v.transcribe))
	}
	mux.HandleFunc("POST /v1/images/edits", media(v.e, v.checkModel, editImages))
	mux.HandleFunc("POST /v1/images/generations", v.e.Pooling(v.checkModel, pydanticError, (*core.Pooled).GenerateImages))
	mux.HandleFunc("POST /v1/audio/speech", v.speak)
}
