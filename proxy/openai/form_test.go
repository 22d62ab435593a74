package openai

import (
	"bytes"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"strings"
	"testing"
)

const formType = "multipart/form-data; boundary=b"

// lines joins the lines of a form with CRLF.
func lines(l ...string) string { return strings.Join(l, "\r\n") }

// field is a part of a form with a text.
func field(name, value string) string {
	return lines(`--b`, `Content-Disposition: form-data; name="`+name+`"`, ``, value, ``)
}

const audio = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n--a\n\x00\xff\r\n"

func TestParseForm(t *testing.T) {
	for _, tt := range []struct {
		name, contentType, body string
		model                   string
		stream                  bool
		cut                     string // the form for an engine; "": unchanged
	}{
		{name: "of httpx", body: field("model", "org/whisper") + field("stream", "true") + audio + "--b--\r\n", model: "org/whisper", stream: true},
		{name: "no parts", body: "--b--"},
		{name: "no line end at the end", body: audio + field("model", "m") + "--b--", model: "m"},
		{name: "an empty model", body: field("model", "") + "--b--"},
		{name: "an empty file", body: lines("--b", `content-disposition:form-data;name="file";filename=""`, "", "", "--b--"), model: ""},
		{name: "of curl", contentType: "multipart/form-data; boundary=------------------------d74496d66958873e",
			body: strings.ReplaceAll(field("model", "m")+"--b--\r\n", "--b", "--------------------------d74496d66958873e"), model: "m"},
		{name: "a quoted boundary and a charset", contentType: `Multipart/Form-Data; charset=utf-7; boundary="a=:b"`,
			body: strings.ReplaceAll(field("model", "m")+"--b--\r\n", "--b", "--a=:b"), model: "m"},
		{name: "names of files", body: lines("--b", `Content-Disposition: form-data; name="image[]"; filename="\"x\".png"; filename*=UTF-8''%e2%82%ac`, "content-transfer-encoding: Binary", "", "1", "") +
			lines("--b", `Content-Disposition: FORM-DATA; filename="a;b=c"; name="image[]"`, "X-Other: y", "", "2", "--b--")},
		{name: "false", body: field("stream", "False") + "--b--"},
		{name: "a long value of stream", body: field("stream", "true "+strings.Repeat("x", 99)) + "--b--"},
		{name: "PD fields", body: field("rid", "x") + field("model", "m") + field("kv_transfer_params[remote_host]", "h") + field("bootstrap_room", "7") + audio + field("request_id", "z") + "--b--",
			model: "m", cut: field("model", "m") + audio + "--b--"},
		{name: "only PD fields", body: field("rid", "x") + field("rid", "y") + "--b--\r\n", cut: "--b--\r\n"},
		{name: "a file as PD field", body: lines("--b", `Content-Disposition: form-data; name="rid"; filename="a"`, "", "x", "--b--"), cut: "--b--"},
		{name: "holders", body: field("vllm_xargs", `{"a":1,"kv_transfer_params":{"x":1}}`) + field("extra_args", `{"a":1}`) + field("vllm_xargs[kv_transfer_params][x]", "1") + field("vllm_xargs[a]", "1") + "--b--",
			cut: field("vllm_xargs", `{"a":1}`) + field("extra_args", `{"a":1}`) + field("vllm_xargs[a]", "1") + "--b--"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := Request{Model: "of another request", Stream: true, ContentType: "x", formEdits: []formEdit{{}}}
			if tt.contentType == "" {
				tt.contentType = formType
			}
			if err := ReadRequest(Transcriptions, tt.contentType, []byte(tt.body), &r); err != nil {
				t.Fatal(err)
			}
			if r.Model != tt.model || r.HasModel != (tt.model != "") || r.Stream != tt.stream || !r.Form || r.Prompt != PromptNone || r.MaxTokens != -1 || r.N != 1 {
				t.Errorf("got %+v", r)
			}
			if got := string(r.AppendForm(nil)); tt.cut == "" && (got != tt.body || !r.WithoutPD) || tt.cut != "" && (got != tt.cut || r.WithoutPD) {
				t.Errorf("the form for the engine is %q", got)
			}
			if string(r.Raw()) != tt.body || r.Len() != 0 {
				t.Errorf("raw %q, %d members", r.Raw(), r.Len())
			}
			if _, params, err := mime.ParseMediaType(r.ContentType); err != nil || len(params) != 1 {
				t.Errorf("Content-Type %q", r.ContentType)
			}
			if err := ReadRequest(Transcriptions, "application/json", []byte(`{"model":"n"}`), &r); err != nil || r.Form || !r.WithoutPD || r.ContentType != "application/json" {
				t.Errorf("the next request: %+v, %v", r, err)
			}
		})
	}
}

