package engine

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/pdproxy/pdproxy/abi"
)

const (
	// lastIncompatible is the failure kind of an incompatible pair.
	lastIncompatible = "incompatible"
	// maxRefusals bounds the number of listed incompatible pairs.
	maxRefusals = 1 << 12
	// maxNamed bounds the number of engines that a log line about incompatible pairs
	// names for one reason.
	maxNamed = 8
)

// refused calls yield for pairs of ready instances that serve a common model and whose
// facts exclude a transfer, until yield returns false. If i is not nil, refused visits
// only pairs with i. No request uses such a pair, because the two are in different
// groups.
func (s *Snapshot) refused(i *Instance, yield func(p, d *Instance, reason error) bool) {
	only := []*Instance{i}
	for _, model := range slices.Sorted(maps.Keys(s.pools)) {
		ready := s.pools[model].instances()
		if i != nil && !slices.Contains(ready, i) {
			continue
		}
		for _, p := range ready {
			partners := ready
			if i != nil && i != p {
				partners = only
			}
			for _, d := range partners {
				if p == d || !p.leads(d) || p.Spec.Connector != d.Spec.Connector {
					continue
				}
				if err := p.protocol.Compatible(p.Facts(), d.Facts()); err != nil && !yield(p, d, err) {
					return
				}
			}
		}
	}
}

// instances lists the ready instances that can take one leg of a pair.
func (p *Pool) instances() []*Instance {
	var list []*Instance
	for i := range p.Ready {
		if r := &p.Ready[i]; r.Rank == 0 && r.pairs() {
			list = append(list, r.Instance)
		}
	}
	return list
}

// refusedRows returns one row for each incompatible pair of ranks. With
// pairs.allow_incompatible there are none.
func (r *Registry) refusedRows() map[pairKey]PairRow {
	rows := make(map[pairKey]PairRow)
	if r.pairing.Load().lax {
		return rows
	}
	r.Snapshot().refused(nil, func(p, d *Instance, reason error) bool {
		for i := range p.ranks() {
			for j := range d.ranks() {
				row := PairRow{
					Prefill: p.Spec.Name, PrefillRank: i, Decode: d.Spec.Name, DecodeRank: j,
					State: abi.PairBroken.String(), LastError: lastIncompatible, Refused: reason.Error(), Since: p.Since(),
				}
				if d.Since().After(row.Since) {
					row.Since = d.Since()
				}
				rows[pairKey{p.ID, d.ID, i, j}] = row
			}
		}
		return len(rows) < maxRefusals
	})
	return rows
}

// Pairs lists, by name and rank, the pairs that have been used, and those that are
// never used because the facts of the two engines exclude a transfer.
func (r *Registry) Pairs() []PairRow {
	rows := r.refusedRows()
	for key, row := range r.pairs.rows() {
		if no, ok := rows[key]; ok { // a row from the time before the facts changed, or the reverse direction
			row.State, row.LastError, row.Refused = no.State, no.LastError, no.Refused
		}
		rows[key] = row
	}
	list := slices.AppendSeq(make([]PairRow, 0, len(rows)), maps.Values(rows)) // never nil, so that JSON shows a list
	slices.SortFunc(list, comparePairs)
	return list
}

// refusals holds the reasons that were logged for incompatible pairs, by the ids of
// prefill and decode.
type refusals struct {
	mu     sync.Mutex
	logged map[[2]uint32]string // guarded by mu
}

// refusalNews names the ready instances that i cannot be paired with, by reason,
// without those that were logged before; "" if there is nothing new.
func (r *Registry) refusalNews(i *Instance) string {
	now := make(map[[2]uint32]string)
	reasons := make(map[string][]string)
	r.refusals.mu.Lock()
	defer r.refusals.mu.Unlock()
	if !r.pairing.Load().lax {
		r.Snapshot().refused(i, func(p, d *Instance, reason error) bool {
			key, text := [2]uint32{p.ID, d.ID}, reason.Error()
			if now[key] != "" { // seen with another model
				return true
			}
			if now[key] = text; r.refusals.logged[key] != text {
				other := d
				if i == d {
					other = p
				}
				reasons[text] = append(reasons[text], other.Spec.Name)
			}
			return true
		})
	}
	maps.DeleteFunc(r.refusals.logged, func(key [2]uint32, _ string) bool { return key[0] == i.ID || key[1] == i.ID })
	maps.Copy(r.refusals.logged, now)
	var text []string
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		names := slices.Sorted(slices.Values(reasons[reason]))
		if more := len(names) - maxNamed; more > 0 {
			names = append(names[:maxNamed:maxNamed], fmt.Sprintf("and %d more", more))
		}
		text = append(text, fmt.Sprintf("%s: %s", strings.Join(names, ", "), reason))
	}
	return strings.Join(text, "; ")
}

// forget drops the logged reasons of an instance that has left.
func (r *refusals) forget(id uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.logged, func(key [2]uint32, _ string) bool { return key[0] == id || key[1] == id })
}
