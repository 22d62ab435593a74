package engine

import (
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/pdproxy/pdproxy/abi"
	"github.com/pdproxy/pdproxy/proxy/circuit"
	"github.com/pdproxy/pdproxy/proxy/config"
	"github.com/pdproxy/pdproxy/proxy/fleetpb"
	"github.com/pdproxy/pdproxy/proxy/state/load"
)

// maxRecords bounds the records of a part or a report; see fleetpb.Unmarshal. 2^19 pairs are
// 2^20 records.
const maxRecords = 1 << 20

func putMember(e *member) *fleetpb.Member {
	return &fleetpb.Member{
		Number: e.Number, Source: e.Source, Spec: putSpec(&e.Spec), ApiKey: e.APIKey, State: uint32(e.State),
		Unresponsive: e.Silent, Ended: e.Ended, Unasked: e.Unasked, Asleep: e.Asleep, SinceMs: e.Since, Restarts: e.Restarts, MoveAtMs: e.MoveAt,
		Facts: putFacts(e.Facts),
	}
}

// getMember returns an instance. A state of a later version is Down: the instance gets no
// requests.
func getMember(m *fleetpb.Member) (member, error) {
	facts, err := getFacts(m.Facts)
	e := member{
		Number: m.Number, Source: m.Source, Spec: getSpec(m.Spec), APIKey: m.ApiKey, State: State(m.State),
		Silent: m.Unresponsive, Ended: m.Ended, Unasked: m.Unasked, Asleep: m.Asleep, Since: m.SinceMs, Restarts: m.Restarts, MoveAt: m.MoveAtMs,
		Facts: facts,
	}
	if e.State > Draining {
		e.State = Down
	}
	return e, err
}

func putSpec(e *config.Engine) *fleetpb.Engine {
	return &fleetpb.Engine{
		Name: e.Name, Url: e.URL, Role: e.Role, Connector: e.Connector, Ranks: int32(e.Ranks), ApiKeyFile: e.APIKeyFile,
		Model: e.Model, RemoteModel: e.RemoteModel, KvEvents: e.KVEvents, KvReplay: e.KVReplay, BlockTokens: int64(e.BlockTokens),
		BootstrapHost: e.BootstrapHost, BootstrapPort: int32(e.BootstrapPort), HeaderOverrides: e.HeaderOverrides,
		KvAddress: e.KVAddress, TpSize: int32(e.TPSize), PpSize: int32(e.PPSize), EngineId: e.EngineID, SideChannel: e.SideChannel,
		Bidirectional: e.Bidirectional, DecoderKvBlocksTtlNs: int64(e.DecoderKVBlocksTTL), KvLeaseDurationNs: int64(e.KVLeaseDuration),
		KvHosts: e.KVHosts, Endpoint: e.Endpoint, Labels: string(e.Labels), Weight: e.Weight, Priority: e.Priority,
		HealthPath: e.HealthPath, MaxConns: int64(e.MaxConns), Ca: e.CA, InsecureSkipVerify: e.InsecureSkipVerify, Wire: e.Wire,
	}
}

func getSpec(m *fleetpb.Engine) config.Engine {
	if m == nil {
		return config.Engine{}
	}
	return config.Engine{
		Name: m.Name, URL: m.Url, Role: m.Role, Connector: m.Connector, Ranks: int(m.Ranks), APIKeyFile: m.ApiKeyFile,
		Model: m.Model, RemoteModel: m.RemoteModel, KVEvents: m.KvEvents, KVReplay: m.KvReplay, BlockTokens: int(m.BlockTokens),
		BootstrapHost: m.BootstrapHost, BootstrapPort: int(m.BootstrapPort), HeaderOverrides: m.HeaderOverrides,
		KVAddress: m.KvAddress, TPSize: int(m.TpSize), PPSize: int(m.PpSize), EngineID: m.EngineId, SideChannel: m.SideChannel,
		Bidirectional: m.Bidirectional, DecoderKVBlocksTTL: config.Duration(m.DecoderKvBlocksTtlNs), KVLeaseDuration: config.Duration(m.KvLeaseDurationNs),
		KVHosts: m.KvHosts, Endpoint: m.Endpoint, Labels: config.Labels(m.Labels), Weight: m.Weight, Priority: m.Priority,
		HealthPath: m.HealthPath, MaxConns: int(m.MaxConns), CA: m.Ca, InsecureSkipVerify: m.InsecureSkipVerify, Wire: m.Wire,
	}
}

