package engine

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/state/load"
	"github.com/pdproxy/pdproxy/proxy/wire"
)

// Part is one part of an exported registry. A mirror needs the latest value of each part.
// Members must be the first, because the other parts refer to instances by the numbers in
// Members.
type Part uint8

// The parts.
const (
	Members Part = iota // the instances and their facts: JSON
	Loads               // load, speed and health of the instances: binary
	Pairs               // state of the pairs: binary
)

// exportEvery is how often loads and pairs are exported. Members are exported when they
// change.
const exportEvery = 250 * time.Millisecond

// members is the Members part.
type members struct {
	Mark      uint64 // identifies the registry with these numbers
	Instances []member
	Known     []Known // models that it has known
}

// member is one instance in it.
type member struct {
	Number   uint32 // Instance.ID in the exporting registry
	Source   string
	Spec     config.Engine
	APIKey   string
	State    State
	Silent   bool   // Instance.Unresponsive
	Ended    bool   // Instance.Ended
	Unasked  bool   // the first probe has not ended
	Asleep   []bool `json:",omitempty"` // ranks that sleep
	Since    int64  // Unix ms
	Restarts uint32
	Facts    *Facts // nil: not known yet
}

// Export passes the registry's parts to publish, first all of them and then each one
// that has changed, until ctx ends. Unchanged loads are passed again after mirroredEvery,
// because loads without updates fade in a mirror. publish may keep the value and must not
// block. Only one Export may run at a time.
func (r *Registry) Export(ctx context.Context, publish func(part Part, value []byte)) {
	var (
		loads, lastLoads []byte
		lastMembers      = r.exportMembers()
		version          = r.pairs.version.Load()
		exported         time.Time // when the loads were exported
	)
	publish(Members, lastMembers)
	publish(Pairs, r.exportPairs())
	tick := time.NewTicker(exportEvery)
	defer tick.Stop()
	for {
		now := time.Now()
		if loads = r.appendLoads(loads[:0], now); !bytes.Equal(loads, lastLoads) || now.Sub(exported) >= mirroredEvery {
			lastLoads, exported = bytes.Clone(loads), now
			publish(Loads, lastLoads)
		}
		select {
		case <-ctx.Done():
			return
		case <-r.changed:
			if b := r.exportMembers(); !bytes.Equal(b, lastMembers) {
				lastMembers = b
				publish(Members, b)
			}
		case <-tick.C:
		}
		if v := r.pairs.version.Load(); v != version {
			version = v
			publish(Pairs, r.exportPairs())
		}
	}
}

// exportMembers encodes the Members part.
func (r *Registry) exportMembers() []byte {
	out := members{Mark: r.mark}
	s := r.Snapshot()
	for _, m := range s.Known() {
		out.Known = append(out.Known, Known{m, uint8(s.known.roles[m])})
	}
	for _, i := range s.Instances {
		out.Instances = append(out.Instances, member{
			Number: i.ID, Source: i.Source, Spec: i.Spec, APIKey: i.APIKey, State: i.State(), Silent: i.Unresponsive(), Ended: i.Ended(), Unasked: !i.asked.Load(), Asleep: i.sleeping(), Since: i.since.Load(),
			Restarts: i.restarts.Load(), Facts: i.facts.Load(),
		})
	}
	b, err := json.Marshal(out)
	if err != nil {
		panic(fmt.Sprintf("encode members: %v", err)) // all its types can be encoded
	}
	return b
}

// String returns the name of the part for logs.
func (p Part) String() string {
	return [...]string{"members", "loads", "pairs", "unknown part"}[min(p, Pairs+1)]
}

// The binary parts begin with the mark of their registry and the number of rows. All
// numbers are little-endian.
//
//	Loads, a row: number, tokens a block by events and by metrics (uint32 each),
//	  circuit, speed of transfers, ranks (uint16), and for each rank requests (uint32),
//	  tokens and queued (uint64), waiting (uint32), usage, recent tokens, requests and work (float32),
//	  speeds of prefill and of output
//	Pairs, a row: number of prefill and of decode (uint32), their ranks (uint16),
//	  state (uint8), circuit
//	A circuit: failures in a row, and one more than the milliseconds until it is
//	  half open, 0 for closed (uint32)
//	A speed: µs a token, and fixed µs (float32)