func TestParseFormRefuses(t *testing.T) {
	disposition := func(value string) string {
		return lines("--b", "Content-Disposition: "+value, "", "x", "--b--")
	}
	for _, tt := range []struct{ name, contentType, body, code, param string }{
		{name: "no boundary", contentType: "multipart/form-data", body: "--b--", code: "invalid_form", param: "Content-Type"},
		{name: "two boundaries", contentType: "multipart/form-data; boundary=b; boundary=c", body: "--b--", code: "invalid_form", param: "Content-Type"},
		{name: "long boundary", contentType: "multipart/form-data; boundary=" + strings.Repeat("b", 71), body: "--b--", code: "invalid_form", param: "Content-Type"},
		{name: "boundary with a space", contentType: `multipart/form-data; boundary="a b"`, body: "--a b--", code: "invalid_form", param: "Content-Type"},
		{name: "empty", body: "", code: "invalid_form"},
		{name: "JSON", body: "{}", code: "invalid_form"},
		{name: "bytes before the form", body: "x\r\n--b--", code: "invalid_form"},
		{name: "bytes behind the form", body: "--b--\r\n\r\n", code: "invalid_form"},
		{name: "no end", body: field("model", "m"), code: "invalid_form"},
		{name: "a part without an end", body: "--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nx", code: "invalid_form"},
		{name: "a boundary without a line end of its own", body: lines("--b", `Content-Disposition: form-data; name="a"`, "", "--b", "--b--"), code: "invalid_form"},
		{name: "a longer boundary", body: field("a", "x\r\n--bb") + "--b--", code: "invalid_form"},
		{name: "space behind a boundary", body: "--b \r\nContent-Disposition: form-data; name=\"a\"\r\n\r\nx\r\n--b--", code: "invalid_form"},
		{name: "line feeds", body: strings.ReplaceAll(field("a", "x")+"--b--", "\r\n", "\n"), code: "invalid_form"},
		{name: "a line feed in a header line", body: disposition("form-data; name=\"a\"\nContent-Disposition: form-data; name=\"rid\""), code: "invalid_form"},
		{name: "no header lines", body: "--b\r\n\r\nx\r\n--b--", code: "invalid_form"},
		{name: "no disposition", body: "--b\r\nContent-Type: a/b\r\n\r\nx\r\n--b--", code: "invalid_form"},
		{name: "two dispositions", body: disposition("form-data; name=\"a\"\r\nContent-disposition: form-data; name=\"rid\""), code: "invalid_form"},
		{name: "a folded line", body: disposition("form-data;\r\n name=\"rid\""), code: "invalid_form"},
		{name: "space before the colon", body: lines("--b", `Content-Disposition: form-data; name="a"`, `Content-Disposition : form-data; name="rid"`, "", "x", "--b--"), code: "invalid_form"},
		{name: "long header lines", body: lines("--b", `Content-Disposition: form-data; name="a"`, "X: "+strings.Repeat("x", 5000), "", "x", "--b--"), code: "invalid_form"},
		{name: "an encoding", body: lines("--b", `Content-Disposition: form-data; name="a"`, "Content-Transfer-Encoding: base64", "", "x", "--b--"), code: "invalid_form"},
		{name: "no name", body: disposition("form-data"), code: "invalid_form"},
		{name: "another kind", body: disposition(`attachment; name="a"`), code: "invalid_form"},
		{name: "a name without quotes", body: disposition("form-data; name=rid"), code: "invalid_form"},
		{name: "an empty name", body: disposition(`form-data; name=""`), code: "invalid_form"},
		{name: "a name without an end", body: disposition(`form-data; name="a`), code: "invalid_form"},
		{name: "an escaped name", body: disposition(`form-data; name="r\id"`), code: "invalid_form"},
		{name: "a name in percent", body: disposition(`form-data; name="r%69d"`), code: "invalid_form"},
		{name: "two names", body: disposition(`form-data; name="a"; name="rid"`), code: "invalid_form"},
		{name: "an encoded name", body: disposition(`form-data; name="a"; name*=UTF-8''rid`), code: "invalid_form"},
		{name: "a name in parts", body: disposition(`form-data; name*0="ri"; name*1="d"`), code: "invalid_form"},
		{name: "an escape that hides a name", body: disposition(`form-data; filename="a\"; name="rid"; x="`), code: "invalid_form"},
		{name: "a comment", body: disposition(`form-data (x); name="a"`), code: "invalid_form"},
		{name: "too many parts", body: strings.Repeat(field("a", "x"), 257) + "--b--", code: "invalid_form"},
		{name: "two models", body: field("model", "a") + field("model", "b") + "--b--", code: "duplicate_key", param: "model"},
		{name: "a file as model", body: lines("--b", `Content-Disposition: form-data; name="model"; filename="a"`, "", "x", "--b--"), code: "invalid_type", param: "model"},
		{name: "a long model", body: field("model", strings.Repeat("m", MaxModel+1)) + "--b--", code: "string_above_max_length", param: "model"},
		{name: "a model that is not UTF-8", body: field("model", "m\xff") + "--b--", code: "invalid_type", param: "model"},
		{name: "a PD field in capitals", body: field("Rid[a]", "x") + "--b--", code: "invalid_name", param: "Rid"},
		{name: "a holder in capitals", body: field("vLLM_xargs", "{}") + "--b--", code: "invalid_name", param: "vLLM_xargs"},
		{name: "a holder that is no object", body: field("vllm_xargs", `["kv_transfer_params"]`) + "--b--", code: "invalid_type", param: "vllm_xargs"},
		{name: "a holder with a key twice", body: field("sampling_params", `{"a":1,"a":2}`) + "--b--", code: "invalid_type", param: "sampling_params"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.contentType == "" {
				tt.contentType = formType
			}
			var e *Error
			if err := ReadRequest(ImageEdits, tt.contentType, []byte(tt.body), new(Request)); !errors.As(err, &e) {
				t.Fatalf("got %v", err)
			}
			if e.Status != 400 || e.Code.String() != tt.code || e.Param != tt.param || !strings.HasSuffix(e.Message, ".") {
				t.Errorf("got %d %s %q: %s", e.Status, e.Code, e.Param, e.Message)
			}
		})
	}
	for api, contentType := range map[API]string{Chat: formType, Speech: formType, Transcriptions: "text/plain"} {
		var e *Error
		if err := ReadRequest(api, contentType, []byte("--b--"), new(Request)); !errors.As(err, &e) || e.Code != CodeInvalidJSON {
			t.Errorf("%s with %s: %v", api, contentType, err)
		}
	}
}

