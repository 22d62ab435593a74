package guest

import "github.com/pdproxy/pdproxy/abi"

// The facts of the current call. A hook never runs inside another hook.
var (
	planFacts   abi.PlanFacts
	placeFacts  abi.PlaceFacts
	placeSpare  []abi.Candidate
	mintFacts   abi.MintFacts
	legFacts    abi.LegFacts
	legEdits    abi.Edits
	finishFacts abi.FinishFacts
	retainFacts abi.RetainFacts
	scoreFacts  = abi.ScoreFacts{PlaceFacts: &placeFacts}
	scoreOut    abi.Scores
	evictFacts  abi.EvictFacts
)

// none is the answer of place to a frame that it cannot read: no row. The answers of retain and
// evict are ^0, which the contract does not define.
var none = abi.PlaceDecision{Prefill: -1, Decode: -1}.Pack()

// refuse logs that a frame cannot be decoded or has no policy.
func refuse(hook abi.Hook) {
	Log(LogError, "a frame of the "+hook.String()+" hook is not of version 1 or 2, or for a policy that is not there")
}

func onPlan(frame []byte) uint64 {
	if !abi.DecodePlan(frame, &planFacts) || int(abi.PolicyOf(frame)) >= len(plans.funcs) {
		refuse(abi.HookPlan)
		return 0
	}
	nameHeaders(&planFacts.Request)
	return plans.funcs[abi.PolicyOf(frame)](&planFacts).Pack()
}

func onPlace(frame []byte) uint64 {
	if !abi.DecodePlace(frame, &placeFacts, &placeSpare) || int(abi.PolicyOf(frame)) >= len(places.funcs) {
		refuse(abi.HookPlace)
		return none
	}
	nameHeaders(&placeFacts.Request)
	d := places.funcs[abi.PolicyOf(frame)](&placeFacts)
	if placeFacts.Scored {
		abi.StoreScores(frame, &placeFacts)
	}
	return d.Pack()
}

func onMint(frame []byte) uint64 {
	if !abi.DecodeMint(frame, &mintFacts) || int(abi.PolicyOf(frame)) >= len(mints.funcs) {
		refuse(abi.HookMint)
		return 0
	}
	return mints.funcs[abi.PolicyOf(frame)](&mintFacts)
}

// onLeg also receives the free memory after the frame, for the list of edits.
func onLeg(frame, room []byte) uint64 {
	if !abi.DecodeLeg(frame, &legFacts) || int(abi.PolicyOf(frame)) >= len(legs.funcs) {
		refuse(abi.HookLeg)
		return uint64(abi.LegPass)
	}
	nameHeaders(&legFacts.Request)
	legEdits = abi.NewEdits(room)
	d := legs.funcs[abi.PolicyOf(frame)](&legFacts, &legEdits)
	if legFacts.Event != abi.LegSend || d != abi.LegEdited {
		return uint64(d)
	}
	if legEdits.Full() {
		Log(LogError, "the edits of a leg need more room than there is: it is sent as it is")
		return uint64(abi.LegPass)
	}
	abi.MarkEdits(frame, len(frame), len(legEdits.Bytes()))
	return uint64(d)
}

func onFinish(frame []byte) {
	if !abi.DecodeFinish(frame, &finishFacts) || int(abi.PolicyOf(frame)) >= len(finishes.funcs) {
		refuse(abi.HookFinish)
		return
	}
	nameHeaders(&finishFacts.Request)
	finishes.funcs[abi.PolicyOf(frame)](&finishFacts)
}

func onRetain(frame []byte) uint64 {
	if !abi.DecodeRetain(frame, &retainFacts) || int(abi.PolicyOf(frame)) >= len(retains.funcs) {
		refuse(abi.HookRetain)
		return ^uint64(0)
	}
	return retains.funcs[abi.PolicyOf(frame)](&retainFacts).Pack()
}

// onScore calls the scorers of the frame in their order.
func onScore(frame []byte) uint64 {
	asked, rows, ok := abi.DecodeScore(frame, &scoreFacts, &placeSpare)
	if !ok {
		refuse(abi.HookScore)
		return 0
	}
	nameHeaders(&placeFacts.Request)
	n := len(placeFacts.Candidates)
	scoreOut = abi.Scores{}
	for i := range asked {
		if int(asked[i].Index) >= len(scorers.funcs) {
			refuse(abi.HookScore)
			return 0
		}
		scoreOut.Close(scoreFacts.Open, rows[i*n:(i+1)*n])
		scorers.funcs[asked[i].Index](&scoreFacts, &scoreOut)
		asked[i].Unit = scoreOut.Unit
	}
	scoreOut.Close(scoreFacts.Open, nil)
	return abi.ScoreDone
}

func onEvict(frame []byte) uint64 {
	if !abi.DecodeEvict(frame, &evictFacts) || int(abi.PolicyOf(frame)) >= len(evicts.funcs) {
		refuse(abi.HookEvict)
		return ^uint64(0)
	}
	return abi.PackEvict(evicts.funcs[abi.PolicyOf(frame)](&evictFacts))
}

// nameHeaders gives the headers of the frame the names that the module declared.
func nameHeaders(r *abi.RequestFacts) {
	for i := range min(len(r.Headers), len(headers)) {
		r.Headers[i].Name = headers[i]
	}
}
