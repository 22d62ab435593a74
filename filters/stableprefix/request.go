package stableprefix

// request is the position of the parts of a body that the rules read.
type request struct {
	model  span
	system []place // the system texts
	tools  span

	// The first texts of the first and of the last user message that have texts. None without such
	// a message.
	firstUser, lastUser span
}

// place is one text.
type place struct {
	text span // with its quotes
	// list are the elements of the array that has the text in the element k: content blocks, or
	// messages whose content is the text. nil: the text is a member that stays if it is empty.
	list *[]span
	k    int
	// keep is set if the element has a member cache_control, which belongs to its position.
	keep bool
}

// reader fills a request while the cursor reads the body.
type reader struct {
	cursor
	request
	texts []place // of the content that the cursor reads, and then of its message
}

// read finds the parts of a body. ok is false if the body is not an object.
func read(api API, b []byte) (r *request, ok bool) {
	reader := reader{cursor: cursor{b: b}}
	if reader.next() != '{' {
		return nil, false
	}
	reader.object(func(name []byte, _ int) {
		switch string(name) {
		case "model":
			reader.model = reader.string()
		case "system":
			reader.member(api == Messages)
		case "instructions":
			reader.member(api == Responses)
		case "messages":
			reader.list(api != Responses)
		case "input":
			reader.list(api == Responses)
		case "tools":
			reader.tools = reader.value()
		default:
			reader.value()
		}
	})
	return &reader.request, !reader.bad
}

// member reads a system content that is a member of the body, if the API has the member.
func (r *reader) member(has bool) {
	if !has {
		r.value()
		return
	}
	r.texts = r.texts[:0]
	r.content()
	r.system = append(r.system, r.texts...)
}

// list reads the list of messages, if the API has the member. A string in its place is the text of
// the user.
func (r *reader) list(has bool) {
	switch {
	case !has:
		r.value()
	case r.next() == '"':
		r.firstUser = r.value()
		r.lastUser = r.firstUser
	default:
		r.array(r.message)
	}
}

// message reads an element of the list of messages.
func (r *reader) message(list *[]span) {
	var role span
	marked := false
	r.texts = r.texts[:0]
	r.object(func(name []byte, _ int) {
		switch string(name) {
		case "role":
			role = r.string()
		case "content":
			r.content()
		case "cache_control":
			marked = true
			r.value()
		default:
			r.value()
		}
	})
	if r.bad || len(r.texts) == 0 {
		return
	}
	switch string(role.inner().of(r.b)) {
	case "system", "developer":
		if t := &r.texts[0]; t.list == nil {
			t.list, t.k, t.keep = list, len(*list), marked
		}
		r.system = append(r.system, r.texts...)
	case "user":
		r.lastUser = r.texts[0].text
		if r.firstUser.none() {
			r.firstUser = r.lastUser
		}
	}
}

// content reads a content, and puts its texts into r.texts.
func (r *reader) content() {
	if r.next() == '"' {
		r.texts = append(r.texts, place{text: r.value()})
		return
	}
	r.array(r.block)
}

// block reads a content block.
func (r *reader) block(list *[]span) {
	p := place{list: list, k: len(*list)}
	r.object(func(name []byte, _ int) {
		switch string(name) {
		case "text":
			p.text = r.string()
		case "cache_control":
			p.keep = true
			r.value()
		default:
			r.value()
		}
	})
	if !p.text.none() {
		r.texts = append(r.texts, p)
	}
}

// word returns the content of a string without escapes of characters, "" if s is none.
func word(b []byte, s span) string {
	raw := s.inner().of(b)
	plain := make([]byte, 0, len(raw))
	for i := 0; i < len(raw); {
		c, size := char(raw, i)
		plain = append(plain, c)
		i += size
	}
	return string(plain)
}