// FuzzParseForm: the standard library reads an accepted form in the same way, and finds no PD
// field in the form for the engine.
func FuzzParseForm(f *testing.F) {
	for _, body := range []string{
		field("model", "m") + audio + "--b--\r\n", field("rid", "x") + field("stream", "1") + "--b--", field("vllm_xargs", `{"kv_transfer_params":1}`) + "--b--",
		lines("--b", `Content-Disposition: form-data; filename="\"a"; name="model"`, "", "x", "--b--"), "--b--", "--b\r\n\r\n",
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var r Request
		if err := ParseForm(Transcriptions, formType, body, &r); err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Status != 400 || e.Message == "" {
				t.Fatalf("got %v", err)
			}
			return
		}
		read := func(form []byte) (model string, names []string) {
			parts := multipart.NewReader(bytes.NewReader(form), "b")
			for {
				p, err := parts.NextRawPart()
				if err == io.EOF {
					return model, names
				}
				if err != nil {
					t.Fatalf("%q: %v", form, err)
				}
				value, err := io.ReadAll(p)
				if err != nil {
					t.Fatalf("%q: %v", form, err)
				}
				if names = append(names, p.FormName()); p.FormName() == "model" {
					model = string(value)
				}
				if p.Header.Get("Content-Disposition") == "" {
					t.Fatalf("%q: a part without a disposition", form)
				}
			}
		}
		if !bytes.Contains(body, []byte("\r\n--b\r\n")) && !bytes.HasPrefix(body, []byte("--b\r\n")) {
			return // the standard library takes a form without parts for a broken one
		}
		if model, _ := read(body); model != r.Model {
			t.Errorf("%q: model %q, the standard library reads %q", body, r.Model, model)
		}
		cut := r.AppendForm(nil)
		if string(cut) == "--b--" || string(cut) == "--b--\r\n" {
			return
		}
		_, names := read(cut)
		for _, name := range names {
			if base, _, _ := strings.Cut(name, "["); PDField(base) {
				t.Errorf("%q: %s is left in %q", body, name, cut)
			}
		}
	})
}
