package openai

import "strings"

// engineFields are the top-level members with which a client changes an engine, or makes the
// engine run code of the client.
//
// Sources: SGLang managers/io_struct.py and entrypoints/openai/protocol.py
// (custom_logit_processor, a serialized Python object; session_params, which reads and changes
// the session of any client that it names); vLLM entrypoints/openai/protocol.py of version 0
// and sampling_params.py (logits_processors, names of Python functions to import).
var engineFields = [...]string{"custom_logit_processor", "session_params", "logits_processors"}

// adapterPrefixes are the beginnings of the names of all top-level members that select an adapter.
//
// Sources: SGLang managers/io_struct.py and entrypoints/openai/protocol.py (lora_path, lora_id);
// TensorRT-LLM serve/openai_protocol.py (lora_request). In vLLM only the model selects an adapter.
var adapterPrefixes = [...]string{"lora", "adapter"}

// Adapter is an adapter that a request selects in addition to its model.
type Adapter struct {
	Field string // in which the client selects the adapter
	Name  string // "": the proxy cannot read the name
	// Exact reports that the engine uses the adapter of that name. Otherwise other parts of the
	// field also decide, such as the path of a file on the engine's host.
	Exact bool
}

// noteMember notes a member, a part of a form, or a parameter of a query that is none of the
// routing fields. value is the text of a part or parameter, nil for a member. Case does not
// matter, because some JSON decoders ignore it.
func (r *Request) noteMember(key string, value []byte) {
	for _, field := range engineFields {
		if strings.EqualFold(field, key) {
			r.EngineField = field
			return
		}
	}
	if !selectsAdapter(key) {
		return
	}
	r.adapters = true
	if value != nil {
		a := Adapter{Field: clip(key)}
		if !strings.Contains(key, "[") && len(value) <= MaxModel {
			a.Name, a.Exact = string(value), true
		}
		r.outside = append(r.outside, a)
	}
}

// selectsAdapter reports whether fields of that name select an adapter.
func selectsAdapter(key string) bool {
	for _, prefix := range adapterPrefixes {
		if len(key) >= len(prefix) && strings.EqualFold(key[:len(prefix)], prefix) {
			return true
		}
	}
	return false
}

// EachAdapter calls visit for each adapter that the request selects in addition to its model, until
// visit returns false. A member that is null or an empty text selects none.
func (r *Request) EachAdapter(visit func(a Adapter) bool) {
	if !r.adapters {
		return
	}
	for _, a := range r.outside {
		if !visit(a) {
			return
		}
	}
	for key, value := range r.Members {
		if selectsAdapter(key) && !selectsNone(value) && !eachAdapter(clip(key), value, visit) {
			return
		}
	}
}

// eachAdapter visits the adapters of one member: a name, a list of names, or the object of
// TensorRT-LLM's lora_request. It reports whether visit wants more.
func eachAdapter(field string, value []byte, visit func(a Adapter) bool) bool {
	switch value[0] {
	case '[':
		c := Cursor{Text: value}
		for c.Open('['); c.Next(']'); {
			if element := c.Skip(); !selectsNone(element) && !visit(adapterOf(field, element)) {
				return false
			}
		}
		return true
	case '{':
		a := Adapter{Field: field}
		if name, ok := Find(value, "lora_name"); ok {
			a.Name, _ = String(name)
		}
		return visit(a)
	}
	return visit(adapterOf(field, value))
}

func selectsNone(value []byte) bool { return IsNull(value) || string(value) == `""` }

func adapterOf(field string, value []byte) Adapter {
	name, ok := String(value)
	return Adapter{Field: field, Name: name, Exact: ok}
}