// appendLoads encodes the Loads part.
func (r *Registry) appendLoads(b []byte, now time.Time) []byte {
	instances := r.Snapshot().Instances
	b = binary.LittleEndian.AppendUint64(b, r.mark)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(instances)))
	for _, i := range instances {
		b = binary.LittleEndian.AppendUint32(b, i.ID)
		b = binary.LittleEndian.AppendUint32(b, uint32(i.eventBlockTokens.Load()))
		b = binary.LittleEndian.AppendUint32(b, uint32(i.metricBlockTokens.Load()))
		b = appendCircuit(b, &i.Breaker, now)
		b = appendFit(b, i.Transfers.Fit())
		b = binary.LittleEndian.AppendUint16(b, uint16(len(i.Load)))
		for rank := range i.Load {
			c := i.Load[rank].Copy(now)
			b = binary.LittleEndian.AppendUint32(b, uint32(c.Requests))
			b = binary.LittleEndian.AppendUint64(b, uint64(c.Tokens))
			b = binary.LittleEndian.AppendUint64(b, uint64(c.Queued))
			b = binary.LittleEndian.AppendUint32(b, uint32(c.Waiting))
			for _, f := range [...]float32{c.Usage, c.RecentTokens, c.RecentRequests, c.RecentWork} {
				b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
			}
			b = appendFit(appendFit(b, c.Prefill), c.Output)
		}
	}
	return b
}

func appendFit(b []byte, f load.Fit) []byte {
	b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f.PerToken))
	return binary.LittleEndian.AppendUint32(b, math.Float32bits(f.Fixed))
}

func appendCircuit(b []byte, c *circuit.Breaker, now time.Time) []byte {
	failures, left := c.Copy(now)
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(b, failures), left)
}

// exportPairs encodes the Pairs part.
func (r *Registry) exportPairs() []byte {
	now := time.Now()
	r.pairs.mu.RLock()
	pairs := maps.Clone(r.pairs.pairs)
	r.pairs.mu.RUnlock()
	b := binary.LittleEndian.AppendUint64(nil, r.mark)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(pairs)))
	for _, key := range slices.SortedFunc(maps.Keys(pairs), comparePairKeys) {
		b = appendPairKey(b, key)
		p := pairs[key]
		p.mu.Lock()
		b = appendCircuit(append(b, byte(p.state)), &p.circuit, now)
		p.mu.Unlock()
	}
	return b
}

func comparePairKeys(a, b pairKey) int {
	return cmp.Or(cmp.Compare(a.prefill, b.prefill), cmp.Compare(a.decode, b.decode), a.prefillRank-b.prefillRank, a.decodeRank-b.decodeRank)
}

func appendPairKey(b []byte, key pairKey) []byte {
	b = binary.LittleEndian.AppendUint32(b, key.prefill)
	b = binary.LittleEndian.AppendUint32(b, key.decode)
	b = binary.LittleEndian.AppendUint16(b, uint16(key.prefillRank))
	return binary.LittleEndian.AppendUint16(b, uint16(key.decodeRank))
}

// partReader reads a binary part.
type partReader struct{ wire.Reader }

// float reads a non-negative number.
func (r *partReader) float() float32 {
	f := math.Float32frombits(r.Uint32())
	if f >= 0 && f <= math.MaxFloat32 {
		return f
	}
	r.Fail()
	return 0
}

// natural reads a non-negative count.
func (r *partReader) natural() int64 {
	n := int64(r.Uint64())
	if n < 0 {
		r.Fail()
	}
	return max(0, n)
}

// int32 reads a non-negative count.
func (r *partReader) int32() int32 {
	n := int32(r.Uint32())
	if n < 0 {
		r.Fail()
	}
	return max(0, n)
}

func (r *partReader) fit() load.Fit { return load.Fit{PerToken: r.float(), Fixed: r.float()} }

func (r *partReader) pairKey() pairKey {
	return pairKey{prefill: r.Uint32(), decode: r.Uint32(), prefillRank: int(r.Uint16()), decodeRank: int(r.Uint16())}
}

// pairState reads a state other than broken, which is a state of the circuit.
func (r *partReader) pairState() abi.PairState {
	s := abi.PairState(r.Uint8())
	if s > abi.PairReady {
		r.Fail()
	}
	return s
}
