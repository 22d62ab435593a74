package openai

import (
	"bytes"
	"mime"
	"strings"
)

// The bounds of a form (multipart/form-data, RFC 7578).
const (
	maxFormParts = 256     // parts of one form
	maxFormHead  = 4 << 10 // header lines of one part, in bytes
	maxBoundary  = 70      // RFC 2046, 5.1.1
)

// isForm reports whether a Content-Type is that of a form.
func isForm(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	return strings.EqualFold(strings.TrimSpace(media), "multipart/form-data")
}

// formEdit replaces a part of a form, or the value of a part.
type formEdit struct {
	at     Span
	params bool // only transfer parameters are cut; false: all bytes are
}

// ParseForm reads the routing fields of a form with that Content-Type, as ParseRequest does
// for a JSON object. The files are searched for the boundary, and not read otherwise.
//
// It accepts only forms that every parser reads in the same way, because a client could
// otherwise hide a PD field from the proxy: lines end in CRLF, nothing precedes the first part
// or follows the last one, and each part has one Content-Disposition with a quoted name
// without escapes. The clients of OpenAI, curl and browsers send such forms. The error is an
// *Error with status 400 that names the field; r is then not usable.
func ParseForm(api API, contentType string, body []byte, r *Request) error {
	*r = Request{Object: r.Object, API: api, Model: r.Model, Form: true, MaxTokens: -1, N: 1, BestOf: 1, formEdits: r.formEdits[:0]}
	r.Object.Reset()
	boundary, err := formBoundary(contentType)
	if err != nil {
		return err
	}
	r.ContentType = mime.FormatMediaType("multipart/form-data", map[string]string{"boundary": boundary})
	r.raw = body
	border := "\r\n--" + boundary
	if !bytes.HasPrefix(body, []byte(border[2:])) {
		return badForm("the form does not begin with its boundary")
	}
	at := len(border) - 2
	for parts := 0; ; parts++ {
		switch rest := body[at:]; {
		case string(rest) == "--" || string(rest) == "--\r\n":
			if !r.HasModel {
				r.Model = ""
			}
			r.WithoutPD = len(r.formEdits) == 0
			return nil
		case !bytes.HasPrefix(rest, []byte("\r\n")):
			return badForm("a boundary is not followed by a part or by the end of the form")
		case parts == maxFormParts:
			return badForm("the form has too many parts")
		}
		head := at + 2
		length := bytes.Index(body[head:min(len(body), head+maxFormHead)], []byte("\r\n\r\n"))
		if length < 0 {
			return badForm("the header of a part does not end, or is too long")
		}
		name, file, err := partName(body[head : head+length])
		if err != nil {
			return err
		}
		value := head + length + 4
		if bytes.HasPrefix(body[value:], []byte(border[2:])) {
			return badForm("a boundary has no line end of its own") // for some parsers the part ends here
		}
		end := bytes.Index(body[value:], []byte(border))
		if end < 0 {
			return badForm("a part does not end with the boundary")
		}
		end += value
		next := end + len(border)
		if err := r.readPart(name, file, Span{at, next}, Span{value, end}); err != nil {
			return err
		}
		at = next
	}
}

// readPart reads one part. part begins after the boundary before it and ends after the
// boundary behind it.
func (r *Request) readPart(name string, file bool, part, value Span) error {
	base, _, _ := strings.Cut(name, "[") // of vllm_xargs[a], as OpenAI's clients write objects
	if err := r.notePD(base); err != nil {
		return err
	}
	v := r.raw[value.Start:value.End]
	switch {
	case PDField(base):
		r.formEdits = append(r.formEdits, formEdit{at: part})
	case HoldsPD(base, nil) || base == "sampling_params":
		return r.readHolder(name, base, part, value)
	case name == "model" && file:
		return mistyped("model", "a string")
	case name == "model" && r.HasModel:
		return NewFieldError(CodeDuplicateKey, "model", "The form has the field 'model' twice.")
	case name == "model":
		if err := checkModel(v); err != nil {
			return err
		}
		if string(v) != r.Model {
			r.Model = string(v)
		}
		r.HasModel, r.modelAt = len(v) > 0, value
	case name == "stream":
		switch strings.ToLower(string(v[:min(len(v), 8)])) { // the forms of true of pydantic
		case "true", "1", "on", "yes", "t", "y":
			r.Stream = true
		}
	default:
		if !file || selectsAdapter(base) {
			r.noteMember(name, v)
		}
	}
	return nil
}

