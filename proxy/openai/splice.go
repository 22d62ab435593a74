package openai

// Edit is one change of a top-level member: a new value or the removal. An edit without a
// value and without a removal changes nothing.
type Edit struct {
	Key    string // unescaped
	Value  []byte // raw JSON, copied unchanged
	Remove bool   // remove the member; Value is ignored
	cut    bool   // [Object.Append] cuts the transfer parameters out of the member, and ignores Value
}

func (e *Edit) idle() bool { return !e.Remove && !e.cut && len(e.Value) == 0 }

// Append appends the object with the edits applied. Present members are replaced in
// place; absent ones are put first, in the order of the edits; a removed member is cut
// together with one comma. All other bytes are kept, including white space before and
// after the object. Of several edits of one key the last counts. The Object itself is
// not changed. An Object that was not parsed counts as {}.
func (o *Object) Append(dst []byte, edits ...Edit) []byte {
	raw := o.raw
	if raw == nil {
		raw = []byte("{}")
	}
	from := o.open + 1 // start of the uncopied rest
	dst = append(dst, raw[:from]...)
	dst = o.appendAbsent(dst, edits)

	before := false // a member has been kept
	for i := range o.members {
		m := &o.members[i]
		e := editOf(edits, o.keyString(m))
		switch {
		case e == nil:
			before = true
		case !e.Remove:
			before = true
			dst = append(dst, raw[from:m.value.start]...)
			if e.cut { // without a copy of the old value, which may be most of the body
				dst = appendCut(dst, o.value(m), "")
			} else {
				dst = append(dst, e.Value...)
			}
			from = int(m.value.end)
		case before: // removed, with the preceding comma
			dst = append(dst, raw[from:max(from, int(o.members[i-1].value.end))]...)
			from = int(m.value.end)
		default: // removed, with the following comma
			dst = append(dst, raw[from:m.key.start-1]...)
			from = int(m.value.end)
			if i+1 < len(o.members) {
				from = int(o.members[i+1].key.start) - 1
			}
		}
	}
	return append(dst, raw[from:]...)
}

// appendAbsent appends the members that only the edits have, followed by a comma if a
// member of the object follows.
func (o *Object) appendAbsent(dst []byte, edits []Edit) []byte {
	added := false
	for i := range edits {
		e := &edits[i]
		if e.Remove || e.cut || editOf(edits, e.Key) != e || o.has(e.Key) {
			continue
		}
		if added {
			dst = append(dst, ',')
		}
		added = true
		dst = AppendQuoted(dst, e.Key)
		dst = append(dst, ':')
		dst = append(dst, e.Value...)
	}
	if !added {
		return dst
	}
	for i := range o.members {
		if e := editOf(edits, o.keyString(&o.members[i])); e == nil || !e.Remove {
			return append(dst, ',')
		}
	}
	return dst
}

func (o *Object) has(key string) bool {
	_, ok := o.Get(key)
	return ok
}

// editOf returns the edit that applies to a key, or nil.
func editOf(edits []Edit, key string) *Edit {
	for i := len(edits) - 1; i >= 0; i-- {
		if e := &edits[i]; e.Key == key && !e.idle() {
			return e
		}
	}
	return nil
}

// AppendEdited is [Object.Append] for an object inside a scanned body: raw is one valid
// JSON object with any number of members. It builds no list of the members and reads
// raw twice.
func AppendEdited(dst, raw []byte, edits ...Edit) []byte {
	open := skipSpace(raw, 0)
	dst = append(dst, raw[:open+1]...)
	room := [8]bool{}
	there := append(room[:0], make([]bool, len(edits))...) // the object has the edit's key
	stays := false                                         // a member of the object stays
	eachMember(raw[open:], func(key, _ []byte) bool {
		e := editOfKey(edits, key)
		stays = stays || e < 0 || !edits[e].Remove
		if e >= 0 {
			there[e] = true
		}
		return true
	})
	added := false
	for i := range edits {
		e := &edits[i]
		if e.Remove || there[i] || editOf(edits, e.Key) != e {
			continue
		}
		if added {
			dst = append(dst, ',')
		}
		added = true
		dst = append(AppendQuoted(dst, e.Key), ':')
		dst = append(dst, e.Value...)
	}
	if added && stays {
		dst = append(dst, ',')
	}
	return appendStaying(dst, raw, open, edits)
}

// appendStaying appends raw's members after AppendEdited's absent ones, and the rest of
// raw.
func appendStaying(dst, raw []byte, open int, edits []Edit) []byte {
	from := open + 1 // start of the uncopied rest
	kept := -1       // end of the last member that stays
	for i := skipSpace(raw, from); i < len(raw) && raw[i] == '"'; {
		at, end := i, skipString(raw, i)
		value := skipSpace(raw, skipSpace(raw, end)+1)
		e := editOfKey(edits, raw[at+1:end-1])
		end = skipValue(raw, value)
		i = skipSpace(raw, end)
		more := i < len(raw) && raw[i] == ','
		if more {
			i = skipSpace(raw, i+1)
		}
		switch {
		case e < 0:
			kept = end
		case !edits[e].Remove:
			dst = append(append(dst, raw[from:value]...), edits[e].Value...)
			kept, from = end, end
		case kept >= 0: // removed, with the preceding comma
			dst = append(dst, raw[from:max(from, kept)]...)
			from = end
		default: // removed, with the following comma
			dst = append(dst, raw[from:at]...)
			if from = end; more {
				from = i
			}
		}
		if !more {
			break
		}
	}
	return append(dst, raw[from:]...)
}

// editOfKey returns the index of the edit that applies to a raw key without its quotes,
// or -1.
func editOfKey(edits []Edit, key []byte) int {
	for i := len(edits) - 1; i >= 0; i-- {
		if e := &edits[i]; !e.idle() && keyEqual(key, e.Key) {
			return i
		}
	}
	return -1
}
