package openai

// Edit is one change of a top-level member: a new value, or its removal. An
// edit with neither changes nothing.
type Edit struct {
	Key    string // unescaped
	Value  []byte // raw JSON, taken over as it is
	Remove bool   // cut the member out; Value is not looked at
}

func (e *Edit) idle() bool { return !e.Remove && len(e.Value) == 0 }

// Append appends the object with the edits applied. Members that are present
// are replaced where they are; absent ones are put first, in the order of the
// edits; a member is cut out together with one comma. Every other byte, white
// space before and behind the object included, is kept. Of several edits of
// one key the last counts. The Object itself stays as it was scanned; one that
// was not scanned counts as {}.
func (o *Object) Append(dst []byte, edits ...Edit) []byte {
	raw := o.raw
	if raw == nil {
		raw = []byte("{}")
	}
	from := o.open + 1 // what is not yet written begins here
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
			dst = append(dst, e.Value...)
			from = int(m.value.end)
		case before: // out, with the comma in front
			dst = append(dst, raw[from:max(from, int(o.members[i-1].value.end))]...)
			from = int(m.value.end)
		default: // out, with the comma behind
			dst = append(dst, raw[from:m.at]...)
			from = int(m.value.end)
			if i+1 < len(o.members) {
				from = int(o.members[i+1].at)
			}
		}
	}
	return append(dst, raw[from:]...)
}

// appendAbsent appends the members that only the edits have, with a comma
// behind them if a member of the object follows.
func (o *Object) appendAbsent(dst []byte, edits []Edit) []byte {
	added := false
	for i := range edits {
		e := &edits[i]
		if e.Remove || editOf(edits, e.Key) != e || o.has(e.Key) {
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

// editOf gives the edit that counts for a key; nil: there is none.
func editOf(edits []Edit, key string) *Edit {
	for i := len(edits) - 1; i >= 0; i-- {
		if e := &edits[i]; e.Key == key && !e.idle() {
			return e
		}
	}
	return nil
}