// readHolder reads a part in which engines also look for transfer parameters. Its value is a
// JSON object; a part such as vllm_xargs[a] has one member of it.
func (r *Request) readHolder(name, base string, part, value Span) error {
	if name != base {
		if strings.Contains(strings.ToLower(name), "transfer_params") {
			r.formEdits = append(r.formEdits, formEdit{at: part})
		}
		return nil
	}
	o := Object{Memory: r.Memory}
	if err := o.Parse(r.raw[value.Start:value.End]); err != nil {
		if _, refused := err.(*Error); !refused {
			return err // no memory
		}
		return mistyped(base, "a JSON object")
	}
	if holdsTransferParams(o.Raw()) {
		r.formEdits = append(r.formEdits, formEdit{at: value, params: true})
	}
	return nil
}

// AppendForm appends the form without its PD fields.
func (r *Request) AppendForm(dst []byte) []byte {
	from := 0
	for _, e := range r.formEdits {
		dst = append(dst, r.raw[from:e.at.Start]...)
		if e.params {
			dst = appendCut(dst, r.raw[e.at.Start:e.at.End], "")
		}
		from = e.at.End
	}
	return append(dst, r.raw[from:]...)
}

func badForm(problem string) *Error {
	return NewError(CodeInvalidForm, "The body is not a valid form: "+problem+".")
}

// formBoundary returns the boundary of a Content-Type.
func formBoundary(contentType string) (string, error) {
	_, params, err := mime.ParseMediaType(contentType)
	boundary := params["boundary"]
	if err != nil || boundary == "" || len(boundary) > maxBoundary {
		return "", NewFieldError(CodeInvalidForm, "Content-Type", "The header Content-Type has no valid boundary.")
	}
	for i := range len(boundary) {
		c := boundary[i]
		if !(c-'0' < 10 || c|0x20-'a' < 26 || strings.IndexByte("'()+_,-./:=?", c) >= 0) {
			return "", NewFieldError(CodeInvalidForm, "Content-Type", "The boundary in the header Content-Type has a character that RFC 2046 does not allow.")
		}
	}
	return boundary, nil
}

// partName returns the name in the header lines of a part, and whether the part is a file.
func partName(head []byte) (name string, file bool, err error) {
	found := false
	for line := range strings.SplitSeq(string(head), "\r\n") {
		key, value, ok := strings.Cut(line, ":")
		if !ok || key == "" || strings.ContainsAny(key, " \t\"(),/:;<=>?@[\\]{}") || strings.ContainsFunc(line, isControl) {
			return "", false, badForm("a part has a broken header line")
		}
		switch strings.ToLower(key) {
		case "content-disposition":
			if found {
				return "", false, badForm("a part has two lines Content-Disposition")
			}
			found = true
			if name, file, ok = readDisposition(strings.Trim(value, " \t")); !ok {
				return "", false, badForm("a part has a line Content-Disposition that parsers read in different ways")
			}
		case "content-transfer-encoding":
			if v := strings.ToLower(strings.Trim(value, " \t")); v != "binary" && v != "8bit" && v != "7bit" {
				return "", false, badForm("a part has a Content-Transfer-Encoding")
			}
		}
	}
	if !found {
		return "", false, badForm("a part has no Content-Disposition")
	}
	return name, file, nil
}

func isControl(c rune) bool { return c < ' ' && c != '\t' || c == 0x7f }

// readDisposition reads form-data; name="..."; filename="...". A file name may also have the
// form filename*=UTF-8”..., and escapes if it cannot be read as further parameters.
func readDisposition(value string) (name string, file, ok bool) {
	const kind, space = "form-data", " \t"
	if len(value) < len(kind) || !strings.EqualFold(value[:len(kind)], kind) {
		return "", false, false
	}
	seen := map[string]bool{}
	for rest := strings.TrimLeft(value[len(kind):], space); rest != ""; rest = strings.TrimLeft(rest, space) {
		if rest[0] != ';' {
			return "", false, false
		}
		key, after, _ := strings.Cut(strings.TrimLeft(rest[1:], space), "=")
		key = strings.ToLower(key)
		if seen[key] {
			return "", false, false
		}
		seen[key] = true
		var text string
		switch key {
		case "name":
			if text, rest, ok = quotedText(after); !ok || text == "" || strings.ContainsAny(text, `\%;=`) {
				return "", false, false
			}
			name = text
		case "filename":
			if text, rest, ok = quotedText(after); !ok || strings.Contains(text, `\`) && strings.ContainsAny(text, ";=") {
				return "", false, false
			}
		case "filename*":
			end := strings.IndexAny(after, "; \t\"=\\")
			if end < 0 {
				end = len(after)
			}
			rest = after[end:]
		default:
			return "", false, false
		}
	}
	return name, seen["filename"] || seen["filename*"], seen["name"]
}

// quotedText reads a quoted text, in which a backslash escapes the next character, and
// returns it with its escapes.
func quotedText(s string) (text, rest string, ok bool) {
	if s == "" || s[0] != '"' {
		return "", "", false
	}
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			i++
		case '"':
			return s[1:i], s[i+1:], true
		}
	}
	return "", "", false
}
