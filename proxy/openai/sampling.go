package openai

func (r *Request) readStreamOptions(m *member, v []byte) (err error) {
	if m.kind != kindObject {
		return mistyped("stream_options", "an object")
	}
	value, _ := Find(v, "include_usage")
	if !IsNull(value) {
		r.IncludeUsage, err = readBool("stream_options.include_usage", value)
	}
	return err
}

func (r *Request) readSequences(key string, v []byte) (err error) {
	switch key {
	case "n":
		r.N, err = readCount(key, v, 1)
	case "best_of":
		r.BestOf, err = readCount(key, v, 1)
	case "use_beam_search":
		r.BeamSearch, err = readBool(key, v)
	}
	return err
}

// readSamplingParams reads the object in which the two native routes have these fields.
// SGLang also accepts a list, with one object for each prompt; the largest values count
// then.
func (r *Request) readSamplingParams(m *member, v []byte) (err error) {
	c := Cursor{Text: v}
	switch {
	case r.API != Generate && r.API != VLLMGenerate:
	case m.kind == kindObject:
		err = r.readSampling(&c)
	case r.API == Generate && m.kind == kindArray && m.shape.kinds&^kindObject == 0:
		for c.Open('['); err == nil && c.Next(']'); {
			err = r.readSampling(&c)
		}
	default:
		err = mistyped("sampling_params", "an object")
	}
	return err
}

func (r *Request) readSampling(c *Cursor) (err error) {
	limit, least := "max_tokens", int64(1)
	if r.API == Generate {
		limit, least = "max_new_tokens", 0
	}
	for c.Open('{'); err == nil && c.Next('}'); {
		key := unescapedName(c.Key)
		value, n := c.Skip(), int64(0)
		switch {
		case IsNull(value):
		case key == limit:
			n, err = readCount("sampling_params."+limit, value, least)
			r.MaxTokens = max(r.MaxTokens, n)
		case key == "n":
			n, err = readCount("sampling_params.n", value, 1)
			r.N = max(r.N, n)
		case key == "extra_args":
			err = checkPDHolder("sampling_params.extra_args", value)
		case key == "vllm_xargs":
			err = checkPDHolder("sampling_params.vllm_xargs", value)
		case key == "logits_processors":
			r.EngineField = "sampling_params.logits_processors"
		}
	}
	return err
}
