package conformance

import (
	"bytes"
	"context"
	"fmt"
	"mime/multipart"
	"strings"
	"testing"

	"github.com/pdproxy/pdproxy/internal/enginesim"
	"github.com/pdproxy/pdproxy/proxy/config"
)

// sound is a file that contains line ends and dashes, as the boundary of a form does.
var sound = bytes.Repeat([]byte("RIFF\r\n--\x00\xff\r\n\r\n"), 20_000)

// formOf returns a form with fields and one file, and its Content-Type.
func formOf(t *testing.T, file string, fields ...string) (body, contentType string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i < len(fields); i += 2 {
		if err := w.WriteField(fields[i], fields[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	part, err := w.CreateFormFile(file, "a.wav")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := part.Write(sound); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String(), w.FormDataContentType()
}

// TestMedia: forms with files, sounds and images pass to one engine of the model and back,
// unchanged except for the PD fields, and failed requests are tried again.
func TestMedia(t *testing.T) {
	taps := newTaps(t, 2)
	f := startFleet(t, enginesim.ConnectorVLLMNixl, fleetOptions{prefill: 1, decode: 1, config: func(c *config.Config) {
		apiFaults(c)
		c.Retry.Attempts = 4
		before(taps, c)
	}})
	type request struct{ path, body, contentType string }
	requests := map[string]request{
		"speech": {"/v1/audio/speech", `{"model":"sim","input":"words","voice":"x"}`, "application/json"},
		"images": {"/v1/images/generations", `{"model":"sim","prompt":"words"}`, "application/json"},
	}
	add := func(name, path, file string, fields ...string) {
		body, contentType := formOf(t, file, fields...)
		requests[name] = request{path, body, contentType}
	}
	add("transcription", "/v1/audio/transcriptions", "file", "model", "sim")
	add("transcription without a model", "/v1/audio/transcriptions", "file", "language", "en")
	add("transcription as text", "/v1/audio/transcriptions", "file", "model", "sim", "response_format", "text")
	add("transcription as a stream", "/v1/audio/transcriptions", "file", "model", "sim", "stream", "true")
	add("translation", "/v1/audio/translations", "file", "model", "sim")
	add("edit of an image", "/v1/images/edits", "image", "model", "sim", "prompt", "words")
	for name, r := range requests {
		t.Run(name, func(t *testing.T) {
			want := f.post(context.Background(), f.alone.URL(), r.path, r.body, "Content-Type", r.contentType)
			got := f.post(context.Background(), f.url, r.path, r.body, "Content-Type", r.contentType)
			if got.status != 200 || want.status != 200 || got.body != want.body || got.header.Get("Content-Type") != want.header.Get("Content-Type") {
				t.Errorf("got status %d, %v: %q\nwant %q", got.status, got.header, got.body, want.body)
			}
			if got.header.Get("X-Pdproxy-Flow") != "aggregated" || got.header.Get("X-Pdproxy-Prefill") != "" {
				t.Errorf("header %v", got.header)
			}
		})
	}
	t.Run("retry", func(t *testing.T) {
		for _, fault := range []string{"1:500", "1:reset"} {
			if err := f.decode[0].SetFault(fault, 0, ""); err != nil {
				t.Fatal(err)
			}
			r, retries := requests["transcription"], f.metric("pdproxy_retries_total")
			if got := f.post(context.Background(), f.url, r.path, r.body, "Content-Type", r.contentType); got.status != 502 || f.metric("pdproxy_retries_total") == retries {
				t.Errorf("%s: got status %d: %s", fault, got.status, got.body)
			}
			if err := f.decode[0].SetFault("", 0, ""); err != nil {
				t.Fatal(err)
			}
			f.eventually("the circuit closes", func() bool {
				return f.post(context.Background(), f.url, r.path, r.body, "Content-Type", r.contentType).status == 200
			})
		}
	})
	t.Run("PD fields", func(t *testing.T) {
		for _, p := range taps {
			p.sent()
		}
		fields := []string{"model", "sim", "vllm_xargs", `{"kv_transfer_params":{"remote_host":"MARK"},"a":1}`, "vllm_xargs[kv_transfer_params][remote_host]", "MARK"}
		for _, member := range pdFields {
			name, value, _ := strings.Cut(strings.TrimPrefix(marked(member), `"`), `":`)
			fields = append(fields, name, value, name+"[x]", value)
		}
		for i := range fields {
			fields[i] = marked(fields[i])
		}
		body, contentType := formOf(t, "file", fields...)
		got := f.post(context.Background(), f.url, "/v1/audio/transcriptions"+marked("?rid=MARK"), body, "Content-Type", contentType+"; charset=utf-7")
		if got.status != 200 || !strings.Contains(got.body, fmt.Sprintf("a sound of %d bytes", len(sound))) {
			t.Errorf("got status %d: %s", got.status, got.body)
		}
		n := 0
		for i, p := range taps {
			for _, sent := range p.sent() {
				n++
				if strings.Contains(sent, markText) || strings.Contains(sent, markNumber) || strings.Contains(sent, "utf-7") || !strings.Contains(sent, `{"a":1}`) {
					t.Errorf("engine %d received %.2000s", i, sent)
				}
			}
		}
		if n != 1 {
			t.Errorf("the engines received %d requests", n)
		}
	})
	t.Run("bad forms", func(t *testing.T) {
		r := requests["transcription"]
		for name, bad := range map[string]struct {
			body, contentType, code string
			status                  int
		}{
			"cut":               {r.body[:len(r.body)-10], r.contentType, "invalid_form", 400},
			"no boundary":       {r.body, "multipart/form-data", "invalid_form", 400},
			"another boundary":  {r.body, "multipart/form-data; boundary=x", "invalid_form", 400},
			"JSON":              {`{"model":"sim"}`, r.contentType, "invalid_form", 400},
			"unknown model":     {strings.Replace(r.body, "\r\nsim\r\n", "\r\nother\r\n", 1), r.contentType, "model_not_found", 404},
			"a form as JSON":    {r.body, "application/json", "invalid_json", 400},
			"too large":         {r.body + strings.Repeat("x", 17<<20), r.contentType, "body_too_large", 413},
			"without the sound": {"--x\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nsim\r\n--x--\r\n", "multipart/form-data; boundary=x", "file", 400},
		} {
			got := f.post(context.Background(), f.url, r.path, bad.body, "Content-Type", bad.contentType)
			if got.status != bad.status || !strings.Contains(got.body, `"error":{"message":`) || !strings.Contains(got.body, bad.code) {
				t.Errorf("%s: got status %d, %v: %s", name, got.status, got.err, got.body)
			}
		}
		if got := f.try("/v1/chat/completions", r.body); got.status != 400 || !strings.Contains(got.body, "invalid_json") {
			t.Errorf("a form for chat: got status %d: %s", got.status, got.body)
		}
	})
}
