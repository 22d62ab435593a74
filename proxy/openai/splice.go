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

// AppendEdited is [Object.Append] for an object inside a body that has been scanned:
// raw is one valid JSON object with any number of members, of which it makes no
// list. It is read twice.
func AppendEdited(dst, raw []byte, edits ...Edit) []byte {
	open := skipSpace(raw, 0)
	dst = append(dst, raw[:open+1]...)
	room := [8]bool{}
	there := append(room[:0], make([]bool, len(edits))...) // has a member of the key
	stays := false                                         // a member does
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

// appendStaying appends what AppendEdited has of raw's members and behind them.
func appendStaying(dst, raw []byte, open int, edits []Edit) []byte {
	from := open + 1 // what is not yet written begins here
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
		case kept >= 0: // out, with the comma in front
			dst = append(dst, raw[from:max(from, kept)]...)
			from = end
		default: // out, with the comma behind
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

// editOfKey gives the index of the edit that counts for a key as it is between its
// quotes; -1: there is none.
func editOfKey(edits []Edit, key []byte) int {
	for i := len(edits) - 1; i >= 0; i-- {
		if e := &edits[i]; !e.idle() && keyEqual(key, e.Key) {
			return i
		}
	}
	return -1
}