func putFacts(f *Facts) *fleetpb.Facts {
	if f == nil {
		return nil
	}
	m := &fleetpb.Facts{
		Models: f.Models, Version: f.Version, Wire: f.Wire, DpSize: int64(f.DPSize), BootstrapPort: int64(f.BootstrapPort),
		FollowsRoom: f.FollowsRoom, PageSize: int64(f.PageSize), KvHash: f.KVHash, KvCacheType: f.KVCacheType, Epoch: f.Epoch,
		EngineIds: f.EngineIDs, Rendezvous: f.Rendezvous, TpSize: int64(f.TPSize), PpSize: int64(f.PPSize), CpSize: int64(f.CPSize),
		Transfer: f.Transfer, Owner: f.Owner,
		KvEvents:  &fleetpb.KVPublisher{BlockTokens: int64(f.KVEvents.BlockTokens)},
		KvAddress: &fleetpb.KVAddress{Host: f.KVAddress.Host, Handshake: int64(f.KVAddress.Handshake), Notify: int64(f.KVAddress.Notify)},
	}
	for _, c := range f.Cards {
		m.Cards = append(m.Cards, &fleetpb.ModelCard{Id: c.ID, MaxModelLen: c.MaxModelLen, Root: c.Root, Parent: c.Parent})
	}
	for _, e := range f.KVEvents.Ranks {
		m.KvEvents.Ranks = append(m.KvEvents.Ranks, &fleetpb.KVEndpoints{Events: e.Events, Replay: e.Replay, Loads: e.Loads})
	}
	for _, a := range f.Addresses {
		m.Addresses = append(m.Addresses, a.String())
	}
	return m
}

func getFacts(m *fleetpb.Facts) (*Facts, error) {
	if m == nil {
		return nil, nil
	}
	e, a := m.GetKvEvents(), m.GetKvAddress()
	f := &Facts{
		Models: m.Models, Version: m.Version, Wire: m.Wire, DPSize: int(m.DpSize), BootstrapPort: int(m.BootstrapPort),
		FollowsRoom: m.FollowsRoom, PageSize: int(m.PageSize), KVHash: m.KvHash, KVCacheType: m.KvCacheType, Epoch: m.Epoch,
		EngineIDs: m.EngineIds, Rendezvous: m.Rendezvous, TPSize: int(m.TpSize), PPSize: int(m.PpSize), CPSize: int(m.CpSize),
		Transfer: m.Transfer, Owner: m.Owner,
		KVEvents:  KVPublisher{BlockTokens: int(e.GetBlockTokens())},
		KVAddress: config.KVAddress{Host: a.GetHost(), Handshake: int(a.GetHandshake()), Notify: int(a.GetNotify())},
	}
	for _, c := range m.Cards {
		f.Cards = append(f.Cards, ModelCard{ID: c.Id, MaxModelLen: c.MaxModelLen, Root: c.Root, Parent: c.Parent})
	}
	for _, r := range e.GetRanks() {
		f.KVEvents.Ranks = append(f.KVEvents.Ranks, KVEndpoints{Events: r.Events, Replay: r.Replay, Loads: r.Loads})
	}
	for _, text := range m.Addresses {
		a, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("address of an engine's host: %w", err)
		}
		f.Addresses = append(f.Addresses, a)
	}
	return f, nil
}

func putFit(f load.Fit) *fleetpb.Fit {
	if f == (load.Fit{}) {
		return nil
	}
	return &fleetpb.Fit{PerTokenUs: f.PerToken, FixedUs: f.Fixed}
}

// values reads numbers of a message that must not be negative.
type values struct{ bad bool }

func (v *values) float(f float32) float32 {
	if f >= 0 && f <= math.MaxFloat32 {
		return f
	}
	v.bad = true
	return 0
}

func (v *values) int64(n int64) int64 {
	if n < 0 {
		v.bad = true
	}
	return max(0, n)
}

func (v *values) int32(n int32) int32 { return int32(v.int64(int64(n))) }

func (v *values) fit(m *fleetpb.Fit) load.Fit {
	return load.Fit{PerToken: v.float(m.GetPerTokenUs()), Fixed: v.float(m.GetFixedUs())}
}

func (v *values) rank(m *fleetpb.RankLoad) load.Copy {
	return load.Copy{
		Requests: v.int32(m.Requests), Tokens: v.int64(m.Tokens), Queued: v.int64(m.Queued), Waiting: v.int32(m.Waiting), Usage: v.float(m.Usage),
		RecentTokens: v.float(m.RecentTokens), RecentRequests: v.float(m.RecentRequests), RecentWork: v.float(m.RecentWork),
		Prefill: v.fit(m.Prefill), Output: v.fit(m.Output),
	}
}

// putCircuit returns the state of a circuit for another process.
func putCircuit(b *circuit.Breaker, now time.Time) *fleetpb.Circuit {
	failures, left := b.Copy(now)
	return &fleetpb.Circuit{Failures: int32(failures), LeftMs: left}
}

// followCircuit sets a circuit to its state in another process.
func followCircuit(b *circuit.Breaker, m *fleetpb.Circuit) {
	b.Follow(uint32(max(0, m.GetFailures())), m.GetLeftMs())
}

// A target is the number of an instance and 2^32 times the rank.

func numberOf(instance uint32, rank int) uint64 { return uint64(uint32(rank))<<32 | uint64(instance) }

func pairKeyOf(prefill, decode uint64) pairKey {
	return pairKey{prefill: uint32(prefill), decode: uint32(decode), prefillRank: rankOf(prefill), decodeRank: rankOf(decode)}
}

func rankOf(target uint64) int { return int(target >> 32) }

func (k pairKey) targets() (prefill, decode uint64) {
	return numberOf(k.prefill, k.prefillRank), numberOf(k.decode, k.decodeRank)
}

// pairStateOf returns a state other than broken, which is a state of the circuit. A state of a
// later version is unknown.
func pairStateOf(v uint32) abi.PairState {
	if v > uint32(abi.PairReady) {
		return abi.PairUnknown
	}
	return abi.PairState(v)
}
