package enginesim

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"
)

// eventCommand runs a line about KV events. It reports whether the command is known.
func (r *runner) eventCommand(word, rest string) bool {
	r.t.Helper()
	rest, want, _ := strings.Cut(rest, " => ")
	args := append(strings.Fields(rest), "", "")
	switch word {
	case "sub": // sub NAME ENGINE TOPIC RANK
		e := r.engine(args[1])
		host, port, _ := net.SplitHostPort(strings.TrimPrefix(e.KVEventsEndpoint(), "tcp://"))
		endpoint := "tcp://" + net.JoinHostPort(host, strconv.Itoa(number(port)+number(args[3])))
		r.subscribers[args[0]] = subscriber(r.t, e, endpoint, strings.Trim(args[2], "-"))
	case "next":
		r.expect(&exchange{shown: r.show(next(r.t, r.subscribers[args[0]]))}, want)
	case "silent":
		if n := len(r.subscribers[args[0]]); n > 0 {
			r.errorf("%d messages", n)
		}
	case "lost":
		for range r.subscribers[args[0]] { // until the connection ends
		}
	case "replay": // replay ENGINE FROM
		from, _ := strconv.ParseUint(args[1], 10, 64)
		var list []string
		for _, frames := range replays(r.t, r.engine(args[0]).KVEventsReplay(), from) {
			n := len(frames)
			p := readPublished(r.t, nil, frames[n-2], frames[n-1])
			if len(frames[0]) > 0 || p.events != nil && len(p.events) != 1 {
				r.errorf("frames %q", frames)
			}
			list = append(list, fmt.Sprintf("%d:%s%d", n, slices.Concat(frames[1:n-2]...), p.seq))
		}
		r.expect(&exchange{shown: strings.Join(append([]string{"batches"}, list...), " ")}, want)
	default:
		return false
	}
	return true
}

// show writes a batch: number, topic, rank and events. A block's hash is shown as h1, h2
// and so on in the order in which a case shows them, a digest as d1.
func (r *runner) show(p published) string {
	r.t.Helper()
	if p.events == nil {
		return fmt.Sprintf("%d garbage", p.seq)
	}
	if p.ts < 1e9 || p.ts > float64(time.Now().Unix()+1) {
		r.errorf("time %v", p.ts)
	}
	hash := func(v any) any {
		if v == nil {
			return nil
		}
		kind := "h"
		if raw, ok := v.([]byte); ok && len(raw) == 32 {
			kind = "d"
		}
		key := fmt.Sprint(v)
		if r.hashes[key] == "" {
			r.hashes[key] = fmt.Sprint(kind, len(r.hashes)+1)
		}
		return r.hashes[key]
	}
	hashes := func(v any) any {
		var list []any
		for _, h := range v.([]any) {
			list = append(list, hash(h))
		}
		return list
	}
	for _, event := range p.events {
		switch event := event.(type) {
		case map[string]any:
			if event["block_hashes"] != nil {
				event["block_hashes"] = hashes(event["block_hashes"])
			}
			if event["parent_block_hash"] != nil {
				event["parent_block_hash"] = hash(event["parent_block_hash"])
			}
		case []any:
			if len(event) > 1 {
				event[1] = hashes(event[1])
			}
			if event[0] == "BlockStored" {
				event[2] = hash(event[2])
			}
		}
	}
	raw, err := json.Marshal(p.events)
	if err != nil {
		r.fatalf("%v", err)
	}
	return fmt.Sprintf("%d %q rank %v %s", p.seq, p.topic, p.rank, raw)
}
