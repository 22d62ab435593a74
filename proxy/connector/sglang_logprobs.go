package connector

import (
	"bytes"
	"errors"
	"strconv"
	"strings"

	"github.com/pdproxy/pdproxy/proxy/openai"
)

// Only prefill has the log probabilities of the prompt. Decode's answer has empty lists
// instead (srt/managers/scheduler_components/output_streamer.py, "Decode server does not
// send input logprobs"). Only answers of /generate have members for these lists. The
// proxy copies the lists into every event of a stream, as a single engine does.

// inputLogprobs are the members of meta_info that only prefill can fill
// (srt/managers/tokenizer_manager.py add_logprob_to_meta_info).
var inputLogprobs = [...]string{"input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"}

var errNoMetaInfo = errors.New("merge log probabilities: an answer without meta_info")

// Merges: requests on /generate with return_logprob, which may be a list with one value
// for each prompt.
func (sglang) Merges(r *openai.Request) bool {
	v, _ := r.Get("return_logprob")
	return r.API == openai.Generate && strings.Contains(string(v), "true")
}

// sglangHandoff returns the Handoff of a valid answer of prefill.
func sglangHandoff(a *Attempt, body []byte) Handoff {
	if a.Merging {
		return Handoff{Extra: body}
	}
	return Handoff{}
}

// Merge implements Merger.
func (sglang) Merge(dst []byte, h *Handoff, answer []byte, events bool) ([]byte, error) {
	if !events {
		return mergeAnswers(dst, h.Extra, answer)
	}
	var err error
	for len(answer) > 0 {
		line, rest := answer, []byte(nil)
		if i := bytes.IndexByte(answer, '\n'); i >= 0 {
			line, rest = answer[:i+1], answer[i+1:]
		}
		answer = rest
		data, ok := bytes.CutPrefix(line, []byte("data:"))
		if data = bytes.TrimSpace(data); !ok || !isObject(data) {
			dst = append(dst, line...)
			continue
		}
		dst = append(dst, "data: "...)
		if dst, err = mergeOne(dst, answerAt(h.Extra, data), data); err != nil {
			return dst, err
		}
		dst = append(dst, '\n')
	}
	return dst, nil
}

// answerAt returns prefill's answer to the prompt to which a decode event belongs. In a
// batch the event has the index of the prompt.
func answerAt(prefill, event []byte) []byte {
	if isObject(prefill) {
		return prefill
	}
	index, _ := openai.Find(event, "index")
	one, _ := openai.Find(prefill, string(index))
	return one
}

// mergeAnswers completes a unary answer, or each answer of a batch.
func mergeAnswers(dst, prefill, answer []byte) ([]byte, error) {
	if isObject(answer) {
		return mergeOne(dst, prefill, answer)
	}
	list, err := openai.Elements(answer)
	if err != nil {
		return dst, err
	}
	dst = append(dst, '[')
	n := 0
	for one := range list {
		if n > 0 {
			dst = append(dst, ',')
		}
		p, _ := openai.Find(prefill, strconv.Itoa(n))
		if dst, err = mergeOne(dst, p, one); err != nil {
			return dst, err
		}
		n++
	}
	return append(dst, ']'), nil
}

// mergeOne appends one answer of decode, with prefill's lists before decode's own. It
// copies any other text, such as an error event, unchanged.
func mergeOne(dst, prefill, answer []byte) ([]byte, error) {
	var whole, meta openai.Object
	if err := whole.Parse(answer); err != nil {
		return dst, err
	}
	raw, ok := whole.Get("meta_info")
	if !ok {
		return append(dst, answer...), nil
	}
	if err := meta.Parse(raw); err != nil {
		return dst, err
	}
	known, _ := openai.Find(prefill, "meta_info")
	if !isObject(known) {
		return dst, errNoMetaInfo
	}
	var edits [len(inputLogprobs)]openai.Edit
	for i, key := range inputLogprobs {
		p, _ := openai.Find(known, key)
		d, has := meta.Get(key)
		if has && len(p) > 0 && p[0] == '[' {
			edits[i] = openai.Edit{Key: key, Value: joinLists(p, d)}
		}
	}
	return whole.Append(dst, openai.Edit{Key: "meta_info", Value: meta.Append(nil, edits[:]...)}), nil
}

// joinLists returns the JSON list of a's elements followed by b's; b may be null.
func joinLists(a, b []byte) []byte {
	switch {
	case openai.IsNull(b), b[0] != '[', len(bytes.TrimSpace(b[1:len(b)-1])) == 0:
		return a
	case len(bytes.TrimSpace(a[1:len(a)-1])) == 0:
		return b
	}
	joined := append(make([]byte, 0, len(a)+len(b)), a[:len(a)-1]...)
	return append(append(joined, ','), b[1:]...)
}
