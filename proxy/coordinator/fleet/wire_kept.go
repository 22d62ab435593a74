package fleet

import (
	"bytes"
	"encoding/binary"
	"time"

	"github.com/pdproxy/pdproxy/proxy/coordinator/link"
	"github.com/pdproxy/pdproxy/proxy/state/conversation"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// appendKeep appends a turn to store, under its number. False: the coordinator does not have the
// holder. The expiry is sent as a duration, because the clocks of two hosts differ.
func appendKeep(dst []byte, number uint64, o *conversation.OnShelf[*RetainedKV], now time.Time, n Numbers) (_ []byte, ok bool) {
	dst = wire.AppendText(wire.AppendText(wire.AppendUint(dst, number), o.Scope), o.Name)
	dst = appendIDs(appendDuration(dst, o.Expires.Sub(now)), o.IDs)
	k := o.Value
	if dst, ok = appendTarget(dst, k.Holder, n); !ok || k.Holder.IsZero() {
		return dst, false
	}
	dst = wire.AppendText(wire.AppendInt(dst, k.Since.UnixMilli()), k.Host)
	return wire.AppendText(wire.AppendText(dst, k.Params), k.Forget), true
}

// readKeep reads the output of appendKeep, up to the end of the message. The result does not alias
// the message.
func readKeep(r *reader, now time.Time) (number uint64, o conversation.OnShelf[[]byte]) {
	number = r.Uint()
	o.Scope, o.Name = string(r.Text()), string(r.Text())
	o.Expires = now.Add(r.duration())
	o.IDs = r.ids(nil)
	o.Value = bytes.Clone(r.Rest())
	return number, o
}

// readKept reads a turn, which aliases b. Its holder is zero if the engine is unknown
// here.
func readKept(b []byte, n Numbers) (*RetainedKV, error) {
	r := newReader(b)
	k := new(RetainedKV)
	var known bool
	if k.Holder, known = r.target(n); known && k.Holder.IsZero() {
		r.Fail()
	}
	k.Since = time.UnixMilli(r.Int())
	k.Host = string(r.Text())
	k.Params, k.Forget = r.Text(), r.Text()
	if !r.Done() {
		return nil, link.Garbage("a turn")
	}
	return k, nil
}

// readTaken reads the answer to kindTake. k does not alias b.
func readTaken(b []byte, n Numbers) (k *RetainedKV, found Found, err error) {
	if len(b) == 0 || b[0] > byte(KVFreed) || b[0] != byte(KVTaken) && len(b) > 1 {
		return nil, CoordinatorUnreachable, link.Garbage("stored KV of a turn")
	}
	if found = Found(b[0]); found != KVTaken {
		return nil, found, nil
	}
	if k, err = readKept(bytes.Clone(b[1:]), n); err != nil {
		return nil, CoordinatorUnreachable, err
	}
	if k.Holder.IsZero() {
		return nil, HolderUnknown, nil
	}
	return k, KVTaken, nil
}

func appendIDs(dst []byte, ids []uint32) []byte {
	dst = wire.AppendUint(dst, len(ids))
	for _, id := range ids {
		dst = binary.LittleEndian.AppendUint32(dst, id)
	}
	return dst
}

func (r *reader) ids(dst []uint32) []uint32 {
	b := r.Bytes(uint64(r.List(4)) * 4)
	if need := len(b) / 4; cap(dst)-len(dst) < need {
		dst = append(make([]uint32, 0, len(dst)+need), dst...)
	}
	for ; len(b) >= 4; b = b[4:] {
		dst = append(dst, binary.LittleEndian.Uint32(b))
	}
	return dst
}
